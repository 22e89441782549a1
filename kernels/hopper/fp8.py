"""The forward kernel for Hopper on float8_e4m3fn.

It is `forward.py`'s pipeline; docs/hopper.md says what eight bits change. V comes turned over, its
keys in an order of their own: see `transpose.py`.
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
from fa_advisor.kernels.hopper.consumers import barriers, cut, lane_sums, pass_by, row_maximum
from fa_advisor.kernels.hopper.pieces import (
    keys_of,
    limits,
    next_piece,
    own_keys,
    turns,
    work,
)
from fa_advisor.kernels.score import LN2, LOG2E, UNSPECIALIZED

# P is at most 2^HEADROOM instead of 1, below e4m3's largest number, 448: what would be under its
# smallest isn't. The sum of a row's P is as much larger, so the output isn't.
HEADROOM = gl.constexpr(8.0)
# What logits are times, at least: as good as 0.
_LEAST_FACTOR = gl.constexpr(2.0**-100)


@gluon.jit
def _produce(
    given,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, cu_q, cu_k, buffers, schedule, numbers, group, total = given
    q_s, k_s, v_s, _, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = buffers
    slot = 0
    phase = 1
    q_phase = 1
    first_turn, last_turn, step, t = turns(schedule, total)
    for turn in range(first_turn, last_turn, step):
        following_t = next_piece(schedule, turn, step)
        batch, head, row_start, sequence = work(
            t, cu_q, cu_k, numbers, schedule is not None, VARLEN, HAS_RIGHT, BM * CONSUMERS
        )
        first_q, len_q, first_k, len_k = sequence
        begin, _full, _rest, end = keys_of(
            row_start, batch, head, sequence, None, numbers,
            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, False, BM * CONSUMERS, BN,
        )  # fmt: skip
        if end > begin:
            a, b, row = origin(batch, first_q, len_q, VARLEN)
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(c), q_phase)
                mbarrier.expect(q_ready.index(c), q_desc.block_type.nbytes)
                load_tile(
                    q_desc, [a, b, head, row + row_start + c * BM, 0], q_ready.index(c),
                    q_s.index(c),
                )  # fmt: skip
            q_phase ^= 1
            a, b, row = origin(batch, first_k, len_k, VARLEN)
            v_batch = batch
            first_v = 0
            if VARLEN:
                v_batch = 0
                first_v = (first_k // BN + batch) * BN
            kv_head = head // group
            last = (end - 1) // BN * BN
            for back in range(0, last - begin + BN, BN):
                start = last - back
                mbarrier.wait(k_empty.index(slot), phase)
                mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
                load_tile(
                    k_desc, [a, b, kv_head, row + start, 0], k_ready.index(slot), k_s.index(slot)
                )
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
                load_tile(
                    v_desc, [0, v_batch, kv_head, 0, first_v + start], v_ready.index(slot),
                    v_s.index(slot),
                )  # fmt: skip
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
        t = following_t


@gluon.jit
def _product(
    q_s, k_s, slot, CID: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr
):
    """Q K^T, on its way."""
    WIDTH: gl.constexpr = q_s.shape[5]
    s = gl.zeros([BM, BN], gl.float32, layout=S)
    q = q_s.index(CID).reshape([BM, WIDTH])
    k = k_s.index(slot).reshape([BN, WIDTH])
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    s, m, start, rows,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    BN: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """exp2 of a tile's logits less the row's maximum, times 2^HEADROOM, and the maxima so far."""
    lowest, highest, scale, softcap = rows
    factor = scale * LOG2E
    if SOFTCAP:
        s = cheap_tanh(s * (scale / softcap)) * softcap
        factor = LOG2E
    if MASKED:
        s = cut(s, highest - start, "gt")
        if HAS_LEFT:
            s = cut(s, lowest - start, "lt")
    new = gl.maximum(m, row_maximum(s, s.shape[0], BN, gl.SliceLayout(1, S)) * factor)
    base = new
    if MASKED:
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = gl.where(new == float("-inf"), 0.0, new)
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * factor - (base - HEADROOM)[:, None])
    return p, new, alpha


@gluon.jit
def _packed(p):
    """P as e4m3, four to a word: keys 16 n + 2 c + (0, 1, 8, 9) of a row, which a thread holds."""
    BM: gl.constexpr = p.shape[0]
    BN: gl.constexpr = p.shape[1]
    p = p.reshape([BM, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(p)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _operand(words, EIGHT: gl.constexpr, P: gl.constexpr):
    """P as the next product's operand, its keys in `key_of_slot`'s order: no thread moves any."""
    BM: gl.constexpr = words.shape[0]
    two = gl.join(words, words)
    four = gl.join(two, two).reshape([BM, words.shape[1] * words.shape[2] * 4])
    # A word once for each of its bytes, of which the first is taken for all.
    p = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.convert_layout(four, P)],
        dtype=gl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    return p.to(EIGHT, bitcast=True)


@gluon.jit
def _added(acc, alpha, part, v_empty):
    """O with a tile's product, once that is there."""
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(v_empty, count=1)
    return acc * alpha[:, None] + part


