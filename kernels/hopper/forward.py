"""The forward kernel for Hopper, warp-specialised: docs/hopper.md explains it.

A block is a producer warp, which copies tiles of Q, K and V into shared memory, and two or three
consumer warpgroups with 64 query rows each. Consumers take turns with the tensor cores: while one's
exponentials run, the next one's product of Q and K and its last of P and V do. The grid is
persistent: each block goes from one piece of work to the next, and the producer is always ahead.
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

from fa_advisor.kernels.hopper.common import accumulator, cheap_tanh, origin
from fa_advisor.kernels.hopper.compat import load_tile, store_tile
from fa_advisor.kernels.hopper.consumers import (
    barriers,
    cut,
    end_turn,
    exceeds,
    lane_sums,
    pass_by,
    prepare_exceeds,
    row_maximum,
    take_turn,
)
from fa_advisor.kernels.hopper.pieces import (
    keys_of,
    limits,
    next_in_order,
    next_piece,
    own_keys,
    tell,
    told,
    turns,
    work,
)
from fa_advisor.kernels.score import LN2, LOG2E, UNSPECIALIZED

# What a thread's weights of a row may add up to before the row's base is raised: as float16 they
# are finite. O is as much larger than it will be, so V must be as much smaller than fp32's largest.
_MOST = gl.constexpr(2.0**15)


@gluon.jit
def _has_queries(begin, end, EACH: gl.constexpr):
    """Whether a piece of work takes its turn with Q's buffer: those that see a key, or EACH."""
    if EACH:
        return begin >= 0
    else:
        return end > begin


