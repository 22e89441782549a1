"""Which module an operator runs in: forward by hooks, backward by autograd's sequence numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fa_advisor.probes.events import Scope

NOWHERE = Scope("", "", 0)
_sequence_number = torch._C._autograd._get_sequence_nr
# Boundaries older than this are forgotten: their graphs are long gone.
_MAX_BOUNDARIES = 400_000


# Where modules keep their number of heads, for calls whose shapes fold heads into the batch.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")


class Scopes:
    """The stack of running modules. `current` is the innermost one's scope.

    `on_enter(module, args)` and `on_leave(module)` are called for outermost modules only.
    """

    def __init__(self) -> None:
        self.current = NOWHERE
        self.depth = 0
        self.types: dict[str, str] = {}
        self.on_enter: Callable[[nn.Module, Any], None] | None = None
        self.on_leave: Callable[[nn.Module], None] | None = None
        self._stack: list[tuple[int, Scope]] = []
        self._known: dict[int, Scope] = {}
        self._roots: list[nn.Module] = []  # keeps ids valid
        self._numbers: list[int] = []
        self._boundary_scopes: list[Scope] = []
        self._lines: dict[int, tuple[str, int]] = {}
        self._handles: list[Any] = []

    def add_root(self, module: nn.Module) -> str:
        """Name a model's modules; a second model's names start with its class's name."""
        known = self._known.get(id(module))
        if known is not None:
            return known.fqn
        prefix = type(module).__name__ if self._roots else ""
        base, count = prefix, 2
        while self._roots and prefix in self.types:
            prefix, count = f"{base}#{count}", count + 1
        self._roots.append(module)
        for name, child in module.named_modules():
            fqn = qualified(prefix, name)
            self._known.setdefault(id(child), _scope(fqn, child))
            self.types.setdefault(fqn, type(child).__name__)
        return prefix

    def first_root(self) -> nn.Module | None:
        """The first model that was named or called."""
        return self._roots[0] if self._roots else None

    def install(self) -> None:
        """Watch every module call of the process until `remove`."""
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()
        self.current, self.depth = NOWHERE, 0

    def of_node(self, node: Any) -> Scope:
        """The module whose forward made an autograd node."""
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._boundary_scopes[at] if at >= 0 else NOWHERE

    def mark_line(self, source: tuple[str, int]) -> None:
        """The autograd node made last belongs to this line."""
        lines = self._lines
        lines[_sequence_number() - 1] = source
        if len(lines) > _MAX_BOUNDARIES:
            for number in list(lines)[: _MAX_BOUNDARIES // 2]:
                del lines[number]

    def line_of_node(self, node: Any) -> tuple[str, int] | None:
        """The line of the forward that made an autograd node."""
        return self._lines.get(node._sequence_nr())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced, not run: a word more, and Dynamo would break the graph here
        scope = self._known.get(id(module))
        if scope is None:
            scope = self._name(module)
        if not self._stack and self.on_enter is not None:
            self.on_enter(module, args)
        self._stack.append((id(module), scope))
        self.current = scope
        self.depth += 1
        self._mark(scope)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not any(entry[0] == id(module) for entry in self._stack):
            return  # entered before the watch began
        while self._stack.pop()[0] != id(module):
            pass  # inner modules that an exception left
        self.depth = len(self._stack)
        self.current = self._stack[-1][1] if self._stack else NOWHERE
        self._mark(self.current)
        if not self._stack and self.on_leave is not None:
            self.on_leave(module)

    def _name(self, module: nn.Module) -> Scope:
        """A module that no known model holds: a model of its own, or a part made on the fly."""
        if self._stack:
            parent = self.current.fqn
            name = type(module).__name__
            fqn = f"{parent}.{name}" if parent else name
            self.types.setdefault(fqn, name)
            return _scope(fqn, module)
        self.add_root(module)
        return self._known[id(module)]

    def _mark(self, scope: Scope) -> None:
        number = _sequence_number()
        numbers = self._numbers
        if numbers and numbers[-1] == number:
            self._boundary_scopes[-1] = scope
            return
        if numbers and numbers[-1] > number:  # another thread's counter: not comparable
            return
        numbers.append(number)
        self._boundary_scopes.append(scope)
        if len(numbers) > _MAX_BOUNDARIES:
            del numbers[: _MAX_BOUNDARIES // 2]
            del self._boundary_scopes[: _MAX_BOUNDARIES // 2]


def qualified(prefix: str, name: str) -> str:
    """A module's name below a model's; what torch.compile wraps around a module has none."""
    plain = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return f"{prefix}.{plain}" if prefix and plain else prefix or plain


def _scope(fqn: str, module: nn.Module) -> Scope:
    for name in _HEADS:
        heads = getattr(module, name, None)
        if type(heads) is int:
            return Scope(fqn, type(module).__name__, heads)
    return Scope(fqn, type(module).__name__, 0)
