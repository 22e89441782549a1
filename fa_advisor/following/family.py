"""Which model a module is part of: who registered it, since the script's first nn.Module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.nn.modules import module as nn_module


class Family:
    """Keeps no module alive. `on_first` is called when the first module gets a parameter."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._parents: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()
        self._holders: WeakSet[nn.Module] = WeakSet()
        self._on_first: Callable[[], None] | None = on_first
        self._handles = [
            nn_module.register_module_module_registration_hook(self._registered),
            nn_module.register_module_parameter_registration_hook(self._has_parameter),
        ]

    def close(self) -> None:
        """Take the hooks down; what is known stays known."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def root_of(self, module: nn.Module) -> nn.Module:
        """The outermost model that holds the module; itself where none does."""
        root, climbed = module, {id(module)}
        while (parent := self._parents.get(root)) is not None:
            above = parent()
            if above is None or id(above) in climbed or not _holds(above, root):
                break
            root = above
            climbed.add(id(root))
        return root

    def roots(self) -> list[nn.Module]:
        """Every living model with parameters, whether it ever runs or not."""
        roots = [self.root_of(module) for module in list(self._holders)]
        return list({id(root): root for root in roots}.values())

    def _registered(self, parent: nn.Module, name: str, child: Any) -> None:
        if isinstance(child, nn.Module):
            self._parents[child] = weakref.ref(parent)

    def _has_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._holders.add(module)
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()


def _holds(parent: nn.Module, child: nn.Module) -> bool:
    return any(each is child for each in parent._modules.values())
