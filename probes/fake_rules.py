"""Operators whose own rule for fake tensors asks for more than it needs.

A rule gets a call and returns the call to make instead, or the output itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_advisor.probes.drawn import CHOOSERS

# isnan and isinf of more elements than this have no value.
FINITE_ELEMENTS = 1 << 24

_aten = torch.ops.aten
_Call = tuple[Any, Any, Any]


def _as_is(func: Any, args: Any, kwargs: Any) -> _Call:
    return func, args, kwargs


def _with_integer_indices(func: Any, args: Any, kwargs: Any) -> _Call:
    """A real boolean mask as an index: its values are there, and so is the output's size."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if type(index) is Tensor and index.dtype in (torch.bool, torch.uint8):
            indices.extend(index.nonzero().unbind(1))
        else:
            indices.append(index)
    return func, (args[0], indices, *args[2:]), kwargs


def _masked_select(func: Any, args: Any, kwargs: Any) -> _Call:
    source, mask = args
    if type(mask) is not Tensor:
        return func, args, kwargs
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    size = [int(mask.expand(shape).sum())]
    return _aten.new_empty.default, (source, size), {}


def _all_finite(func: Any, args: Any, kwargs: Any) -> _Call | Tensor:
    """isnan, isinf: nothing that a model checks is, so that the check passes."""
    source = args[0]
    if source.numel() > FINITE_ELEMENTS:
        return func, args, kwargs
    return torch.zeros(source.shape, dtype=torch.bool)


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> _Call:
    """The products of groups of rows, for every dtype; torch's own rule knows bfloat16 alone.

    [M, K] x [G, K, N] -> [M, N]; [G, M, K] x [K, N] -> [M, N]; [M, K] x [K, N] -> [G, M, N], for G
    groups. Rows start at multiples of 16 bytes (ATen/native/GroupedMMUtils.h).
    """
    a, b, offsets, _, out_dtype = tuple(args) + (None,) * (5 - len(args))
    offsets = kwargs.get("offs", offsets)
    dtype = kwargs.get("out_dtype", out_dtype) or a.dtype
    if a.ndim == 2 and b.ndim == 2:
        leading = [offsets.shape[0], a.shape[0]]
    elif b.ndim == 2:
        leading = [a.shape[1]]
    else:
        leading = list(a.shape[:-1])
    alignment = max(1, 16 // dtype.itemsize)
    row = -(-b.shape[-1] // alignment) * alignment
    strides = [row, 1] if len(leading) == 1 else [leading[1] * row, row, 1]
    size = [*leading, b.shape[-1]]
    return _aten.new_empty_strided.default, (a, size, strides), {"dtype": dtype}


def _binary_cross_entropy(func: Any, args: Any, kwargs: Any) -> _Call | Tensor:
    """Reduced in the storage of all the losses, which stays as large (ATen/native/cuda/Loss.cu)."""
    reduction = args[3] if len(args) > 3 else kwargs.get("reduction", 1)
    if reduction == 0 or not args[0].numel():
        return func, args, kwargs
    return torch.empty_like(args[0]).as_strided((), ())


RULES: dict[Any, Any] = {
    **dict.fromkeys(CHOOSERS, _as_is),
    _aten.index.Tensor: _with_integer_indices,
    _aten.index_put.default: _with_integer_indices,
    _aten.index_put_.default: _with_integer_indices,
    _aten._index_put_impl_.default: _with_integer_indices,
    _aten.masked_select.default: _masked_select,
    _aten._grouped_mm.default: _grouped_mm,
    _aten.isnan.default: _all_finite,
    _aten.isinf.default: _all_finite,
    _aten.binary_cross_entropy.default: _binary_cross_entropy,
}