@gluon.jit
def _load_piece(
    t, place, slot, phase, q_phase, EACH: gl.constexpr,
    SCHEDULED: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, PADDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The copies of a piece of work: Q for each consumer, then K and V, tile by tile."""
    q_desc, k_desc, v_desc, cu_q, cu_k, spans, buffers, numbers, group = place
    q_s, k_s, v_s, _, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = buffers
    PART: gl.constexpr = q_desc.block_type.shape[4]
    batch, head, row_start, sequence = work(
        t, cu_q, cu_k, numbers, SCHEDULED, VARLEN, HAS_RIGHT, BM * CONSUMERS
    )
    first_q, len_q, first_k, len_k = sequence
    begin, _full, _rest, end = keys_of(
        row_start, batch, head, sequence, spans, numbers,
        HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING, BM * CONSUMERS, BN,
    )  # fmt: skip
    if _has_queries(begin, end, EACH):
        a, b, row = origin(batch, first_q, len_q, VARLEN)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), q_phase)
            mbarrier.expect(q_ready.index(c), PARTS * q_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                load_tile(
                    q_desc, [a, b, head, row + row_start + c * BM, part * PART],
                    q_ready.index(c), q_s.index(c * PARTS + part),
                )  # fmt: skip
        q_phase ^= 1
    if end > begin:
        a, b, row = origin(batch, first_k, len_k, VARLEN)
        kv_head = head // group
        last = (end - 1) // BN * BN
        for back in range(0, last - begin + BN, BN):
            start = row + last - back
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_ready.index(slot), PARTS * k_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                load_tile(
                    k_desc, [a, b, kv_head, start, part * PART], k_ready.index(slot),
                    k_s.index(slot * PARTS + part),
                )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
            load_tile(v_desc, [a, b, kv_head, start, 0], v_ready.index(slot), v_s.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    return slot, phase, q_phase


@gluon.jit
def _produce(
    given, ORDERED: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, PADDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SHARED_O: gl.constexpr,
):  # fmt: skip
    place, schedule, total = given
    buffers = place[6]
    q_ready, q_empty, handed = buffers[4], buffers[5], buffers[10]
    EACH: gl.constexpr = SHARED_O or ORDERED
    slot = 0
    phase = 1
    q_phase = 1
    if ORDERED:
        turn = 0
        t = next_in_order(schedule)
        while t >= 0:
            tell(handed, turn, t)
            slot, phase, q_phase = _load_piece(
                t, place, slot, phase, q_phase, EACH, True, VARLEN, HAS_LEFT, HAS_RIGHT,
                BOTTOM_RIGHT, PADDING, BM, BN, PARTS, STAGES, CONSUMERS,
            )  # fmt: skip
            turn ^= 1
            t = next_in_order(schedule)
        tell(handed, turn, t)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), q_phase)
            mbarrier.arrive(q_ready.index(c), count=1)
    else:
        first_turn, last_turn, step, t = turns(schedule, total)
        for turn in range(first_turn, last_turn, step):
            following_t = next_piece(schedule, turn, step)
            slot, phase, q_phase = _load_piece(
                t, place, slot, phase, q_phase, EACH, schedule is not None, VARLEN, HAS_LEFT,
                HAS_RIGHT, BOTTOM_RIGHT, PADDING, BM, BN, PARTS, STAGES, CONSUMERS,
            )  # fmt: skip
            t = following_t


@gluon.jit
def _product(
    q_s, k_s, slot, CID: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Q K^T, on its way."""
    PART: gl.constexpr = q_s.shape[5]
    s = gl.zeros([BM, BN], gl.float32, layout=S)
    for part in gl.static_range(PARTS):
        q = q_s.index(CID * PARTS + part).reshape([BM, PART])
        k = k_s.index(slot * PARTS + part).reshape([BN, PART])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def _logits(
    s, start, rows, bias,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, PADDING: gl.constexpr, SOFTCAP: gl.constexpr,
    BN: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """A tile's logits, -inf where they are hidden, and what times them gives powers of two.

    lowest, highest: the first and last key that each row sees.
    """
    lowest, highest, padding, stride_bn, scale, softcap, len_k = rows
    factor = scale * LOG2E
    if SOFTCAP:
        s = cheap_tanh(s * (scale / softcap)) * softcap
        factor = LOG2E
    if MASKED:
        s = cut(s, highest - start, "gt")
        if HAS_LEFT:
            s = cut(s, lowest - start, "lt")
        if PADDING:
            cols = start + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
            shown = gl.load(
                bias + padding + cols.to(gl.int64) * stride_bn, mask=cols < len_k, other=0
            )
            s = gl.where((shown != 0)[None, :], s, float("-inf"))
    return s, factor


@gluon.jit
def _weights(s, m, factor, MASKED: gl.constexpr):
    """exp2 of a tile's logits less their row's base, and the lanes' sums of it."""
    base = m
    if MASKED:
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(s * factor - base[:, None])
    return p, lane_sums(p)


@gluon.jit
def _raised(
    s, m, factor, MASKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr
):
    """The rows' base raised to the largest of their logits, and what rescales what came before."""
    new = gl.maximum(m, row_maximum(s, BM, BN, gl.SliceLayout(1, S)) * factor)
    base = new
    if MASKED:
        base = gl.where(new == float("-inf"), 0.0, new)
    return new, gl.exp2(m - base)


@gluon.jit
def _rescaled(acc, z, alpha):
    """O and the lanes' sums, each in a layout of its own, times a factor for each row."""
    acc *= gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    z *= gl.convert_layout(alpha, gl.SliceLayout(1, z.type.layout))[:, None]
    return acc, z


@gluon.jit
def _packed(weights, dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """A tile of weights as pairs in int32: what a loop hands to the next loop.

    Sixteen bits each, they would be taken apart and put together again in every round.
    """
    low, high = gl.split(weights.reshape([BM, BN // 2, 2]))
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return pairs


@gluon.jit
def _unpacked(pairs, dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, P: gl.constexpr):
    """`_packed` undone: the first operand of the product with V."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    weights = gl.join(low, high).reshape([BM, BN]).to(dtype, bitcast=True)
    return gl.convert_layout(weights, P)


@gluon.jit
def _attend(
    state, high, low, buffers, rows, bias,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, PADDING: gl.constexpr, SOFTCAP: gl.constexpr,
    CID: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BLOCK_DV: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Carry the state over the tiles of keys from `high` down to `low`.

    Each follows one whose P is in the state and whose V waits in `slot`. Where nothing is masked a
    row's weights are taken from the base that it has: only if they are too large for that, which
    their sums tell, is the tile done again with the base raised to its largest logit.
    """
    acc, m, z, p, slot, phase = state
    q_s, k_s, v_s, _, _, _, k_ready, k_empty, v_ready, v_empty, _ = buffers
    dtype: gl.constexpr = q_s.dtype
    for back in range(BN, high - low + BN, BN):
        following = slot + 1
        next_phase = phase
        if following == STAGES:
            following = 0
            next_phase = phase ^ 1
        mbarrier.wait(k_ready.index(following), next_phase)
        take_turn(CID)
        s = _product(q_s, k_s, following, CID, PARTS, BM, BN, S)
        mbarrier.wait(v_ready.index(slot), phase)
        v = v_s.index(slot).reshape([BN, BLOCK_DV])
        acc = warpgroup_mma(_unpacked(p, dtype, BM, BN, P), v, acc, is_async=True)
        end_turn(CID, CONSUMERS)
        s = warpgroup_mma_wait(1, deps=(s,))
        s, factor = _logits(s, high - back, rows, bias, MASKED, HAS_LEFT, PADDING, SOFTCAP, BN, S)
        if MASKED:
            m, alpha = _raised(s, m, factor, MASKED, BM, BN, S)
        weights, sums = _weights(s, m, factor, MASKED)
        if not MASKED:
            beyond = exceeds(sums, _MOST, CID)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        p = _packed(weights, dtype, BM, BN)
        if MASKED:
            acc, z = _rescaled(acc, z, alpha)
        elif beyond != 0:
            s = _product(q_s, k_s, following, CID, PARTS, BM, BN, S)
            s = warpgroup_mma_wait(0, deps=(s,))
            s, factor = _logits(
                s, high - back, rows, bias, MASKED, HAS_LEFT, PADDING, SOFTCAP, BN, S
            )
            # Of the rows alone that need it: a row's bits don't depend on its neighbours.
            over = gl.convert_layout(gl.max(sums, axis=1), gl.SliceLayout(1, S)) > _MOST
            higher, alpha = _raised(s, m, factor, MASKED, BM, BN, S)
            m = gl.where(over, higher, m)
            alpha = gl.where(over, alpha, 1.0)
            weights, sums = _weights(s, m, factor, MASKED)
            p = _packed(weights, dtype, BM, BN)
            acc, z = _rescaled(acc, z, alpha)
        mbarrier.arrive(k_empty.index(following), count=1)
        z += sums
        slot = following
        phase = next_phase
    return acc, m, z, p, slot, phase


@gluon.jit
def _do_piece(
    t, given, slot, phase, q_phase, ORDERED: gl.constexpr,
    SCHEDULED: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    PADDING: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, EVEN_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BLOCK_DV: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    SHARED_O: gl.constexpr, CID: gl.constexpr,
):  # fmt: skip
    """What a consumer does of a piece of work: out and lse of its 64 rows."""
    o_desc, lse, bias, sinks, cu_q, cu_k, spans, buffers, numbers, more = given
    q_s, k_s, v_s, o_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = buffers
    stride_lb, stride_lh, stride_bb, stride_bh, stride_bn, scale, softcap, left, right = more
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator(BN)
    OUT: gl.constexpr = accumulator(BLOCK_DV)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    # Only what some row may not see whole is masked.
    CUT: gl.constexpr = VARLEN or HAS_LEFT or HAS_RIGHT or PADDING or not EVEN_K
    batch, head, row_start, sequence = work(
        t, cu_q, cu_k, numbers, SCHEDULED, VARLEN, HAS_RIGHT, BM * CONSUMERS
    )  # fmt: skip
    first_q, len_q, _first_k, len_k = sequence
    all_begin, all_end, some, last, rest, full, begin = own_keys(
        row_start, batch, head, sequence, spans, numbers,
        HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING, BM, BN, CONSUMERS, CID,
    )  # fmt: skip
    row = row_start + CID * BM
    local = row + gl.arange(0, BM, layout=ROW)
    m = gl.full([BM], float("-inf"), gl.float32, layout=ROW)
    z = gl.full([BM], 0.0, gl.float32, layout=ROW)
    if SINKS:
        # A sink is a logit without a value.
        sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        m = gl.maximum(m, sink)
    acc = gl.zeros([BM, BLOCK_DV], gl.float32, layout=OUT)
    queries = _has_queries(all_begin, all_end, SHARED_O or ORDERED)
    if queries:
        if not ORDERED:  # Else it was waited for, to know what comes.
            mbarrier.wait(q_ready.index(CID), q_phase)
        q_phase ^= 1
    if all_end > all_begin:
        first = (all_end - 1) // BN * BN
        slot, phase = pass_by(
            first + BN, last + BN, slot, phase, buffers, some, True, STAGES, BN, CID, CONSUMERS
        )
    if some:
        lowest, highest = limits(local, sequence, left, right, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT)
        padding = batch.to(gl.int64) * stride_bb + head.to(gl.int64) * stride_bh
        rows = (lowest, highest, padding, stride_bn, scale, softcap, len_k)
        mbarrier.wait(k_ready.index(slot), phase)
        s = _product(q_s, k_s, slot, CID, PARTS, BM, BN, S)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        s, factor = _logits(s, last, rows, bias, CUT, HAS_LEFT, PADDING, SOFTCAP, BN, S)
        m, _alpha = _raised(s, m, factor, CUT, BM, BN, S)
        weights, sums = _weights(s, m, factor, CUT)
        carried = (acc, m, sums, _packed(weights, dtype, BM, BN), slot, phase)
        if HAS_RIGHT or PADDING:
            carried = _attend(
                carried, last, rest, buffers, rows, bias,
                True, HAS_LEFT, PADDING, SOFTCAP, CID, CONSUMERS, PARTS, STAGES,
                BM, BN, BLOCK_DV, S, P,
            )  # fmt: skip
        carried = _attend(
            carried, rest, full, buffers, rows, bias,
            False, HAS_LEFT, PADDING, SOFTCAP, CID, CONSUMERS, PARTS, STAGES,
            BM, BN, BLOCK_DV, S, P,
        )  # fmt: skip
        if HAS_LEFT or PADDING:
            carried = _attend(
                carried, full, begin, buffers, rows, bias,
                True, HAS_LEFT, PADDING, SOFTCAP, CID, CONSUMERS, PARTS, STAGES,
                BM, BN, BLOCK_DV, S, P,
            )  # fmt: skip
        acc, m, sums, p, slot, phase = carried
        z = gl.convert_layout(gl.sum(sums, axis=1), ROW)
        mbarrier.wait(v_ready.index(slot), phase)
        v = v_s.index(slot).reshape([BN, BLOCK_DV])
        acc = warpgroup_mma(_unpacked(p, dtype, BM, BN, P), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if queries and not SHARED_O:
        mbarrier.arrive(q_empty.index(CID), count=1)
    if all_end > all_begin:
        slot, phase = pass_by(
            begin, all_begin, slot, phase, buffers, some, True, STAGES, BN, CID, CONSUMERS
        )
    if SINKS:
        z += gl.exp2(sink - gl.where(m == float("-inf"), 0.0, m))
    empty = z == 0.0
    share = 1.0 / gl.where(empty, 1.0, z)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
    # What lay in the buffer has been read by its copy out.
    tma.store_wait(0)
    out = o_s.index(CID)
    out.reshape([BM, BLOCK_DV]).store(acc.to(dtype))
    fence_async_shared()
    a, b, first_row = origin(batch, first_q, len_q, VARLEN)
    store_tile(o_desc, [a, b, head, first_row + row, 0], out)
    log_sum = gl.where(empty, float("-inf"), (m + gl.log2(z)) * LN2)
    where = lse + head.to(gl.int64) * stride_lh + local
    if VARLEN:
        where += first_q
    else:
        where += batch.to(gl.int64) * stride_lb
    gl.store(where, log_sum, mask=local < len_q)
    if SHARED_O:
        tma.store_wait(0)
        if queries:
            mbarrier.arrive(q_empty.index(CID), count=1)
    return slot, phase, q_phase


@gluon.jit
def _consume(
    given, schedule, total, ORDERED: gl.constexpr,
    VARLEN: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PADDING: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    EVEN_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SHARED_O: gl.constexpr,
    CID: gl.constexpr,
):  # fmt: skip
    buffers = given[7]
    q_ready, handed = buffers[4], buffers[10]
    slot = 0
    phase = 0
    q_phase = 0
    if CID == CONSUMERS - 1:
        end_turn(CID, CONSUMERS)  # The first is the first consumer's.
    if ORDERED:
        turn = 0
        mbarrier.wait(q_ready.index(CID), 0)
        t = told(handed, turn)
        while t >= 0:
            slot, phase, q_phase = _do_piece(
                t, given, slot, phase, q_phase, ORDERED, True, VARLEN, SOFTCAP, SINKS, PADDING,
                HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS, STAGES,
                CONSUMERS, SHARED_O, CID,
            )  # fmt: skip
            turn ^= 1
            mbarrier.wait(q_ready.index(CID), q_phase)
            t = told(handed, turn)
    else:
        first_turn, last_turn, step, t = turns(schedule, total)
        for turn in range(first_turn, last_turn, step):
            following_t = next_piece(schedule, turn, step)
            slot, phase, q_phase = _do_piece(
                t, given, slot, phase, q_phase, ORDERED, schedule is not None, VARLEN, SOFTCAP,
                SINKS, PADDING, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV,
                PARTS, STAGES, CONSUMERS, SHARED_O, CID,
            )  # fmt: skip
            t = following_t
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "total"])
def forward_kernel(
    query, key, value, out, lse, row_max, row_sum, bias, spans, sinks, slopes, cu_q, cu_k, seeds,
    schedule, stride_lb, stride_lh, stride_bb, stride_bh, stride_bn, span_b, span_h,
    len_q, len_k, batch_heads, heads, group, blocks, side_by_side, total,
    scale, softcap, left, right,
    VARLEN: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PADDING: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    EVEN_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    SHARED_O: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """out and lse (natural log), as the portable `forward_kernel` gives them.

    query, key, value, out: descriptors of one block each, rank 5 (see `plan`); what the portable
    kernel knows and this one doesn't (row_max, row_sum, slopes, seeds) is None. schedule: of
    `schedule_of`, or, ORDERED, of `order_kernel`.
    """
    dtype: gl.constexpr = query.dtype
    PART: gl.constexpr = query.block_type.shape[4]
    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS * PARTS, 1, 1, 1, BM, PART], query.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES * PARTS, 1, 1, 1, BN, PART], key.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BN, BLOCK_DV], value.layout)
    if SHARED_O:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 1, BM, BLOCK_DV], out.layout)
    prepare_exceeds()
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers(STAGES, CONSUMERS)
    handed = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = (
        q_s, k_s, v_s, o_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, handed,
    )  # fmt: skip
    numbers = (
        len_q, len_k, batch_heads, heads, blocks, side_by_side, left, right, span_b, span_h,
    )  # fmt: skip
    more = (stride_lb, stride_lh, stride_bb, stride_bh, stride_bn, scale, softcap, left, right)
    given = (out, lse, bias, sinks, cu_q, cu_k, spans, buffers, numbers, more)
    place = (query, key, value, cu_q, cu_k, spans, buffers, numbers, group)
    producing = (place, schedule, total)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, schedule, total, ORDERED, VARLEN, SOFTCAP, SINKS, PADDING,
                            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS,
                            STAGES, 2, SHARED_O, 0)),
                (_consume, (given, schedule, total, ORDERED, VARLEN, SOFTCAP, SINKS, PADDING,
                            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS,
                            STAGES, 2, SHARED_O, 1)),
                (_produce, (producing, ORDERED, VARLEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING,
                            BM, BN, PARTS, STAGES, 2, SHARED_O)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (given, schedule, total, ORDERED, VARLEN, SOFTCAP, SINKS, PADDING,
                            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS,
                            STAGES, 3, SHARED_O, 0)),
                (_consume, (given, schedule, total, ORDERED, VARLEN, SOFTCAP, SINKS, PADDING,
                            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS,
                            STAGES, 3, SHARED_O, 1)),
                (_consume, (given, schedule, total, ORDERED, VARLEN, SOFTCAP, SINKS, PADDING,
                            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K, BM, BN, BLOCK_DV, PARTS,
                            STAGES, 3, SHARED_O, 2)),
                (_produce, (producing, ORDERED, VARLEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, PADDING,
                            BM, BN, PARTS, STAGES, 3, SHARED_O)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
