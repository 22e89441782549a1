"""The models of patched.py: from configurations, with dropout off, at sizes for one large GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_outputs import TokenClassifierOutput

DTYPE = torch.bfloat16
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """`example`: the length that patch is shown, short enough for it to compare in float64."""

    width: int = 1024
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 64
    layers: int = 8
    batch: int = 2
    length: int = 4096
    example: int = 1024
    vocabulary: int = 32_000

    def tiny(self) -> Size:
        heads = {"heads": 4, "kv_heads": 4 * self.kv_heads // self.heads, "head_dim": 16}
        return replace(
            self, **heads, width=64, layers=2, batch=2, length=96, example=48, vocabulary=128
        )


GROUPED = Size(width=2048, heads=32, kv_heads=8, layers=6, batch=1)


def common(size: Size, attention: str) -> dict[str, Any]:
    """The configuration names that most models share."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "attn_implementation": attention,
    }


def grouped(size: Size, attention: str) -> dict[str, Any]:
    return {
        **common(size, attention), "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim
    }  # fmt: skip


def gpt2(size: Size, attention: str) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.length, n_embd=size.width,
        n_layer=size.layers, n_head=size.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(size: Size, attention: str) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped(size, attention)))


def bert(size: Size, attention: str) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**common(size, attention), **dropout))


def t5(size: Size, attention: str) -> nn.Module:
    config = hf.T5Config(
        vocab_size=size.vocabulary, d_model=size.width, d_kv=size.head_dim, d_ff=4 * size.width,
        num_layers=size.layers, num_heads=size.heads, dropout_rate=0.0, decoder_start_token_id=0,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def gemma2(size: Size, attention: str) -> nn.Module:
    config = hf.Gemma2Config(
        **grouped(size, attention), sliding_window=size.length // 8,
        query_pre_attn_scalar=size.head_dim,
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config)


def gpt_oss(size: Size, attention: str) -> nn.Module:
    # Every expert takes every token: a router's choice that flips isn't attention's rounding.
    config = hf.GptOssConfig(
        **{**grouped(size, attention), "intermediate_size": size.width},
        sliding_window=size.length // 32, num_local_experts=4, num_experts_per_tok=4,
        experts_implementation="eager",
    )  # fmt: skip
    return hf.GptOssForCausalLM(config)


class Encoder(nn.Module):
    """torch's own encoder under a classifier of tokens."""

    def __init__(self, size: Size, *, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True
        )
        self.body = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=nested)
        self.head = nn.Linear(size.width, 16)

    def forward(self, src: Tensor, padding: Tensor, labels: Tensor) -> TokenClassifierOutput:
        logits = self.head(self.body(src, src_key_padding_mask=padding)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits)


def encoder(size: Size, attention: str) -> nn.Module:
    return Encoder(size, nested=attention == "nested")


def tokens(size: Size) -> Tensors:
    ids = torch.randint(3, size.vocabulary, (size.batch, size.length))
    return {"input_ids": ids, "labels": ids}


def padding(size: Size) -> Tensor:
    """True beyond the last token: the last row has a fifth of the others' length."""
    lengths = torch.full((size.batch, 1), size.length)
    lengths[-1] = size.length // 5
    return torch.arange(size.length) >= lengths


def padded_tokens(size: Size) -> Tensors:
    ids, beyond = tokens(size)["input_ids"], padding(size)
    return {
        "input_ids": ids.masked_fill(beyond, 0),
        "attention_mask": (~beyond).long(),
        "labels": ids.masked_fill(beyond, -100),
    }


def source_and_target(size: Size) -> Tensors:
    ids = tokens(size)["input_ids"]
    return {"input_ids": ids, "labels": ids[:, : size.length // 2].contiguous()}


def features(size: Size) -> Tensors:
    beyond = padding(size)
    labels = torch.randint(16, beyond.shape).masked_fill(beyond, -100)
    return {"src": torch.randn(*beyond.shape, size.width), "padding": beyond, "labels": labels}


@dataclass(frozen=True, kw_only=True)
class Model:
    """`attentions`: those that it has of itself; for torch's encoder, how it takes padding."""

    build: Callable[[Size, str], nn.Module]
    inputs: Callable[[Size], Tensors] = tokens
    attentions: tuple[str, ...] = ("eager", "sdpa")
    size: Size = Size()


MODELS = {
    "gpt2": Model(build=gpt2),
    "llama": Model(build=llama, size=GROUPED),
    "bert": Model(build=bert, inputs=padded_tokens),
    "t5": Model(build=t5, inputs=source_and_target, size=Size(layers=4)),
    "gemma2": Model(
        build=gemma2, attentions=("eager",),
        size=replace(GROUPED, heads=16, head_dim=128, layers=4),
    ),
    "gpt-oss": Model(build=gpt_oss, attentions=("eager",), size=replace(GROUPED, layers=4)),
    "encoder": Model(build=encoder, inputs=features, attentions=("mask", "nested")),
}  # fmt: skip


def made(name: str, attention: str, size: Size, device: str) -> tuple[nn.Module, Tensors]:
    """The model in training mode, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name].build(size, attention).to(DTYPE).train()
    inputs = {key: each.to(device) for key, each in MODELS[name].inputs(size).items()}
    return model, in_dtype(inputs, DTYPE)


def in_dtype(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    return {
        key: each.to(dtype) if each.is_floating_point() else each for key, each in inputs.items()
    }
