"""`flash_attention`: the public function over the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fa_advisor.kernels import cpu, fp8
from fa_advisor.kernels.arguments import check, unsupported_gpu
from fa_advisor.kernels.packed import check_offsets

# The way of calls like an earlier one, once there is one: it needs Triton.
_repeated: Any = None
# By CUDA device: why the kernels can't run there, or None.
_refusals: dict[int, str | None] = {}


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal_alignment: str = "top-left",
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal_alignment: str = "top-left",
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal_alignment: str = "top-left",
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with no N x N matrix in memory, forward or backward.

    The arguments up to enable_gqa are torch.nn.functional.scaled_dot_product_attention's, in its
    order and with its meaning. A row that may see no key gives 0, never NaN.

    Args:
        query: [..., H, Lq, D], or [total_q, H, D] with cu_seqlens_q. D from 1 to 256. On a GPU
            float16, bfloat16 or float32 (IEEE, or TF32 where torch's own flag allows it); without
            gradients float8_e4m3fn too.
        key: [..., G, Lk, D], or [total_k, G, D].
        value: [..., G, Lk, Dv], or [total_k, G, Dv]; Dv may differ from D.
        attn_mask: broadcasts to [..., H, Lq, Lk]: boolean, True takes part; or float32 or query's
            dtype, added to the logits, with a gradient. Not with is_causal (window=(-1, 0) says
            the same and goes with a mask) nor with cu_seqlens.
        dropout_p: probability with which a weight is dropped, from [0, 1).
        is_causal: query i sees keys up to its own position.
        scale: of Q K^T; 1/sqrt(D) by default.
        enable_gqa: lets G divide H; query head h reads key head h // (H / G). G = 1 needs no leave.
        window: (left, right), how many keys a query sees beside its own position on each side;
            an int stands for both, -1 for no limit.
        softcap: logits become softcap * tanh(logits / softcap), before any mask; 0: they don't.
        sinks: [H], a logit a head that joins the softmax's denominator and has no value.
        alibi_slopes: [H] or [B, H], constants; subtracts slope * distance from the logits.
        cu_seqlens_q: int32 [B + 1], where each packed sequence starts, and their end; on query's
            device, as is cu_seqlens_k.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: longest of query's sequences, an int.
        max_seqlen_k: longest of key's.
        causal_alignment: query i's position among the keys: "top-left": i, "bottom-right":
            i + Lk - Lq. Causality, window and ALiBi count from it.
        q_descale: what query's float8_e4m3fn numbers are times: float32, not negative, broadcasts
            to [B, H]; 1 by default. Not with other dtypes.
        k_descale: the same for key, broadcasts to [B, G].
        v_descale: the same for value.
        return_lse: returns (out, lse): the natural log of the softmax's denominator, sinks
            included, float32 (float64 for float64), [..., H, Lq] ([H, total_q] with cu_seqlens);
            -inf for a row that sees nothing. Differentiable.

    Returns:
        out, [..., H, Lq, Dv] or [total_q, H, Dv], in query's dtype (bfloat16 for float8_e4m3fn);
        with return_lse (out, lse).

    Raises:
        ValueError, TypeError: name the argument, what was expected and what came; nothing has
            reached the GPU then.
        ImportError: a CUDA tensor, and no Triton.

    """
    tensors = (
        query, key, value, attn_mask, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k
    )  # fmt: skip
    eight = (
        q_descale is not None or k_descale is not None or v_descale is not None
        or getattr(query, "dtype", None) is fp8.E4M3
    )  # fmt: skip
    known = None
    if _repeated is not None and not eight and not torch.compiler.is_compiling():
        known = _repeated.signature(tensors, (
            dropout_p, is_causal, scale, enable_gqa, window, softcap, max_seqlen_q, max_seqlen_k,
            causal_alignment,
        ))  # fmt: skip
        again: tuple[Tensor, Tensor] | None = _repeated.again(known, tensors)
        if again is not None:
            return again if return_lse else again[0]
    q, k, v, bias, call = check(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        softcap,
        sinks,
        alibi_slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal_alignment,
    )
    if q.is_cuda:
        attention = _gpu_attention(q)
    else:
        attention = cpu.attention
        if call.varlen and not torch.compiler.is_compiling():
            check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], call.max_seqlen_q)
            check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], call.max_seqlen_k)
    if eight:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        descales = fp8.check_descales(
            q_descale, k_descale, v_descale, q, batch, call.num_heads, call.num_kv_heads
        )
        fp8.refuse_gradients(
            query=query, key=key, value=value, attn_mask=attn_mask, sinks=sinks,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        attention = partial(fp8.attention, descales, attention)
    out, lse = attention(q, k, v, bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, call)
    if known is not None:
        _repeated.remember(known, tensors, (q, k, v, bias), call)
    if not call.varlen and (query.ndim != 4 or query.shape[0] != out.shape[0]):
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        out, lse = out.reshape(*lead, *out.shape[1:]), lse.reshape(*lead, *lse.shape[1:])
    return (out, lse) if return_lse else out


def _gpu_attention(query: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernels' operator, once it is known to run on query's device."""
    if not torch.compiler.is_compiling():
        index = query.get_device()
        if index not in _refusals:
            _refusals[index] = unsupported_gpu(index)
        refusal = _refusals[index]
        if refusal is not None:
            raise ValueError(refusal)
    global _repeated
    try:
        from fa_advisor.kernels import repeated
        from fa_advisor.kernels.op import attention
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "flash_attention on a CUDA tensor needs Triton, which isn't installed: pip install"
            " triton (triton-windows on Windows)"
        ) from error
    _repeated = repeated
    return attention
