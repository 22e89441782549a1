"""The one place where a patched module meets the kernel, and what the kernel doesn't take.

H heads, Lq and Lk lengths, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fa_advisor.kernels import reference
from fa_advisor.kernels.api import flash_attention

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cpu", "cuda")


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str | None:
    """The code of the reason why the kernel doesn't take this call, `None` where it does.

    Looks at shapes and types alone, so that it costs little and compiles.
    """
    tensors = (query, key, value)
    if any(each.is_nested or each.layout is not torch.strided for each in tensors):
        return "LAYOUT"
    if query.dim() < 3 or any(each.dim() != query.dim() for each in tensors):
        return "LAYOUT"
    if query.device.type not in DEVICES or any(each.device != query.device for each in tensors):
        return "DEVICE"
    if computing_dtype(query) not in DTYPES:
        return "DTYPE"
    if any(computing_dtype(each) != computing_dtype(query) for each in tensors):
        return "DTYPE"
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return "LAYOUT"
    if not (0 < query.shape[-1] <= MAX_HEAD_DIM and 0 < value.shape[-1] <= MAX_HEAD_DIM):
        return "HEAD_DIM"
    if not 0.0 <= dropout_p < 1.0:
        return "DROPOUT"
    if not _heads_fit(query, key, value, enable_gqa):
        return "LAYOUT"
    if mask is not None:
        return _mask_refusal(query, key, mask, is_causal)
    return None


def _heads_fit(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether the leading dims broadcast and the key's heads are the query's, one, or shared."""
    if key.shape[-3] != value.shape[-3]:
        return False
    for one in (key, value):
        if not _broadcasts(one.shape[:-3], query.shape[:-3]):
            return False
    heads, kv_heads = query.shape[-3], key.shape[-3]
    return heads == kv_heads or kv_heads == 1 or (enable_gqa and heads % kv_heads == 0)


def _broadcasts(shape: torch.Size, full: torch.Size) -> bool:
    """Whether dims stand in for each other: equal, or 1 on either side."""
    return all(a == b or 1 in (a, b) for a, b in zip(shape, full, strict=True))


def _mask_refusal(query: Tensor, key: Tensor, mask: Tensor, is_causal: bool) -> str | None:
    lead = [max(a, b) for a, b in zip(query.shape[:-3], key.shape[:-3], strict=True)]
    full = (*lead, *query.shape[-3:-1], key.shape[-2])
    if (
        is_causal  # SDPA refuses both at once: its own message is the best
        or mask.is_nested
        or not 2 <= mask.dim() <= len(full)
        or not (mask.dtype == torch.bool or mask.is_floating_point())
        or mask.device != query.device
        or any(
            have not in (1, want)
            for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
        )
    ):
        return "MASK_NOT_REPRESENTABLE"
    return None


def computing_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that SDPA computes in for this tensor: its own, or autocast's."""
    kind = tensor.device.type
    if (
        kind in DEVICES
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and torch.is_autocast_enabled(kind)
    ):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[..., H, Lq, Dv] of a call for which `refusal` is `None`.

    The meaning is scaled_dot_product_attention's: top-left causal alignment, leading dims
    broadcast, fewer key heads than query heads are shared, autocast decides the dtype.
    """
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, computing_dtype(query)):
        mask = mask.to(computing_dtype(query))
    if _rounded is not None:
        return _exact(query, key, value, mask, is_causal, scale, softcap, sinks, _rounded)
    return flash_attention(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa=True, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip


# A plain global, as a compiled graph can only be guarded by such.
_rounded: torch.dtype | None = None


@contextmanager
def exact_but_for_the_output(dtype: torch.dtype) -> Iterator[None]:
    """`attend` computes in float64, but its backward takes sum(dO * O) of an O rounded to `dtype`.

    That is what every flash backward does, however exact it is in all else.
    """
    global _rounded
    before, _rounded = _rounded, dtype
    try:
        yield
    finally:
        _rounded = before


class _RoundedOutput(torch.autograd.Function):
    """out as it is; to backward the rounding looks like a gradient of the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(out.to(dtype).to(out.dtype) - out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        (noise,) = ctx.saved_tensors
        return grads[0], -(grads[0] * noise).sum(-1), None


def _exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    q, k, v = (
        each.expand(*lead, *each.shape[-3:]).reshape(-1, *each.shape[-3:])
        for each in (query, key, value)
    )
    if mask is not None and mask.dim() > 2:
        full = (*lead, *mask.shape[-3:])
        mask = mask.expand(full).reshape(-1, *mask.shape[-3:])
    out, lse = reference.attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, softcap=softcap, sinks=sinks
    )
    rounded: Tensor = _RoundedOutput.apply(out, lse, dtype)  # type: ignore[no-untyped-call]
    return rounded.reshape(*lead, *out.shape[-3:])
