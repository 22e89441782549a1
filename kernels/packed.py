"""Packed sequences: [total, heads, dim] and the offsets that say where each sequence starts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[int, int]:
    """The two longest lengths of a call over packed sequences."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(
                f"{name}: expected [total, heads, dim] with cu_seqlens, got shape {tuple(x.shape)}"
            )
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key: expected query's head dim {query.shape[2]}, got {key.shape[2]}")
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"value: expected key's total and heads {tuple(key.shape[:2])},"
            f" got {tuple(value.shape[:2])}"
        )
    if attn_mask is not None:
        raise ValueError("attn_mask: expected None with cu_seqlens, got a mask")
    lengths = (
        ("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k),
    )
    for name, cu_seqlens, max_name, longest in lengths:
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(
                f"{name}: expected an int32 Tensor [B + 1] (cu_seqlens_q and cu_seqlens_k go"
                f" together), got {type(cu_seqlens).__name__}"
            )
        if cu_seqlens.dtype is not torch.int32:
            raise TypeError(f"{name}: expected int32, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"{name}: expected shape [B + 1], one sequence at least,"
                f" got {tuple(cu_seqlens.shape)}"
            )
        if cu_seqlens.device != query.device:
            raise ValueError(
                f"{name}: expected query's device {query.device}, got {cu_seqlens.device}"
            )
        if not isinstance(longest, (int, torch.SymInt)):
            raise TypeError(
                f"{max_name}: expected the longest sequence's length, an int (reading it off"
                f" {name} would wait for the GPU), got {type(longest).__name__}"
            )
        if longest < 0:
            raise ValueError(f"{max_name}: expected 0 or more, got {longest}")
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    assert max_seqlen_q is not None and max_seqlen_k is not None
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected cu_seqlens_q's {cu_seqlens_q.shape[0]} entries,"
            f" got {cu_seqlens_k.shape[0]}"
        )
    return max_seqlen_q, max_seqlen_k


def check_offsets(name: str, cu_seqlens: Tensor | None, total: int, longest: int) -> None:
    """The values of cu_seqlens, rising from 0 to `total`, where they can be read without waiting.

    That is on the CPU; a fake tensor, or one that torch.func has wrapped, is let through.
    """
    if type(cu_seqlens) is not Tensor or not cu_seqlens.is_cpu:
        return
    if torch._C._are_functorch_transforms_active():
        return
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != total or min(lengths) < 0:
        raise ValueError(
            f"{name}: expected values that rise from 0 to the {total} tokens given, got {offsets}"
        )
    if max(lengths) > longest:
        raise ValueError(
            f"max_seqlen_{name[-1]}: expected {max(lengths)}, the longest of {name}, got {longest}"
        )
