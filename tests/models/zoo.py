"""Small models of real architectures, with what is known of their attention beforehand.

B batch, L sequence, H heads, D head dim. Each has two layers, so that a site that is lost or
counted twice shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

B, L, H, D = 2, 48, 4, 8
WIDTH, VOCAB, LAYERS = H * D, 128, 2
EAGER = ("eager",)
BOTH = ("eager", "sdpa")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`count` attention calls of one shape."""

    count: int
    heads: int = H
    kv_heads: int = H
    q: int = L
    k: int = L
    head_dim: int = D


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """`build(attn_implementation)`, the inputs of a training step, and the sites it must have.

    `implementations`: those that the model itself has.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    attention: tuple[Attention, ...]
    implementations: tuple[str, ...] = BOTH


def text(length: int = L, labels: int | None = None) -> Callable[[], dict[str, Tensor]]:
    """Token ids, and as many labels unless said otherwise."""
    return lambda: {"input_ids": tokens(length), "labels": tokens(labels or length)}


def tokens(length: int = L) -> Tensor:
    return torch.randint(5, VOCAB, (B, length))


def classified(name: str, *shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(*shape), "labels": torch.zeros(B, dtype=torch.long)}


def decoder(
    model: type[nn.Module],
    config: type[Any],
    *,
    kv: int = H,
    head_dim: int = D,
    implementations: tuple[str, ...] = BOTH,
    **more: Any,
) -> Architecture:
    """A causal language model with the configuration names that most share."""

    def build(implementation: str) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": H,
            "num_key_value_heads": kv,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if head_dim != D:
            sizes["head_dim"] = head_dim
        return model(config(**{**sizes, **more}, attn_implementation=implementation))

    return Architecture(
        name=config.__name__.removesuffix("Config"),
        build=build,
        inputs=text(),
        attention=(Attention(count=LAYERS, kv_heads=kv, head_dim=head_dim),),
        implementations=implementations,
    )


def of(
    model: type[nn.Module],
    config: Any,
    inputs: Callable[[], dict[str, Tensor]],
    *attention: Attention,
    implementations: tuple[str, ...] = BOTH,
    name: str = "",
) -> Architecture:
    """`config` is a function of no arguments that makes the configuration."""

    def build(implementation: str) -> nn.Module:
        made = config()
        made._attn_implementation = implementation
        return model(made)

    return Architecture(
        name=name or model.__name__,
        build=build,
        inputs=inputs,
        attention=attention,
        implementations=implementations,
    )


ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "image_size": 32,
    "patch_size": 8,
}
SELF = Attention(count=LAYERS)

DECODERS = (
    decoder(hf.LlamaForCausalLM, hf.LlamaConfig, kv=2),
    decoder(hf.MistralForCausalLM, hf.MistralConfig, kv=2, sliding_window=16),
    decoder(hf.Qwen2ForCausalLM, hf.Qwen2Config, kv=2),
    decoder(hf.Qwen3ForCausalLM, hf.Qwen3Config, kv=2, head_dim=16),
    decoder(hf.Gemma2ForCausalLM, hf.Gemma2Config, kv=1, head_dim=16,
        sliding_window=16, implementations=EAGER),
    decoder(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, kv=1, head_dim=16, sliding_window=16),
    decoder(hf.Phi3ForCausalLM, hf.Phi3Config, kv=2),
    decoder(
        hf.GptOssForCausalLM, hf.GptOssConfig, kv=2, head_dim=16, sliding_window=16,
        num_local_experts=4, num_experts_per_tok=2, implementations=EAGER,
    ),
    decoder(
        hf.MixtralForCausalLM, hf.MixtralConfig, kv=2, num_local_experts=4, num_experts_per_tok=2
    ),
    decoder(
        hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, kv=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    decoder(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig),
    decoder(hf.OPTForCausalLM, hf.OPTConfig, ffn_dim=64, word_embed_proj_dim=WIDTH),
    decoder(hf.BloomForCausalLM, hf.BloomConfig, n_layer=LAYERS, n_head=H, implementations=EAGER),
    decoder(hf.FalconForCausalLM, hf.FalconConfig, kv=1, multi_query=True),
    replace(
        decoder(
            hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, n_routed_experts=4,
            num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
            kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            first_k_dense_replace=1,
        ),
        attention=(Attention(count=LAYERS, head_dim=16),),
    ),
)  # fmt: skip

OTHERS = (
    of(
        hf.GPT2LMHeadModel,
        lambda: hf.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=H, n_positions=64
        ),
        text(),
        SELF,
    ),
    of(
        hf.MptForCausalLM,
        lambda: hf.MptConfig(
            vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=H, max_seq_len=64
        ),
        text(),
        SELF,
        implementations=EAGER,
    ),
    of(hf.BertForMaskedLM, lambda: hf.BertConfig(**ENCODER), text(), SELF),
    of(hf.RobertaForMaskedLM, lambda: hf.RobertaConfig(**ENCODER), text(), SELF),
    of(
        hf.DistilBertForMaskedLM,
        lambda: hf.DistilBertConfig(
            vocab_size=VOCAB,
            dim=WIDTH,
            hidden_dim=64,
            n_layers=LAYERS,
            n_heads=H,
            max_position_embeddings=64,
        ),
        text(),
        SELF,
    ),
    of(
        hf.DebertaV2ForMaskedLM,
        lambda: hf.DebertaV2Config(
            **ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16
        ),
        text(),
        SELF,
        implementations=EAGER,
    ),
    of(
        hf.ElectraForMaskedLM,
        lambda: hf.ElectraConfig(**ENCODER, embedding_size=WIDTH),
        text(),
        SELF,
    ),
    of(
        hf.AlbertForMaskedLM,
        lambda: hf.AlbertConfig(**ENCODER, embedding_size=16),
        text(),
        Attention(count=1),
    ),
    of(
        hf.EsmForMaskedLM,
        lambda: hf.EsmConfig(**ENCODER, mask_token_id=3, position_embedding_type="rotary"),
        text(),
        SELF,
    ),
    of(
        hf.ModernBertForMaskedLM,
        lambda: hf.ModernBertConfig(
            **ENCODER,
            local_attention=16,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        text(),
        SELF,
    ),
    of(
        hf.LongformerForMaskedLM,
        lambda: hf.LongformerConfig(**ENCODER, attention_window=16),
        text(),
        Attention(count=LAYERS, k=17),
        implementations=EAGER,
    ),
    of(
        hf.MambaForCausalLM,
        lambda: hf.MambaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=LAYERS
        ),
        text(length=8),
        implementations=EAGER,
    ),
    of(
        hf.T5ForConditionalGeneration,
        lambda: hf.T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=D,
            d_ff=64,
            num_layers=LAYERS,
            num_heads=H,
            decoder_start_token_id=0,
        ),
        text(labels=24),
        SELF,
        Attention(count=LAYERS, q=24, k=24),
        Attention(count=LAYERS, q=24),
    ),
    of(
        hf.BartForConditionalGeneration,
        lambda: hf.BartConfig(
            vocab_size=VOCAB,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=H,
            decoder_attention_heads=H,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        ),
        text(labels=24),
        SELF,
        Attention(count=LAYERS, q=24, k=24),
        Attention(count=LAYERS, q=24),
    ),
    of(
        hf.WhisperForConditionalGeneration,
        lambda: hf.WhisperConfig(
            vocab_size=VOCAB,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=H,
            decoder_attention_heads=H,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=40,
            max_target_positions=64,
            num_mel_bins=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        lambda: {"input_features": torch.randn(B, 8, 80), "labels": tokens(24)},
        Attention(count=LAYERS, q=40, k=40),
        Attention(count=LAYERS, q=24, k=24),
        Attention(count=LAYERS, q=24, k=40),
    ),
    of(
        hf.ViTForImageClassification,
        lambda: hf.ViTConfig(**VISION),
        classified("pixel_values", B, 3, 32, 32),
        Attention(count=LAYERS, q=17, k=17),
    ),
    of(
        hf.DeiTForImageClassification,
        lambda: hf.DeiTConfig(**VISION),
        classified("pixel_values", B, 3, 32, 32),
        Attention(count=LAYERS, q=18, k=18),
    ),
    of(
        hf.BeitForImageClassification,
        lambda: hf.BeitConfig(**VISION),
        classified("pixel_values", B, 3, 32, 32),
        Attention(count=LAYERS, q=17, k=17),
    ),
    of(
        hf.SwinForImageClassification,
        lambda: hf.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        classified("pixel_values", B, 3, 32, 32),
        Attention(count=2, heads=2, kv_heads=2, q=16, k=16),
        Attention(count=2, q=16, k=16),
        implementations=EAGER,
    ),
    of(
        hf.Swinv2ForImageClassification,
        lambda: hf.Swinv2Config(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        classified("pixel_values", B, 3, 32, 32),
        Attention(count=2, heads=2, kv_heads=2, q=16, k=16),
        Attention(count=2, q=16, k=16),
        implementations=EAGER,
    ),
    of(
        hf.CLIPModel,
        lambda: hf.CLIPConfig(
            text_config={**ENCODER, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=VISION,
            projection_dim=16,
        ),
        lambda: {
            "input_ids": tokens(),
            "pixel_values": torch.randn(B, 3, 32, 32),
            "return_loss": True,
        },
        SELF,
        Attention(count=LAYERS, q=17, k=17),
    ),
    of(
        hf.Wav2Vec2ForSequenceClassification,
        lambda: hf.Wav2Vec2Config(
            **{k: v for k, v in ENCODER.items() if k != "max_position_embeddings"},
            conv_dim=(16, 16),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_length=2,
        ),
        classified("input_values", B, 400),
        Attention(count=LAYERS, q=39, k=39),
    ),
    of(
        hf.SamVisionModel,
        lambda: hf.SamVisionConfig(
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=H,
            image_size=64,
            patch_size=8,
            window_size=4,
            global_attn_indexes=[1],
            output_channels=16,
            mlp_dim=64,
        ),
        lambda: {"pixel_values": torch.randn(B, 3, 64, 64)},
        Attention(count=1, q=16, k=16),
        Attention(count=1, q=64, k=64),
        implementations=("sdpa",),
    ),
    of(
        hf.BertForSequenceClassification,
        lambda: hf.BertConfig(**ENCODER),
        lambda: {"input_ids": tokens(), "labels": torch.zeros(B, dtype=torch.long)},
        SELF,
    ),
    of(
        hf.ResNetForImageClassification,
        lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        classified("pixel_values", B, 3, 32, 32),
        implementations=EAGER,
    ),
)
ARCHITECTURES = (*DECODERS, *OTHERS)
