"""nn.MultiheadAttention through the kernel.

B batch, H heads, L target length, S source length, E embedding, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from fa_advisor.patching import fallback
from fa_advisor.patching.attend import attend, refusal
from fa_advisor.patching.swap import Patched


class FusedMultihead(Patched):
    """nn.MultiheadAttention whose calls with need_weights=False go to the kernel."""

    weights_unused = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """nn.MultiheadAttention's forward; the weights are `None` where they were never used."""
        module: Any = self
        code = "WEIGHTS_CONSUMED" if need_weights and not self.weights_unused else None
        code = code or multihead_refusal(
            module, query, key, value, key_padding_mask, attn_mask, is_causal
        )
        if code is None:
            hint = is_causal and not need_weights
            return multihead(module, query, key, value, key_padding_mask, attn_mask, hint), None
        fallback.count(module, code)
        out: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights,
            attn_mask=attn_mask, average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip
        return out


class FusedMultiheadWithoutWeights(FusedMultihead):
    """The same where the weights are asked for and were seen to be thrown away."""

    weights_unused = True


def configuration_refusal(module: nn.MultiheadAttention) -> str | None:
    """Why a module can't be patched whatever it is called with."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "EXTRA_KEYS"
    if any(parametrize.is_parametrized(each) for each in module.modules()):
        return "PARAMETRIZED"  # the fused call reads the weights, not what makes them
    return "HEAD_DIM" if module.head_dim > 256 else None


def multihead_refusal(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> str | None:
    """Why the kernel doesn't take this call; `None` where it does."""
    if is_causal and attn_mask is None:
        return "MASK_NOT_REPRESENTABLE"  # the original raises, and says why
    if query.dim() not in (2, 3):
        return "LAYOUT"  # the original raises, or takes a nested tensor
    heads = _leading(query, module).shape[0] * module.num_heads
    for mask, rank in ((key_padding_mask, query.dim() - 1), (attn_mask, 2)):
        if mask is None:
            continue
        if not (mask.dtype == torch.bool or mask.is_floating_point()):
            return "MASK_NOT_REPRESENTABLE"
        if mask.dim() != rank and not (mask is attn_mask and mask.shape[0] == heads):
            return "MASK_NOT_REPRESENTABLE"
    # The projections make the head dims equal; here they may differ, so one channel stands for all.
    q, k, v = (_leading(each, module)[:, None, :, :1] for each in (query, key, value))
    return refusal(q, k, v)


def multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The output of the module, without weights, for inputs [B, L, E], [L, B, E] or [L, E].

    `is_causal` is torch's hint: `attn_mask` is the causal mask. It is believed where the original
    believes it, without a key-padding mask.
    """
    batched = query.dim() == 3
    if not batched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[None]
    q_BLE, k_BSE, v_BSE = _project(module, query, key, value)
    q_BHLD, k_BHSD, v_BHSD = (
        each.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for each in (q_BLE, k_BSE, v_BSE)
    )
    is_causal = is_causal and key_padding_mask is None
    mask = None if is_causal else _mask(module, q_BHLD, key_padding_mask, attn_mask)
    dropout_p = module.dropout if module.training else 0.0
    out_BHLD = attend(q_BHLD, k_BHSD, v_BHSD, mask, dropout_p=dropout_p, is_causal=is_causal)
    if not batched:
        out = out_BHLD[0].transpose(0, 1)
    elif module.batch_first:
        out = out_BHLD.transpose(1, 2)
    else:
        out = out_BHLD.permute(2, 0, 1, 3)
    # Called as a module: hooks and adapters on the output projection are served.
    projected: Tensor = module.out_proj(out.flatten(-2))
    return projected


def _leading(tensor: Tensor, module: nn.MultiheadAttention) -> Tensor:
    """[B, L, E] of an input in whichever of the three layouts the module takes."""
    if tensor.dim() == 2:
        return tensor[None]
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_leading(each, module) for each in (query, key, value))
    bias: Any = module.in_proj_bias
    same_dims: bool = module._qkv_same_embed_dim
    if same_dims:
        if query is key and key is value:
            first, second, third = linear(q, module.in_proj_weight, bias).chunk(3, -1)
            return first, second, third
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    first, second, third = (
        linear(each, weight, b) for each, weight, b in zip((q, k, v), weights, biases, strict=True)
    )
    return first, second, third


def _mask(
    module: nn.MultiheadAttention,
    q_BHLD: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor | None:
    """Both masks as one, in the kernel's sense: True is visible, floats are added."""
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, module.num_heads))
    elif attn_mask is not None:
        attn_mask = attn_mask[None, None]
    given = [each for each in (attn_mask, padding) if each is not None]
    if not given:
        return None
    if all(each.dtype == torch.bool for each in given):
        visible = [~each for each in given]
        return visible[0] & visible[1] if len(visible) == 2 else visible[0]
    added = [
        torch.zeros_like(each, dtype=q_BHLD.dtype).masked_fill(each, float("-inf"))
        if each.dtype == torch.bool
        else each.to(q_BHLD.dtype)
        for each in given
    ]
    return added[0] + added[1] if len(added) == 2 else added[0]
