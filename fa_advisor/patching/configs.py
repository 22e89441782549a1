"""A model's own copies of its configurations, so that a change of them reaches no other model.

Two models built from one configuration share the object; naming our implementation in it would
patch both. The copies are put in place of the originals and, at the end, the originals back, with
what the user set on the copies in the meantime.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref

from torch import nn

from fa_advisor.patching.interface import KEYS, ORIGINALS, register

IMPLEMENTATION = "_attn_implementation_internal"


class OwnConfigs:
    """The configurations of a model's modules, copied and naming our implementation.

    Modules below `root` alone are touched. `undo` puts the originals back.
    """

    def __init__(self, root: nn.Module) -> None:
        register()
        memo: dict[int, Any] = {}
        self._places: list[tuple[ref[nn.Module], str, Any]] = []
        self._copies: list[tuple[Any, Any, dict[str, Any]]] = []
        originals: dict[int, Any] = {}
        for module in root.modules():
            for name, value in list(vars(module).items()):
                if not is_config(value):
                    continue
                made = copy.deepcopy(value, memo)
                self._places.append((ref(module), name, value))
                vars(module)[name] = made
                _collect(value, originals)
        for original in originals.values():
            made = memo[id(original)]
            key = KEYS.get(getattr(original, IMPLEMENTATION, None) or "")
            if key is not None:
                setattr(made, IMPLEMENTATION, key)
            self._copies.append((original, made, dict(vars(made))))

    def undo(self) -> None:
        """The original objects again, with what was set on the copies since."""
        for place, name, original in self._places:
            module = place()
            if module is not None:
                vars(module)[name] = original
        for original, made, before in self._copies:
            for name, value in vars(made).items():
                changed = name not in before or before[name] is not value
                if changed and name != IMPLEMENTATION:
                    vars(original)[name] = value
            for name in before.keys() - vars(made).keys():
                vars(original).pop(name, None)


def is_config(value: Any) -> bool:
    """Whether this is a configuration of transformers'."""
    return hasattr(value, IMPLEMENTATION) and hasattr(value, "to_dict")


def _collect(config: Any, found: dict[int, Any]) -> None:
    """A configuration and those nested in it."""
    if id(config) in found:
        return
    found[id(config)] = config
    for value in vars(config).values():
        if is_config(value):
            _collect(value, found)


def name_originals(root: nn.Module) -> None:
    """Undo in a copy of a patched model, whose configurations are its own already."""
    for module in root.modules():
        for value in vars(module).values():
            if not is_config(value):
                continue
            found: dict[int, Any] = {}
            _collect(value, found)
            for config in found.values():
                original = ORIGINALS.get(getattr(config, IMPLEMENTATION, None) or "")
                if original is not None:
                    setattr(config, IMPLEMENTATION, original)
