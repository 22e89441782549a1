"""The backward kernels for Hopper where a head dim is over 128: docs/hopper.md explains them.

Tiles of Q and K have 256 features, those of values 128 or 256; of up to 192 features no products
are made with the padding beyond (see `dot` and `share`). Where dK, dV of 64 rows fill the
registers, there is no room for dQ. So it has a kernel of its own: 7/5 of the products, but nothing
is added in global memory, and the bits are the same every time.

Three launches: `backward.prepare_kernel`, `wide_keys_kernel`, `wide_queries_kernel`.

`wide_keys_kernel`: 64 KV rows a block. Its two consumer warpgroups split the features: each holds
[64, D / 2] of dK and [64, DV / 2] of dV. They share S^T = K Q^T and dP^T = V dO^T as well, 32 query
columns each, and exchange P and dS through shared memory, twice buffered: a slot of the ring of Q
and dO is only filled again when both consumers have done with that slot's P and dS, so one barrier
of both is enough a tile.

`wide_queries_kernel`: 128 query rows a block, 64 for each consumer; Q and dO stay, K and V come by.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_advisor.kernels.hopper.backward import (
    consumers_sync,
    fetch,
    fetch_queries,
    first_row,
    owned,
    surroundings,
    write,
)
from fa_advisor.kernels.hopper.common import FAR, accumulator, cheap_tanh, lengths
from fa_advisor.kernels.hopper.compat import thread_barrier
from fa_advisor.kernels.score import LOG2E, UNSPECIALIZED


@gluon.constexpr_function
def share(wide: int, used: int, w: int) -> int:
    """How many of the features consumer `w` has; it has them from `w * wide / 2` on."""
    return min(used - w * (wide // 2), wide // 2)


@gluon.constexpr_function
def groups(used: int) -> int:
    """In how many pieces `dot` is committed."""
    return 2 if used == 192 else 1


@gluon.jit
def dot(a, b, M: gl.constexpr, N: gl.constexpr, USED: gl.constexpr):
    """A B^T, under way, over the first USED features: the rest is padding."""
    zero = gl.zeros([M, N], gl.float32, layout=accumulator(N))
    if USED == 192:
        x = warpgroup_mma(
            a.slice(0, 128, dim=1), b.slice(0, 128, dim=1).permute((1, 0)), zero, use_acc=False,
            is_async=True,
        )  # fmt: skip
        return warpgroup_mma(
            a.slice(128, 64, dim=1), b.slice(128, 64, dim=1).permute((1, 0)), x, is_async=True
        )
    else:
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def exponential(logits, base, scale, softcap, SOFTCAP: gl.constexpr):
    """P, and the tanh of the logits if they are capped."""
    if SOFTCAP:
        t = cheap_tanh(logits * (scale / softcap))
        return gl.exp2(t * (softcap * LOG2E) - base), t
    else:
        return gl.exp2(logits * (scale * LOG2E) - base), 0.0


@gluon.jit
def owned_keys(kv_heads, all_kv_heads, blocks_n, side):
    """The block's first KV row, batch and KV head."""
    place = (kv_heads, all_kv_heads, blocks_n, side)
    start, batch, kv_head = owned(gl.program_id(0), place)
    return start // 2, batch, kv_head  # `owned` counts in blocks of 128.


