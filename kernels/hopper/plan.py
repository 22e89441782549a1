"""Which calls the Hopper kernels take, with which tiles, and how they are launched.

This is the one place where that is decided: a function here gives a launch, or None and the
portable kernel runs. What Gluon can't compile is left for the portable kernel too, with one line
in the log that says why.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.fp8 import E4M3
from fa_advisor.kernels.hopper import dealing
from fa_advisor.kernels.hopper.dealing import Ordered, Scheduled, deal, order_of
from fa_advisor.kernels.hopper.tiles import (
    BLOCK_N,
    CAPABILITY,
    ROWS_OF_A_CONSUMER,
    WIDE_QUERIES,
    tiles_of,
    value_stages,
    widths,
)
from fa_advisor.kernels.kinds import (
    ADDITIVE,
    BOOLEAN,
    NONE,
    Inputs,
    Kind,
    Options,
    by_descriptor,
    like,
    strides2,
    strides3,
)
from fa_advisor.kernels.launcher import Launch
from fa_advisor.kernels.tiles import SHORT, Tile

_LOG = logging.getLogger(__name__)
# Rows of a descriptor of packed sequences. Coordinates past them are out of bounds, so that a
# sequence's rows can be laid against that end: see `describe`.
FAR = 2**30
_MOST = 0x7FFF0000


def refusal(kind: Kind, o: Options, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the portable kernel takes a call's forward; None where Hopper's does.

    Each row is a kind of call and the reason.
    """
    least = ROWS_OF_A_CONSUMER
    wide = kind.bias == BOOLEAN and kind.bias_strides[2] != 0
    reasons: tuple[tuple[bool, str], ...] = (
        (q.dtype not in (torch.float16, torch.bfloat16), "float32 has no wgmma of its own"),
        (kind.bias == ADDITIVE, "an additive bias is read tile by tile from global memory"),
        (wide, "so is a mask with a row for each query"),
        (kind.dropout, "dropout's random numbers take the registers of a second consumer"),
        (kind.alibi, "ALiBi isn't written for it"),
        (not o.scale > 0.0, "what is hidden is -inf before the scale, and 0 times that is NaN"),
        (max(kind.dim, kind.dim_v) <= 32, "small head dims would be padded to 64"),
        (o.max_seqlen_q < least, f"fewer than {least} queries leave its rows empty"),
        (o.max_seqlen_k <= SHORT, "encoding four tensor maps costs more than is gained"),
        (not by_descriptor(kind, q, k, v), "tensor maps can't name such strides"),
        (kind.dim_v % 8 != 0, "nor rows that aren't multiples of 16 bytes"),
        (max(q.numel(), k.numel(), v.numel()) >= 2**40, "nor tensors as large"),
    )
    return next((why for applies, why in reasons if applies), None)


def describe(t: Tensor, varlen: bool, rows: int, features: int) -> tuple[Any, ...]:
    """Shape, strides, block and layout of a rank-5 descriptor over t's blocks [rows, features].

    [B, H, L, D] is [1, B, H, L, D]. Packed [total, H, D] is told so that the bounds are those of
    each sequence, without a descriptor for each: row r of the sequence that is `length` long from
    `first` has the coordinates (FAR, first + length, head, FAR - length + r), whose address is
    right by 64-bit wrap-around, and whose last coordinate passes FAR where r passes the length.
    """
    from triton.experimental.gluon import language as gl  # Absent where refused.

    block = [1, 1, 1, rows, features]
    element = {torch.bfloat16: gl.bfloat16, E4M3: gl.float8e4nv}.get(t.dtype, gl.float16)
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    aligned = 16 // t.element_size()
    if varlen:
        total, heads, dim = t.shape
        row, head = t.stride(0), t.stride(1)
        if heads == 1:
            head = aligned
        if total == 1:
            row = triton.cdiv(dim, aligned) * aligned
        return [_MOST, _MOST, heads, FAR, dim], [2**34 - row, row, head, row, 1], block, layout
    strides = [
        max(aligned, triton.cdiv(s, aligned) * aligned) if n == 1 else s
        for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)
    ]
    return [1, *t.shape], [aligned, *strides, 1], block, layout


