"""What the codes in `why_not` and `rejections` mean, in a sentence each."""

from __future__ import annotations

from fa_advisor.probes.sdpa import REASONS

_OTHERS = {
    "HAND_WRITTEN": "the model computes softmax(QK^T)V itself, so torch has no backend to choose",
    "NOT_EXPRESSIBLE": "between QK^T and the softmax stands more than scale, mask and bias, "
    "which is all that scaled_dot_product_attention computes",
    "WEIGHTS_REQUESTED": "nn.MultiheadAttention is called with need_weights=True, its default, and "
    "has to keep P to return it",
}


def explain(code: str) -> str:
    """The sentence for a code; a code that this version doesn't know stands for itself."""
    return REASONS.get(code) or _OTHERS.get(code, code)
