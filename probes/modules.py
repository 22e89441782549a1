"""What a module holds, without asking its class: a user's own `__hash__`, `parameters` or
`__getattr__` may raise, and torch's own walk needs modules that can be hashed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model and all modules in it, each once, with their names as `named_modules` has them."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        held = [(child, part) for child, part in _items(module, "_modules") if part is not None]
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in reversed(held)]


def parameters_of(model: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Its parameters, each once."""
    return _tensors_of(model, "_parameters", recurse)


def buffers_of(model: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """Its buffers, each once."""
    return _tensors_of(model, "_buffers", recurse)


def _tensors_of(model: nn.Module, kind: str, recurse: bool) -> Iterator[Any]:
    seen: set[int] = set()
    for _, module in modules_of(model) if recurse else (("", model),):
        for _, tensor in _items(module, kind):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _items(module: nn.Module, kind: str) -> Any:
    held = vars(module).get(kind)
    return held.items() if held else ()
