"""In which order the pieces of packed sequences are taken: known on the GPU only, at each call."""

from __future__ import annotations

import triton
import triton.language as tl

from fa_advisor.kernels.score import UNSPECIALIZED


@triton.jit
def _level(
    at, cu_q, cu_k, entries, blocks, shift, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """How long the at-th block of rows takes, from 1 to LEVELS - 1; 0 where there is none."""
    inside = at < entries
    sequence = at // blocks
    row = at % blocks * ROWS
    len_q = tl.load(cu_q + sequence + 1, mask=inside, other=0)
    len_q -= tl.load(cu_q + sequence, mask=inside, other=0)
    len_k = tl.load(cu_k + sequence + 1, mask=inside, other=0)
    len_k -= tl.load(cu_k + sequence, mask=inside, other=0)
    begin = at * 0
    end = len_k
    offset = row
    if BOTTOM_RIGHT:
        offset += len_k - len_q
    if HAS_RIGHT:
        end = tl.minimum(end, tl.maximum(offset + ROWS + right, 0))
    if HAS_LEFT:
        begin = tl.maximum(offset - left, 0) // BN * BN
    tiles = tl.maximum(end - begin + BN - 1, 0) // BN
    level = 1 + tl.minimum(tiles >> shift, LEVELS - 2)
    return tl.where(inside & (row < len_q), level, 0)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "entries", "shift"])
def order_kernel(
    order, cu_q, cu_k, entries, blocks, heads, side_by_side, shift, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program. Heads come in groups of `side_by_side`, a group's longest pieces first.

    entries: sequences * blocks. order: int32 [2 + entries * heads + LEVELS]: how many pieces have
    been taken (0), how many there are, the pieces, each (sequence * heads + head) * blocks + block,
    and scratch.
    """
    lanes = tl.arange(0, CHUNK)
    levels = tl.arange(0, LEVELS)
    count = tl.zeros([LEVELS], tl.int32)
    for first in range(0, entries, CHUNK):
        level = _level(
            first + lanes, cu_q, cu_k, entries, blocks, shift, left, right,
            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, ROWS, BN, LEVELS,
        )  # fmt: skip
        count += tl.histogram(level, LEVELS)
    count = tl.where(levels == 0, 0, count)
    total = tl.sum(count, axis=0)
    ranks = order + 2 + entries * heads
    tl.store(ranks + levels, total - tl.cumsum(count, axis=0))  # How many are longer.
    tl.store(order, 0)
    tl.store(order + 1, total * heads)
    tl.debug_barrier()
    for first in range(0, entries, CHUNK):
        at = first + lanes
        level = _level(
            at, cu_q, cu_k, entries, blocks, shift, left, right,
            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, ROWS, BN, LEVELS,
        )  # fmt: skip
        rank = tl.atomic_add(ranks + level, 1, mask=level > 0)
        for head in range(heads):
            group = head // side_by_side * side_by_side
            width = tl.minimum(side_by_side, heads - group)
            piece = (at // blocks * heads + head) * blocks + at % blocks
            place = total * group + rank * width + head - group
            tl.store(order + 2 + place, piece, mask=level > 0)
