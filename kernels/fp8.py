"""float8_e4m3fn: what `flash_attention` takes with it, and the same call in wider numbers.

Each head's numbers stand for themselves times a factor, its descale. There is no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fa_advisor.kernels.arguments import Call

E4M3 = torch.float8_e4m3fn
_SIGN = 0x80


class Descales(NamedTuple):
    """float32 [B, H], [B, G] and [B, G], of any strides; None: 1."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention over inputs of a dtype gives."""
    return torch.bfloat16 if dtype is E4M3 else dtype


def negated(x: Tensor) -> Tensor:
    """-x, which torch lacks for eight bits."""
    return (x.view(torch.uint8) ^ _SIGN).view(E4M3) if x.dtype is E4M3 else -x


def check_descales(
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    query: Tensor,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
) -> Descales:
    """The three, each [batch, heads].

    Raises ValueError or TypeError that names the argument, what was expected and what came.
    """
    given = (
        ("q_descale", q_descale, num_heads),
        ("k_descale", k_descale, num_kv_heads),
        ("v_descale", v_descale, num_kv_heads),
    )
    found: list[Tensor | None] = []
    for name, x, heads in given:
        if x is None:
            found.append(None)
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor or None, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested one" if x.is_nested else f"one in layout {x.layout}"
            raise TypeError(f"{name}: expected a strided tensor, got {kind}")
        if query.dtype is not E4M3:
            raise ValueError(
                f"{name}: expected None with query in {query.dtype}, as it goes with {E4M3} alone;"
                " got a Tensor"
            )
        if x.dtype is not torch.float32:
            raise TypeError(f"{name}: expected float32, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name}: expected query's device {query.device}, got {x.device}")
        lead = (1,) * (2 - x.ndim) + tuple(x.shape)
        if len(lead) != 2 or lead[0] not in (1, batch) or lead[1] not in (1, heads):
            raise ValueError(
                f"{name}: expected a shape that broadcasts to {(batch, heads)},"
                f" got {tuple(x.shape)}"
            )
        found.append(x.resolve_neg().expand(batch, heads))
    return Descales(*found)


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Raise ValueError for the first that wants a gradient."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that doesn't require grad ({E4M3} has a forward"
                " alone), got one that does; call it under torch.no_grad()"
            )


def widened(
    x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What [B, heads, length, dim], or [total, heads, dim] with cu_seqlens, stands for."""
    if descale is None:
        return x.to(dtype)
    if cu_seqlens is None:
        factor = descale[:, :, None, None]
    else:
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        sequence = torch.bucketize(tokens, cu_seqlens[1:-1].contiguous(), right=True)
        factor = descale[sequence][:, :, None]
    return (x.to(torch.float32) * factor).to(dtype)


def attention(
    descales: Descales,
    ordinary: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """out, in bfloat16, and lse, in float32, of a validated call.

    ordinary: attention in float32, for what isn't on CUDA.
    """
    rest = (bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    if query.is_cuda:
        from fa_advisor.kernels import fp8_op

        return fp8_op.attention(descales, query, key, value, *rest, call)
    of_q, of_k, of_v = descales
    out, lse = ordinary(
        widened(query, of_q, cu_seqlens_q, torch.float32),
        widened(key, of_k, cu_seqlens_k, torch.float32),
        widened(value, of_v, cu_seqlens_k, torch.float32),
        *rest,
        call,
    )
    return out.to(torch.bfloat16), lse