def flat_layout(rank: int) -> Any:
    """How a block of fp32 lies in shared memory as it lies in global memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def forward(
    kind: Kind, o: Options, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    row_strides: tuple[int, int], span_strides: tuple[int, int, int], x: Inputs,
) -> Scheduled | Ordered | None:  # fmt: skip
    """The launch of the Hopper kernel, or None where the portable one shall run."""
    if not available(q.device) or refusal(kind, o, q, k, v) is not None:
        return None
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa_advisor.kernels.hopper.forward import forward_kernel

    cut = tiles_of(kind.dim, kind.dim_v)
    varlen = kind.varlen
    pieces = deal(kind, o, cut, q)
    order = order_of(kind, o, cut, pieces, k) if varlen else None
    grid = pieces.grid if order is None else order.grid
    bm, bn = ROWS_OF_A_CONSUMER, cut.block_n
    described = {
        0: describe(q, varlen, bm, cut.part),
        1: describe(k, varlen, bn, cut.part),
        2: describe(v, varlen, bn, cut.block_dv),
        3: describe(out, varlen, bm, cut.block_dv),
    }
    static = (
        *row_strides, *kind.bias_strides[:2], kind.bias_strides[3], *span_strides[:2],
        o.max_seqlen_q, o.max_seqlen_k, kind.batch * kind.heads, kind.heads, kind.group,
        pieces.blocks, pieces.side_by_side, pieces.total, o.scale, o.softcap, kind.left, kind.right,
        varlen, kind.softcap, x.sinks is not None, kind.bias == BOOLEAN, kind.has_left,
        kind.has_right, o.bottom_right, not varlen and o.max_seqlen_k % bn == 0,
        bm, bn, cut.parts, cut.block_dv, cut.stages, cut.consumers, cut.shared_out,
        order is not None,
    )  # fmt: skip
    launch = Launch(
        "hopper_forward", forward_kernel, lambda _: (grid, static),
        Tile(bm, bn, 4, cut.stages), lambda _: described, adjustable=False,
        describe=TensorDescriptor,
    )  # fmt: skip
    spans = out.new_empty(4, dtype=torch.int32) if kind.bias == BOOLEAN else None
    lse = out.new_empty(4, dtype=torch.float32)
    bias = x.bias.view(torch.uint8) if x.bias is not None else None
    cu = x.cu_seqlens_q, x.cu_seqlens_k
    words = pieces.schedule if order is None else order.empty(q.device)
    pointers = (
        q, k, v, out, lse, None, None, bias, spans, x.sinks, None, *cu, None, words,
    )  # fmt: skip
    if not compiles(launch, q.device, pointers):
        return None
    if order is not None and not compiles(order.launch, q.device, (words, *cu)):
        return None
    return Scheduled(launch, pieces.schedule) if order is None else Ordered(launch, order)


def compiles(launch: Launch, device: torch.device, pointers: tuple[Any, ...]) -> bool:
    """Whether a launch can be made; if not, the log says why. Nothing is launched."""
    try:
        with torch.cuda.device(device):
            launch.ready(device.index, pointers)
    except Exception as error:  # Whatever a compiler raises, the portable kernel can do the call.
        _say_once(_reason(error))
        return False
    return True


def _reason(error: BaseException) -> str:
    """What the innermost of an error's causes says, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[-1] if said else ''}".rstrip(": ")


