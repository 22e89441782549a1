"""The advice's figures against really running what they speak of (on fake tensors).

The largest length and batch: profiled there, the peak allocated must fit the GPU, and 10 % further
it must not. The peak without attention's N x N memory: the same model on a fused backend.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fa_advisor
import samples
from fa_advisor.probes.gpus import lookup
from fa_advisor.recommend import Situation, recommendations
from fa_advisor.report import Report

B, N = 2, 1024
How = Literal["eager", "sdpa"]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, how: How) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (
            t.view(b, n, self.heads, c // self.heads).transpose(1, 2)
            for t in self.c_attn(x).split(c, 2)
        )
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.mT) * (1.0 / math.sqrt(k.size(-1)))
            future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            y = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, how: How) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, how)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """No table of positions, so that it runs at any length."""

    def __init__(self, how: How, layers: int = 2, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.wte = nn.Embedding(8192, width)
        self.h = nn.Sequential(*(Block(width, heads, how) for _ in range(layers)))
        self.lm_head = nn.Linear(width, 8192, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.h(self.wte(input_ids)))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def model(name: str, how: How) -> nn.Module:
    if name == "nanogpt":
        return NanoGpt(how).bfloat16()
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 24,
        use_cache=False, attn_implementation=how,
    )  # fmt: skip
    llama: nn.Module = transformers.LlamaForCausalLM(config).bfloat16()
    return llama


@cache
def report(name: str, how: How, mode: Any, gpu: str, batch: int = B, length: int = N) -> Report:
    ids = torch.zeros(batch, length, dtype=torch.long)
    inputs = {"input_ids": ids} | ({"labels": ids} if mode == "train" else {})
    return fa_advisor.profile(model(name, how), inputs, mode=mode, gpu=gpu)


def share(name: str, how: How, mode: Any, gpu: str, batch: int, length: int) -> float:
    """Peak allocated over the GPU's memory."""
    made = report(name, how, mode, gpu, batch, length)
    return made.memory.peak_allocated_bytes / made.device.total_memory_bytes


CASES = [
    ("nanogpt", "L4", "train"),
    ("nanogpt", "A100-80GB", "train"),
    ("nanogpt", "H200", "infer"),
    ("llama", "A100-80GB", "infer"),
    ("llama", "L4", "train"),
]


@pytest.mark.parametrize(("name", "gpu", "mode"), CASES)
def test_the_largest_length_and_batch_are_right(name: str, gpu: str, mode: Any) -> None:
    advice = report(name, "eager", mode, gpu).advice
    length, batch = advice.max_seq_len, advice.max_batch_size
    assert length.now and length.advised and batch.now and batch.advised
    assert length.now < length.advised
    assert batch.now <= batch.advised
    runs: list[tuple[How, int, int]] = [("eager", length.now, batch.now)]
    # Fused kernels keep an LSE that the replay knows nothing of, and other copies of K and V.
    runs.append(("sdpa", length.advised, batch.advised))
    for how, most_tokens, most_sequences in runs:
        assert 0.95 <= share(name, how, mode, gpu, B, most_tokens) <= 1.002
        assert share(name, how, mode, gpu, B, math.ceil(1.1 * most_tokens)) > 1
        assert 0.95 <= share(name, how, mode, gpu, most_sequences, N) <= 1.002
        assert share(name, how, mode, gpu, math.ceil(1.1 * most_sequences), N) > 1


@pytest.mark.parametrize(("name", "gpu", "mode"), CASES)
def test_the_peak_without_attention_is_a_fused_backends(name: str, gpu: str, mode: Any) -> None:
    eager, fused = (report(name, how, mode, gpu) for how in ("eager", "sdpa"))
    assert {s.backend for s in fused.sites} <= {"flash", "cudnn"}
    without = eager.advice.counterfactual_peak_bytes
    assert without == pytest.approx(fused.memory.peak_allocated_bytes, rel=0.02)
    assert without < eager.memory.peak_allocated_bytes
    assert fused.advice.counterfactual_peak_bytes == fused.memory.peak_allocated_bytes
    (recommended,) = eager.advice.recommendations
    assert recommended.predicted.peak_allocated_bytes == without
    assert recommended.backend == fused.sites[0].backend
    assert recommended.sites == tuple(s.fqn for s in eager.sites)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_nothing_is_promised_where_no_fused_backend_runs(mode: Any) -> None:
    """bf16 on a T4: SDPA has but its math path, which makes N x N memory too."""
    made = report("nanogpt", "eager", mode, "T4")
    advice = made.advice
    assert advice.max_seq_len.now == advice.max_seq_len.advised
    assert advice.max_batch_size.now == advice.max_batch_size.advised
    (recommended,) = advice.recommendations
    assert recommended.backend == "keep"
    assert recommended.predicted.peak_allocated_bytes == made.memory.peak_allocated_bytes
    assert {s.backend for s in report("nanogpt", "sdpa", mode, "T4").sites} == {"math"}


def test_the_verdict_is_who_holds_most() -> None:
    attention = report("nanogpt", "eager", "train", "A100-80GB", B, 4096)
    assert attention.advice.verdict == "attention-bound"
    activations = report("nanogpt", "sdpa", "train", "A100-80GB", B, 4096)
    assert activations.advice.verdict == "activations-bound"
    wide = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    x = torch.zeros(1, 8, 2048)
    weights = fa_advisor.profile(wide, x, mode="infer")
    assert weights.advice.verdict == "weights-bound"
    # AdamW holds two copies, and the gradients count as the weights' own.
    assert fa_advisor.profile(wide, x, optimizer="none").advice.verdict == "weights-bound"
    none = weights.advice
    assert none.max_seq_len.now == none.max_seq_len.advised
    assert none.counterfactual_peak_bytes == weights.memory.peak_allocated_bytes


def test_sites_with_other_predictions_are_told_apart() -> None:
    """Nothing else differs between a site with a mask and one without, for a backend that takes
    masks; the peak that is predicted does."""
    plain = replace(samples.site(0), is_causal=False, has_mask=False)
    masked = replace(samples.site(1), is_causal=False, has_mask=True)
    situation = Situation(
        verdict="attention-bound", device=lookup("a100"), parameters=10**8, basis="modelled",
        peak_bytes=3 * 2**30, without_bytes=2**30, masked_bytes=2 * 2**30,
    )  # fmt: skip
    made = recommendations((plain, masked), situation, lambda site: ("efficient", {}))
    assert [each.sites for each in made] == [(plain.fqn,), (masked.fqn,)]
    assert [each.predicted.peak_allocated_bytes for each in made] == [2**30, 2 * 2**30]
