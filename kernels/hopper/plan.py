"""Which calls the Hopper kernels take, with which tiles, and how they are launched.

This is the one place where that is decided: a function here gives a launch, or None and the
portable kernel runs. What Gluon can't compile is left for the portable kernel too, with one line
in the log that says why.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.kinds import ADDITIVE, BOOLEAN, Kind, Options, by_descriptor
from fa_advisor.kernels.launcher import Launch
from fa_advisor.kernels.tiles import Tile

_LOG = logging.getLogger(__name__)
CAPABILITY = (9, 0)
ROWS_OF_A_CONSUMER = 64
# Rows of a descriptor of packed sequences. Coordinates past them are out of bounds, so that a
# sequence's rows can be laid against that end: see `describe`.
FAR = 2**30
_MOST = 0x7FFF0000
# The keys and values of heads that run side by side: half of an H100's L2.
_BYTES_SIDE_BY_SIDE = 24 * 2**20


# A schedule is made on the host: up to so many pieces, in milliseconds.
_MOST_SCHEDULED = 2**16
# What a piece of work takes beside its tiles of keys, in such tiles.
_COST_OF_A_TURN = 0.7


class Tiles(NamedTuple):
    """How the forward kernel cuts a call. Features of Q and K are `parts` * `part`.

    shared_out: the output leaves through the buffer of Q, for want of room for one of its own.
    """

    part: int
    parts: int
    block_dv: int
    block_n: int
    stages: int
    consumers: int
    shared_out: bool


def tiles_of(dim: int, dim_v: int, uneven: bool) -> Tiles:
    """The tiles for a query's and a value's head dim, up to 256 each.

    uneven: rows see more or fewer keys than others, so that smaller pieces of work are better.
    """
    part, parts = next(p for limit, p in _PARTS if dim <= limit)
    block_dv = next(size for size in (64, 128, 256) if dim_v <= size)
    widest = max(part * parts, block_dv)
    if widest <= 64:
        return Tiles(part, parts, block_dv, 128, 4, 2 if uneven else 3, shared_out=False)
    if widest <= 128:
        return Tiles(part, parts, block_dv, 128, 2, 2, shared_out=False)
    return Tiles(part, parts, block_dv, 64, 2, 2, shared_out=part == block_dv == 256)


# Head dims up to the first are cut in parts of the second: a box of a tensor map is a power of two.
_PARTS = ((64, (64, 1)), (96, (32, 3)), (128, (128, 1)), (192, (64, 3)), (256, (256, 1)))


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
        (max(kind.dim, kind.dim_v) <= 32, "small head dims would be padded to 64"),
        (o.max_seqlen_q < least, f"fewer than {least} queries leave its rows empty"),
        (o.max_seqlen_k <= 512, "encoding four tensor maps costs more than is gained"),
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
    element = gl.bfloat16 if t.dtype is torch.bfloat16 else gl.float16
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


def forward(
    kind: Kind, o: Options, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    row_strides: tuple[int, int], span_strides: tuple[int, int, int], sinks: bool,
    portable: Callable[[], Launch],
) -> OrPortable | None:  # fmt: skip
    """The launch of the Hopper kernel, or None where the portable one shall run."""
    if not available(q.device) or refusal(kind, o, q, k, v) is not None:
        return None
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa_advisor.kernels.hopper.forward import forward_kernel

    uneven = kind.has_left or kind.has_right
    cut = tiles_of(kind.dim, kind.dim_v, uneven)
    blocks = triton.cdiv(o.max_seqlen_q, ROWS_OF_A_CONSUMER * cut.consumers)
    batch_heads = kind.batch * kind.heads
    total = blocks * batch_heads
    varlen = kind.varlen
    side_by_side = _side_by_side(kind, o)
    grid = min(total, processors(q.device))
    schedule = None
    if uneven or varlen:
        rows = ROWS_OF_A_CONSUMER * cut.consumers
        costs = (
            None if varlen else [_cost(kind, o, b * rows, rows, cut.block_n) for b in range(blocks)]
        )
        if costs is None or total > _MOST_SCHEDULED or torch.cuda.is_current_stream_capturing():
            grid = total  # Then the GPU hands the pieces out, as processors are free for them.
        else:
            words = schedule_of(costs, batch_heads, side_by_side, grid)
            schedule = torch.tensor(words, dtype=torch.int32, device=q.device)
    bm, bn = ROWS_OF_A_CONSUMER, cut.block_n
    described = {
        0: describe(q, varlen, bm, cut.part),
        1: describe(k, varlen, bn, cut.part),
        2: describe(v, varlen, bn, cut.block_dv),
        3: describe(out, varlen, bm, cut.block_dv),
    }
    static = (
        *row_strides, *kind.bias_strides[:2], kind.bias_strides[3], *span_strides[:2],
        o.max_seqlen_q, o.max_seqlen_k, batch_heads, kind.heads, kind.group, blocks, side_by_side,
        total, o.scale, o.softcap, kind.left, kind.right,
        varlen, kind.softcap, sinks, kind.bias == BOOLEAN, kind.has_left, kind.has_right,
        o.bottom_right, not varlen and o.max_seqlen_k % bn == 0,
        bm, bn, cut.parts, cut.block_dv, cut.stages, cut.consumers, cut.shared_out,
    )  # fmt: skip
    launch = Launch(
        "hopper_forward", forward_kernel, lambda _: (grid, static), Tile(bm, bn, 4, cut.stages),
        lambda _: described, adjustable=False, describe=TensorDescriptor,
    )  # fmt: skip
    return OrPortable(launch, (schedule,), portable)


def _side_by_side(kind: Kind, o: Options) -> int:
    """How many query heads run side by side: their keys and values shall stay in L2."""
    bytes_a_head = max(1, o.max_seqlen_k * (kind.dim + kind.dim_v) * 2)
    heads = max(1, _BYTES_SIDE_BY_SIDE // bytes_a_head) * kind.group
    return min(heads, kind.batch * kind.heads)


def _cost(kind: Kind, o: Options, first: int, rows: int, block_n: int) -> float:
    """The time that rows from `first` take, in tiles of keys."""
    shift = o.max_seqlen_k - o.max_seqlen_q if o.bottom_right else 0
    begin, end = 0, o.max_seqlen_k
    if kind.has_right:
        end = max(min(end, first + rows + shift + kind.right), 0)
    if kind.has_left:
        begin = max(first + shift - kind.left, 0) // block_n * block_n
    return _COST_OF_A_TURN + max(0, -(-(end - begin) // block_n))


def schedule_of(costs: list[float], batch_heads: int, side_by_side: int, grid: int) -> list[int]:
    """Which pieces of work each of `grid` persistent blocks does: as a queue would deal them out.

    costs: of each of a head's pieces. Heads run in groups of `side_by_side`, the costliest pieces
    of a group first. Returns grid + 1 offsets, into what follows: batch_head * len(costs) + piece,
    and one word more, so that the next may be read before its turn.
    """
    longest_first = sorted(range(len(costs)), key=lambda piece: -costs[piece])
    free = [(0.0, block) for block in range(grid)]
    own: list[list[int]] = [[] for _ in range(grid)]
    for first in range(0, batch_heads, side_by_side):
        heads = range(first, min(first + side_by_side, batch_heads))
        for piece in longest_first:
            for head in heads:
                at, block = free[0]
                own[block].append(head * len(costs) + piece)
                heapq.heapreplace(free, (at + costs[piece], block))
    offsets = list(itertools.accumulate(map(len, own), initial=grid + 1))
    return [*offsets, *itertools.chain.from_iterable(own), 0]


class OrPortable:
    """Hopper's launch; the portable one from the first call on if that doesn't compile.

    more: what the kernel takes after the pointers that both take.
    """

    def __init__(
        self, launch: Launch, more: tuple[Tensor | None, ...], portable: Callable[[], Launch]
    ) -> None:
        self._chosen = launch
        self._more = more
        self._portable: Callable[[], Launch] | None = portable

    def __call__(self, device: int, *pointers: Any) -> None:
        if self._portable is not None:
            try:
                self._chosen.ready(device, (*pointers, *self._more))
            except Exception as error:  # Whatever a compiler raises, the call can be done.
                _say_once(f"{type(error).__name__}: {error}".splitlines()[0])
                self._chosen, self._more = self._portable(), ()
            self._portable = None
        self._chosen(device, *pointers, *self._more)


@lru_cache
def _say_once(why: str) -> None:
    _LOG.warning(
        "The Hopper attention kernel doesn't compile under Triton %s, the portable one runs: %s",
        triton.__version__, why,
    )  # fmt: skip


@lru_cache
def available(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU and this Triton has the Gluon that the kernels need."""
    if os.environ.get("FA_ADVISOR_KERNELS") != "hopper":  # TODO
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    try:
        import fa_advisor.kernels.hopper.forward  # noqa: F401
    except (ImportError, AttributeError) as error:
        _say_once(f"{type(error).__name__}: {error}")
        return False
    return True


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors: a persistent grid has a block for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