@gluon.jit
def load_queries(
    given,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """K and V once; per tile Q with the statistics of its exponent, and dO with delta."""
    q_desc, k_desc, v_desc, g_desc, base_desc, delta_desc, cu_q, cu_k = given[:8]
    buffers, place, sizes = given[8:]
    q_s, g_s, k_s, v_s, base_s, delta_s, _p_s, _ds_s = buffers[0]
    k_full, v_full, q_full, q_free, g_full, g_free = buffers[1]
    kv_heads, all_kv_heads, blocks_n, side = place
    group, row_stride_h = sizes[2], sizes[6]
    where = owned_keys(kv_heads, all_kv_heads, blocks_n, side)
    sequence, tiles, row = surroundings(
        where, cu_q, cu_k, sizes,
        VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK, BLOCK,
    )  # fmt: skip
    col_start, batch, kv_head = where
    first_q, len_q, first_k, len_k = sequence
    begin, count = tiles[0], tiles[3]
    mbarrier.expect(k_full, BLOCK * D * 2)
    fetch(k_desc, batch, first_k, len_k, kv_head, col_start, k_full, k_s.index(0), VARLEN)
    it = 0
    for member in range(group):
        head = kv_head * group + member
        for j in range(count):
            i = it & 1
            phase = ((it >> 1) & 1) ^ 1  # The first pass through the ring doesn't wait.
            start = begin + j * BLOCK
            at = row + head * row_stride_h + j * BLOCK
            mbarrier.wait(q_free.index(i), phase)
            fetch_queries(
                q_desc, base_desc, batch, first_q, len_q, head, start, at,
                q_full.index(i), q_s.index(i), base_s.index(i), VARLEN,
            )  # fmt: skip
            if it == 0:  # S needs K and Q alone.
                mbarrier.expect(v_full, BLOCK * DV * 2)
                fetch(
                    v_desc, batch, first_k, len_k, kv_head, col_start, v_full, v_s.index(0), VARLEN
                )
            mbarrier.wait(g_free.index(i), phase)
            fetch_queries(
                g_desc, delta_desc, batch, first_q, len_q, head, start, at,
                g_full.index(i), g_s.index(i), delta_s.index(i), VARLEN,
            )  # fmt: skip
            it += 1


@gluon.jit
def walk_queries(
    dk, dv, it, row, low, high, buffers, numbers,
    MASKS: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, USED: gl.constexpr, USED_V: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One tile of queries: what it adds to this consumer's features of dK and dV.

    low, high: the rows that see a column, counted as `row` is; that is negative where nothing is
    hidden. A branch, as a second loop for such tiles costs registers.
    """
    q_s, g_s, k_s, v_s, base_s, delta_s, p_s, ds_s = buffers[0]
    _k_full, _v_full, q_full, q_free, g_full, g_free = buffers[1]
    scale, softcap = numbers
    dtype: gl.constexpr = q_s.dtype
    CM: gl.constexpr = gl.SliceLayout(0, accumulator(32))
    i = it & 1
    phase = (it >> 1) & 1
    q = q_s.index(i)
    g = g_s.index(i)
    # Nought, but unknown to the compiler, which would keep 32 addresses in registers.
    k = k_s.index(it >> 30)
    v = v_s.index(it >> 30)
    p_t = p_s.index(i)
    ds_t = ds_s.index(i)
    mbarrier.wait(q_full.index(i), phase)
    product = dot(k, q.slice(W * 32, 32, dim=0), 64, 32, USED)
    mbarrier.wait(g_full.index(i), phase)
    dp = dot(v, g.slice(W * 32, 32, dim=0), 64, 32, USED_V)
    base = base_s.index(i).slice(W * 32, 32).load(CM)
    delta = delta_s.index(i).slice(W * 32, 32).load(CM)
    # dP runs on under the exponentials.
    logits = warpgroup_mma_wait(groups(USED_V), deps=(product,))
    p, t = exponential(logits, base[None, :], scale, softcap, SOFTCAP)
    if MASKS:  # noqa: SIM102  # Known to the compiler, unlike the row.
        if row >= 0:
            rows = row + W * 32 + gl.arange(0, 32, layout=CM)
            seen = low[:, None] <= rows[None, :]
            if HAS_LEFT:
                seen = seen & (high[:, None] >= rows[None, :])
            p = gl.where(seen, p, 0.0)
    p_t.slice(W * 32, 32, dim=1).store(p.to(dtype))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    ds_t.slice(W * 32, 32, dim=1).store(ds.to(dtype))
    fence_async_shared()  # For wgmma, and before the barrier.
    consumers_sync()
    own_v: gl.constexpr = share(DV, USED_V, W)
    dv = warpgroup_mma(p_t, g.slice(W * (DV // 2), own_v, dim=1), dv, is_async=True)
    own: gl.constexpr = share(D, USED, W)
    dk = warpgroup_mma(ds_t, q.slice(W * (D // 2), own, dim=1), dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(g_free.index(i), count=1)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q_free.index(i), count=1)
    return dk, dv


@gluon.jit
def keys_consumer(
    given, VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, USED: gl.constexpr, USED_V: gl.constexpr,
    BLOCK: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Half of the features of dK and dV of 64 KV rows."""
    dk_desc, dv_desc, cu_q, cu_k, buffers, place, sizes, numbers = given
    q_s, _g_s, k_s, v_s, _base_s, _delta_s, _p_s, _ds_s = buffers[0]
    k_full, v_full, _q_full, _q_free, _g_full, _g_free = buffers[1]
    kv_heads, all_kv_heads, blocks_n, side = place
    group, left, right = sizes[2], sizes[3], sizes[4]
    dtype: gl.constexpr = q_s.dtype
    RN: gl.constexpr = gl.SliceLayout(1, accumulator(32))
    MASKS: gl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN
    OWN: gl.constexpr = share(D, USED, W)
    OWN_V: gl.constexpr = share(DV, USED_V, W)
    where = owned_keys(kv_heads, all_kv_heads, blocks_n, side)
    sequence, tiles, _row = surroundings(
        where, cu_q, cu_k, sizes,
        VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK, BLOCK,
    )  # fmt: skip
    col_start, batch, kv_head = where
    first_k, len_k = sequence[2], sequence[3]
    begin, plain, edge, count, shift = tiles
    cols = col_start + gl.arange(0, 64, layout=RN)
    # The rows from `low` to `high` see a column, counted from `begin`.
    low = cols * 0
    high = cols
    if HAS_RIGHT:
        low = cols - (shift + right + begin)
    if not EVEN:
        low = gl.where(cols < len_k, low, FAR)
    if HAS_LEFT:
        high = cols + (left - shift - begin)
    dk = gl.zeros([64, OWN], gl.float32, layout=accumulator(OWN))
    dv = gl.zeros([64, OWN_V], gl.float32, layout=accumulator(OWN_V))
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0, pred=group * count > 0)  # V comes after the first Q.
    it = 0
    for _ in range(group):
        for j in range(count):
            row = 0
            if MASKS:
                if HAS_LEFT:
                    row = gl.where((j < plain) | (j >= edge), j * BLOCK, -1)
                else:
                    row = gl.where(j < plain, j * BLOCK, -1)
            dk, dv = walk_queries(
                dk, dv, it, row, low, high, buffers, numbers,
                MASKS, HAS_LEFT, SOFTCAP, D, DV, USED, USED_V, W,
            )  # fmt: skip
            it += 1
    consumers_sync()  # The other consumer has read K and V for the last time.
    v_s.index(0).slice(W * (DV // 2), OWN_V, dim=1).store(dv.to(dtype))
    k_s.index(0).slice(W * (D // 2), OWN, dim=1).store((dk * numbers[0]).to(dtype))
    fence_async_shared()
    consumers_sync()
    if W == 0:
        write(dv_desc, batch, first_k, len_k, kv_head, col_start, v_s.index(0), VARLEN)
    else:
        write(dk_desc, batch, first_k, len_k, kv_head, col_start, k_s.index(0), VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def wide_keys_kernel(
    query, key, value, grad_out, grad_key, grad_value, base, delta, cu_q, cu_k,
    len_q, len_k, kv_heads, all_kv_heads, group, blocks_n, side, left, right,
    row_stride_b, row_stride_h, scale, softcap,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    USED: gl.constexpr, USED_V: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """dK, dV.

    All tensors but cu_q and cu_k are descriptors (see `plan`). Grid: blocks_n * batch * KV heads.
    """
    dtype: gl.constexpr = query.dtype
    QD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    GD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DV], dtype)
    # Each consumer writes half of the columns: swizzled within 32 of them.
    SD: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, BLOCK, D], QD)
    g_s = gl.allocate_shared_memory(dtype, [2, BLOCK, DV], GD)
    # One of each, but told by an index: see `walk_queries`.
    k_s = gl.allocate_shared_memory(dtype, [1, BLOCK, D], QD)
    v_s = gl.allocate_shared_memory(dtype, [1, BLOCK, DV], GD)
    p_s = gl.allocate_shared_memory(dtype, [2, 64, BLOCK], SD)
    ds_s = gl.allocate_shared_memory(dtype, [2, 64, BLOCK], SD)
    base_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK], base.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK], delta.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    g_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)  # One arrival per consumer.
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_free.index(i), count=2)
    fence_async_shared()  # The copy engine counts on the barriers as well.
    buffers = (
        (q_s, g_s, k_s, v_s, base_s, delta_s, p_s, ds_s),
        (k_full, v_full, q_full, q_free, g_full, g_free),
    )
    place = (kv_heads, all_kv_heads, blocks_n, side)
    sizes = (len_q, len_k, group, left, right, row_stride_b, row_stride_h)
    given = (grad_key, grad_value, cu_q, cu_k, buffers, place, sizes, (scale, softcap))
    loading = (query, key, value, grad_out, base, delta, cu_q, cu_k, buffers, place, sizes)
    gl.warp_specialize(
        [
            (keys_consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP,
                             D, DV, USED, USED_V, BLOCK, 0)),
            (keys_consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP,
                             D, DV, USED, USED_V, BLOCK, 1)),
            (load_queries, (loading, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, D, DV,
                            BLOCK)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def owned_queries(heads, all_heads, blocks_m, side, BLOCK_M: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """The block's first query row, batch and head; see `owned`. The longest causal rows first."""
    pid = gl.program_id(0)
    per = blocks_m * side
    first = pid // per * side
    rest = pid - first * blocks_m
    width = gl.minimum(side, all_heads - first)
    block = rest // width
    every = first + rest - block * width
    if HAS_RIGHT:
        block = blocks_m - 1 - block
    batch = every // heads
    return block * BLOCK_M, batch, every - batch * heads


@gluon.jit
def seen_bounds(
    start, len_q, len_k, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """For a block of queries: the first key that one sees, and three counts of KV tiles from it.

    Tiles below the first count and from the second on need a mask; the third is all of them.
    """
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q
    begin = 0
    end = len_k
    full = 0
    rest = len_k
    if HAS_RIGHT:
        end = gl.maximum(gl.minimum(end, start + BLOCK_M + shift + right), 0)
        rest = gl.minimum(rest, gl.maximum(start + shift + right + 1, 0))
    if HAS_LEFT:
        begin = gl.maximum(start + shift - left, 0) // BLOCK_N * BLOCK_N
        full = gl.maximum(start + BLOCK_M - 1 + shift - left, 0)
    if start >= len_q:
        end = 0
    count = (gl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    plain = gl.minimum((gl.maximum(full - begin, 0) + BLOCK_N - 1) // BLOCK_N, count)
    edge = gl.maximum(gl.minimum(gl.maximum(rest - begin, 0) // BLOCK_N, count), plain)
    return begin, plain, edge, count, shift


@gluon.jit
def load_keys(
    given, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Q and dO once, K and V per tile."""
    q_desc, k_desc, v_desc, g_desc, cu_q, cu_k, buffers, place, sizes = given
    q_s, g_s, k_s, v_s = buffers[0]
    q_full, g_full, k_full, k_free, v_full, v_free = buffers[1]
    heads, all_heads, blocks_m, side = place
    len_q, len_k, group, left, right, _row_stride_b, _row_stride_h = sizes
    start, batch, head = owned_queries(heads, all_heads, blocks_m, side, BLOCK_M, HAS_RIGHT)
    first_q, first_k, len_q, len_k = lengths(batch, cu_q, cu_k, len_q, len_k, VARLEN)
    begin, _plain, _edge, count, _shift = seen_bounds(
        start, len_q, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT
    )
    kv_head = head // group
    mbarrier.expect(q_full, BLOCK_M * D * 2)
    for w in gl.static_range(2):
        fetch(q_desc, batch, first_q, len_q, head, start + w * 64, q_full, q_s.index(w), VARLEN)
    for j in range(count):
        i = j & 1
        row = begin + j * BLOCK_N
        mbarrier.wait(k_free.index(i), ((j >> 1) & 1) ^ 1)
        mbarrier.expect(k_full.index(i), BLOCK_N * D * 2)
        fetch(k_desc, batch, first_k, len_k, kv_head, row, k_full.index(i), k_s.index(i), VARLEN)
        if j == 0:  # S needs Q and K alone.
            mbarrier.expect(g_full, BLOCK_M * DV * 2)
            for w in gl.static_range(2):
                fetch(
                    g_desc, batch, first_q, len_q, head, start + w * 64, g_full, g_s.index(w),
                    VARLEN,
                )  # fmt: skip
        n = j % V_STAGES
        mbarrier.wait(v_free.index(n), ((j // V_STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(n), BLOCK_N * DV * 2)
        fetch(v_desc, batch, first_k, len_k, kv_head, row, v_full.index(n), v_s.index(n), VARLEN)


@gluon.jit
def queries_consumer(
    given, VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    D: gl.constexpr, USED: gl.constexpr, USED_V: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, PADDED: gl.constexpr, V_STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dQ of 64 query rows."""
    dq_desc, base, delta, cu_q, cu_k, buffers, place, sizes, numbers = given
    q_s, g_s, k_s, v_s = buffers[0]
    q_full, g_full, k_full, k_free, v_full, v_free = buffers[1]
    heads, all_heads, blocks_m, side = place
    len_q, len_k, _group, left, right, row_stride_b, row_stride_h = sizes
    scale, softcap = numbers
    dtype: gl.constexpr = q_s.dtype
    SL: gl.constexpr = accumulator(BLOCK_N)
    RM: gl.constexpr = gl.SliceLayout(1, SL)
    CN: gl.constexpr = gl.SliceLayout(0, SL)
    # dQ in two parts of the features: half of them, and the rest of those in use.
    HALF: gl.constexpr = D // 2
    REST: gl.constexpr = USED - HALF
    # The registers of `SL` as they are: these conversions are free.
    HL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(HALF), k_width=2)
    ML: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(REST), k_width=2)
    MASKS: gl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN
    start, batch, head = owned_queries(heads, all_heads, blocks_m, side, BLOCK_M, HAS_RIGHT)
    first_q, _first_k, len_q, len_k = lengths(batch, cu_q, cu_k, len_q, len_k, VARLEN)
    begin, plain, edge, count, shift = seen_bounds(
        start, len_q, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT
    )
    local = start + W * 64 + gl.arange(0, 64, layout=RM)
    # The statistics are padded to whole tiles of PADDED rows: beyond them is another's, or nothing.
    inside = local < (len_q + PADDED - 1) // PADDED * PADDED
    at = first_row(batch, first_q, row_stride_b, PADDED, VARLEN) + head * row_stride_h + local
    b = gl.load(base + at, mask=inside, other=float("inf"))
    d = gl.load(delta + at, mask=inside, other=0.0)
    # The keys from `low` to `high` are seen, counted from `begin`.
    low = local
    high = local * 0 + (len_k - 1 - begin)
    if HAS_RIGHT:
        high = gl.minimum(high, local + (shift + right - begin))
    if HAS_LEFT:
        low = local + (shift - left - begin)
    q = q_s.index(W)
    g = g_s.index(W)
    dq = gl.zeros([64, HALF], gl.float32, layout=accumulator(HALF))
    more = gl.zeros([64, REST], gl.float32, layout=accumulator(REST))
    mbarrier.wait(q_full, 0)
    mbarrier.wait(g_full, 0, pred=count > 0)  # dO comes after the first K.
    for j in range(count):
        i = j & 1
        k = k_s.index(i)
        mbarrier.wait(k_full.index(i), (j >> 1) & 1)
        product = dot(q, k, 64, BLOCK_N, USED)
        n = j % V_STAGES
        if V_STAGES == 1:
            # Nought, but unknown to the compiler, which would keep 32 addresses in registers.
            n = j >> 30
        mbarrier.wait(v_full.index(n), (j // V_STAGES) & 1)
        dp = dot(g, v_s.index(n), 64, BLOCK_N, USED_V)
        # dP runs on under the exponentials.
        logits = warpgroup_mma_wait(groups(USED_V), deps=(product,))
        p, t = exponential(logits, b[:, None], scale, softcap, SOFTCAP)
        if MASKS:  # noqa: SIM102
            if (j < plain) | (j >= edge):
                keys = j * BLOCK_N + gl.arange(0, BLOCK_N, layout=CN)
                seen = keys[None, :] <= high[:, None]
                if HAS_LEFT:
                    seen = seen & (keys[None, :] >= low[:, None])
                p = gl.where(seen, p, 0.0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_free.index(n), count=1)
        ds = p * (dp - d[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        ds = ds.to(dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, HL), k.slice(0, HALF, dim=1), dq, is_async=True)
        more = warpgroup_mma(
            gl.convert_layout(ds, ML), k.slice(HALF, REST, dim=1), more, is_async=True
        )
        # Nothing may be under way across the loop's end: ptxas would wait after every product.
        dq, more = warpgroup_mma_wait(0, deps=(dq, more))
        mbarrier.arrive(k_free.index(i), count=1)
    # No one else reads these rows of Q.
    q.slice(0, HALF, dim=1).store((dq * scale).to(dtype))
    q.slice(HALF, REST, dim=1).store((more * scale).to(dtype))
    fence_async_shared()
    thread_barrier()
    write(dq_desc, batch, first_q, len_q, head, start + W * 64, q, VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def wide_queries_kernel(
    query, key, value, grad_out, grad_query, base, delta, cu_q, cu_k,
    len_q, len_k, heads, all_heads, group, blocks_m, side, left, right,
    row_stride_b, row_stride_h, scale, softcap,
    VARLEN: gl.constexpr, EVEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    USED: gl.constexpr, USED_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    PADDED: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M query rows a block.

    base and delta, padded to PADDED rows, are pointers; the other tensors but cu_q and cu_k are
    descriptors (see `plan`). Grid: blocks_m * batch * heads.
    """
    dtype: gl.constexpr = query.dtype
    QD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    GD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DV], dtype)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, D], QD)
    g_s = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, DV], GD)
    k_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], QD)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, BLOCK_N, DV], GD)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BAR)
    v_free = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(g_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # One arrival per consumer.
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()  # The copy engine counts on the barriers as well.
    buffers = ((q_s, g_s, k_s, v_s), (q_full, g_full, k_full, k_free, v_full, v_free))
    place = (heads, all_heads, blocks_m, side)
    sizes = (len_q, len_k, group, left, right, row_stride_b, row_stride_h)
    given = (grad_query, base, delta, cu_q, cu_k, buffers, place, sizes, (scale, softcap))
    loading = (query, key, value, grad_out, cu_q, cu_k, buffers, place, sizes)
    gl.warp_specialize(
        [
            (queries_consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP,
                                D, USED, USED_V, BLOCK_M, BLOCK_N, PADDED, V_STAGES, 0)),
            (queries_consumer, (given, VARLEN, EVEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP,
                                D, USED, USED_V, BLOCK_M, BLOCK_N, PADDED, V_STAGES, 1)),
            (load_keys, (loading, VARLEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, D, DV,
                         BLOCK_M, BLOCK_N, V_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
