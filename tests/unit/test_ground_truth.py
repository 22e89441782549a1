"""The report against arithmetic: each model's attention bytes at the peak, derived by hand.

Legend: B batch, H heads, N length (M: the keys' where it differs), D head dim, C = H x D.
X is one [B, H, N, N] tensor, Z one [B, H, N, D] tensor, both in bytes of the model's dtype;
NN one [N, N] tensor of one-byte elements.

In training the highest moment is softmax's backward, mostly: P, dP, dS, and the product of dP and P
that CUDA makes for its kernel, 4X; in the backward of the product with V there are at most P, the
dropped-out P, dropout's mask and dP, 3.25X.

N is so much larger than D that attention dwarfs everything else, and each model is written so
that one moment of the step is the highest by at least Z. What autograd keeps (PyTorch 2.11+):
softmax its output; matmul both operands (as the [B x H, ...] copies that it makes of transposed
ones); masked_fill and where the boolean mask; CUDA's dropout a one-byte mask; a product with or
a sum of anything that needs no gradient: nothing. A node lets go of what it kept when it has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_advisor
from fa_advisor.records import AttentionSite
from fa_advisor.report import Report

B, H, N, D = 2, 4, 256, 16
C = H * D
NN = N * N
X = B * H * N * N * 4
Z = B * H * N * D * 4
NAMES = ("score", "prob", "mask", "dropout", "grad")


@dataclass(frozen=True)
class Expected:
    """Bytes at the peak, when that is, and what the site's backward read."""

    phase: str = "forward"
    score: float = 0
    prob: float = 0
    mask: float = 0
    dropout: float = 0
    grad: float = 0
    saved: float = 0

    def bytes(self) -> dict[str, int]:
        return {f"attention_{n}": int(getattr(self, n)) for n in NAMES if getattr(self, n)}


