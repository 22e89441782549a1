"""V turned over for the forward kernel on eight bits.

wgmma takes fp8 operands with the summed dim contiguous alone, which for V is that of the keys. They
come in an order in which a thread's registers of P, as the product of Q and K leaves them, are the
operand of the next product: see `key_of_slot`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_advisor.kernels.score import UNSPECIALIZED


@triton.jit
def key_of_slot(slot):
    """Which of 16 keys stands at a slot of V's transpose.

    Of a row of S a thread holds the pairs of columns 8 n + 2 c + (0, 1), of an operand the fours
    16 n + 4 c + (0, 1, 2, 3): so two of its pairs, 8 columns apart, make one four.
    """
    return slot % 4 // 2 * 8 + slot // 4 * 2 + slot % 2


@triton.jit(do_not_specialize=UNSPECIALIZED)
def transpose_kernel(
    value, transposed, cu_k, stride_b, stride_h, stride_n, out_b, out_h, out_d,
    len_k, heads, blocks, dim,
    VARLEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """V [.., keys, dim] as bytes to [.., WIDTH, slots], with zeros past its keys and its dim.

    Sequences begin at multiples of BLOCK there: packed sequence b at (cu_k[b] // BLOCK + b) blocks.
    """
    t = tl.program_id(0).to(tl.int64)
    block = t % blocks
    head = t // blocks % heads
    batch = t // blocks // heads
    first = tl.zeros([], tl.int64)
    first_out = tl.zeros([], tl.int64)
    if VARLEN:
        first = tl.load(cu_k + batch).to(tl.int64)
        len_k = tl.load(cu_k + batch + 1) - first
        first_out = (first // BLOCK + batch) * BLOCK
        batch = batch * 0
    if block * BLOCK < len_k:
        slots = tl.arange(0, BLOCK)
        keys = block * BLOCK + slots // 16 * 16 + key_of_slot(slots % 16)
        features = tl.arange(0, WIDTH)
        where = value + batch * stride_b + head * stride_h
        where += (first + keys)[:, None] * stride_n + features[None, :]
        tile = tl.load(where, mask=(keys < len_k)[:, None] & (features < dim)[None, :], other=0)
        to = transposed + batch * out_b + head * out_h + features[:, None] * out_d
        to += (first_out + block * BLOCK + slots)[None, :]
        tl.store(to, tl.trans(tile))
