"""What a boolean mask lets each query see, so that tiles it hides are skipped and others not read.

A causal mask, a window, padding, documents in one sequence: in all of them a query sees one stretch
of keys, and a key is seen by one stretch of queries. That is a few bytes a row to know.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_advisor.kernels.score import UNSPECIALIZED

_FAR = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "owned", "looped"])
def spans_kernel(
    mask, spans, stride_b, stride_h, stride_owned, stride_looped, heads, owned, looped, blocks,
    BROADCAST: tl.constexpr, OWNED: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """Of each row (or column, by the strides): the first it sees and past the last; and again
    where it sees all between, else nothing. int32 [B, H, owned, 4].

    BROADCAST: the mask has one entry for all `looped` of them. Grid: blocks * B * heads.
    """
    pid = tl.program_id(0)
    batch_head = pid // blocks
    local = pid % blocks * OWNED + tl.arange(0, OWNED)
    inside = local < owned
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    mask += batch * stride_b + head * stride_h
    at = mask + local.to(tl.int64) * stride_owned
    if BROADCAST:
        # Of a mask without entries there is nothing to load.
        seen = tl.load(at, mask=inside & (looped > 0), other=0) != 0
        first = tl.where(seen, 0, _FAR)
        past = tl.where(seen, looped, 0)
        whole = seen
    else:
        first = tl.full([OWNED], _FAR, tl.int32)
        past = tl.zeros([OWNED], tl.int32)
        count = tl.zeros([OWNED], tl.int32)
        for start in tl.range(0, looped, LOOPED):
            others = start + tl.arange(0, LOOPED)
            tile = tl.load(
                at[:, None] + others[None, :].to(tl.int64) * stride_looped,
                mask=inside[:, None] & (others < looped)[None, :],
                other=0,
            )
            tile = tile != 0
            first = tl.minimum(first, tl.min(tl.where(tile, others[None, :], _FAR), 1))
            past = tl.maximum(past, tl.max(tl.where(tile, others[None, :] + 1, 0), 1))
            count += tl.sum(tile.to(tl.int32), 1)
        whole = (count > 0) & (count == past - first)
    to = spans + (batch_head.to(tl.int64) * owned + local) * 4
    tl.store(to, first, mask=inside)
    tl.store(to + 1, past, mask=inside)
    tl.store(to + 2, tl.where(whole, first, _FAR), mask=inside)
    tl.store(to + 3, tl.where(whole, past, 0), mask=inside)
