"""Which module an operator runs in: forward by hooks, backward by autograd's sequence numbers."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fa_advisor.probes.events import NOWHERE, Scope
from fa_advisor.probes.modules import buffers_of, modules_of, parameters_of

_sequence_number = torch._C._autograd._get_sequence_nr
# Boundaries older than this are forgotten: their graphs are long gone.
_MAX_BOUNDARIES = 400_000
# Of those of steps that have ended, so many are kept, for graphs that live on.
_KEPT = 4_096


# Where modules keep their number of heads, for calls whose shapes fold heads into the batch.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")


class Scopes:
    """The stack of running modules. `current` is the innermost one's scope.

    `on_enter(module, args)` and `on_leave(module)` are called for outermost modules only.
    `root_of(module)`: the model that a module called on its own is part of, where that is known.
    No module is kept alive.
    """

    def __init__(self) -> None:
        self.current = NOWHERE
        self.depth = 0
        self.calls_elsewhere = 0  # of modules, in threads that aren't followed
        self._thread = 0
        self.types: dict[str, str] = {}
        self.root_of: Callable[[nn.Module], nn.Module] = lambda module: module
        self.on_enter: Callable[[nn.Module, Any], None] | None = None
        self.on_leave: Callable[[nn.Module], None] | None = None
        # Of every module that a thread that isn't followed calls.
        self.on_elsewhere: Callable[[nn.Module, Any], None] | None = None
        self._stack: list[tuple[int, Scope]] = []
        self._known: dict[int, Scope] = {}  # by id, for as long as the model lives
        self._roots: list[weakref.ref[nn.Module]] = []
        self._taken: set[str] = set()
        self._vacant: dict[str, list[str]] = {}  # prefixes that models of a class had
        self._numbers: list[int] = []
        self._boundary_scopes: list[Scope] = []
        self._lines: dict[int, tuple[str, int]] = {}
        # The sequence numbers at which steps ended.
        self._steps: deque[int] = deque(maxlen=_KEPT)
        self._handles: list[Any] = []

    def add_root(self, module: nn.Module) -> str:
        """Name a model's modules; a second model's names start with its class's name.

        A model that is built anew, for the next fold say, has the names of the one that is gone.
        """
        known = self._known.get(id(module))
        if known is not None:
            return known.fqn
        kind = type(module).__name__
        prefix = self._prefix(kind)
        ids = []
        for name, child in modules_of(module):
            fqn = qualified(prefix, name)
            if self._known.setdefault(id(child), scope := _scope(fqn, child)) is scope:
                ids.append(id(child))
            if type(child).__name__ != "OptimizedModule" or fqn not in self.types:
                self.types[fqn] = type(child).__name__

        def gone(root: weakref.ref[nn.Module]) -> None:
            for number in ids:
                self._known.pop(number, None)
            self._roots.remove(root)
            self._vacant.setdefault(kind, []).append(prefix)

        self._roots.append(weakref.ref(module, gone))
        return prefix

    def _prefix(self, kind: str) -> str:
        vacant = self._vacant.get(kind)
        if vacant:
            return vacant.pop(0)
        prefix = kind if self._taken else ""
        base, count = prefix, 2
        while prefix in self._taken or (prefix and prefix in self.types):
            prefix, count = f"{base}#{count}", count + 1
        self._taken.add(prefix)
        return prefix

    def roots(self) -> list[nn.Module]:
        """The models that were named or called and that live, in that order."""
        return [module for root in self._roots if (module := root()) is not None]

    def first_root(self) -> nn.Module | None:
        """The first model that was named or called."""
        return next(iter(self.roots()), None)

    def install(self) -> None:
        """Watch every module call of this thread until `remove`."""
        self._thread = get_ident()
        self._handles = [
            nn_module.register_module_forward_pre_hook(self.enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()
        self.current, self.depth = NOWHERE, 0

    def step_ends(self) -> None:
        """A step has. What nodes of earlier ones were made by is forgotten where that is much."""
        self._steps.append(_sequence_number())
        while len(self._steps) > 1 and max(len(self._numbers), len(self._lines)) > _KEPT:
            self._forget_before(self._steps.popleft())

    def _forget_before(self, number: int) -> None:
        at = bisect_right(self._numbers, number) - 1
        if at > 0:
            del self._numbers[:at]
            del self._boundary_scopes[:at]
        for old in list(takewhile(lambda each: each < number, self._lines)):
            del self._lines[old]

    def of_node(self, node: Any) -> Scope:
        """The module whose forward made an autograd node."""
        return self._of_number(node._sequence_nr())

    def _of_number(self, number: int) -> Scope:
        at = bisect_right(self._numbers, number) - 1
        return self._boundary_scopes[at] if at >= 0 else NOWHERE

    def place_of_node(self, node: Any) -> tuple[Scope, tuple[str, int] | None]:
        """The module, and the line of the forward, that made an autograd node."""
        number = node._sequence_nr()
        return self._of_number(number), self._lines.get(number)

    def mark_line(self, source: tuple[str, int] | None) -> None:
        """The autograd node made last belongs to this line, if there is one."""
        if source is None:
            return
        lines = self._lines
        lines[_sequence_number() - 1] = source
        if len(lines) > _MAX_BOUNDARIES:
            for number in list(lines)[: _MAX_BOUNDARIES // 2]:
                del lines[number]

    def enter(self, module: nn.Module, args: Any) -> None:
        """A module's forward begins."""
        if torch.compiler.is_compiling():
            return  # traced, not run: a word more, and Dynamo would break the graph here
        if self.elsewhere():
            self.calls_elsewhere += 1
            if self.on_elsewhere is not None:
                self.on_elsewhere(module, args)
            return
        scope = self._known.get(id(module))
        if scope is None:
            scope = self._name(module)
        if not self._stack and self.on_enter is not None:
            self.on_enter(module, args)
        self._stack.append((id(module), scope))
        self.current = scope
        self.depth += 1
        self._mark(scope)

    def elsewhere(self) -> bool:
        """Whether a thread that isn't followed asks; autograd's are, for checkpoints' sake."""
        return get_ident() != self._thread and torch._C._current_graph_task_id() == -1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number, stack = id(module), self._stack
        if not stack or (stack[-1][0] != number and not any(entry[0] == number for entry in stack)):
            return  # entered before the watch began
        while stack.pop()[0] != number:
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
        if not _holds_tensors(module):  # a loss, a transform: made anew in every step, perhaps
            name = type(module).__name__
            self.types.setdefault(name, name)
            return _scope(name, module)
        self.add_root(self.root_of(module))
        known = self._known.get(id(module))
        if known is None:  # the model doesn't hold it any more
            self.add_root(module)
            known = self._known[id(module)]
        return known

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


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in parameters_of(module)) or any(True for _ in buffers_of(module))


def _scope(fqn: str, module: nn.Module) -> Scope:
    for name in _HEADS:
        try:
            heads = getattr(module, name, None)
        except Exception:  # a property of the user's, or a __getattr__
            continue
        if type(heads) is int:
            return Scope(fqn, type(module).__name__, heads)
    return Scope(fqn, type(module).__name__, 0)
