"""The forward kernel: online softmax over tiles of K and V, one program per block of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from fa_advisor.kernels.score import (
    ADDITIVE,
    BOOLEAN,
    LN2,
    LOG2E,
    UNSPECIALIZED,
    kept,
    load_rows,
    logits,
    within,
)


@triton.jit
def _attend(
    acc, m, z, q, key, value, batch, kv_head, batch_head, first_k, row_start, begin, end,
    len_q, len_k, shift, left, right, stride_kn, stride_vn, dim, dim_v,
    scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold,
    MASKED: tl.constexpr, EVEN_K: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Carry (acc, m, z) over the keys from `begin` to `end`.

    m: each row's largest logit so far, times log2(e) if FOLD; z: the sum of exp(logit - m).
    """
    rows = row_start + tl.arange(0, BLOCK_M)[:, None]
    local = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k = load_rows(key, batch, kv_head, first_k, start, local, len_k, stride_kn, dim,
                      BLOCK_N, BLOCK_D, TMA, MASKED and not TMA, EVEN)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _ = logits(
            s, row_start, start, rows, start + local[None, :], len_q, len_k, shift, left, right,
            scale, softcap, slope, bias, stride_bm, stride_bn, MASKED, EVEN_K, FOLD, SOFTCAP, ALIBI,
            BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        highest = tl.max(s, 1)
        if FOLD:
            highest *= scale * LOG2E
        m_new = tl.maximum(m, highest)
        base = m_new
        if MASKED or BIAS != 0:
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        if FOLD:
            p = tl.exp2(s * (scale * LOG2E) - base[:, None])
            alpha = tl.exp2(m - base)
        else:
            # The difference first: finfo.min * log2(e) would overflow.
            p = tl.exp2((s - base[:, None]) * LOG2E)
            alpha = tl.exp2((m - base) * LOG2E)
        z = z * alpha + tl.sum(p, 1)
        if DROPOUT:
            keep = kept(seed, batch_head, row_start, start, threshold, BLOCK_M, BLOCK_N, False)
            p = tl.where(keep, p, 0.0)
        acc = acc * alpha[:, None]
        v = load_rows(value, batch, kv_head, first_k, start, local, len_k, stride_vn, dim_v,
                      BLOCK_N, BLOCK_DV, TMA, MASKED and (PADDED or not TMA), EVEN_V)  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, z


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    query, key, value, out, lse, row_max, row_sum, bias, spans, sinks, slopes, cu_q, cu_k, seeds,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om, stride_lb, stride_lh,
    stride_bb, stride_bh, stride_bm, stride_bn, stride_ub, stride_uh, stride_um, stride_sb,
    len_q, len_k, heads, group, blocks_m, scale, softcap, left, right, threshold, keep_scale,
    VARLEN: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out, lse (natural log) and, with an additive bias, row_max and row_sum.

    Grid: blocks_m * batch * heads programs. `left`, `right`: the window; causal is right = 0.
    lse alone would not do for backward where a whole row lies at finfo.min: log(n) is lost in it.
    """
    pid = tl.program_id(0)
    block = pid % blocks_m
    batch_head = pid // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    if HAS_RIGHT:
        # Later rows see more keys: the longest programs first, the short ones fill the tail.
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
    tma_batch = batch
    if VARLEN:
        tma_batch = 0
        query += tl.cast(first_q, tl.int64) * stride_qm
        out += tl.cast(first_q, tl.int64) * stride_om
        lse += first_q
    else:
        query += batch.to(tl.int64) * stride_qb
        out += batch.to(tl.int64) * stride_ob
        lse += batch.to(tl.int64) * stride_lb
    query += head64 * stride_qh
    out += head64 * stride_oh
    lse += head64 * stride_lh
    if not TMA:
        key += kv_head64 * stride_kh
        value += kv_head64 * stride_vh
        if VARLEN:
            key += tl.cast(first_k, tl.int64) * stride_kn
            value += tl.cast(first_k, tl.int64) * stride_vn
        else:
            key += batch.to(tl.int64) * stride_kb
            value += batch.to(tl.int64) * stride_vb
    if BIAS != 0:
        bias += batch.to(tl.int64) * stride_bb + head64 * stride_bh
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * stride_sb + head)
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)

    local_m = tl.arange(0, BLOCK_M)
    q = load_rows(query, 0, 0, 0, row_start, local_m, len_q, stride_qm, DIM,
                  BLOCK_M, BLOCK_D, False, True, BLOCK_D == DIM)  # fmt: skip
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # A sink is a logit without a value, so the sum starts with it.
        sink = tl.load(sinks + head).to(tl.float32)
        z += tl.where(sink == float("-inf"), 0.0, 1.0)
        if FOLD:
            sink *= LOG2E
        m = tl.maximum(m, sink)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # [begin, end): the keys that some row sees; [full, rest): tiles that every row sees whole.
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
    # Where every row sees every key, a boolean mask needn't be read.
    INNER_BIAS: tl.constexpr = ADDITIVE if BIAS == ADDITIVE else 0
    if BIAS == BOOLEAN:
        spans += batch.to(tl.int64) * stride_ub + head64 * stride_uh
        begin, full, rest, end = within(
            spans, stride_um, row_start, len_q, begin, full, rest, end, BLOCK_M, BLOCK_N
        )
    if HAS_LEFT or BIAS == BOOLEAN:
        acc, m, z = _attend(
            acc, m, z, q, key, value, tma_batch, kv_head, batch_head, first_k, row_start, begin,
            full, len_q, len_k, shift, left, right, stride_kn, stride_vn, DIM, DIM_V,
            scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold,
            True, EVEN_K, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT, DROPOUT,
            TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    acc, m, z = _attend(
        acc, m, z, q, key, value, tma_batch, kv_head, batch_head, first_k, row_start, full, rest,
        len_q, len_k, shift, left, right, stride_kn, stride_vn, DIM, DIM_V,
        scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold,
        False, EVEN_K, FOLD, SOFTCAP, ALIBI, INNER_BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT,
        DROPOUT,
        TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if HAS_RIGHT or BIAS == BOOLEAN or not EVEN_K:
        acc, m, z = _attend(
            acc, m, z, q, key, value, tma_batch, kv_head, batch_head, first_k, row_start, rest, end,
            len_q, len_k, shift, left, right, stride_kn, stride_vn, DIM, DIM_V,
            scale, softcap, slope, bias, stride_bm, stride_bn, seed, threshold,
            True, EVEN_K, FOLD, SOFTCAP, ALIBI, BIAS, BIAS_M, BIAS_N, HAS_LEFT, HAS_RIGHT, DROPOUT,
            TMA, VARLEN, BLOCK_D == DIM, BLOCK_DV == DIM_V, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    empty = z == 0.0
    acc = acc * (keep_scale / tl.where(empty, 1.0, z))[:, None]
    rows = row_start + local_m
    log_sum = (m + tl.log2(z)) * LN2 if FOLD else m + tl.log2(z) * LN2
    tl.store(lse + rows, tl.where(empty, float("-inf"), log_sum), mask=rows < len_q)
    if BIAS == ADDITIVE:
        # Dense: an additive bias has no variable lengths. An empty row: no probability anywhere.
        offset = batch.to(tl.int64) * stride_lb + head64 * stride_lh
        tl.store(row_max + offset + rows, tl.where(empty, float("inf"), m), mask=rows < len_q)
        tl.store(row_sum + offset + rows, tl.where(empty, 1.0, z), mask=rows < len_q)
    features = tl.arange(0, BLOCK_DV)
    where = (
        out + row_start.to(tl.int64) * stride_om
        + local_m[:, None] * stride_om + features[None, :]
    )  # fmt: skip
    mask = rows[:, None] < len_q
    if BLOCK_DV != DIM_V:
        mask = mask & (features[None, :] < DIM_V)
    tl.store(where, acc.to(out.dtype.element_ty), mask=mask)
