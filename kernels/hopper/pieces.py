"""Which piece of work a block of a Hopper kernel does next, and which keys a forward's rows see."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_advisor.kernels.hopper.common import lengths


@gluon.jit
def turns(schedule, total):
    """First, last and step of a block's turns - its own stretch of a schedule, or every n-th - and
    the first one's piece of work."""
    if schedule is not None:
        at = schedule + gl.program_id(0)
        first = gl.load(at)
        return first, gl.load(at + 1), 1, gl.load(schedule + first)
    else:
        return gl.program_id(0), total, gl.num_programs(0), gl.program_id(0)


@gluon.jit
def next_piece(schedule, turn, step):
    """Asked for a turn ahead, so that it is there when that one comes."""
    if schedule is not None:
        return gl.load(schedule + turn + 1)
    else:
        return turn + step


@gluon.jit
def next_in_order(order):
    """The first piece that nobody has taken yet; -1: there are no more. See `order_kernel`."""
    at = gl.atomic_add(order, 1)
    return gl.load(order + 2 + at, mask=at < gl.load(order + 1), other=-1)


@gluon.jit
def tell(handed, turn, t):
    """Leave a turn's piece for the consumers: the barrier that tells of its Q tells of this too."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    handed.index(turn).store(gl.full([32], t, gl.int32, layout=lanes))


@gluon.jit
def told(handed, turn, WARPS: gl.constexpr = 4):
    """The turn's piece, as the producer's first lane wrote it: it is the one that arrives."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first = gl.arange(0, 32, layout=lanes) == 0
    return gl.sum(gl.where(first, handed.index(turn).load(lanes), 0), axis=0)


@gluon.jit
def work(
    t, cu_q, cu_k, numbers, SCHEDULED: gl.constexpr, VARLEN: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Which head and rows the t-th piece of work is, and the sequence that they are of.

    Without a schedule heads run in groups whose keys and values stay in L2; in one, the longest
    rows come first.
    """
    len_q, len_k, batch_heads, heads, blocks, side_by_side, _left, _right, _b, _h = numbers
    if SCHEDULED:
        batch_head = t // blocks
        block = t % blocks
    else:
        per = blocks * side_by_side
        first = t // per * side_by_side
        width = gl.minimum(side_by_side, batch_heads - first)
        block = t % per // width
        batch_head = first + t % per % width
        if HAS_RIGHT:
            block = blocks - 1 - block
    batch = batch_head // heads
    head = batch_head % heads
    first_q, first_k, len_q, len_k = lengths(batch, cu_q, cu_k, len_q, len_k, VARLEN)
    return batch, head, block * ROWS, (first_q, len_q, first_k, len_k)


@gluon.jit
def keys_of(
    row_start, batch, head, sequence, spans, numbers,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    PADDING: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The keys that ROWS rows see. [begin, end): those that some row sees, and `begin` is a
    tile's first; [full, rest): whole tiles that every row sees.
    """
    _len_q, _len_k, _n, _heads, _blocks, _side, left, right, span_b, span_h = numbers
    _first_q, len_q, _first_k, len_k = sequence
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q
    begin = 0
    end = len_k
    full = 0
    rest = len_k // BN * BN
    if HAS_RIGHT:
        end = gl.maximum(gl.minimum(len_k, row_start + ROWS + shift + right), 0)
        rest = gl.minimum(rest, gl.maximum(row_start + shift + right + 1, 0) // BN * BN)
    if HAS_LEFT:
        begin = gl.maximum(row_start + shift - left, 0) // BN * BN
        full = (gl.maximum(row_start + ROWS - 1 + shift - left, 0) + BN - 1) // BN * BN
        full = gl.minimum(full, (end + BN - 1) // BN * BN)
        rest = gl.maximum(rest, full)
    if PADDING:
        at = spans + batch.to(gl.int64) * span_b + head.to(gl.int64) * span_h
        end = gl.minimum(end, gl.load(at + 1))
        begin = gl.maximum(begin, gl.minimum(gl.load(at), end) // BN * BN)
        last = gl.maximum((end + BN - 1) // BN * BN, begin)
        full = gl.maximum(full, (gl.minimum(gl.load(at + 2), last) + BN - 1) // BN * BN)
        full = gl.minimum(gl.maximum(full, begin), last)
        rest = gl.maximum(gl.minimum(rest, gl.load(at + 3) // BN * BN), full)
    end = gl.where(row_start < len_q, end, begin)
    return begin, full, rest, end


@gluon.jit
def own_keys(
    row_start, batch, head, sequence, spans, numbers,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    PADDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CONSUMERS: gl.constexpr,
    CID: gl.constexpr,
):  # fmt: skip
    """What comes for all of a block's consumers, and what of it the rows of one see.

    The first tile and the end for all; whether there is any for this one, its last tile, `rest`
    and `full`: tiles from `rest` on and below `full` need a mask; its first tile. Where it sees
    none, as if they were all below the first.
    """
    all_begin, _full, _rest, all_end = keys_of(
        row_start, batch, head, sequence, spans, numbers,
        HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING, BM * CONSUMERS, BN,
    )  # fmt: skip
    begin, full, rest, end = keys_of(
        row_start + CID * BM, batch, head, sequence, spans, numbers,
        HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING, BM, BN,
    )  # fmt: skip
    begin = gl.maximum(begin, all_begin)
    some = end > begin
    last = gl.where(some, (end - 1) // BN * BN, all_begin - BN)
    begin = gl.where(some, begin, all_begin)
    rest = gl.minimum(rest, last)
    full = gl.maximum(gl.minimum(full, rest), begin)
    rest = gl.maximum(rest, full)
    return all_begin, all_end, some, last, rest, full, begin


@gluon.jit
def limits(
    local, sequence, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """The first and the last key that each row sees, of those that there are."""
    _first_q, len_q, _first_k, len_k = sequence
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q
    highest = local * 0 + (len_k - 1)
    lowest = highest
    if HAS_RIGHT:
        highest = gl.minimum(highest, local + (shift + right))
    if HAS_LEFT:
        lowest = local + (shift - left)
    return lowest, highest
