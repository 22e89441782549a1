"""Python's garbage collector, which shouldn't run because of what a watch keeps.

It runs when so many more objects have come than gone, and then frees whatever tensors are caught
in reference cycles: earlier, with a watch's thousands of records, than without one. And each run
costs. So the first threshold is raised by as many objects as the watch has, and falls with them.
"""

from __future__ import annotations

import gc
from typing import ClassVar


class Allowance:
    """Of one watch; those of several add up.

    A threshold that somebody else sets in between is taken for theirs.
    """

    _all: ClassVar[dict[int, int]] = {}
    _theirs: ClassVar[int] = 0
    _set: ClassVar[int] = -1

    def allow(self, ours: int) -> None:
        """The watch has so many objects now."""
        Allowance._all[id(self)] = ours
        _apply()

    def close(self) -> None:
        """Leave the threshold as it would be without this watch."""
        if Allowance._all.pop(id(self), None) is not None:
            _apply()


def _apply() -> None:
    first, *others = gc.get_threshold()
    if first != Allowance._set:
        Allowance._theirs = first
    if Allowance._theirs > 0:  # else it is switched off
        Allowance._set = Allowance._theirs + sum(Allowance._all.values())
        gc.set_threshold(Allowance._set, *others)
