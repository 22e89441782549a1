"""`FlashAttention`: the function with its options held by a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fa_advisor.kernels.api import flash_attention


class FlashAttention(nn.Module):
    """`flash_attention` as a module between projections, as nn.Softmax stands for softmax.

    Holds the options that belong to a model; lengths and masks come with each call. Dropout is
    live in training alone. Options mean what they mean for `flash_attention`.

    Args:
        num_sinks: gives the module a parameter `sinks` of that many logits, one a query head,
            zero at the start.
        alibi_slopes: [H] or [B, H]; kept as a buffer that moves with the module and isn't saved.

    """

    sinks: nn.Parameter | None
    alibi_slopes: Tensor | None

    def __init__(
        self,
        *,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: int | tuple[int, int] | None = None,
        softcap: float = 0.0,
        num_sinks: int | None = None,
        alibi_slopes: Tensor | None = None,
        causal_alignment: str = "top-left",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.window = window
        self.softcap = softcap
        self.causal_alignment = causal_alignment
        self.sinks = (
            None
            if num_sinks is None
            else nn.Parameter(torch.zeros(num_sinks, device=device, dtype=dtype))
        )
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """out [..., H, Lq, Dv]; with cu_seqlens [total_q, H, Dv]."""
        return flash_attention(
            query,
            key,
            value,
            attn_mask,
            self.dropout_p if self.training else 0.0,
            self.is_causal,
            self.scale,
            self.enable_gqa,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal_alignment=self.causal_alignment,
        )

    def extra_repr(self) -> str:
        options = {
            "dropout_p": (self.dropout_p, 0.0),
            "is_causal": (self.is_causal, False),
            "scale": (self.scale, None),
            "enable_gqa": (self.enable_gqa, False),
            "window": (self.window, None),
            "softcap": (self.softcap, 0.0),
            "num_sinks": (None if self.sinks is None else self.sinks.numel(), None),
            "causal_alignment": (self.causal_alignment, "top-left"),
        }
        return ", ".join(
            f"{name}={value!r}" for name, (value, default) in options.items() if value != default
        )
