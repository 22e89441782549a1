"""Tensors of made-up values, from generators of their own: the target's randomness is its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def token_ids(shape: tuple[int, ...], vocabulary: int, special: Iterable[int] = ()) -> Tensor:
    """int64 ids below `vocabulary`, none of them `special` (padding, end of text, images)."""
    skipped = sorted({each for each in special if 0 <= each < vocabulary})
    if len(skipped) >= vocabulary:
        skipped = []
    ids = torch.randint(vocabulary - len(skipped), shape, generator=_generator())
    for each in skipped:
        ids = ids + (ids >= each)
    return ids


def floats(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=_generator()).to(dtype)


def causal_mask(length: int, *, leading: tuple[int, ...] = ()) -> Tensor:
    """Boolean [*leading, L, L], true where a query may look."""
    return torch.ones((*leading, length, length), dtype=torch.bool).tril()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
