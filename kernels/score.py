"""What forward and backward share: the logits of one tile, what is visible in it, its dropout.

A tile is square-indexed by `rows` (queries) and `cols` (keys), index blocks that broadcast against
each other: [M, 1] and [1, N], or [1, M] and [N, 1] where the tile is held transposed. Both count
from the start of the sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Kinds of bias.
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)
# What differs from call to call and says nothing of how operands are loaded. Triton would compile a
# kernel anew where such a number is 1 or divides by 16: seconds, in the midst of a training step.
UNSPECIALIZED = [
    "batches", "heads", "kv_heads", "all_heads", "all_kv_heads", "batch_heads", "group", "side",
    "side_by_side", "len_q", "len_k", "blocks", "blocks_m", "blocks_n", "left", "right",
    "threshold", "stride_lb", "stride_lh", "stride_rb", "stride_rh", "stride_ub", "stride_uh",
    "stride_um", "stride_un",
]  # fmt: skip


@triton.jit
def tanh(x):
    """Tanh in fp32 to about an ulp: near 0, 1 - 2 / (exp(2x) + 1) would lose every digit."""
    z = x * x
    poly = -5.70498872745e-3 * z + 2.06390887954e-2
    poly = poly * z - 5.37397155531e-2
    poly = poly * z + 1.33314422036e-1
    poly = poly * z - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(z < 0.390625, x + x * z * poly, tl.where(x < 0, -far, far))


@triton.jit
def visible(rows, cols, len_k, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which pairs the lengths and the window let through; `shift` aligns queries with keys."""
    seen = (cols < len_k) & (rows >= 0)
    if HAS_RIGHT:
        seen = seen & (cols - rows <= shift + right)
    if HAS_LEFT:
        seen = seen & (cols - rows >= shift - left)
    return seen


