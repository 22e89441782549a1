"""Calls that a patched module handed to its original code, counted; the first one warns."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn


class PatchFallbackWarning(UserWarning):
    """A patched module ran its original code, because the call is none that the kernel takes."""


_COUNTS: WeakKeyDictionary[nn.Module, Counter[str]] = WeakKeyDictionary()


def count(module: nn.Module, code: str) -> None:
    """Note one call that ran the original code, for the reason `code`.

    Warns at the first of a module and reason. Inside a compiled graph nothing is counted: a count
    would break the graph.
    """
    if torch.compiler.is_compiling():
        return
    counts = _COUNTS.setdefault(module, Counter())
    counts[code] += 1
    if counts[code] == 1:
        warnings.warn(
            f"{type(module).__name__} ran its original attention: {code} "
            "(docs/patching.md says what that means). This is said once for a module; "
            "handle.fallbacks counts the calls",
            PatchFallbackWarning,
            stacklevel=3,
        )


def counts(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, dict[str, int]]:
    """{name: {code: calls}} of those that ran their original code."""
    return {name: dict(_COUNTS[module]) for name, module in modules if module in _COUNTS}
