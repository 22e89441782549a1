"""nn.TransformerEncoderLayer in eval mode: its own attention module instead of torch's fused layer.

Without gradients the layer hands everything to one operator of torch's, which asks no module and,
with a mask, writes the N x N scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fa_advisor.patching.swap import Patched


class UnfusedEncoderLayer(Patched):
    """An encoder layer that calls its attention module in eval mode too.

    Not for nested tensors, which nn.TransformerEncoder makes of a padded batch: only the fused
    operator takes them, and it has no mask then.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """nn.TransformerEncoderLayer's forward, as torch has it beside its fused operator."""
        layer: Any = self
        if layer.training or src.is_nested:
            out: Tensor = super().forward(src, src_mask, src_key_padding_mask, is_causal)  # type: ignore[misc]
            return out

        def attended(x: Tensor) -> Any:
            return layer._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)

        if layer.norm_first:
            x = src + attended(layer.norm1(src))
            out = x + layer._ff_block(layer.norm2(x))
        else:
            x = layer.norm1(src + attended(src))
            out = layer.norm2(x + layer._ff_block(x))
        return out


def around(attentions: Sequence[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """The encoder layers of `model` that these attention modules belong to."""
    for layer in model.modules():
        if (
            isinstance(layer, nn.TransformerEncoderLayer)
            and type(layer).forward is nn.TransformerEncoderLayer.forward
            and "forward" not in vars(layer)
            and any(layer.self_attn is each for each in attentions)
        ):
            yield layer