@triton.jit
def load_bias(
    bias, row_start, col_start, rows, cols, len_q, len_k, stride_m, stride_n,
    BIAS_M: tl.constexpr, BIAS_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The bias of a tile, broadcast over what BIAS_M and BIAS_N say it hasn't got."""
    if BIAS_M:
        bias += row_start.to(tl.int64) * stride_m
    if BIAS_N:
        bias += col_start.to(tl.int64) * stride_n
    # A tile of a mask may reach over more than 2^31 elements.
    down = (rows - row_start).to(tl.int64) * stride_m
    across = (cols - col_start).to(tl.int64) * stride_n
    if BIAS_M and BIAS_N:
        where = bias + down + across
        if PADDED:
            return tl.load(where, mask=(rows < len_q) & (cols < len_k), other=0)
        return tl.load(where, mask=rows < len_q, other=0)
    elif BIAS_M:
        return tl.load(bias + down, mask=rows < len_q, other=0)
    elif BIAS_N:
        return tl.load(bias + across, mask=cols < len_k, other=0)
    else:
        return tl.load(bias)


@triton.jit
def logits(
    product, row_start, col_start, rows, cols, len_q, len_k, shift, left, right,
    scale, softcap, slope, bias, stride_bm, stride_bn,
    MASKED: tl.constexpr, EVEN_K: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, BIAS_M: tl.constexpr, BIAS_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """A tile's logits from QK^T, and the derivative of the softcap at them.

    FOLD leaves them unscaled: the caller folds the scale into its exp2. MASKED: some pairs of the
    tile may be hidden. EVEN_K: the keys fill their tiles, so that a bias is loaded in long words.
    """
    PADDED: tl.constexpr = MASKED and not EVEN_K
    s = product
    slope_of_cap = s
    if not FOLD:
        s = s * scale
        if SOFTCAP:
            t = tanh(s / softcap)
            slope_of_cap = 1.0 - t * t
            s = t * softcap
        if ALIBI:
            s -= slope * tl.abs(rows + shift - cols).to(tl.float32)
        if BIAS == ADDITIVE:
            s += load_bias(
                bias, row_start, col_start, rows, cols, len_q, len_k, stride_bm, stride_bn,
                BIAS_M, BIAS_N, PADDED,
            ).to(tl.float32)  # fmt: skip
    if BIAS == BOOLEAN:
        shown = load_bias(
            bias, row_start, col_start, rows, cols, len_q, len_k, stride_bm, stride_bn,
            BIAS_M, BIAS_N, PADDED,
        )  # fmt: skip
        s = tl.where(shown != 0, s, float("-inf"))
    # Beyond the last key a boolean mask has been read as hidden.
    if MASKED and (HAS_LEFT or HAS_RIGHT or BIAS != BOOLEAN or not BIAS_N):
        s = tl.where(visible(rows, cols, len_k, shift, left, right, HAS_LEFT, HAS_RIGHT), s,
                     float("-inf"))  # fmt: skip
    return s, slope_of_cap


@triton.jit
def within(
    spans, stride, first, length, begin, full, rest, end,
    OWNED: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """Narrow the four bounds of a block's loop to what a boolean mask lets through.

    spans: of the block's rows (or columns), as `spans_kernel` leaves them; they begin at `first` of
    `length`. OWNED and LOOPED: the block's own size, and that of the tiles that it loops over.
    """
    local = first + tl.arange(0, OWNED)
    at = spans + local.to(tl.int64) * stride
    inside = local < length
    seen_from = tl.min(tl.load(at, mask=inside, other=2147483647), 0)
    seen_to = tl.max(tl.load(at + 1, mask=inside, other=0), 0)
    whole_from = tl.max(tl.load(at + 2, mask=inside, other=0), 0)
    whole_to = tl.min(tl.load(at + 3, mask=inside, other=2147483647), 0)
    end = tl.minimum(end, seen_to)
    begin = tl.maximum(begin, tl.minimum(seen_from, end) // LOOPED * LOOPED)
    # Whole tiles alone, and the three stretches in their order.
    last = tl.maximum((end + LOOPED - 1) // LOOPED * LOOPED, begin)
    full = tl.maximum(full, (tl.minimum(whole_from, last) + LOOPED - 1) // LOOPED * LOOPED)
    full = tl.minimum(tl.maximum(full, begin), last)
    rest = tl.maximum(tl.minimum(rest, whole_to // LOOPED * LOOPED), full)
    return begin, full, rest, end


@triton.jit
def _halves_kept(bits, threshold):
    """For each of 32 bits' two halves, whether it is not below the threshold."""
    low = ((bits & 0xFFFF).to(tl.int32) >= threshold).to(tl.int8)
    high = ((bits >> 16).to(tl.int32) >= threshold).to(tl.int8)
    return tl.join(low, high)


@triton.jit
def kept(
    seed, batch_head, row_start, col_start, threshold,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which of a tile's probabilities dropout keeps: a function of (seed, head, row, column) alone.

    One philox call serves eight neighbouring columns, with 16 bits each. Seven rounds pass BigCrush
    (Salmon et al., 2011); ten only cost more.
    """
    rows = row_start + tl.arange(0, ROWS)[:, None]
    eights = col_start // 8 + tl.arange(0, COLS // 8)[None, :]
    zero = tl.zeros([ROWS, COLS // 8], tl.int32)
    a, b, c, d = tl.philox(seed, zero + rows, zero + eights, zero + batch_head, zero, n_rounds=7)
    keep = tl.join(
        tl.join(_halves_kept(a, threshold), _halves_kept(b, threshold)),
        tl.join(_halves_kept(c, threshold), _halves_kept(d, threshold)),
    )
    keep = tl.reshape(keep, (ROWS, COLS))
    if TRANSPOSED:
        keep = tl.trans(keep)
    return keep != 0


@triton.jit
def load_rows(
    tensor, batch, head, first, start, local, length, stride, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, PADDED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Rows `start` to `start + ROWS` of a sequence, [ROWS, WIDTH]; 0 beyond the ends if PADDED.

    tensor: with TMA a descriptor of [batch, head, token, feature] whose sequence begins at token
    `first`; else a pointer to the sequence's first row. EVEN: `width` is WIDTH.
    """
    if TMA:
        tile = tensor.load([batch, head, first + start, 0]).reshape(ROWS, WIDTH)
        if PADDED:
            # Beyond the sequence is the next one, which may hold anything.
            tile = tl.where((start + local)[:, None] < length, tile, 0.0)
        return tile
    else:
        features = tl.arange(0, WIDTH)
        where = tensor + start.to(tl.int64) * stride + local[:, None] * stride + features[None, :]
        if PADDED and EVEN:
            return tl.load(where, mask=(start + local)[:, None] < length, other=0.0)
        elif PADDED:
            mask = ((start + local)[:, None] < length) & (features[None, :] < width)
            return tl.load(where, mask=mask, other=0.0)
        elif EVEN:
            return tl.load(where)
        else:
            return tl.load(where, mask=features[None, :] < width, other=0.0)
