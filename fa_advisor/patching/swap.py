"""Giving one module another class, and back: the change that a patch makes to a model.

`module.__class__ = patched_class(...)` leaves everything that is stored in the module alone:
parameters and their identity, buffers, hooks, state_dict keys, attributes. The new class derives
from the old one and carries its name, so isinstance, printing and code that looks classes up by
name see no difference. Pickle and copy.deepcopy name the old class and the kind of patch, not the
made class, so both work, in another process too.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

from torch import nn


class Patched:
    """What every patched class has first among its bases. Makes no attributes of its own.

    Neither it nor a kind may name `__slots__`: Python then finds another layout in the made class
    and refuses to assign it.
    """

    patched_from: ClassVar[type[nn.Module]]
    patched_kind: ClassVar[type[Patched]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the module's class has its own way of being copied
        return rebuild, (self.patched_from, self.patched_kind), *reduced[2:]


_CLASSES: dict[tuple[Any, Any], type[nn.Module]] = {}


def patched_class(base: type[nn.Module], kind: type[Patched]) -> type[nn.Module]:
    """The subclass of `base` whose behaviour `kind` changes; one for all instances of `base`."""
    known = _CLASSES.get((base, kind))
    if known is not None:
        return known
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "patched_from": base,
        "patched_kind": kind,
    }
    made = type(base.__name__, (kind, base), body)
    return _CLASSES.setdefault((base, kind), made)


def rebuild(base: type[nn.Module], kind: type[Patched]) -> nn.Module:
    """An empty patched module, for pickle and copy to fill."""
    made = patched_class(base, kind)
    return made.__new__(made)


def swap(module: nn.Module, kind: type[Patched]) -> None:
    """Give this one module the behaviour of `kind`."""
    module.__class__ = patched_class(original_class(module), kind)


def restore(module: nn.Module) -> None:
    """Give the module its own class back; nothing where it has it.

    A class that somebody derived from the patched one meanwhile, as parametrizations and FSDP do,
    stays, derived from the module's own.
    """
    if is_patched(module):
        module.__class__ = _unpatched(type(module))


def _unpatched(of: type[Any]) -> type[Any]:
    if not issubclass(of, Patched):
        return of
    if "patched_kind" in vars(of):
        return of.patched_from
    body = {k: v for k, v in vars(of).items() if k not in ("__dict__", "__weakref__")}
    metaclass: Any = type(of)
    made: type[Any] = metaclass(of.__name__, tuple(map(_unpatched, of.__bases__)), body)
    return made


def is_patched(module: nn.Module) -> bool:
    """Whether the module has a patched class."""
    return isinstance(module, Patched)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module has when it isn't patched."""
    return module.patched_from if isinstance(module, Patched) else type(module)
