"""Attention masks: what is accepted, and the one form that the kernels take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_advisor.kernels.fp8 import result_dtype


def normal_mask(mask: Tensor, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """The mask with four dims, each full or 1: nothing is broadcast in memory but leading dims."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask: expected a Tensor or None, got {type(mask).__name__}")
    if is_causal:
        raise ValueError(
            "attn_mask: expected None with is_causal=True, as scaled_dot_product_attention has it,"
            " got both; window=(-1, 0) means is_causal and goes with a mask"
        )
    own = result_dtype(query.dtype)
    if mask.dtype not in (torch.bool, torch.float32, own):
        whose = "query's" if own is query.dtype else "the result's"
        hint = "" if mask.is_floating_point() else "; mask.bool() makes True what takes part"
        raise TypeError(
            f"attn_mask: expected bool, float32 or {whose} dtype {own}, got {mask.dtype}{hint}"
        )
    if mask.device != query.device:
        raise ValueError(f"attn_mask: expected query's device {query.device}, got {mask.device}")
    if query.ndim < 3 or key.ndim != query.ndim:
        return mask  # `arguments` says so, with the rest about ranks.
    full = (*query.shape[:-1], key.shape[-2])
    lead = full[:-3]
    if query.shape[:-3] != key.shape[:-3]:
        try:
            lead = torch.broadcast_shapes(lead, key.shape[:-3])
        except RuntimeError:
            return mask  # The same, of leading dims.
        full = (*lead, *full[-3:])
    shape = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
    if len(shape) != len(full) or any(m != 1 and m != f for m, f in zip(shape, full, strict=True)):
        hint = ""
        if mask.ndim == 2 and len(full) == 4 and shape[2:] == (full[0], full[3]):
            hint = "; a key-padding mask [B, Lk] is passed as mask[:, None, None, :]"
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {full}, got {tuple(mask.shape)}{hint}"
        )
    if mask.ndim == 4 == len(full):
        return mask
    mask = mask.view(shape) if mask.ndim == len(full) else mask[(None,) * (len(full) - mask.ndim)]
    if all(m == 1 for m in shape[:-3]):
        return mask.reshape(1, *shape[-3:])
    return mask.expand(*lead, *shape[-3:]).reshape(math.prod(lead), *shape[-3:])
