"""The backward kernels for Hopper, warp-specialised: docs/hopper.md explains them.

A piece of work is 128 rows of one KV head, and the queries that see them of each head of its group,
in tiles of BLOCK_M; as many blocks as processors take one piece after the other. Two consumer
warpgroups have 64 KV rows each; one warp loads, another adds dQ into global memory. Per tile each
consumer does S^T = K Q^T, dP^T = V dO^T, dV += P^T dO and dK += dS^T Q (P and dS in registers), and
half of the piece's dQ = dS K over all 128 KV rows: dS is exchanged through shared memory, which
halves what is added. dQ is kept in fp32 in the order of wgmma's fragments (see `fragments`), so
that it leaves by 16-byte stores without bank conflicts and in one contiguous reduction per half.

Three launches: `prepare_kernel`, `backward_kernel`, `finish_kernel`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_advisor.kernels.hopper.common import FAR, accumulator, cheap_tanh, lengths, origin
from fa_advisor.kernels.hopper.compat import add_tile, load_tile, store_tile, viewed
from fa_advisor.kernels.hopper.pieces import tell, told
from fa_advisor.kernels.score import LOG2E, UNSPECIALIZED


@gluon.constexpr_function
def fragments() -> Any:
    """The order of `accumulator(64)` in memory, [64, 64] in fp32.

    An element's offset, from its lowest bit: column 0, row 3, lane (columns 1-2, rows 0-2), warp
    (rows 4-5), columns 3-5.
    """
    return gl.SharedLinearLayout(
        offset_bases=[
            [0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8],
            [0, 16], [0, 32],
        ]
    )  # fmt: skip


@gluon.jit
def consumers_sync():
    """A barrier of both consumers: named barrier 9; Gluon's own have lower numbers."""
    gl.inline_asm_elementwise(
        "bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def owned(piece, place):
    """A piece's first KV row, batch and KV head.

    `side` heads run side by side, so that their queries stay in L2; among them the first rows,
    which the most causal queries see, are taken first.
    """
    kv_heads, all_kv_heads, blocks_n, side = place
    per = blocks_n * side
    first = piece // per * side
    rest = piece - first * blocks_n
    width = gl.minimum(side, all_kv_heads - first)
    block = rest // width
    head = first + rest - block * width
    batch = head // kv_heads
    return block * 128, batch, head - batch * kv_heads


@gluon.jit
def bounds(
    col_start, len_q, len_k, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """For a block of keys: the first query that sees one, and three counts of query tiles from it.

    Tiles below the first count and from the second on need a mask; the third is all of them.
    Queries past the end need none: their P is 0.
    """
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q
    begin = 0
    end = len_q
    full = 0
    rest = len_q + BLOCK_M
    if HAS_RIGHT:
        begin = gl.maximum(col_start - shift - right, 0) // BLOCK_M * BLOCK_M
        full = gl.maximum(col_start + BLOCK_N - 1 - shift - right, 0)
    if HAS_LEFT:
        end = gl.maximum(gl.minimum(end, col_start + BLOCK_N - shift + left), 0)
        rest = gl.minimum(rest, gl.maximum(col_start - shift + left + 1, 0))
    if not EVEN:
        # Past the last key P isn't 0 of itself.
        if col_start + BLOCK_N > len_k:
            full = end
        if col_start >= len_k:
            end = 0
    count = (gl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M
    plain = gl.minimum((gl.maximum(full - begin, 0) + BLOCK_M - 1) // BLOCK_M, count)
    edge = gl.maximum(gl.minimum(gl.maximum(rest - begin, 0) // BLOCK_M, count), plain)
    return begin, plain, edge, count, shift


@gluon.jit
def first_row(batch, first_q, row_stride_b, BLOCK_M: gl.constexpr, VARLEN: gl.constexpr):
    """Where a sequence's rows begin, of head 0, among rows padded to whole tiles."""
    if VARLEN:
        return (first_q + batch * BLOCK_M) // BLOCK_M * BLOCK_M
    else:
        return batch * row_stride_b


@gluon.jit
def surroundings(
    where, cu_q, cu_k, sizes,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Around keys that are `owned`: their sequence, its `bounds`, its first query's padded row."""
    len_q, len_k, _group, left, right, row_stride_b, _row_stride_h = sizes
    col_start, batch, _kv_head = where
    first_q, first_k, len_q, len_k = lengths(batch, cu_q, cu_k, len_q, len_k, VARLEN)
    tiles = bounds(
        col_start, len_q, len_k, left, right, BLOCK_M, BLOCK_N, EVEN, HAS_LEFT, HAS_RIGHT,
        BOTTOM_RIGHT,
    )  # fmt: skip
    row = first_row(batch, first_q, row_stride_b, BLOCK_M, VARLEN) + tiles[0]
    return (first_q, len_q, first_k, len_k), tiles, row


@gluon.jit
def fetch(desc, batch, first, length, head, row, barrier, tile, VARLEN: gl.constexpr):
    """Load a tile's rows from `row` on; zeros beyond the sequence's end."""
    flat = viewed(tile, desc.dtype, desc.block_type.shape, desc.layout)
    a, b, start = origin(batch, first, length, VARLEN)
    load_tile(desc, [a, b, head, start + row, 0], barrier, flat)


@gluon.jit
def fetch_queries(
    desc, of_rows, batch, first, length, head, row, at, barrier, tile, statistic,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """Load a tile of Q or dO, and what is known of its rows, from padded row `at` on."""
    mbarrier.expect(barrier, desc.block_type.nbytes + of_rows.block_type.nbytes)
    fetch(desc, batch, first, length, head, row, barrier, tile, VARLEN)
    load_tile(of_rows, [at], barrier, statistic)


@gluon.jit
def write(desc, batch, first, length, head, row, tile, VARLEN: gl.constexpr):
    """Store a tile's rows from `row` on; nothing beyond the sequence's end."""
    flat = viewed(tile, desc.dtype, desc.block_type.shape, desc.layout)
    a, b, start = origin(batch, first, length, VARLEN)
    store_tile(desc, [a, b, head, start + row, 0], flat)


@gluon.jit
def load_warp(
    given,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """For each piece K and V once; per tile Q with the statistics of its exponent, dO with delta.

    Who takes which piece is only known when it is taken, as some take longer: this warp counts
    them in `taken`, and tells the others.
    """
    q_desc, k_desc, v_desc, g_desc, base_desc, delta_desc, taken, cu_q, cu_k = given[:9]
    buffers, place, sizes = given[9:]
    q_s, g_s, k_s, v_s, base_s, delta_s, _ds_s, _dq_s, handed = buffers[0]
    q_full, q_free, g_full, _dq_full, _dq_free, kv_full, kv_free = buffers[1]
    _kv_heads, all_kv_heads, blocks_n, _side = place
    _len_q, _len_k, group, _left, _right, _row_stride_b, row_stride_h = sizes
    total = all_kv_heads * blocks_n
    piece = gl.program_id(0)
    turn = 0
    it = 0
    while piece < total:
        where = owned(piece, place)
        sequence, tiles, row = surroundings(
            where, cu_q, cu_k, sizes,
            VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        col_start, batch, kv_head = where
        first_q, len_q, first_k, len_k = sequence
        begin, _plain, _edge, count, _shift = tiles
        some = True
        if VARLEN:  # Of a sequence that is shorter than the longest: nobody is told.
            some = col_start < len_k
        if some:
            mbarrier.wait(kv_free, turn ^ 1)  # The first doesn't wait.
            tell(handed, 0, piece)
            mbarrier.expect(kv_full, BLOCK_N * (D + DV) * 2)
            fetch(k_desc, batch, first_k, len_k, kv_head, col_start, kv_full, k_s.index(0), VARLEN)
            fetch(v_desc, batch, first_k, len_k, kv_head, col_start, kv_full, v_s.index(0), VARLEN)
            for member in range(group):
                head = kv_head * group + member
                for j in range(count):
                    i = it & 1
                    phase = ((it >> 1) & 1) ^ 1  # The first pass through the ring doesn't wait.
                    start = begin + j * BLOCK_M
                    at = row + head * row_stride_h + j * BLOCK_M
                    mbarrier.wait(q_free.index(i), phase)
                    fetch_queries(
                        q_desc, base_desc, batch, first_q, len_q, head, start, at,
                        q_full.index(i), q_s.index(i), base_s.index(i), VARLEN,
                    )  # fmt: skip
                    fetch_queries(
                        g_desc, delta_desc, batch, first_q, len_q, head, start, at,
                        g_full.index(i), g_s.index(i), delta_s.index(i), VARLEN,
                    )  # fmt: skip
                    it += 1
            turn ^= 1
        piece = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    mbarrier.wait(kv_free, turn ^ 1)
    tell(handed, 0, piece)
    mbarrier.arrive(kv_full, count=1)


@gluon.jit
def add_warp(
    given,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, DQ: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Add the halves of dQ that the consumers leave in shared memory to the accumulator."""
    dq_desc, cu_q, cu_k, buffers, place, sizes = given
    dq_s, handed = buffers[0][7:]
    _q_full, _q_free, _g_full, dq_full, dq_free, kv_full, kv_free = buffers[1]
    _kv_heads, all_kv_heads, blocks_n, _side = place
    _len_q, _len_k, group, _left, _right, _row_stride_b, row_stride_h = sizes
    if not DQ:
        group = 0
    total = all_kv_heads * blocks_n
    turn = 0
    phase = 0
    mbarrier.wait(kv_full, 0)
    piece = told(handed, 0, 1)
    while piece < total:
        mbarrier.arrive(kv_free, count=1)
        where = owned(piece, place)
        _sequence, tiles, row = surroundings(
            where, cu_q, cu_k, sizes,
            VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        kv_head = where[2]
        count = tiles[3]
        for member in range(group):
            tile = (row + (kv_head * group + member) * row_stride_h) // BLOCK_M
            for j in range(count):
                for c in gl.static_range(2):
                    mbarrier.wait(dq_full.index(c), phase)
                    half = viewed(dq_s.index(c), gl.float32, [16, 256], dq_desc.layout)
                    add_tile(dq_desc, [((tile + j) * 2 + c) * 16, 0], half)
                tma.store_wait(1)  # Half 0 has been read: consumer 0 may overwrite it.
                mbarrier.arrive(dq_free.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(dq_free.index(1), count=1)
                phase ^= 1
        turn ^= 1
        mbarrier.wait(kv_full, turn)
        piece = told(handed, 0, 1)


@gluon.jit
def first_product(q, k, BLOCK_M: gl.constexpr):
    """S^T = K Q^T, under way."""
    SL: gl.constexpr = accumulator(BLOCK_M)
    return warpgroup_mma(
        k, q.permute((1, 0)), gl.zeros([64, BLOCK_M], gl.float32, layout=SL), use_acc=False,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def walk_tile(
    dk, dv, s, it, last, row, low, high, buffers, numbers,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr, DQ: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One tile of queries: what it adds to dK and dV, and half of its dQ.

    low, high: the rows that see a column, counted as `row` is. S comes from the tile before, which
    has the tensor cores at it while dK is finished.
    """
    q_s, g_s, k_s, v_s, base_s, delta_s, ds_s, dq_s, _handed = buffers[0]
    q_full, q_free, g_full, dq_full, dq_free, _kv_full, _kv_free = buffers[1]
    scale, softcap = numbers
    dtype: gl.constexpr = q_s.dtype
    SL: gl.constexpr = accumulator(BLOCK_M)
    QL: gl.constexpr = accumulator(64)
    # The registers of `SL` as they are: these conversions are free.
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(DV), k_width=2)
    DL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(D), k_width=2)
    CM: gl.constexpr = gl.SliceLayout(0, SL)
    i = it & 1
    phase = (it >> 1) & 1
    q = q_s.index(i)
    g = g_s.index(i)
    # A zero that the compiler can't see through: else K's and V's descriptors are made once, and
    # spilled.
    zero = it >> 30
    k_all = k_s.index(zero)
    k = k_all.slice(W * 64, 64, dim=0)
    v = v_s.index(zero).slice(W * 64, 64, dim=0)
    mbarrier.wait(g_full.index(i), phase)
    dp = warpgroup_mma(
        v, g.permute((1, 0)), gl.zeros([64, BLOCK_M], gl.float32, layout=SL), use_acc=False,
        is_async=True,
    )  # fmt: skip
    base = base_s.index(i).load(CM)
    if SOFTCAP:
        t = cheap_tanh(s * (scale / softcap))
        p = gl.exp2(t * (softcap * LOG2E) - base[None, :])
    else:
        p = gl.exp2(s * (scale * LOG2E) - base[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK_M, layout=CM)
        seen = low[:, None] <= rows[None, :]
        if HAS_LEFT:
            seen = seen & (high[:, None] >= rows[None, :])
        p = gl.where(seen, p, 0.0)
    weights = gl.convert_layout(p.to(dtype), PL)
    if SOFTCAP:
        p = p * (1.0 - t * t)
    if D == 128:  # Before the wait it hides the load, after it it saves registers.
        delta = delta_s.index(i).load(CM)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if D != 128:
        delta = delta_s.index(i).load(CM)
    ds = (p * (dp - delta[None, :])).to(dtype)
    if DQ:
        # Two buffers: who writes to one has passed the other's barrier, so its dQ is done.
        shared = ds_s.index(i)
        shared.slice(W * 64, 64, dim=0).store(ds)
    dv = warpgroup_mma(weights, g, dv, is_async=True)
    if DQ:
        fence_async_shared()  # For wgmma, and before the barrier.
        consumers_sync()
        none = gl.zeros([64, 64], gl.float32, layout=QL)
        if BLOCK_M == 128:  # Halves of the rows; else of the features.
            own = shared.slice(W * 64, 64, dim=1).permute((1, 0))
            dq = warpgroup_mma(own, k_all, none, use_acc=False, is_async=True)
        else:
            own = k_all.slice(W * 64, 64, dim=1)
            dq = warpgroup_mma(shared.permute((1, 0)), own, none, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, DL), q, dk, is_async=True)
    # dK runs on while dQ is written.
    if DQ:
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        mbarrier.wait(dq_free.index(W), (it & 1) ^ 1)  # The first tile doesn't wait.
        dq_s.index(W).store(dq)
        fence_async_shared()  # For TMA, and before the arrival.
        mbarrier.arrive(dq_full.index(W), count=1)
    else:
        dv = warpgroup_mma_wait(1, deps=(dv,))
    # Past the last tile this one's Q gives a product that nobody reads.
    following = it + 1
    more = following < last
    j = gl.where(more, following & 1, i)
    mbarrier.wait(q_full.index(j), (following >> 1) & 1, pred=more)
    product = first_product(q_s.index(j), k, BLOCK_M)
    # Nothing may be under way across the loop's end: ptxas would wait after every product.
    dk, s = warpgroup_mma_wait(0, deps=(dk, product))
    mbarrier.arrive(q_free.index(i), count=1)
    return dk, dv, s


@gluon.jit
def do_piece(
    piece, it, given, VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    DQ: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 of a piece's KV rows, and half of every dQ. it: tiles done so far."""
    dk_desc, dv_desc, cu_q, cu_k, buffers, place, sizes, numbers = given
    q_s, _g_s, k_s, v_s, _base_s, _delta_s, ds_s, dq_s, handed = buffers[0]
    q_full, _q_free, _g_full, _dq_full, dq_free, _kv_full, kv_free = buffers[1]
    _len_q, _len_k, group, left, right, _row_stride_b, _row_stride_h = sizes
    dtype: gl.constexpr = q_s.dtype
    SL: gl.constexpr = accumulator(BLOCK_M)
    RN: gl.constexpr = gl.SliceLayout(1, SL)
    MASKS: gl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN
    where = owned(piece, place)
    sequence, tiles, _row = surroundings(
        where, cu_q, cu_k, sizes,
        VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    col_start, batch, kv_head = where
    len_k = sequence[3]
    begin, plain, edge, count, shift = tiles
    cols = col_start + W * 64 + gl.arange(0, 64, layout=RN)
    # The rows from `low` to `high` see a column, counted from `begin`.
    low = cols * 0
    high = cols
    if HAS_RIGHT:
        low = cols - (shift + right + begin)
    if not EVEN:
        low = gl.where(cols < len_k, low, FAR)
    if HAS_LEFT:
        high = cols + (left - shift - begin)
    dk = gl.zeros([64, D], gl.float32, layout=accumulator(D))
    dv = gl.zeros([64, DV], gl.float32, layout=accumulator(DV))
    first = it
    last = first + group * count
    i = it & 1
    mbarrier.wait(q_full.index(i), (it >> 1) & 1, pred=last > first)
    product = first_product(q_s.index(i), k_s.index(0).slice(W * 64, 64, dim=0), BLOCK_M)
    s = warpgroup_mma_wait(0, deps=(product,))
    if not MASKS:
        for it in range(first, last):
            dk, dv, s = walk_tile(
                dk, dv, s, it, last, 0, low, high, buffers, numbers,
                False, HAS_LEFT, SOFTCAP, DQ, D, DV, BLOCK_M, W,
            )  # fmt: skip
    else:
        for _ in range(group):
            for j in range(plain):
                dk, dv, s = walk_tile(
                    dk, dv, s, it, last, j * BLOCK_M, low, high, buffers, numbers,
                    True, HAS_LEFT, SOFTCAP, DQ, D, DV, BLOCK_M, W,
                )  # fmt: skip
                it += 1
            stop = edge if HAS_LEFT else count
            for _ in range(plain, stop):
                dk, dv, s = walk_tile(
                    dk, dv, s, it, last, 0, low, high, buffers, numbers,
                    False, HAS_LEFT, SOFTCAP, DQ, D, DV, BLOCK_M, W,
                )  # fmt: skip
                it += 1
            if HAS_LEFT:
                for j in range(edge, count):
                    dk, dv, s = walk_tile(
                        dk, dv, s, it, last, j * BLOCK_M, low, high, buffers, numbers,
                        True, HAS_LEFT, SOFTCAP, DQ, D, DV, BLOCK_M, W,
                    )  # fmt: skip
                    it += 1
    # Asked for again: kept over the loops, these would take registers.
    col_start, batch, kv_head = owned(told(handed, 0), place)
    _first_q, first_k, _len_q, len_k = lengths(batch, cu_q, cu_k, sizes[0], sizes[1], VARLEN)
    # The next piece's K and V may come; dK and dV leave through the buffers of dS and dQ.
    mbarrier.arrive(kv_free, count=1)
    # The other has done its last tile as well: else its dQ's parity could be that of two before.
    consumers_sync()
    if DQ:
        for c in gl.static_range(2):
            mbarrier.wait(dq_free.index(c), (last & 1) ^ 1)
    dv_s = viewed(dq_s, dtype, [BLOCK_N, DV], v_s.layout)
    dk_s = viewed(ds_s, dtype, [BLOCK_N, D], k_s.layout)
    dv_s.slice(W * 64, 64, dim=0).store(dv.to(dtype))
    dk_s.slice(W * 64, 64, dim=0).store((dk * numbers[0]).to(dtype))
    fence_async_shared()
    consumers_sync()
    if W == 0:
        write(dv_desc, batch, first_k, len_k, kv_head, col_start, dv_s, VARLEN)
    else:
        write(dk_desc, batch, first_k, len_k, kv_head, col_start, dk_s, VARLEN)
    tma.store_wait(0)
    consumers_sync()  # Both have been read: what comes next may lie there.
    return last


@gluon.jit
def consumer(
    given, VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    DQ: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Half of each piece that the block takes."""
    buffers, place = given[4:6]
    handed = buffers[0][8]
    kv_full = buffers[1][5]
    _kv_heads, all_kv_heads, blocks_n, _side = place
    total = all_kv_heads * blocks_n
    it = 0
    turn = 0
    mbarrier.wait(kv_full, 0)
    piece = told(handed, 0)
    while piece < total:
        it = do_piece(
            piece, it, given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP, DQ,
            D, DV, BLOCK_M, BLOCK_N, W,
        )  # fmt: skip
        turn ^= 1
        mbarrier.wait(kv_full, turn)
        piece = told(handed, 0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    query, key, value, grad_out, grad_key, grad_value, base, delta, total, taken, cu_q, cu_k,
    len_q, len_k, kv_heads, all_kv_heads, group, blocks_n, side, left, right,
    row_stride_b, row_stride_h, scale, softcap,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, DQ: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """dK, dV, and dQ (unscaled, in fragment order) added to `total` unless DQ is off.

    All tensors but taken, cu_q and cu_k are descriptors (see `plan`). There are blocks_n * batch *
    KV heads pieces of work; the grid's first are the blocks' own, of the others `taken` counts
    those that were taken.
    """
    dtype: gl.constexpr = query.dtype
    QD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    GD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DV], dtype)
    SD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, BLOCK_M, D], QD)
    g_s = gl.allocate_shared_memory(dtype, [2, BLOCK_M, DV], GD)
    k_s = gl.allocate_shared_memory(dtype, [1, BLOCK_N, D], QD)
    v_s = gl.allocate_shared_memory(dtype, [1, BLOCK_N, DV], GD)
    base_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], base.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], SD)
    # As dV has to lie: it leaves through there.
    OD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], dtype)
    dq_s = gl.allocate_shared_memory(dtype, [128, 128], OD)
    dq_s = viewed(dq_s, gl.float32, [2, 64, 64], fragments())
    handed = gl.allocate_shared_memory(gl.int32, [1, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    kv_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_free, count=3)  # Consumers, and the warp that adds dQ: it was told the piece.
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)  # One arrival per consumer, for Q and dO.
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_free.index(i), count=1)
    fence_async_shared()  # The copy engine counts on the barriers as well.
    buffers = (
        (q_s, g_s, k_s, v_s, base_s, delta_s, ds_s, dq_s, handed),
        (q_full, q_free, g_full, dq_full, dq_free, kv_full, kv_free),
    )
    place = (kv_heads, all_kv_heads, blocks_n, side)
    sizes = (len_q, len_k, group, left, right, row_stride_b, row_stride_h)
    given = (grad_key, grad_value, cu_q, cu_k, buffers, place, sizes, (scale, softcap))
    loading = (
        query, key, value, grad_out, base, delta, taken, cu_q, cu_k, buffers, place, sizes
    )  # fmt: skip
    adding = (total, cu_q, cu_k, buffers, place, sizes)
    gl.warp_specialize(
        [
            (consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP, DQ,
                        D, DV, BLOCK_M, BLOCK_N, 0)),
            (consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP, DQ,
                        D, DV, BLOCK_M, BLOCK_N, 1)),
            (load_warp, (loading, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, D, DV,
                         BLOCK_M, BLOCK_N)),
            (add_warp, (adding, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, DQ,
                        BLOCK_M, BLOCK_N)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_kernel(
    out, grad_out, lse, grad_lse, base, delta, total, taken, rows_delta, cu_q,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
    stride_rb, stride_rh, stride_rm, row_stride_b, row_stride_h, len_q, heads, blocks_m,
    VARLEN: tl.constexpr, LSE: tl.constexpr, ZERO: tl.constexpr, DIM_V: tl.constexpr,
    DV: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the backward takes from P's exponent, delta, and zeros in dQ's accumulator and `taken`.

    base: lse * log2(e), infinity in rows without keys and beyond the sequence, so that P comes out
    0; there delta is 0. Both are padded to whole tiles; rows_delta, if asked for, is laid out as
    lse is. Backwards, so that what the next kernel
    reads first is in L2. Grid: blocks_m * batch * heads.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if taken is not None:  # noqa: SIM102 (a constexpr alone is left out when compiled)
        if pid == 0:
            tl.store(taken, 0)
    block = pid % blocks_m
    batch = pid // blocks_m // heads
    head = pid // blocks_m % heads
    storage = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    first = tl.cast(0, tl.int64)
    padded = batch * row_stride_b
    start = block * BLOCK_M
    if VARLEN:
        first_q = tl.load(cu_q + batch)
        len_q = tl.load(cu_q + batch + 1) - first_q
        if start >= len_q:
            return
        padded = (first_q + batch * BLOCK_M) // BLOCK_M * BLOCK_M
        first = first_q.to(tl.int64)
        storage = storage * 0
    padded += head * row_stride_h + start
    local = start + tl.arange(0, BLOCK_M)
    features = tl.arange(0, DV)
    rows = first + local
    inside = local < len_q
    mask = inside[:, None]
    if DIM_V != DV:
        mask = mask & (features[None, :] < DIM_V)
    o = tl.load(
        out + storage * stride_ob + head64 * stride_oh + rows[:, None] * stride_om + features,
        mask=mask, other=0.0,
    )  # fmt: skip
    g = tl.load(
        grad_out + storage * stride_gb + head64 * stride_gh + rows[:, None] * stride_gm + features,
        mask=mask, other=0.0,
    )  # fmt: skip
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if LSE:
        at = grad_lse + storage * stride_rb + head64 * stride_rh + rows * stride_rm
        d -= tl.load(at, mask=inside, other=0.0)
    x = tl.load(
        lse + storage * stride_lb + head64 * stride_lh + rows, mask=inside, other=float("-inf")
    )
    empty = x == float("-inf")
    if rows_delta is not None:
        at = rows_delta + storage * stride_lb + head64 * stride_lh + rows
        tl.store(at, d, mask=inside)
    at = padded + tl.arange(0, BLOCK_M)
    tl.store(base + at, tl.where(empty, float("inf"), x * LOG2E))
    tl.store(delta + at, tl.where(empty, 0.0, d))
    if ZERO:
        tile = total + padded.to(tl.int64) * D
        tl.store(tile + tl.arange(0, BLOCK_M * D), tl.zeros([BLOCK_M * D], tl.float32))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def finish_kernel(
    total, grad_query, cu_q, stride_b, stride_h, stride_m, row_stride_b, row_stride_h,
    len_q, heads, blocks_m, scale,
    VARLEN: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dQ from its accumulator: scaled, cast, and put from fragment order into the query's layout.

    Backwards, as what was added last is in L2. Grid: blocks_m * batch * heads.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    block = pid % blocks_m
    batch = pid // blocks_m // heads
    head = pid // blocks_m % heads
    storage = batch.to(tl.int64)
    first = tl.cast(0, tl.int64)
    padded = batch * row_stride_b
    start = block * BLOCK_M
    if VARLEN:
        first_q = tl.load(cu_q + batch)
        len_q = tl.load(cu_q + batch + 1) - first_q
        if start >= len_q:
            return
        padded = (first_q + batch * BLOCK_M) // BLOCK_M * BLOCK_M
        first = first_q.to(tl.int64)
        storage = storage * 0
    padded += head * row_stride_h + start
    x = tl.load(total + padded.to(tl.int64) * D + tl.arange(0, BLOCK_M * D))
    # Half; columns 3-5; rows 4-5; rows 0-2; columns 1-2; row 3; column 0: see `fragments`.
    x = tl.reshape(x, (2, 8, 4, 8, 4, 2, 2))
    if BLOCK_M == 128:
        x = tl.permute(x, (0, 2, 5, 3, 1, 4, 6))
    else:
        x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6))
    x = tl.reshape(x, (BLOCK_M, D))
    local = start + tl.arange(0, BLOCK_M)
    features = tl.arange(0, D)
    mask = (local < len_q)[:, None]
    if DIM != D:
        mask = mask & (features[None, :] < DIM)
    at = grad_query + storage * stride_b + head.to(tl.int64) * stride_h
    tl.store(
        at + (first + local)[:, None] * stride_m + features,
        (x * scale).to(grad_query.dtype.element_ty),
        mask=mask,
    )
