"""What a call is, as far as its kernels need to know: options, shapes, and how tensors lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.launcher import INTERPRET

# Tensor maps and their asynchronous copies came with Hopper.
TMA_CAPABILITY = (9, 0)
# Dropout's probability is kept in steps of 1/65,536 (torch's flash kernel: 1/256).
_DROPOUT_STEPS = 2**16
NONE, BOOLEAN, ADDITIVE = 0, 1, 2


class Options(NamedTuple):
    """A call's options as the ops carry them; None: no limit."""

    scale: float
    is_causal: bool
    bottom_right: bool
    window_left: int | None
    window_right: int | None
    softcap: float
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_k: int


class Inputs(NamedTuple):
    """The tensors of a call. `seeds`: int64 [1], the key of dropout's random numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seeds: Tensor | None


def padded(dim: int) -> int:
    """A head dim as the portable kernels' tiles hold it."""
    return max(16, int(triton.next_power_of_2(dim)))


def allow_tf32() -> bool:
    """torch's own flag for float32 products, by whichever of its two interfaces it was set."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # Once the newer one was used, torch refuses to read the older.
        precision = torch.backends.cuda.matmul.fp32_precision
        if precision == "none":
            precision = getattr(torch.backends, "fp32_precision")  # noqa: B009  # Unknown to mypy.
        return bool(precision == "tf32")


class Kind(NamedTuple):
    """What all kernels of a call need to know of it."""

    batch: int
    heads: int
    group: int
    dim: int
    dim_v: int
    varlen: bool
    fold: bool
    softcap: bool
    alibi: bool
    bias: int
    bias_shape: tuple[int, ...]
    bias_strides: tuple[int, ...]
    slope_stride: int
    has_left: bool
    has_right: bool
    left: int
    right: int
    dropout: bool
    threshold: int
    keep_scale: float
    precision: str
    options: Options


def kind_of(x: Inputs, o: Options) -> Kind:
    """What all kernels of such a call need to know of it."""
    varlen = x.cu_seqlens_q is not None
    heads, dim = x.query.shape[1], x.query.shape[-1]
    bias = NONE
    shape: tuple[int, ...] = (1, 1, 1, 1)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if x.bias is not None:
        bias = BOOLEAN if x.bias.dtype is torch.bool else ADDITIVE
        shape = tuple(x.bias.shape)
        strides = tuple(0 if n == 1 else s for n, s in zip(shape, x.bias.stride(), strict=True))
    right = 0 if o.is_causal else o.window_right
    tf32 = x.query.dtype is torch.float32 and allow_tf32()
    slopes = x.alibi_slopes
    threshold = min(round(o.dropout_p * _DROPOUT_STEPS), _DROPOUT_STEPS - 1)
    return Kind(
        batch=x.cu_seqlens_q.shape[0] - 1 if x.cu_seqlens_q is not None else x.query.shape[0],
        heads=heads,
        group=heads // x.key.shape[1],
        dim=dim,
        dim_v=x.value.shape[-1],
        varlen=varlen,
        fold=not o.softcap and slopes is None and bias != ADDITIVE and o.scale > 0,
        softcap=o.softcap != 0.0,
        alibi=slopes is not None,
        bias=bias,
        bias_shape=shape,
        bias_strides=strides,
        slope_stride=slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0,
        has_left=o.window_left is not None,
        has_right=right is not None,
        # A side wider than the keys says nothing; kept small, so that 32 bits hold the sums.
        left=min(o.window_left, 2**30) if o.window_left is not None else 0,
        right=min(right, 2**30) if right is not None else 0,
        dropout=o.dropout_p > 0.0,
        threshold=threshold,
        # By the share that is really kept: near 1 the step is large beside what is left.
        keep_scale=_DROPOUT_STEPS / (_DROPOUT_STEPS - threshold),
        precision="tf32" if tf32 else "ieee",
        options=o,
    )


def strides3(t: Tensor, varlen: bool) -> tuple[int, int, int]:
    """Strides of batch, head and token, for [B, H, L, D] or packed [total, H, D]."""
    s = t.stride()
    return (0, s[1], s[0]) if varlen else (s[0], s[1], s[2])


def strides2(t: Tensor, varlen: bool) -> tuple[int, int]:
    """Strides of batch and head of [B, H, L] or [H, total], fp32 and contiguous in tokens."""
    s = t.stride()
    return (0, s[0]) if varlen else (s[0], s[1])


def addressable(t: Tensor) -> Tensor:
    """`t`, or a copy where the kernels can't read it in place.

    They need the features contiguous, and 32 bits for the offsets within a tile.
    """
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        return t.contiguous()
    if max(t.stride(), default=0) < 2**22 or t.stride(-2 if t.ndim == 4 else 0) < 2**22:
        return t
    return t.contiguous()


def by_descriptor(kind: Kind, *tensors: Tensor) -> bool:
    """Whether tensor descriptors can name all of them: 16-byte strides and bases, nothing empty.

    IEEE's fp32 products have no use for operands in shared memory as descriptors lay them: they
    would spill thousands of bytes on the way to registers.
    """
    if kind.precision == "ieee" and tensors[0].dtype is torch.float32:
        return False
    if INTERPRET or torch.cuda.get_device_capability(tensors[0].device) < TMA_CAPABILITY:
        return False
    for t in tensors:
        size = t.element_size()
        if t.numel() == 0 or t.data_ptr() % 16 or t.shape[-1] * size < 16:
            return False
        for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            if n > 1 and (s == 0 or s * size % 16):
                return False
    return True


def descriptor_layout(t: Tensor, varlen: bool) -> tuple[list[int], list[int]]:
    """Shape and strides of a descriptor over [B, heads, tokens, features]."""
    if varlen:
        total, heads, dim = t.shape
        shape, strides = [1, heads, total, dim], [0, t.stride(1), t.stride(0)]
    else:
        shape, strides = list(t.shape), list(t.stride()[:3])
    # A dim of one never moves the address, but its stride must pass for one.
    aligned = 16 // t.element_size()
    return shape, [
        max(aligned, triton.cdiv(s, aligned) * aligned) if n == 1 else s
        for n, s in zip(shape[:3], strides, strict=True)
    ] + [1]


def like(t: Tensor, last: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor in `t`'s layout, dense, with `last` as its last dim.

    Heads outside of tokens or tokens outside of heads, as `t` has them: what follows in a model
    is written for the layout that it made.
    """
    shape = (*t.shape[:-1], t.shape[-1] if last is None else last)
    if t.ndim == 4 and t.stride(1) < t.stride(2):
        b, h, n, d = shape
        return t.new_empty((b, n, h, d), dtype=dtype).transpose(1, 2)
    return t.new_empty(shape, dtype=dtype)