class Projected(nn.Module):
    """q, k, v of [B, N, C] as [B, H, N, D]; subclasses attend."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, C, bias=False)
        self.v = nn.Linear(C, C, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = x.shape[0]
        q, k, v = (f(x).view(batch, -1, H, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Plain(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q * D**-0.5) @ k.transpose(-2, -1), -1) @ v


# Inference: S and P while softmax runs (the product with V has P, V's copy and O: X + 2Z).
# Training: softmax's backward.
PLAIN = (
    Expected(score=X, prob=X),
    Expected("backward", prob=X, grad=3 * X, saved=X + 3 * Z),
)


class NanoGpt(nn.Module):
    """One block's attention as nanoGPT writes it where it has no flash."""

    def __init__(self, width: int = C) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(N, N)).view(1, 1, N, N))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        k = k.view(batch, length, H, width // H).transpose(1, 2)
        q = q.view(batch, length, H, width // H).transpose(1, 2)
        v = v.view(batch, length, H, width // H).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        return self.c_proj(y)


# Inference: masked_fill has the scaled S, its masked copy and the boolean mask of [1, 1, N, N];
# the scaling before it has two copies but no mask, softmax after it neither (the mask is gone).
# Training: softmax's backward; the boolean mask waits for masked_fill's.
NANOGPT = (
    Expected(score=2 * X, mask=NN),
    Expected("backward", prob=X, mask=NN, grad=3 * X, saved=2 * X + X / 4 + NN + 3 * Z),
)


class Einsum(Projected):
    """masked_fill by a triu mask; the unmasked scores keep their name while softmax runs."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(B, N, H, D) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
        future = torch.triu(torch.ones(N, N, dtype=torch.bool, device=x.device), 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        del scores
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


# Inference: softmax has scores, masked scores, P, and the mask.
EINSUM = (
    Expected(score=2 * X, prob=X, mask=NN),
    Expected("backward", prob=X, mask=NN, grad=3 * X, saved=X + NN + 3 * Z),
)


class Baddbmm(Projected):
    """Heads folded into the batch; the uninitialised addend is N x N memory too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q3, k3, v3 = (t.reshape(B * H, N, D) for t in (q, k, v))
        addend = torch.empty(B * H, N, N, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(addend, q3, k3.transpose(1, 2), beta=0, alpha=D**-0.5)
        weights = scores.softmax(-1)
        del addend, scores
        return torch.bmm(weights, v3)


# Inference: softmax has the addend, S and P. baddbmm keeps its two factors, not the addend.
BADDBMM = (
    Expected(score=2 * X, prob=X),
    Expected("backward", prob=X, grad=3 * X, saved=X + 3 * Z),
)


class Where(Projected):
    """where with the dtype's lowest value, and dropout; every step keeps its name."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        past = torch.tril(torch.ones(N, N, device=q.device)).bool()
        masked = torch.where(past, scores, torch.finfo(scores.dtype).min)
        weights = masked.softmax(-1)
        dropped = F.dropout(weights, 0.1, self.training)
        return dropped @ v


# The product with V has all that is named: scores, masked, weights, the boolean mask (the float
# ones and tril that it came from are gone), and in training dropped and dropout's mask.
WHERE = (
    Expected(score=2 * X, prob=X, mask=NN),
    Expected(
        "forward", score=2 * X, prob=2 * X, mask=NN, dropout=X / 4,
        saved=2 * X + X / 4 + NN + 3 * Z,
    ),
)  # fmt: skip


class AdditiveUpcast(Projected):
    """A -inf mask added in bf16, softmax in fp32, cast back: X and Z are bf16's here."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * D**-0.5
        future = torch.full((N, N), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        masked = scores + future
        weights = F.softmax(masked, -1, dtype=torch.float32).to(q.dtype)
        return weights @ v


# Softmax: scores and masked (X each), the fp32 cast of masked and the fp32 P (2X each), the mask
# (2 bytes an element). Its backward has fp32 P, dP, their product and dS (2X each). Kept: fp32 P by
# softmax (2X), its bf16 cast by the product (X).
X16, Z16 = X // 2, Z // 2
ADDITIVE = (
    Expected(score=4 * X16, prob=2 * X16, mask=2 * NN),
    Expected("backward", prob=2 * X16, grad=6 * X16, saved=3 * X16 + 3 * Z16),
)


class HalfUpcast(Projected):
    """From fp16 to an fp32 softmax CUDA's kernel casts on the fly: no fp32 copy of S."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        weights = F.softmax(scores, -1, dtype=torch.float32)
        return weights.to(q.dtype) @ v


# The product with V has S (X), fp32 P (2X), fp16 P (X), V's copy and O. Training: softmax's
# backward has fp32 P, dP and their product (2X each) and the fp16 dS (X). Kept: fp32 P, fp16 P.
HALF = (
    Expected(score=X16, prob=3 * X16),
    Expected("backward", prob=2 * X16, grad=5 * X16, saved=3 * X16 + 3 * Z16),
)


class ByHand(Projected):
    """Softmax by exp and sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v


# Inference: the product with V has S, E = exp(S - max) and P, all named or needed, V's copy and O;
# exp itself has S, S - max and E, and less by 2Z.
# Training: the quotient's backward works out the divisor's gradient first, -dP * ((E / s) / s):
# S (kept by amax), E (by exp and the quotient), dP, -dP, two quotients, their product. P was kept
# too, but the product with V has let it go by then.
BY_HAND = (
    Expected(score=X, prob=2 * X),
    Expected("backward", score=X, prob=X, grad=5 * X, saved=3 * X + 3 * Z),
)


class Weights(nn.Module):
    """nn.MultiheadAttention, asked for its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(C, H, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mha(x, x, x)[0]
        return out


# bmm of [B x H, N, D] views, so nothing is copied but the scaled q: K and V are views of one
# packed projection [3, N, B, C], 3Z, which is kept as one storage.
# Inference: softmax's S and P (the mean over heads later has P and X / H).
# Training: as nanoGPT's, without its mask.
MHA_WEIGHTS = (
    Expected(score=X, prob=X),
    Expected("backward", prob=X, grad=3 * X, saved=2 * X + X / 4 + Z + 3 * Z),
)


class NoWeights(Weights):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mha(x, x, x, need_weights=False)[0]
        return out


# fp32 on an A100: the memory-efficient kernel. It keeps q, k, v (one packed projection), O, the
# LSE in fp32 [B, H, N], and the two 8-byte halves of the random state.
MHA_FUSED = (
    Expected(),
    Expected("backward", saved=3 * Z + Z + B * H * N * 4 + 16),
)


class MathSdpa(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)


class Windows(Projected):
    """Swin: B images of W windows of n tokens, a learned bias of [H, n, n], a shift mask."""

    W, n = 32, 64

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(225, H))
        index = torch.arange(self.n * self.n) % 225
        self.register_buffer("index", index)
        self.register_buffer("shift", torch.zeros(self.W, self.n, self.n))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        W, n = self.W, self.n
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index].view(n, n, H).permute(2, 0, 1).contiguous()
        biased = scores + bias.unsqueeze(0)
        shifted = biased.view(B, W, H, n, n) + self.shift.unsqueeze(1).unsqueeze(0)
        weights = shifted.view(B * W, H, n, n).softmax(-1)
        return weights @ v


# The product with V has all that is named: scores, biased, shifted, P; the bias [H, n, n] (the
# gathered [n x n, H] it was copied from is gone; the shift mask is a buffer).
WX = B * Windows.W * H * Windows.n**2 * 4
WZ = B * Windows.W * H * Windows.n * D * 4
WBIAS = H * Windows.n**2 * 4
WINDOWS = (
    Expected(score=3 * WX, prob=WX, mask=WBIAS),
    Expected("forward", score=3 * WX, prob=WX, mask=WBIAS, saved=WX + 3 * WZ),
)


class Cross(Projected):
    """Lq != Lk: the keys come from a memory of M tokens."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q(x).view(B, -1, H, D).transpose(1, 2)
        k = self.k(memory).view(B, -1, H, D).transpose(1, 2)
        v = self.v(memory).view(B, -1, H, D).transpose(1, 2)
        return torch.softmax((q * D**-0.5) @ k.transpose(-2, -1), -1) @ v


# As Plain, with [B, H, N, M]; Q's copy is of N tokens, K's and V's of M.
M = 384
CX = B * H * N * M * 4
CZ = B * H * M * D * 4
CROSS = (
    Expected(score=CX, prob=CX),
    Expected("backward", prob=CX, grad=3 * CX, saved=CX + Z + 2 * CZ),
)


class Single(nn.Module):
    """3-D, one head of C features: bmm takes the projections as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(C, C)
        self.k = nn.Linear(C, C)
        self.v = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x) * C**-0.5, self.k(x), self.v(x)
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)


# As Plain with one head: [B, L, L]. The scaled q, k and v are kept themselves.
L = 1024
SX = B * L * L * 4
SZ = B * L * C * 4
SINGLE = (
    Expected(score=SX, prob=SX),
    Expected("backward", prob=SX, grad=3 * SX, saved=SX + 3 * SZ),
)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, C, dtype=dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[Expected, Expected]]] = {
    "plain": (Plain, tokens(B, N), PLAIN),
    "nanogpt": (NanoGpt, tokens(B, N), NANOGPT),
    "einsum": (Einsum, tokens(B, N), EINSUM),
    "baddbmm": (Baddbmm, tokens(B, N), BADDBMM),
    "where": (Where, tokens(B, N), WHERE),
    "additive": (lambda: AdditiveUpcast().bfloat16(), tokens(B, N, dtype=torch.bfloat16), ADDITIVE),
    "half": (lambda: HalfUpcast().half(), tokens(B, N, dtype=torch.float16), HALF),
    "by_hand": (ByHand, tokens(B, N), BY_HAND),
    "mha_weights": (Weights, tokens(B, N), MHA_WEIGHTS),
    "mha_fused": (NoWeights, tokens(B, N), MHA_FUSED),
    "windows": (Windows, tokens(B * Windows.W, Windows.n), WINDOWS),
    "cross": (Cross, (tokens(B, N), tokens(B, M)), CROSS),
    "single": (Single, tokens(B, L), SINGLE),
}


def check(report: Report, expected: Expected) -> AttentionSite:
    memory = report.memory
    found = {k: v for k, v in memory.categories.items() if k.startswith("attention_")}
    assert memory.peak_phase == expected.phase
    assert found == expected.bytes()
    (site,) = report.sites
    assert site.attention_bytes_at_peak == sum(expected.bytes().values())
    assert site.saved_for_backward_bytes == int(expected.saved)
    assert sum(memory.categories.values()) == memory.peak_allocated_bytes
    assert memory.unattributed_bytes == 0
    return site


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_at_the_peak(name: str, mode: Any) -> None:
    build, inputs, expected = CASES[name]
    report = fa_advisor.profile(build(), inputs, mode=mode, optimizer="none", gpu="A100-80GB")
    check(report, expected[mode == "train"])


def test_layers_add_what_each_has_kept() -> None:
    """nanoGPT twice: at the peak, in the second's backward, the first has what it kept."""
    model = nn.Sequential(NanoGpt(), NanoGpt())
    report = fa_advisor.profile(model, tokens(B, N), mode="train", optimizer="none")
    first, second = report.sites
    kept = 2 * X + X // 4 + NN
    assert (first.fqn, second.fqn) == ("0", "1")
    assert first.attention_bytes_at_peak == kept
    assert second.attention_bytes_at_peak == 4 * X + NN
    saved = int(NANOGPT[1].saved)
    assert first.saved_for_backward_bytes == second.saved_for_backward_bytes == saved
    categories = {m.fqn: m.categories for m in report.modules}
    assert categories["0"]["attention_prob"] == X
    assert categories["0.attn_dropout"] == {"attention_prob": X, "attention_dropout": X // 4}
    assert "attention_grad" not in categories["0"]
    # dropout's backward made dP
    assert sum(c.get("attention_grad", 0) for c in categories.values()) == 3 * X


def test_dropout_keeps_a_full_mask_on_the_cpu() -> None:
    """There dropout is a product with noise in the input's dtype: X bytes, not X / 4."""
    model = NanoGpt()
    with fa_advisor.record(model) as recording:
        model(tokens(B, N)).mean().backward()
    check(
        recording.report,
        Expected("backward", prob=2 * X, dropout=X, mask=NN, grad=X, saved=3 * X + NN + 3 * Z),
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_on_the_math_backend(is_causal: bool) -> None:
    """Scaled Q and K; S, which the causal mask is added to in place; softmax; dropout.

    Training: softmax's backward. The additive mask isn't kept: a sum keeps neither of its terms.
    Kept besides: copies of the scaled q, the scaled k, and v.
    """

    class Model(MathSdpa):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(
                    q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=is_causal
                )

    report = fa_advisor.profile(Model(), tokens(B, N), mode="train", optimizer="none")
    site = check(
        report,
        Expected("backward", prob=X, grad=3 * X, saved=2 * X + X / 4 + 3 * Z),
    )
    assert (site.form, site.backend) == ("sdpa", "math")


def test_sdpa_on_the_math_backend_looks_for_masked_rows() -> None:
    """Its softmax holds S == -inf, a byte an element, beside S and P until it is done."""
    report = fa_advisor.profile(MathSdpa(), tokens(B, N), mode="infer")
    assert report.sites[0].attention_bytes_at_peak == 2 * X + X // 4


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_llama_eager(mode: Any) -> None:
    """transformers' eager attention in bf16: KV heads repeated, softmax in fp32 and cast back.

    X is [B, H, N, N] in bf16, Z [B, H, N, D]. S is scaled, then masked; both names go as the next
    is made, so softmax has the masked S (X), its fp32 cast (2X) and the fp32 P (2X).
    Inference: that, and the mask that the model made, [B, 1, N, N] in bf16.
    Training, second layer's softmax backward: fp32 P, dP, their product and dS (2X each), and what
    the first layer kept: fp32 P (2X) and its bf16 cast (X). The mask went when forward returned.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=C, intermediate_size=C, num_hidden_layers=2,
        num_attention_heads=H, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(B, N, dtype=torch.long)
    report = fa_advisor.profile(
        model, {"input_ids": ids, "labels": ids, "use_cache": False}, mode=mode, optimizer="none"
    )
    x, z = X // 2, Z // 2
    expected = (
        {"attention_score": 3 * x, "attention_prob": 2 * x, "attention_mask": B * NN * 2}
        if mode == "infer"
        else {"attention_prob": 5 * x, "attention_grad": 6 * x}
    )
    categories = report.memory.categories
    assert {k: v for k, v in categories.items() if k.startswith("attention_")} == expected
    assert [s.fqn for s in report.sites] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    for site in report.sites:
        # fp32 P and its bf16 cast; q, and k and v as they are after the repeat
        assert site.saved_for_backward_bytes == (0 if mode == "infer" else 3 * x + 3 * z)
        assert (site.num_heads, site.num_kv_heads, site.head_dim) == (H, 2, D)
        assert site.is_causal and site.form == "eager"
