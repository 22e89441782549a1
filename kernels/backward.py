"""The backward kernels. Each output has one owner: no atomics, so a repeat gives the same bits.

With P recomputed from the saved log-sum-exp: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta),
dQ = dS K, dK = dS^T Q, where delta = rowsum(dO * O), less the gradient of the log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_advisor.kernels.score import (
    ADDITIVE,
    BOOLEAN,
    LOG2E,
    UNSPECIALIZED,
    kept,
    load_rows,
    logits,
    within,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    out, grad_out, grad_lse, lse, delta, base, cu_q,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
    stride_rb, stride_rh, stride_rm, len_q, heads, blocks_m,
    VARLEN: tl.constexpr, LSE: tl.constexpr, FOLD: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta and base, fp32 [B, H, L] ([H, total] with VARLEN).

    base: lse as P's exponent wants it, times log2(e) if FOLD; infinity in a row without keys,
    so that its P comes out 0.
    """
    pid = tl.program_id(0)
    block = pid % blocks_m
    batch = (pid // blocks_m // heads).to(tl.int64)
    head = (pid // blocks_m % heads).to(tl.int64)
    first = tl.cast(0, tl.int64)
    if VARLEN:
        first = tl.load(cu_q + batch).to(tl.int64)
        len_q = tl.load(cu_q + batch + 1) - first
        batch = batch * 0
    local = tl.arange(0, BLOCK_M)
    start = block * BLOCK_M
    o = load_rows(
        out + batch * stride_ob + head * stride_oh + first * stride_om,
        0, 0, 0, start, local, len_q, stride_om, DIM_V, BLOCK_M, BLOCK_DV, False, True,
        BLOCK_DV == DIM_V,
    )  # fmt: skip
    g = load_rows(
        grad_out + batch * stride_gb + head * stride_gh + first * stride_gm,
        0, 0, 0, start, local, len_q, stride_gm, DIM_V, BLOCK_M, BLOCK_DV, False, True,
        BLOCK_DV == DIM_V,
    )  # fmt: skip
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    rows = first + start + local
    mask = start + local < len_q
    if LSE:
        at = grad_lse + batch * stride_rb + head * stride_rh + rows * stride_rm
        d -= tl.load(at, mask=mask, other=0.0)
    at = batch * stride_lb + head * stride_lh + rows
    tl.store(delta + at, d, mask=mask)
    x = tl.load(lse + at, mask=mask, other=0.0)
    x = tl.where(x == float("-inf"), float("inf"), x)
    if FOLD:
        x *= LOG2E
    tl.store(base + at, x, mask=mask)


@triton.jit
def _probabilities(s, row_base, row_sum, scale, FOLD: tl.constexpr, BIAS: tl.constexpr):
    """P of a tile; the row statistics broadcast against it."""
    if FOLD:
        return tl.exp2(s * (scale * LOG2E) - row_base)
    elif BIAS == ADDITIVE:
        return tl.exp2((s - row_base) * LOG2E) / row_sum
    else:
        return tl.exp2((s - row_base) * LOG2E)


@triton.jit
def _load_statistics(
    base, row_max, row_sum, delta, rows, len_q, BIAS: tl.constexpr, PADDED: tl.constexpr
):
    """What P's exponent is less, what P is divided by, and delta, of some rows.

    Infinity is taken from the exponent where a row has no probabilities. An additive bias has the
    divisor apart: beside finfo.min the logarithm of the sum would be lost.
    """
    if BIAS == ADDITIVE:
        base = row_max
    if PADDED:
        x = tl.load(base + rows, mask=rows < len_q, other=float("inf"))
        d = tl.load(delta + rows, mask=rows < len_q, other=0.0)
    else:
        x = tl.load(base + rows)
        d = tl.load(delta + rows)
    total = x
    if BIAS == ADDITIVE:
        total = tl.load(row_sum + rows, mask=rows < len_q, other=1.0)
    return x, total, d


@triton.jit
def _to_keys(
    dk, dv, k, v, query, grad_out, base, row_max, row_sum, delta, batch, head, batch_head, first_q,
    col_start, begin, end, len_q, len_k, shift, left, right, stride_qm, stride_gm, dim, dim_v,
    scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold, keep_scale,
    MASKED: tl.constexpr, EVEN_K: tl.constexpr, PADDED_ROWS: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add to dK (unscaled) and dV of a block of keys what the queries `begin` to `end` give.

    Tiles are held transposed, [BLOCK_N, BLOCK_M], so that P^T and dS^T feed their products as
    they are.
    """
    cols = col_start + tl.arange(0, BLOCK_N)[:, None]
    local = tl.arange(0, BLOCK_M)
    for start in tl.range(begin, end, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        q = load_rows(query, batch, head, first_q, start, local, len_q, stride_qm, dim,
                      BLOCK_M, BLOCK_D, TMA, MASKED and (PADDED or not TMA), EVEN)  # fmt: skip
        row_base, total, d = _load_statistics(
            base, row_max, row_sum, delta, start + local, len_q, BIAS, PADDED_ROWS
        )
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        g = load_rows(grad_out, batch, head, first_q, start, local, len_q, stride_gm, dim_v,
                      BLOCK_M, BLOCK_DV, TMA, MASKED and (PADDED or not TMA), EVEN_V)  # fmt: skip
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        s, slope_of_cap = logits(
            s, start, col_start, (start + local)[None, :], cols, len_q, len_k, shift, left, right,
            scale, softcap, slope, bias, stride_bm, stride_bn, MASKED, EVEN_K, FOLD, SOFTCAP, ALIBI,
            BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        p = _probabilities(s, row_base[None, :], total[None, :], scale, FOLD, BIAS)
        p_dropped = p
        if DROPOUT:
            keep = kept(seed, batch_head, start, col_start, threshold, BLOCK_M, BLOCK_N, True)
            p_dropped = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        dv = tl.dot(p_dropped.to(g.dtype), g, dv, input_precision=PRECISION)
        ds = p * (dp - d[None, :])
        if SOFTCAP:
            ds *= slope_of_cap
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def keys_kernel(
    query, key, value, grad_out, grad_key, grad_value, base, row_max, row_sum, delta,
    bias, spans, slopes, cu_q, cu_k, seeds,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_lb, stride_lh, stride_bb, stride_bh, stride_bm, stride_bn,
    stride_ub, stride_uh, stride_un, stride_sb,
    len_q, len_k, heads, group, blocks_n, scale, softcap, left, right, threshold, keep_scale,
    VARLEN: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: blocks_n * batch * KV heads; a program walks its group's query heads."""
    pid = tl.program_id(0)
    block = pid % blocks_n
    kv_heads = heads // group
    batch = pid // blocks_n // kv_heads
    kv_head = pid // blocks_n % kv_heads
    col_start = block * BLOCK_N
    first_q = 0
    first_k = 0
    if VARLEN:
        first_q = tl.load(cu_q + batch)
        first_k = tl.load(cu_k + batch)
        len_q = tl.load(cu_q + batch + 1) - first_q
        len_k = tl.load(cu_k + batch + 1) - first_k
        if col_start >= len_k:
            return
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q

    kv_head64 = kv_head.to(tl.int64)
    storage = batch.to(tl.int64)
    tma_batch = batch
    if VARLEN:
        storage = tl.cast(0, tl.int64)
        tma_batch = 0
    row64 = tl.cast(first_q, tl.int64)
    col64 = tl.cast(first_k, tl.int64)
    key += storage * stride_kb + kv_head64 * stride_kh + col64 * stride_kn
    value += storage * stride_vb + kv_head64 * stride_vh + col64 * stride_vn
    base += storage * stride_lb + row64
    delta += storage * stride_lb + row64
    if BIAS == ADDITIVE:
        row_max += storage * stride_lb
        row_sum += storage * stride_lb
    if not TMA:
        query += storage * stride_qb + row64 * stride_qm
        grad_out += storage * stride_gb + row64 * stride_gm
    if BIAS != 0:
        bias += storage * stride_bb
    if BIAS == BOOLEAN:
        spans += storage * stride_ub
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)

    local_n = tl.arange(0, BLOCK_N)
    k = load_rows(key, 0, 0, 0, col_start, local_n, len_k, stride_kn, DIM,
                  BLOCK_N, BLOCK_D, False, True, BLOCK_D == DIM)  # fmt: skip
    v = load_rows(value, 0, 0, 0, col_start, local_n, len_k, stride_vn, DIM_V,
                  BLOCK_N, BLOCK_DV, False, True, BLOCK_DV == DIM_V)  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # [begin, end): the queries that see some key; [full, rest): tiles in which all see all.
    begin = 0
    end = len_q
    full = 0
    rest = len_q // BLOCK_M * BLOCK_M
    if HAS_RIGHT:
        begin = tl.maximum(col_start - shift - right, 0) // BLOCK_M * BLOCK_M
        sees_last = tl.maximum(col_start + BLOCK_N - 1 - shift - right, 0)
        full = (sees_last + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(len_q, col_start + BLOCK_N - shift + left), 0)
        rest = tl.minimum(rest, tl.maximum(col_start - shift + left + 1, 0) // BLOCK_M * BLOCK_M)
    if HAS_RIGHT:
        full = tl.minimum(full, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
        rest = tl.maximum(rest, full)
    # Rows past the end need no loop of their own where loads give 0 there: their P is 0.
    PEELED: tl.constexpr = (not TMA) or VARLEN or HAS_LEFT or BIAS != 0
    if not PEELED:
        rest = end
    # Where every query sees every key, a boolean mask needn't be read.
    INNER_BIAS: tl.constexpr = ADDITIVE if BIAS == ADDITIVE else 0

    for member in tl.range(0, group):
        head = kv_head * group + member
        head64 = head.to(tl.int64)
        batch_head = batch * heads + head
        q_head = query
        g_head = grad_out
        if not TMA:
            q_head += head64 * stride_qh
            g_head += head64 * stride_gh
        base_head = base + head64 * stride_lh
        delta_head = delta + head64 * stride_lh
        max_head = row_max
        sum_head = row_sum
        if BIAS == ADDITIVE:
            max_head += head64 * stride_lh
            sum_head += head64 * stride_lh
        bias_head = bias
        if BIAS != 0:
            bias_head += head64 * stride_bh
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + batch * stride_sb + head)
        first, full_from, full_to, past = begin, full, rest, end
        if BIAS == BOOLEAN:
            first, full_from, full_to, past = within(
                spans + head64 * stride_uh, stride_un, col_start, len_k, begin, full, rest, end,
                BLOCK_N, BLOCK_M,
            )  # fmt: skip
        if HAS_RIGHT or BIAS == BOOLEAN:
            dk, dv = _to_keys(
                dk, dv, k, v, q_head, g_head, base_head, max_head, sum_head, delta_head, tma_batch,
                head, batch_head, first_q, col_start, first, full_from, len_q, len_k, shift,
                left, right, stride_qm, stride_gm, DIM, DIM_V, scale, softcap, slope, bias_head,
                stride_bm, stride_bn, seed, threshold, keep_scale,
                True, EVEN_K, True, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N,
                HAS_LEFT, HAS_RIGHT, DROPOUT,
                TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        dk, dv = _to_keys(
            dk, dv, k, v, q_head, g_head, base_head, max_head, sum_head, delta_head, tma_batch,
            head, batch_head, first_q, col_start, full_from, full_to, len_q, len_k, shift,
            left, right, stride_qm, stride_gm, DIM, DIM_V, scale, softcap, slope, bias_head,
            stride_bm, stride_bn, seed, threshold, keep_scale,
            False, EVEN_K, not PEELED, FOLD, SOFTCAP, ALIBI, INNER_BIAS, BIAS_M, BIAS_N,
            HAS_LEFT, HAS_RIGHT, DROPOUT,
            TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        if PEELED:
            dk, dv = _to_keys(
                dk, dv, k, v, q_head, g_head, base_head, max_head, sum_head, delta_head, tma_batch,
                head, batch_head, first_q, col_start, full_to, past, len_q, len_k, shift,
                left, right, stride_qm, stride_gm, DIM, DIM_V, scale, softcap, slope, bias_head,
                stride_bm, stride_bn, seed, threshold, keep_scale,
                True, EVEN_K, True, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N,
                HAS_LEFT, HAS_RIGHT, DROPOUT,
                TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip

    _store_rows(
        grad_key + storage * stride_dkb + kv_head64 * stride_dkh + col64 * stride_dkn, dk * scale,
        col_start, local_n, len_k, stride_dkn, DIM, BLOCK_D,
    )  # fmt: skip
    _store_rows(
        grad_value + storage * stride_dvb + kv_head64 * stride_dvh + col64 * stride_dvn,
        dv * keep_scale, col_start, local_n, len_k, stride_dvn, DIM_V, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _store_rows(
    tensor, tile, start, local, length, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    features = tl.arange(0, BLOCK)
    where = tensor + start.to(tl.int64) * stride + local[:, None] * stride + features[None, :]
    mask = (start + local)[:, None] < length
    if BLOCK != WIDTH:
        mask = mask & (features[None, :] < WIDTH)
    tl.store(where, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def _logit_gradient(
    q, k, v, g, row_base, total, d, row_start, col_start, rows, cols, batch_head,
    len_q, len_k, shift, left, right, scale, softcap, slope, bias, stride_bm, stride_bn,
    seed, threshold, keep_scale,
    MASKED: tl.constexpr, EVEN_K: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dS of a tile, [BLOCK_M, BLOCK_N], and the derivative of the softcap at it."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    s, slope_of_cap = logits(
        s, row_start, col_start, rows, cols, len_q, len_k, shift, left, right,
        scale, softcap, slope, bias, stride_bm, stride_bn, MASKED, EVEN_K, FOLD, SOFTCAP, ALIBI,
        BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    p = _probabilities(s, row_base[:, None], total[:, None], scale, FOLD, BIAS)
    if DROPOUT:
        keep = kept(seed, batch_head, row_start, col_start, threshold, BLOCK_M, BLOCK_N, False)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return p * (dp - d[:, None]), slope_of_cap


@triton.jit
def _to_queries(
    dq, q, g, key, value, row_base, total, d, batch, kv_head, batch_head, first_k,
    row_start, begin, end, len_q, len_k, shift, left, right, stride_kn, stride_vn, dim, dim_v,
    scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold, keep_scale,
    MASKED: tl.constexpr, EVEN_K: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add to dQ (unscaled) of a block of queries what the keys `begin` to `end` give."""
    rows = row_start + tl.arange(0, BLOCK_M)[:, None]
    local = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k = load_rows(key, batch, kv_head, first_k, start, local, len_k, stride_kn, dim,
                      BLOCK_N, BLOCK_D, TMA, MASKED and (PADDED or not TMA), EVEN)  # fmt: skip
        v = load_rows(value, batch, kv_head, first_k, start, local, len_k, stride_vn, dim_v,
                      BLOCK_N, BLOCK_DV, TMA, MASKED and (PADDED or not TMA), EVEN_V)  # fmt: skip
        ds, slope_of_cap = _logit_gradient(
            q, k, v, g, row_base, total, d, row_start, start, rows, start + local[None, :],
            batch_head, len_q, len_k, shift, left, right, scale, softcap, slope,
            bias, stride_bm, stride_bn, seed, threshold, keep_scale,
            MASKED, EVEN_K, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
            DROPOUT, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if SOFTCAP:
            ds *= slope_of_cap
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def queries_kernel(
    query, key, value, grad_out, grad_query, base, row_max, row_sum, delta,
    bias, spans, slopes, cu_q, cu_k, seeds,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dqb, stride_dqh, stride_dqm,
    stride_lb, stride_lh, stride_bb, stride_bh, stride_bm, stride_bn,
    stride_ub, stride_uh, stride_um, stride_sb,
    len_q, len_k, heads, group, blocks_m, scale, softcap, left, right, threshold, keep_scale,
    VARLEN: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ. Grid: blocks_m * batch * heads."""
    pid = tl.program_id(0)
    block = pid % blocks_m
    batch_head = pid // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    if HAS_RIGHT:
        block = blocks_m - 1 - block
    row_start = block * BLOCK_M
    first_q = 0
    first_k = 0
    if VARLEN:
        first_q = tl.load(cu_q + batch)
        first_k = tl.load(cu_k + batch)
        len_q = tl.load(cu_q + batch + 1) - first_q
        len_k = tl.load(cu_k + batch + 1) - first_k
        if row_start >= len_q:
            return
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q

    head64 = head.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    storage = batch.to(tl.int64)
    tma_batch = batch
    if VARLEN:
        storage = tl.cast(0, tl.int64)
        tma_batch = 0
    row64 = tl.cast(first_q, tl.int64)
    col64 = tl.cast(first_k, tl.int64)
    query += storage * stride_qb + head64 * stride_qh + row64 * stride_qm
    grad_out += storage * stride_gb + head64 * stride_gh + row64 * stride_gm
    statistics = storage * stride_lb + head64 * stride_lh + row64
    base += statistics
    delta += statistics
    if BIAS == ADDITIVE:
        row_max += statistics
        row_sum += statistics
    if not TMA:
        key += storage * stride_kb + kv_head64 * stride_kh + col64 * stride_kn
        value += storage * stride_vb + kv_head64 * stride_vh + col64 * stride_vn
    if BIAS != 0:
        bias += storage * stride_bb + head64 * stride_bh
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * stride_sb + head)
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)

    local_m = tl.arange(0, BLOCK_M)
    q = load_rows(query, 0, 0, 0, row_start, local_m, len_q, stride_qm, DIM,
                  BLOCK_M, BLOCK_D, False, True, BLOCK_D == DIM)  # fmt: skip
    g = load_rows(grad_out, 0, 0, 0, row_start, local_m, len_q, stride_gm, DIM_V,
                  BLOCK_M, BLOCK_DV, False, True, BLOCK_DV == DIM_V)  # fmt: skip
    row_base, total, d = _load_statistics(
        base, row_max, row_sum, delta, row_start + local_m, len_q, BIAS, True
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # As in the forward kernel.
    begin = 0
    end = len_k
    rest = len_k // BLOCK_N * BLOCK_N
    full = 0
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(len_k, row_start + BLOCK_M + shift + right), 0)
        seen_by_first = tl.maximum(row_start + shift + right + 1, 0)
        rest = tl.minimum(rest, seen_by_first // BLOCK_N * BLOCK_N)
    if HAS_LEFT:
        begin = tl.maximum(row_start + shift - left, 0) // BLOCK_N * BLOCK_N
        seen_by_last = tl.maximum(row_start + BLOCK_M - 1 + shift - left, 0)
        full = (seen_by_last + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full = tl.minimum(full, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        rest = tl.maximum(rest, full)
    INNER_BIAS: tl.constexpr = ADDITIVE if BIAS == ADDITIVE else 0
    if BIAS == BOOLEAN:
        begin, full, rest, end = within(
            spans + storage * stride_ub + head64 * stride_uh, stride_um, row_start, len_q,
            begin, full, rest, end, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if HAS_LEFT or BIAS == BOOLEAN:
        dq = _to_queries(
            dq, q, g, key, value, row_base, total, d, tma_batch, kv_head, batch_head,
            first_k, row_start, begin, full, len_q, len_k, shift, left, right,
            stride_kn, stride_vn, DIM, DIM_V, scale, softcap, slope, bias, stride_bm, stride_bn,
            seed, threshold, keep_scale,
            True, EVEN_K, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT, DROPOUT,
            TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    dq = _to_queries(
        dq, q, g, key, value, row_base, total, d, tma_batch, kv_head, batch_head,
        first_k, row_start, full, rest, len_q, len_k, shift, left, right,
        stride_kn, stride_vn, DIM, DIM_V, scale, softcap, slope, bias, stride_bm, stride_bn,
        seed, threshold, keep_scale,
        False, EVEN_K, FOLD, SOFTCAP, ALIBI, INNER_BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
        DROPOUT,
        TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if HAS_RIGHT or BIAS == BOOLEAN or not EVEN_K:
        dq = _to_queries(
            dq, q, g, key, value, row_base, total, d, tma_batch, kv_head, batch_head,
            first_k, row_start, rest, end, len_q, len_k, shift, left, right,
            stride_kn, stride_vn, DIM, DIM_V, scale, softcap, slope, bias, stride_bm, stride_bn,
            seed, threshold, keep_scale,
            True, EVEN_K, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT, DROPOUT,
            TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    _store_rows(
        grad_query + storage * stride_dqb + head64 * stride_dqh + row64 * stride_dqm, dq * scale,
        row_start, local_m, len_q, stride_dqm, DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bias_kernel(
    query, key, value, grad_out, grad_bias, row_max, row_sum, delta, bias, slopes, seeds,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gm,
    stride_dbb, stride_dbh, stride_dbm, stride_dbn,
    stride_lb, stride_lh, stride_bb, stride_bh, stride_bm, stride_bn, stride_sb,
    batches, len_q, len_k, heads, group, blocks_m, blocks_n,
    scale, softcap, left, right, threshold, keep_scale,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS_B: tl.constexpr, BIAS_H: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of an additive bias, in the bias's own (unbroadcast) shape.

    A program owns one tile of the bias and walks all that was broadcast from it - batches, heads,
    blocks of rows and of columns: no N x N tensor, no atomics. The price is dS once more.
    Grid: (blocks_n or 1) * (blocks_m or 1) * (batch or 1) * (heads or 1).
    """
    pid = tl.program_id(0)
    n_begin = 0
    n_end = blocks_n
    if BIAS_N:
        n_begin = pid % blocks_n
        n_end = n_begin + 1
        pid = pid // blocks_n
    m_begin = 0
    m_end = blocks_m
    if BIAS_M:
        m_begin = pid % blocks_m
        m_end = m_begin + 1
        pid = pid // blocks_m
    h_begin = 0
    h_end = heads
    if BIAS_H:
        h_begin = pid % heads
        h_end = h_begin + 1
        pid = pid // heads
    b_begin = 0
    b_end = batches
    if BIAS_B:
        b_begin = pid
        b_end = b_begin + 1
    shift = 0
    if BOTTOM_RIGHT:
        shift = len_k - len_q
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    span_m = m_end - m_begin
    span_n = n_end - n_begin
    span_h = h_end - h_begin
    for step in tl.range(0, (b_end - b_begin) * span_h * span_m * span_n):
        col_start = (n_begin + step % span_n) * BLOCK_N
        row_start = (m_begin + step // span_n % span_m) * BLOCK_M
        head = h_begin + step // span_n // span_m % span_h
        batch = b_begin + step // span_n // span_m // span_h
        seen = True
        if HAS_RIGHT:
            seen = seen and col_start <= row_start + BLOCK_M - 1 + shift + right
        if HAS_LEFT:
            seen = seen and col_start + BLOCK_N - 1 >= row_start + shift - left
        if seen:
            head64 = tl.cast(head, tl.int64)
            batch64 = tl.cast(batch, tl.int64)
            kv_head64 = head64 // group
            q = load_rows(
                query + batch64 * stride_qb + head64 * stride_qh, 0, 0, 0, row_start, local_m,
                len_q, stride_qm, DIM, BLOCK_M, BLOCK_D, False, True, BLOCK_D == DIM,
            )  # fmt: skip
            g = load_rows(
                grad_out + batch64 * stride_gb + head64 * stride_gh, 0, 0, 0, row_start, local_m,
                len_q, stride_gm, DIM_V, BLOCK_M, BLOCK_DV, False, True, BLOCK_DV == DIM_V,
            )  # fmt: skip
            k = load_rows(
                key + batch64 * stride_kb + kv_head64 * stride_kh, 0, 0, 0, col_start, local_n,
                len_k, stride_kn, DIM, BLOCK_N, BLOCK_D, False, True, BLOCK_D == DIM,
            )  # fmt: skip
            v = load_rows(
                value + batch64 * stride_vb + kv_head64 * stride_vh, 0, 0, 0, col_start, local_n,
                len_k, stride_vn, DIM_V, BLOCK_N, BLOCK_DV, False, True, BLOCK_DV == DIM_V,
            )  # fmt: skip
            at = batch64 * stride_lb + head64 * stride_lh
            row_base, total, d = _load_statistics(
                row_max, row_max + at, row_sum + at, delta + at, row_start + local_m, len_q,
                ADDITIVE, True,
            )  # fmt: skip
            slope = 0.0
            if ALIBI:
                slope = tl.load(slopes + batch * stride_sb + head)
            ds, _ = _logit_gradient(
                q, k, v, g, row_base, total, d, row_start, col_start,
                row_start + local_m[:, None], col_start + local_n[None, :],
                (batch * heads + head).to(tl.int32), len_q, len_k, shift, left, right,
                scale, softcap, slope, bias + batch64 * stride_bb + head64 * stride_bh,
                stride_bm, stride_bn, seed, threshold, keep_scale,
                True, False, False, SOFTCAP, ALIBI, ADDITIVE, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
                DROPOUT, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            acc += ds
    out = grad_bias
    if BIAS_B:
        out += tl.cast(b_begin, tl.int64) * stride_dbb
    if BIAS_H:
        out += tl.cast(h_begin, tl.int64) * stride_dbh
    rows = m_begin * BLOCK_M + local_m
    cols = n_begin * BLOCK_N + local_n
    kind = grad_bias.dtype.element_ty
    if BIAS_M and BIAS_N:
        at = rows[:, None].to(tl.int64) * stride_dbm + cols[None, :].to(tl.int64) * stride_dbn
        mask = (rows[:, None] < len_q) & (cols[None, :] < len_k)
        tl.store(out + at, acc.to(kind), mask=mask)
    elif BIAS_M:
        sums = tl.sum(acc, 1).to(kind)
        tl.store(out + rows.to(tl.int64) * stride_dbm, sums, mask=rows < len_q)
    elif BIAS_N:
        sums = tl.sum(acc, 0).to(kind)
        tl.store(out + cols.to(tl.int64) * stride_dbn, sums, mask=cols < len_k)
    else:
        tl.store(out, tl.sum(tl.sum(acc, 1), 0).to(kind))