class Backward(NamedTuple):
    """A backward call's three launches; with `exact`, dQ by the portable kernel instead.

    rows: of the padded statistics, over all heads. words: of dQ's accumulator, in its rows of 256.
    gradients: size and stride of dQ, dK and dV.
    """

    prepare: Launch
    main: Launch
    finish: Launch | None
    rows: int
    words: int
    gradients: tuple[tuple[Any, Any], ...]

    @property
    def makes_dq(self) -> bool:
        """Whether dQ isn't to be given."""
        return self.finish is not None

    def buffers(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """base, delta, the accumulator and how many pieces were taken."""
        total = torch.empty((self.words, 256), dtype=torch.float32, device=device)
        taken = torch.empty(1, dtype=torch.int32, device=device)
        return *_statistics(self.rows, device), total, taken

    def __call__(
        self, x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
        grad_query: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """dQ (`grad_query`, if that was made elsewhere), dK, dV, and delta where sinks want it."""
        q, k, v, device = x.query, x.key, x.value, x.query.device
        index = q.get_device()
        for_query, *rest = self.gradients
        dk, dv = (torch.empty_strided(*of, dtype=q.dtype, device=device) for of in rest)
        base, delta, total, taken = self.buffers(device)
        rows_delta = torch.empty_like(lse) if x.sinks is not None else None
        cu = x.cu_seqlens_q, x.cu_seqlens_k
        self.prepare(
            index, out, grad_out, lse, grad_lse, base, delta, total, taken, rows_delta, cu[0]
        )
        self.main(index, q, k, v, grad_out, dk, dv, base, delta, total, taken, *cu)
        dq = grad_query
        if self.finish is not None:
            dq = torch.empty_strided(*for_query, dtype=q.dtype, device=device)
            self.finish(index, total, dq, x.cu_seqlens_q)
        assert dq is not None
        return dq, dk, dv, lse if rows_delta is None else rows_delta


class WideBackward(NamedTuple):
    """A backward call's three launches where a head dim is over 128; called as `Backward` is.

    rows, gradients: as there. Nothing is added in memory: dQ is exact of itself.
    """

    prepare: Launch
    keys: Launch
    queries: Launch
    rows: int
    gradients: tuple[tuple[Any, Any], ...]

    @property
    def makes_dq(self) -> bool:
        """Whether dQ isn't to be given."""
        return True

    def buffers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """base and delta."""
        return _statistics(self.rows, device)

    def __call__(
        self, x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
        grad_query: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """dQ, dK, dV, and delta where sinks want it. `grad_query` isn't needed."""
        q, k, v, device = x.query, x.key, x.value, x.query.device
        index = q.get_device()
        dq, dk, dv = (
            torch.empty_strided(*of, dtype=q.dtype, device=device) for of in self.gradients
        )
        base, delta = self.buffers(device)
        rows_delta = torch.empty_like(lse) if x.sinks is not None else None
        cu = x.cu_seqlens_q, x.cu_seqlens_k
        self.prepare(
            index, out, grad_out, lse, grad_lse, base, delta, None, None, rows_delta, cu[0]
        )
        self.keys(index, q, k, v, grad_out, dk, dv, base, delta, *cu)
        self.queries(index, q, k, v, grad_out, dq, base, delta, *cu)
        return dq, dk, dv, lse if rows_delta is None else rows_delta


def _statistics(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """base and delta."""
    base, delta = torch.empty((2, rows), dtype=torch.float32, device=device).unbind()
    return base, delta


def backward_refusal(
    kind: Kind, o: Options, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> str | None:
    """Why the portable kernels take a call's backward; None where Hopper's do."""
    reasons: tuple[tuple[bool, str], ...] = (
        (q.dtype not in (torch.float16, torch.bfloat16), "float32 has no wgmma of its own"),
        (kind.bias != NONE, "masks and biases aren't written for it"),
        (kind.dropout, "dropout isn't written for it"),
        (kind.alibi, "ALiBi isn't written for it"),
        (max(kind.dim, kind.dim_v) <= 32, "small head dims would be padded to 64"),
        (min(o.max_seqlen_q, o.max_seqlen_k) <= SHORT, "encoding the tensor maps costs more"),
        (not by_descriptor(kind, q, k, v, grad_out), "tensor maps can't name such strides"),
        (kind.dim % 8 + kind.dim_v % 8 != 0, "nor rows that aren't multiples of 16 bytes"),
        (_padded_rows(kind, o, q) >= 2**31, "32 bits don't count such rows"),
    )
    return next((why for applies, why in reasons if applies), None)


def used_features(dim: int, dim_v: int) -> tuple[int, int]:
    """Where a head dim is over 128: how many features of Q and V products are made with."""
    used_v = 128 if dim_v <= 128 else 192 if dim_v <= 192 else 256
    return 192 if dim <= 192 else 256, used_v


def _rows_of_a_head(kind: Kind, o: Options, q: Tensor) -> int:
    """Padded to tiles: of one sequence, or of all with room for each one's tail."""
    block_m = widths(kind.dim, kind.dim_v)[2]
    if kind.varlen:
        return (q.shape[0] // block_m + kind.batch) * block_m
    return int(triton.cdiv(o.max_seqlen_q, block_m)) * block_m


def _padded_rows(kind: Kind, o: Options, q: Tensor) -> int:
    return _rows_of_a_head(kind, o, q) * kind.heads * (1 if kind.varlen else kind.batch)


def backward(
    kind: Kind, o: Options, x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
    lse: Tensor, exact: bool,
) -> Backward | WideBackward | None:  # fmt: skip
    """The plan for the Hopper kernels, or None where the portable ones shall run.

    exact: up to head dims of 128 dQ comes from another kernel then, as sums in no order would
    differ from run to run.
    """
    q, k, v = x[:3]
    if not available(q.device) or backward_refusal(kind, o, q, k, v, grad_out) is not None:
        return None
    wide = max(kind.dim, kind.dim_v) > 128
    prepare = _prepare(kind, o, grad_out, grad_lse, out, lse, zero=not (wide or exact))
    if wide:
        return _wide_backward(kind, o, x, grad_out, prepare)
    return _narrow_backward(kind, o, x, grad_out, prepare, exact)


def _prepare(
    kind: Kind, o: Options, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
    zero: bool,
) -> Launch:  # fmt: skip
    """The launch before the others: the statistics, and `zero`s in dQ's accumulator."""
    from fa_advisor.kernels.hopper.backward import prepare_kernel

    varlen = kind.varlen
    wide, wide_v, block_m = widths(kind.dim, kind.dim_v)
    blocks = int(triton.cdiv(o.max_seqlen_q, block_m))
    lse_strides = (0, 0, 0)
    if grad_lse is not None:
        s = grad_lse.stride()
        lse_strides = (0, s[0], s[1]) if varlen else (s[0], s[1], s[2])
    static = (
        *strides3(out, varlen), *strides3(grad_out, varlen), *strides2(lse, varlen), *lse_strides,
        *_row_strides(kind, o, out), o.max_seqlen_q, kind.heads, blocks,
        varlen, grad_lse is not None, zero, kind.dim_v, wide_v, wide, block_m,
    )  # fmt: skip
    grid = blocks * kind.batch * kind.heads
    return Launch(
        "hopper_prepare", prepare_kernel, lambda _: (grid, static),
        Tile(block_m, BLOCK_N, 8 if wide == 256 else 4, 1), adjustable=False,
    )  # fmt: skip


def _row_strides(kind: Kind, o: Options, q: Tensor) -> tuple[int, int]:
    """Of batch and head, among the padded rows."""
    padded = _rows_of_a_head(kind, o, q)
    return (0, padded) if kind.varlen else (kind.heads * padded, padded)


def _heads_beside(kind: Kind, o: Options) -> int:
    """How many heads run side by side in the backward."""
    if not kind.has_right:
        return 1
    if o.max_seqlen_q <= 1024:
        return 32
    return 8 if o.max_seqlen_q < 8192 else 4


def _narrow_backward(
    kind: Kind, o: Options, x: Inputs, grad_out: Tensor, prepare: Launch, exact: bool
) -> Backward | None:
    """For head dims up to 128."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa_advisor.kernels.hopper import backward as kernels

    q, k, v = x[:3]
    varlen, n = kind.varlen, BLOCK_N
    wide, wide_v, block_m = widths(kind.dim, kind.dim_v)
    blocks_m, blocks_n = (
        int(triton.cdiv(o.max_seqlen_q, block_m)), int(triton.cdiv(o.max_seqlen_k, n))
    )  # fmt: skip
    rows, row_strides = _padded_rows(kind, o, q), _row_strides(kind, o, q)
    words = 16 if exact else max(16, rows * wide // 256)
    kv_heads = kind.heads // kind.group
    dq, dk, dv = like(q), like(k), like(v)
    statistic = ([rows], [1], [block_m], flat_layout(1))
    described = {
        0: describe(q, varlen, block_m, wide),
        1: describe(k, varlen, n, wide),
        2: describe(v, varlen, n, wide_v),
        3: describe(grad_out, varlen, block_m, wide_v),
        4: describe(dk, varlen, n, wide),
        5: describe(dv, varlen, n, wide_v),
        6: statistic,
        7: statistic,
        8: ([words, 256], [256, 1], [16, 256], flat_layout(2)),
    }
    main = (
        o.max_seqlen_q, o.max_seqlen_k, kv_heads, kind.batch * kv_heads, kind.group, blocks_n,
        _heads_beside(kind, o), kind.left, kind.right, *row_strides, o.scale, o.softcap,
        varlen, not varlen and o.max_seqlen_k % n == 0, kind.has_left, kind.has_right,
        o.bottom_right, kind.softcap, not exact, wide, wide_v, block_m, n,
    )  # fmt: skip
    finish = (
        *strides3(dq, varlen), *row_strides, o.max_seqlen_q, kind.heads, blocks_m, o.scale,
        varlen, kind.dim, wide, block_m,
    )  # fmt: skip
    over_rows = blocks_m * kind.batch * kind.heads
    grid = min(blocks_n * kind.batch * kv_heads, dealing.processors(q.device))
    plan = Backward(
        prepare=prepare,
        main=Launch(
            "hopper_backward", kernels.backward_kernel,
            lambda _: (grid, main), Tile(block_m, n, 4, 2),
            lambda _: described, adjustable=False, describe=TensorDescriptor,
        ),
        finish=None if exact else Launch(
            "hopper_finish", kernels.finish_kernel, lambda _: (over_rows, finish),
            Tile(block_m, n, 4, 1), adjustable=False,
        ),
        rows=rows,
        words=words,
        gradients=tuple((tuple(t.shape), t.stride()) for t in (dq, dk, dv)),
    )  # fmt: skip
    pointers = (q, k, v, grad_out, dk, dv, *plan.buffers(q.device), x.cu_seqlens_q, x.cu_seqlens_k)
    return plan if compiles(plan.main, q.device, pointers) else None


def _wide_backward(
    kind: Kind, o: Options, x: Inputs, grad_out: Tensor, prepare: Launch
) -> WideBackward | None:
    """For a head dim over 128."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa_advisor.kernels.hopper import wide as kernels

    q, k, v = x[:3]
    varlen = kind.varlen
    wide, wide_v, n = widths(kind.dim, kind.dim_v)  # As many keys in a tile as queries.
    blocks_m, blocks_n = (
        int(triton.cdiv(o.max_seqlen_q, WIDE_QUERIES)), int(triton.cdiv(o.max_seqlen_k, n))
    )  # fmt: skip
    rows, side = _padded_rows(kind, o, q), _heads_beside(kind, o)
    kv_heads = kind.heads // kind.group
    dq, dk, dv = like(q), like(k), like(v)
    statistic = ([rows], [1], [n], flat_layout(1))
    inputs = {
        0: describe(q, varlen, n, wide),
        1: describe(k, varlen, n, wide),
        2: describe(v, varlen, n, wide_v),
        3: describe(grad_out, varlen, n, wide_v),
    }
    of_keys = inputs | {
        4: describe(dk, varlen, n, wide),
        5: describe(dv, varlen, n, wide_v),
        6: statistic,
        7: statistic,
    }
    of_queries = inputs | {4: describe(dq, varlen, n, wide)}
    numbers = (kind.left, kind.right, *_row_strides(kind, o, q), o.scale, o.softcap)
    constants = (
        varlen, not varlen and o.max_seqlen_k % n == 0, kind.has_left, kind.has_right,
        o.bottom_right, kind.softcap, wide, wide_v, *used_features(kind.dim, kind.dim_v),
    )  # fmt: skip
    keys = (
        o.max_seqlen_q, o.max_seqlen_k, kv_heads, kind.batch * kv_heads, kind.group, blocks_n,
        side, *numbers, *constants, n,
    )  # fmt: skip
    queries = (
        o.max_seqlen_q, o.max_seqlen_k, kind.heads, kind.batch * kind.heads, kind.group, blocks_m,
        side, *numbers, *constants, WIDE_QUERIES, n, n, value_stages(wide_v),
    )  # fmt: skip
    plan = WideBackward(
        prepare=prepare,
        keys=Launch(
            "hopper_wide_keys", kernels.wide_keys_kernel,
            lambda _: (blocks_n * kind.batch * kv_heads, keys), Tile(n, n, 4, 2),
            lambda _: of_keys, adjustable=False, describe=TensorDescriptor,
        ),
        queries=Launch(
            "hopper_wide_queries", kernels.wide_queries_kernel,
            lambda _: (blocks_m * kind.batch * kind.heads, queries), Tile(WIDE_QUERIES, n, 4, 2),
            lambda _: of_queries, adjustable=False, describe=TensorDescriptor,
        ),
        rows=rows,
        gradients=tuple((tuple(t.shape), t.stride()) for t in (dq, dk, dv)),
    )  # fmt: skip
    cu = x.cu_seqlens_q, x.cu_seqlens_k
    statistics = plan.buffers(q.device)
    ready = compiles(plan.keys, q.device, (q, k, v, grad_out, dk, dv, *statistics, *cu))
    ready = ready and compiles(plan.queries, q.device, (q, k, v, grad_out, dq, *statistics, *cu))
    return plan if ready else None


@lru_cache
def _say_once(why: str) -> None:
    _LOG.warning(
        "The Hopper attention kernel doesn't compile under Triton %s, the portable one runs: %s",
        triton.__version__, why,
    )  # fmt: skip


@lru_cache
def available(device: torch.device) -> bool:
    """Whether the GPU and this Triton can run the Hopper kernels.

    FA_ADVISOR_KERNELS=portable leaves them out, to compare or to look for a fault.
    """
    if os.environ.get("FA_ADVISOR_KERNELS") == "portable":
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    try:
        import fa_advisor.kernels.hopper.forward  # noqa: F401
    except (ImportError, AttributeError) as error:
        _say_once(f"{type(error).__name__}: {error}")
        return False
    return True
