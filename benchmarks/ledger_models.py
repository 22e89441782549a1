"""The 24 cases of benchmarks/ledger.py: models from their configs, inputs, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# model-attention-mode[-extra]; extra: compile, checkpoint, autocast (fp32 weights, bf16 products)
CASES = (
    "gpt2-eager-infer",
    "gpt2-eager-train",
    "gpt2-sdpa-train",
    "gpt2-eager-train-checkpoint",
    "gpt2-eager-train-autocast",
    "gpt2-eager-train-compile",
    "llama-eager-infer",
    "llama-eager-train",
    "llama-sdpa-infer",
    "llama-sdpa-train-checkpoint",
    "bert-eager-train",
    "bert-sdpa-infer",
    "bert-sdpa-train-autocast",
    "t5-eager-infer",
    "t5-eager-train",
    "vit-eager-infer",
    "vit-sdpa-train",
    "whisper-eager-train",
    "whisper-sdpa-infer",
    "swin-eager-infer",
    "swin-eager-train",
    "nanogpt-eager-train-checkpoint",
    "nanogpt-sdpa-train",
    "nanogpt-eager-infer-compile",
)


class NanoGPT(nn.Module):
    """A GPT of GPT-2 small's shape, written out by hand; attention eager or in one call."""

    def __init__(self, eager: bool, recompute: bool, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.eager, self.recompute, self.heads = eager, recompute, 12
        self.wte = nn.Embedding(50304, width)
        self.wpe = nn.Embedding(1024, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50304, bias=False)
        self.head.weight = self.wte.weight

    def block(self, index: int, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv[index](F.layer_norm(x, (width,))).chunk(3, -1)
        )
        if self.eager:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj[index](y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp[index](x)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for index in range(len(self.qkv)):
            if self.recompute and self.training:
                x = checkpoint(self.block, index, x, use_reentrant=False)
            else:
                x = self.block(index, x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


class Autocast(nn.Module):
    """The model under autocast to bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(**inputs)


def _ids(batch: int, length: int, train: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 1000, (batch, length))
    return {"input_ids": ids} | ({"labels": ids} if train else {})


def _gpt2(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    model = hf.GPT2LMHeadModel(hf.GPT2Config(attn_implementation=attention))
    return model, _ids(2, 1024, train)


def _llama(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        attn_implementation=attention,
    )
    return hf.LlamaForCausalLM(config), _ids(2, 1024, train)


def _bert(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    model = hf.BertForMaskedLM(hf.BertConfig(attn_implementation=attention))
    return model, _ids(8, 512, train)


def _t5(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    config = hf.T5Config(attn_implementation=attention, decoder_start_token_id=0)
    inputs = _ids(8, 512, train)
    if not train:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :64]
    return hf.T5ForConditionalGeneration(config), inputs


def _vit(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    model = hf.ViTForImageClassification(hf.ViTConfig(attn_implementation=attention))
    return model, _images(16, train)


def _swin(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    model = hf.SwinForImageClassification(hf.SwinConfig(attn_implementation=attention))
    return model, _images(16, train)


def _images(batch: int, train: bool) -> dict[str, Tensor]:
    pixels = {"pixel_values": torch.randn(batch, 3, 224, 224)}
    return pixels | ({"labels": torch.zeros(batch, dtype=torch.long)} if train else {})


def _whisper(attention: str, train: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    config = hf.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        attn_implementation=attention,
    )
    ids = torch.randint(0, 1000, (4, 128))
    inputs = {"input_features": torch.randn(4, 80, 3000)}
    return hf.WhisperForConditionalGeneration(config), inputs | {
        "labels" if train else "decoder_input_ids": ids
    }


_BUILDERS: dict[str, Callable[[str, bool], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "swin": _swin,
    "whisper": _whisper,
}


def build(case: str, device: str) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The case's model and inputs on a device, and its mode. On the CPU nothing is compiled."""
    name, attention, mode, extra = (*case.split("-"), "")[:4]
    torch.manual_seed(0)
    train = mode == "train"
    if name == "nanogpt":
        model: nn.Module = NanoGPT(attention == "eager", extra == "checkpoint")
        inputs = _ids(2, 1024, train)
    else:
        model, inputs = _BUILDERS[name](attention, train)
        if extra == "checkpoint":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if extra == "autocast":
        model = Autocast(model)
    else:
        model = model.to(torch.bfloat16)
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    model = model.to(device)
    if extra == "compile" and device != "cpu":
        model = torch.compile(model)  # type: ignore[assignment]
    return model, {k: v.to(device) for k, v in inputs.items()}, mode
