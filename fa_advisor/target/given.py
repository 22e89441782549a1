"""The inputs that the user's file gives for its model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from fa_advisor.errors import UsageError
from fa_advisor.probes.structure import tensors_in
from fa_advisor.target.faults import target_code
from fa_advisor.target.find import Found
from fa_advisor.target.geometry import max_positions
from fa_advisor.target.sizes import DEFAULT_BATCH_SIZE, fitting_seq_len

NAMES = ("inputs", "example_inputs", "get_inputs")
SIZES = ("batch_size", "seq_len")

Call = tuple[tuple[Any, ...], dict[str, Any]]


def given_inputs(
    module: ModuleType, found: Found, label: str, batch_size: int | None, seq_len: int | None
) -> Call | None:
    """What to call the model with, or `None` where the user's file doesn't say.

    Raises: UsageError for inputs without a tensor, for an empty batch, and where sizes are asked
    for that these inputs can't be given in; TargetError.
    """
    asked = {
        size: value
        for size, value in zip(SIZES, (batch_size, seq_len), strict=True)
        if value is not None
    }
    if found.inputs is not None:
        return _fixed(found.inputs, f"the inputs that {found.name}() returned", label, asked)
    for name in NAMES:
        value = getattr(module, name, None)
        if callable(value) and not isinstance(value, torch.Tensor):
            made = _call(value, name, found, label, asked)
            return _checked(made, f"what {name}() returned", label)
        if value is not None and next(tensors_in(value), None) is not None:
            return _fixed(value, f"`{name}`", label, asked)
    return None


def _call(
    function: Callable[..., Any], name: str, found: Found, label: str, asked: dict[str, int]
) -> Any:
    """Call it with the sizes asked for, and with the defaults of those it can't do without."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in named if p.default is p.empty]
    foreign = [each for each in needed if each not in SIZES]
    if foreign:
        raise UsageError(
            f"{name} in {label} needs {', '.join(foreign)}; "
            "it is given batch_size and seq_len, by keyword, and nothing else"
        )
    refused = [size for size in asked if not takes_any and size not in [p.name for p in named]]
    if refused:
        raise _cannot_resize(f"{name}()", refused[0], label)
    sizes = dict(asked)
    if "batch_size" in needed:
        sizes.setdefault("batch_size", DEFAULT_BATCH_SIZE)
    if "seq_len" in needed and "seq_len" not in sizes:
        sizes["seq_len"] = fitting_seq_len(None, max_positions(found.model))
    with target_code(label):
        return function(**sizes)


def _fixed(value: Any, what: str, label: str, asked: dict[str, int]) -> Call:
    for size in asked:
        raise _cannot_resize(what, size, label)
    return _checked(value, what, label)


def _cannot_resize(what: str, size: str, label: str) -> UsageError:
    return UsageError(
        f"--{size.replace('_', '-')} can't change {what} in {label}",
        hint=f"leave the option out, or make the inputs with a function that takes {size}",
        detail=(
            f"For example, in {label}:\n\n"
            "    def get_inputs(batch_size=1, seq_len=1024):\n"
            "        return torch.randint(0, 50257, (batch_size, seq_len))\n"
        ),
    )


def _checked(value: Any, what: str, label: str) -> Call:
    tensors = list(tensors_in(value))
    if not tensors:
        raise UsageError(
            f"{what} in {label} holds no tensor; "
            "expected a tensor, a tuple of the model's arguments, or a dict of them"
        )
    if tensors[0].numel() == 0:
        shape = tuple(tensors[0].shape)
        raise UsageError(f"{what} in {label} is an empty batch: its first tensor has shape {shape}")
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple | list):
        return tuple(value), {}
    return (value,), {}