@gluon.jit
def _attend(
    state, high, low, buffers, rows,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    CID: gl.constexpr, STAGES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BLOCK_DV: gl.constexpr,
    S: gl.constexpr, OUT: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Carry the state over the tiles of keys from `high` down to `low`.

    Each follows one whose P is in the state and whose V waits in `slot`; O isn't rescaled by
    `alpha` yet. Each tile's product starts from 0 and is added to O in fp32: a sum of products of
    fp8 is carried in fewer bits, and over 16k keys, if V's mean is its deviation, 14 % were lost.
    """
    acc, m, z, alpha, words, slot, phase = state
    q_s, k_s, v_s, _, _, _, k_ready, k_empty, v_ready, v_empty = buffers
    for back in range(BN, high - low + BN, BN):
        following = slot + 1
        next_phase = phase
        if following == STAGES:
            following = 0
            next_phase = phase ^ 1
        p = _operand(words, q_s.dtype, P)
        mbarrier.wait(k_ready.index(following), next_phase)
        s = _product(q_s, k_s, following, CID, BM, BN, S)
        mbarrier.wait(v_ready.index(slot), phase)
        part = gl.zeros([BM, BLOCK_DV], gl.float32, layout=OUT)
        v = v_s.index(slot).reshape([BLOCK_DV, BN]).permute((1, 0))
        part = warpgroup_mma(p, v, part, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(following), count=1)
        weights, m, next_alpha = _softmax(s, m, high - back, rows, MASKED, HAS_LEFT, SOFTCAP, BN, S)
        sums = lane_sums(weights)
        z = z * gl.convert_layout(next_alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        # Over already: but ptxas doesn't move the wait for the product over it, above the
        # exponentials.
        mbarrier.wait(v_ready.index(slot), phase)
        acc = _added(acc, alpha, part, v_empty.index(slot))
        alpha = gl.convert_layout(next_alpha, gl.SliceLayout(1, OUT))
        # Not earlier: while the product reads P, ptxas would wait for it before P's registers
        # change hands.
        words = _packed(weights)
        slot = following
        phase = next_phase
    return acc, m, z, alpha, words, slot, phase


@gluon.jit
def _descale(scales, batch, head, stride_b, stride_h):
    """A head's factor; 1 where none are given."""
    if scales is not None:
        return gl.load(scales + batch * stride_b + head * stride_h)
    else:
        return 1.0


@gluon.jit
def _consume(
    given,
    VARLEN: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    EVEN_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CID: gl.constexpr,
):  # fmt: skip
    (
        o_desc, lse, q_descale, k_descale, v_descale, sinks, cu_q, cu_k, buffers, schedule,
        numbers, more, total,
    ) = given  # fmt: skip
    q_s, k_s, v_s, o_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = buffers
    (
        stride_lb, stride_lh, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
        group, scale, softcap, left, right,
    ) = more  # fmt: skip
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator(BN, 32)
    OUT: gl.constexpr = accumulator(BLOCK_DV, 32)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=4)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    # Only what some row may not see whole is masked.
    CUT: gl.constexpr = VARLEN or HAS_LEFT or HAS_RIGHT or not EVEN_K
    slot = 0
    phase = 0
    q_phase = 0
    first_turn, last_turn, step, t = turns(schedule, total)
    for turn in range(first_turn, last_turn, step):
        following_t = next_piece(schedule, turn, step)
        batch, head, row_start, sequence = work(
            t, cu_q, cu_k, numbers, schedule is not None, VARLEN, HAS_RIGHT, BM * CONSUMERS
        )
        first_q, len_q, _first_k, _len_k = sequence
        all_begin, all_end, some, last, rest, full, begin = own_keys(
            row_start, batch, head, sequence, None, numbers,
            HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, False, BM, BN, CONSUMERS, CID,
        )  # fmt: skip
        row = row_start + CID * BM
        local = row + gl.arange(0, BM, layout=ROW)
        m = gl.full([BM], float("-inf"), gl.float32, layout=ROW)
        if SINKS:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        z = gl.full([BM], 0.0, gl.float32, layout=ROW)
        acc = gl.zeros([BM, BLOCK_DV], gl.float32, layout=OUT)
        if all_end > all_begin:
            mbarrier.wait(q_ready.index(CID), q_phase)
            q_phase ^= 1
            first = (all_end - 1) // BN * BN
            slot, phase = pass_by(
                first + BN, last + BN, slot, phase, buffers, some, False, STAGES, BN, CID, CONSUMERS
            )
        if some:
            lowest, highest = limits(
                local, sequence, left, right, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT
            )
            factor = scale * _descale(q_descale, batch, head, stride_qb, stride_qh)
            factor *= _descale(k_descale, batch, head // group, stride_kb, stride_kh)
            # A head of zeros has a factor of 0, and 0 times what masks put in, -inf, is NaN.
            factor = gl.where(factor < _LEAST_FACTOR, _LEAST_FACTOR, factor)
            rows = (lowest, highest, factor, softcap)
            mbarrier.wait(k_ready.index(slot), phase)
            s = _product(q_s, k_s, slot, CID, BM, BN, S)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            weights, m, alpha = _softmax(s, m, last, rows, CUT, HAS_LEFT, SOFTCAP, BN, S)
            state = (
                acc, m, lane_sums(weights), gl.convert_layout(alpha, gl.SliceLayout(1, OUT)),
                _packed(weights), slot, phase,
            )  # fmt: skip
            if HAS_RIGHT:
                state = _attend(
                    state, last, rest, buffers, rows,
                    True, HAS_LEFT, SOFTCAP, CID, STAGES, BM, BN, BLOCK_DV, S, OUT, P,
                )  # fmt: skip
            state = _attend(
                state, rest, full, buffers, rows,
                False, HAS_LEFT, SOFTCAP, CID, STAGES, BM, BN, BLOCK_DV, S, OUT, P,
            )  # fmt: skip
            if HAS_LEFT:
                state = _attend(
                    state, full, begin, buffers, rows,
                    True, HAS_LEFT, SOFTCAP, CID, STAGES, BM, BN, BLOCK_DV, S, OUT, P,
                )  # fmt: skip
            acc, m, lane_z, alpha, words, slot, phase = state
            z = gl.convert_layout(gl.sum(lane_z, axis=1), ROW)
            p = _operand(words, q_s.dtype, P)
            mbarrier.wait(v_ready.index(slot), phase)
            part = gl.zeros([BM, BLOCK_DV], gl.float32, layout=OUT)
            v = v_s.index(slot).reshape([BLOCK_DV, BN]).permute((1, 0))
            part = warpgroup_mma(p, v, part, use_acc=False, is_async=True)
            acc = _added(acc, alpha, part, v_empty.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        if all_end > all_begin:
            mbarrier.arrive(q_empty.index(CID), count=1)
            slot, phase = pass_by(
                begin, all_begin, slot, phase, buffers, some, False, STAGES, BN, CID, CONSUMERS
            )
        share = 1.0
        if SINKS:
            # A sink is a logit without a value. It is in the sum alone, so that no weight is
            # rounded to nothing beside it; there it may be larger than any of them could be.
            highest = m
            m = gl.maximum(m, sink)
            base = gl.where(m == float("-inf"), 0.0, m)
            share = gl.exp2(highest - base)
            z = z * share + gl.exp2(sink - base + HEADROOM)
        empty = z == 0.0
        share = share / gl.where(empty, 1.0, z)
        share *= _descale(v_descale, batch, head // group, stride_vb, stride_vh)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
        # What lay in the buffer has been read by its copy out.
        tma.store_wait(0)
        out = o_s.index(CID)
        out.reshape([BM, BLOCK_DV]).store(acc.to(dtype))
        fence_async_shared()
        a, b, first_row = origin(batch, first_q, len_q, VARLEN)
        store_tile(o_desc, [a, b, head, first_row + row, 0], out)
        log_sum = gl.where(empty, float("-inf"), (m + (gl.log2(z) - HEADROOM)) * LN2)
        where = lse + head.to(gl.int64) * stride_lh + local
        if VARLEN:
            where += first_q
        else:
            where += batch.to(gl.int64) * stride_lb
        gl.store(where, log_sum, mask=local < len_q)
        t = following_t
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "total", "stride_qb", "stride_qh",
                              "stride_kb", "stride_kh", "stride_vb", "stride_vh"])  # fmt: skip
def fp8_forward_kernel(
    query, key, transposed, out, lse, q_descale, k_descale, v_descale, sinks, cu_q, cu_k, schedule,
    stride_lb, stride_lh, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    len_q, len_k, batch_heads, heads, group, blocks, side_by_side, total,
    scale, softcap, left, right,
    VARLEN: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    EVEN_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """out (bf16) and lse (natural log) of fp8 query, key and `transpose_kernel`'s value.

    query, key, transposed, out: descriptors of one block each, rank 5 (see `plan`).
    """
    EIGHT: gl.constexpr = query.dtype
    WIDTH: gl.constexpr = query.block_type.shape[4]
    q_s = gl.allocate_shared_memory(EIGHT, [CONSUMERS, 1, 1, 1, BM, WIDTH], query.layout)
    k_s = gl.allocate_shared_memory(EIGHT, [STAGES, 1, 1, 1, BN, WIDTH], key.layout)
    v_s = gl.allocate_shared_memory(EIGHT, [STAGES, 1, 1, 1, BLOCK_DV, BN], transposed.layout)
    o_s = gl.allocate_shared_memory(out.dtype, [CONSUMERS, 1, 1, 1, BM, BLOCK_DV], out.layout)
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers(STAGES, CONSUMERS)
    buffers = (q_s, k_s, v_s, o_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    numbers = (len_q, len_k, batch_heads, heads, blocks, side_by_side, left, right, 0, 0)
    more = (
        stride_lb, stride_lh, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
        group, scale, softcap, left, right,
    )  # fmt: skip
    given = (
        out, lse, q_descale, k_descale, v_descale, sinks, cu_q, cu_k, buffers, schedule, numbers,
        more, total,
    )  # fmt: skip
    producing = (query, key, transposed, cu_q, cu_k, buffers, schedule, numbers, group, total)
    gl.warp_specialize(
        [
            (_consume, (given, VARLEN, SOFTCAP, SINKS, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K,
                        BM, BN, BLOCK_DV, STAGES, 2, 0)),
            (_consume, (given, VARLEN, SOFTCAP, SINKS, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, EVEN_K,
                        BM, BN, BLOCK_DV, STAGES, 2, 1)),
            (_produce, (producing, VARLEN, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BM, BN, STAGES, 2)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
