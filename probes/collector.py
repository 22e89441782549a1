"""Python's garbage collector, which shouldn't run because of what a watch keeps.

It runs when so many more objects have come than gone, and then frees whatever tensors are caught
in reference cycles: earlier, with a watch's thousands of records, than without one. And each run
costs. So the first threshold is raised by as many objects as the watch has, and falls with them.
"""

from __future__ import annotations

import gc


class Allowance:
    """`ours`: objects that the watch keeps, added to the collector's threshold until `close`.

    A threshold that somebody else sets in between is taken for theirs.
    """

    def __init__(self) -> None:
        self._theirs = 0
        self._set = -1

    def allow(self, ours: int) -> None:
        """There are so many of our objects now."""
        first, *others = gc.get_threshold()
        if first != self._set:
            self._theirs = first
        if self._theirs <= 0:  # switched off
            return
        self._set = self._theirs + ours
        gc.set_threshold(self._set, *others)

    def close(self) -> None:
        """Leave the threshold as it would be without us."""
        if self._set >= 0:
            self.allow(0)
            self._set = -1
