"""Models with inputs, each behind a function of no arguments: targets as a user would name them.

Dropout is 0 and attention eager, where a CPU does what a GPU does.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

B, L, H, WIDTH, VOCAB = 2, 40, 4, 32, 96
Target = tuple[nn.Module, dict[str, Tensor]]

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def _tokens() -> Tensor:
    return torch.randint(5, VOCAB, (B, L))


def _text() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": _tokens()}


def llama() -> Target:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)), _text()


def gemma2() -> Target:
    config = hf.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=16, sliding_window=16)
    return hf.Gemma2ForCausalLM(config), _text()


def gpt_neox() -> Target:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)), _text()


def bert() -> Target:
    config = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, L // 2 :] = 0
    return hf.BertForMaskedLM(config), {**_text(), "attention_mask": mask}


def t5() -> Target:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=H,
        dropout_rate=0.0, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _text()


def vit() -> Target:
    config = hf.ViTConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=H,
        image_size=32, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.zeros(B, dtype=torch.long)}
    return hf.ViTForImageClassification(config), inputs


def mixtral() -> Target:
    """Experts in a loop over those that a token chose: the shapes depend on values."""
    config = hf.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"
    )
    return hf.MixtralForCausalLM(config), _text()


class LayerWithWeights(nn.TransformerEncoderLayer):
    """Asks for the attention weights, so that nn.MultiheadAttention computes them."""

    def _sa_block(self, x: Tensor, *masks: Any, is_causal: bool = False) -> Tensor:
        mask, padding = masks
        return self.self_attn(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=True)[
            0
        ]


def transformer_encoder() -> Target:
    """With a causal mask."""
    layer = LayerWithWeights(WIDTH, H, 64, dropout=0.0, batch_first=True)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, {"src": torch.randn(B, L, WIDTH), "mask": mask}


def nanogpt() -> Target:
    from fa_advisor.examples.nanogpt import GPT, Config

    config = Config(vocab_size=VOCAB, block_size=64, layers=2, heads=H, width=WIDTH, dropout=0.0)
    return GPT(config), {"idx": _tokens(), "targets": _tokens()}


SAME_EVERYWHERE = (llama, gemma2, gpt_neox, bert, t5, vit, transformer_encoder, nanogpt)
