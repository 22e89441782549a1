"""Which model a module is part of: looked up among the modules that live, because no module knows
who holds it and copies and unpickled ones pass no hook."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

from torch import nn

from fa_advisor.probes.by_id import ById
from fa_advisor.probes.modules import parameters_of

# A class of which so many modules were found that nothing holds: the next is taken for one of them,
# where a script builds a model in every step. Looking takes a tenth of a second.
_ALONE = 16


class Family:
    """Keeps no module alive."""

    def __init__(self) -> None:
        self._holder: ById[weakref.ref[nn.Module]] = ById()
        self._seen: ById[bool] = ById()
        self._alone: Counter[str] = Counter()

    def root_of(self, module: nn.Module) -> nn.Module:
        """The outermost module that holds this one; itself where none does."""
        if module in self._seen:
            return self._outermost(module)
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if self._alone[kind] < _ALONE:
            self.look()
        self._seen[module] = True
        root = self._outermost(module)
        self._alone[kind] = self._alone[kind] + 1 if root is module else 0
        return root

    def _outermost(self, module: nn.Module) -> nn.Module:
        root, climbed = module, {id(module)}
        while (holder := self._holder.get(root)) is not None:
            above = holder()
            if above is None or id(above) in climbed or not _holds(above, root):
                break
            root = above
            climbed.add(id(root))
        return root

    def roots(self) -> list[nn.Module]:
        """Every living model with parameters, whether it ever runs or not."""
        self.look()
        roots = {id(root): root for root in map(self.root_of, self._seen.keys())}
        return [root for root in roots.values() if any(True for _ in parameters_of(root))]

    def look(self) -> None:
        """See all modules that live now, and who holds whom; of several the one with the most."""
        living = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        self._holder.clear()
        for module in living:
            self._seen[module] = True
            for child in vars(module).get("_modules", {}).values():
                if child is None:
                    continue
                known = self._holder.get(child)
                other = known() if known is not None else None
                if other is None or _size(other) < _size(module):
                    self._holder[child] = weakref.ref(module)


def _holds(holder: nn.Module, child: nn.Module) -> bool:
    return any(each is child for each in holder._modules.values())


def _size(module: nn.Module) -> int:
    return sum(1 for _ in parameters_of(module))
