"""The attention written out plainly, N x N matrix and all: what the kernels are held against.

Written for reading, apart from kernels and CPU path, with autograd for the gradients. In float64 it
is the truth; in the inputs' own dtype it is the standard computation, whose error is the measure.

Shapes: B batch, H query heads, G key and value heads, L lengths, D and Dv head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOWHERE = float("-inf")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal_alignment: str = "top-left",
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] and lse [B, H, Lq], computed in `dtype` and left in it.

    Options as in `flash_attention`. `keep` [B, H, Lq, Lk] says which weights dropout leaves; with
    cu_seqlens, query [total_q, H, D], out [total_q, H, Dv] and lse [H, total_q].
    """
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "window": (window, window) if isinstance(window, int) else window or (-1, -1),
        "softcap": softcap,
        "sinks": sinks,
        "bottom_right": causal_alignment == "bottom-right",
        "keep": keep,
        "dropout_p": dropout_p,
        "dtype": dtype,
    }
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _dense(query, key, value, attn_mask, alibi_slopes, **options)

    outs, lses = [], []
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]]
        k, v = (x[ends_k[i] : ends_k[i + 1]] for x in (key, value))
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[i]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = _dense(q, k, v, None, slopes, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs, 0), torch.cat(lses, 1)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    bottom_right: bool,
    keep: Tensor | None,
    dropout_p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, len_q, _ = query.shape
    len_k = key.shape[2]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    value = value.repeat_interleave(heads // value.shape[1], 1)

    logits = query @ key.transpose(2, 3) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    i = torch.arange(len_q, device=query.device)[:, None]
    if bottom_right:
        i = i + len_k - len_q
    j = torch.arange(len_k, device=query.device)[None, :]
    if alibi_slopes is not None:
        logits = logits - alibi_slopes.to(dtype).reshape(-1, heads, 1, 1) * (i - j).abs()

    visible = torch.ones(batch, heads, len_q, len_k, dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible & (j <= i)
    left, right = window
    if left >= 0:
        visible = visible & (j >= i - left)
    if right >= 0:
        visible = visible & (j <= i + right)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        visible = visible & (attn_mask > NOWHERE)
        logits = logits + attn_mask.to(dtype).masked_fill(attn_mask == NOWHERE, 0.0)
    logits = logits.masked_fill(~visible, NOWHERE)

    if sinks is not None:  # One more column, which has no value to give.
        column = sinks.to(dtype)[None, :, None, None].expand(batch, heads, len_q, 1)
        logits = torch.cat([logits, column], 3)
    empty = (logits == NOWHERE).all(3, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    weights = torch.softmax(logits, 3).masked_fill(empty, 0.0)[..., :len_k]
    # Not torch.logsumexp: its gradient exp(logits - lse) loses log n in a row at finfo.min.
    highest = logits.new_zeros(batch, heads, len_q, 1)
    if logits.shape[3] > 0:
        highest = logits.detach().amax(3, keepdim=True)
    lse = highest + torch.exp(logits - highest).sum(3, keepdim=True).log()
    lse = lse.masked_fill(empty, NOWHERE).squeeze(3)
    if keep is not None:
        weights = weights * keep.to(dtype) / (1 - dropout_p)
    return weights @ value, lse
