"""What is attention and what isn't, however it is written: sites, shapes, flags and source lines.

The line that makes S carries the comment `# S` in each form below.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fa_advisor
from fa_advisor.records import AttentionSite
from fa_advisor.report import Report

B, H, N, D = 2, 4, 32, 16
C = H * D
ATTENTION = (
    "attention_score",
    "attention_prob",
    "attention_mask",
    "attention_dropout",
    "attention_grad",
)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, N)), C)


class Projected(nn.Module):
    def __init__(self, kv_heads: int = H) -> None:
        super().__init__()
        self.kv = kv_heads
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, kv_heads * D, bias=False)
        self.v = nn.Linear(C, kv_heads * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, H, D).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv, D).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv, D).transpose(1, 2)
        return self.attend(q, k, v).transpose(1, 2).reshape(batch, length, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


# -- attention ---------------------------------------------------------------------------------


class ScaleAfter(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v  # S


class ScaleBefore(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * D**-0.5, k.mT)  # S
        return scores.softmax(-1).matmul(v)


class ScaledInPlace(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        scores *= D**-0.5
        scores.masked_fill_(torch.ones(N, N, dtype=torch.bool).triu_(1), -1e9)
        return scores.softmax(-1) @ v


class Einsum(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k)  # S
        future = torch.triu(torch.ones(N, N, dtype=torch.bool), 1)
        return torch.einsum(
            "bhij,bhjd->bhid", scores.masked_fill(future, -torch.inf).softmax(-1), v
        )


class Baddbmm(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.reshape(-1, N, D) for t in (q, k, v))
        bias = torch.full((N, N), -1e9).triu(1).expand(B * H, N, N)
        scores = torch.baddbmm(bias, q, k.mT, alpha=D**-0.5)  # S
        return torch.bmm(scores.softmax(-1), v).view(B, H, N, D)


class WherePositions(Projected):
    """A causal mask by comparing positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        at = torch.arange(N)
        scores = torch.where(at[:, None] >= at[None, :], scores, torch.finfo(scores.dtype).min)
        return F.dropout(scores.softmax(-1), 0.2, self.training) @ v


class Additive(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * D**-0.5 + torch.full((N, N), -torch.inf).triu(1)  # S
        return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


class PaddingMask(Projected):
    """Keys masked by an argument-like mask [B, 1, 1, N]: a mask, but not a causal one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padding = torch.zeros(B, 1, 1, N)
        scores = q @ k.mT + padding  # S
        return scores.softmax(-1) @ v


class HandWrittenSoftmax(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v


class NormalisedAfter(Projected):
    """The division by the sum comes after the product with V."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).exp()  # S
        return (weights @ v) / weights.sum(-1, keepdim=True)


class Softcap(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        scores = torch.tanh(scores / 50) * 50 + torch.full((N, N), -1e9).triu(1)
        return scores.softmax(-1) @ v


class Sinks(Projected):
    """gpt-oss: a learned logit beside the scores, dropped after softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        scores = torch.cat([scores, self.sinks.view(1, H, 1, 1).expand(B, H, N, 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v


class TalkingHeads(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(H, H)
        self.after = nn.Linear(H, H)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT  # S
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return weights @ v


class RelativeShift(Projected):
    """Transformer-XL: content scores plus shifted position scores."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(C, C, bias=False)
        self.u = nn.Parameter(torch.zeros(H, 1, D))
        self.w = nn.Parameter(torch.zeros(H, 1, D))
        self.register_buffer("positions", torch.randn(N, C))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        r = self.r(self.positions).view(N, H, D).transpose(0, 1)
        content = (q + self.u) @ k.mT  # S
        position = (q + self.w) @ r.mT
        padded = F.pad(position, (1, 0)).view(B, H, N + 1, N)
        scores = content + padded[:, :, 1:].reshape(B, H, N, N)
        return (scores * D**-0.5).softmax(-1) @ v


class Disentangled(Projected):
    """DeBERTa: content to content, content to position and position to content, by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = nn.Embedding(2 * N, C)
        at = torch.arange(N)
        self.register_buffer("index", (at[:, None] - at[None, :] + N))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = self.relative.weight
        pos_k = self.k(table).view(2 * N, H, D).transpose(0, 1)
        pos_q = self.q(table).view(2 * N, H, D).transpose(0, 1)
        scores = q @ k.mT  # S
        index = self.index.expand(B, H, N, N)
        scores = scores + (q @ pos_k.mT).gather(-1, index)
        scores = scores + (k @ pos_q.mT).gather(-1, index).mT
        return (scores / math.sqrt(3 * D)).softmax(-1) @ v


class Alibi(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(N)
        distance = (at[None, :] - at[:, None]).abs() * -0.5
        scores = q @ k.mT + distance  # S
        return scores.softmax(-1) @ v


class SingleHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)  # S


class Unbatched(SingleHead):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[0]).chunk(3, -1)
        return torch.softmax(q @ k.T, -1) @ v  # S


class Cross(Projected):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q(x).view(B, -1, H, D).transpose(1, 2)
        k = self.k(memory).view(B, -1, H, D).transpose(1, 2)
        v = self.v(memory).view(B, -1, H, D).transpose(1, 2)
        return torch.softmax(q @ k.mT, -1) @ v  # S


class Transposed(Projected):
    """K Q^T, softmax over the first of the two lengths, V^T P."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = k @ q.mT  # S
        return (v.mT @ scores.softmax(-2)).mT


class Sagan(nn.Module):
    """Attention over pixels, projections by 1 x 1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
        weights = torch.bmm(q.transpose(1, 2), k).softmax(-1)  # S
        return torch.bmm(v, weights.transpose(1, 2)).view_as(x)


class RepeatInterleave(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(H // self.kv, 1), v.repeat_interleave(H // self.kv, 1)
        return torch.softmax(q @ k.mT, -1) @ v  # S


class ExpandReshape(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def repeat(t: Tensor) -> Tensor:
            wide = t[:, :, None].expand(B, self.kv, H // self.kv, N, D)
            return wide.reshape(B, H, N, D)

        return torch.softmax(q @ repeat(k).mT, -1) @ repeat(v)  # S


class GroupedSdpa(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # S


class GroupedEinsum(Projected):
    """Query heads that share K are folded into the queries: [B, KV, G x N, D] by [B, KV, D, N]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.view(B, self.kv, H // self.kv, N, D)
        scores = torch.einsum("bkgid,bkjd->bkgij", q, k)  # S
        weights = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -1e9).softmax(-1)
        return torch.einsum("bkgij,bkjd->bkgid", weights, v).reshape(B, H, N, D)


class MultiQueryEinsum(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.squeeze(1), v.squeeze(1)
        scores = torch.einsum("bhid,bjd->bhij", q, k)  # S
        weights = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -1e9).softmax(-1)
        return torch.einsum("bhij,bjd->bhid", weights, v)


class MultiQuery(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v  # S


class IntoBuffer(Projected):
    """S into a buffer of the user's by `out=`, without gradients."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(B, N, H, D).transpose(1, 2).reshape(-1, N, D)
            for f in (self.q, self.k, self.v)
        )
        scores = q.new_empty(B * H, N, N)  # S
        torch.bmm(q, k.mT, out=scores)
        return torch.bmm(scores.softmax(-1), v)


class Sdpa(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # S


class Chunked(Projected):
    """Queries in chunks of N / 4: one site, four calls."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for part in q.split(N // 4, 2):
            out.append(torch.softmax(part @ k.mT, -1) @ v)  # S
        return torch.cat(out, 2)


class Checkpointed(nn.Module):
    """The module's forward runs again in backward: one call, its bytes those of the second run."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)  # a reentrant checkpoint needs an input with a gradient
        self.attention = ScaleAfter()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = checkpoint(self.attention, x, use_reentrant=self.use_reentrant)
        return out


class CheckpointedCore(Checkpointed):
    """Not a module but a function of q, k and v is run again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.first(x).view(B, N, H, D).transpose(1, 2) for _ in range(3))
        out: Tensor = checkpoint(self.core, q, k, v, use_reentrant=self.use_reentrant)
        return out

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v  # S


class Luong(nn.Module):
    """A decoder step's hidden state over the encoder's outputs: attention with one query."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(C, C, batch_first=True)
        self.project = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, _) = self.encoder(x)
        query = self.project(hidden[-1]).unsqueeze(1)
        weights = torch.bmm(query, outputs.transpose(1, 2)).softmax(-1)  # S
        return torch.bmm(weights, outputs)


class KvCache(Projected):
    """A decode step: one query over a cache of N keys."""

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        q = self.q(x).view(B, 1, H, D).transpose(1, 2)
        k = torch.cat([past_k, self.k(x).view(B, 1, H, D).transpose(1, 2)], 2)
        v = torch.cat([past_v, self.v(x).view(B, 1, H, D).transpose(1, 2)], 2)
        return torch.softmax(q @ k.mT, -1) @ v  # S


class Latents(Projected):
    """Perceiver: learned latents, projected, over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, C))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.latents).view(1, 8, H, D).transpose(1, 2).expand(B, -1, -1, -1)
        k = self.k(x).view(B, N, H, D).transpose(1, 2)
        v = self.v(x).view(B, N, H, D).transpose(1, 2)
        return torch.softmax(q @ k.mT, -1) @ v  # S


class Gated(Projected):
    """Evoformer: a learned pair bias on S and a gate on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)
        self.pair = nn.Linear(8, H, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.pair(torch.zeros(B, N, N, 8)).permute(0, 3, 1, 2)
        scores = q @ k.mT + bias  # S
        return torch.sigmoid(self.gate(q)) * (scores.softmax(-1) @ v)


class SquaredDistance(Projected):
    """Minus |q - k|^2 by a product; |k|^2 is a bias over the keys, as attn_mask would carry it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = 2 * q @ k.mT - k.square().sum(-1)[:, :, None, :]  # S
        return scores.softmax(-1) @ v


class PixelLogits(nn.Module):
    """A non-local block with embedded Gaussian, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(16, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).flatten(2).permute(0, 2, 1) for f in (self.theta, self.phi, self.g))
        return torch.matmul(F.softmax(torch.matmul(q, k.permute(0, 2, 1)), -1), v)  # S


def pixels() -> Tensor:
    return torch.randn(B, 16, 8, 8)


# batch, heads, KV heads, Lq, Lk, head dim
SAME = (B, H, H, N, N, D)
GROUPED = (B, H, 2, N, N, D)
FOLDED = (B * H, 1, 1, N, N, D)
Flags = dict[str, Any]
CAUSAL: Flags = {"is_causal": True, "has_mask": True}

FORMS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], Flags]] = {
    "scale after": (ScaleAfter, tokens(), SAME, {}),
    "scale before": (ScaleBefore, tokens(), SAME, {}),
    "in place": (ScaledInPlace, tokens(), SAME, CAUSAL),
    "einsum": (Einsum, tokens(), SAME, CAUSAL),
    "baddbmm": (Baddbmm, tokens(), FOLDED, CAUSAL),
    "where": (WherePositions, tokens(), SAME, {**CAUSAL, "dropout_p": 0.2}),
    "additive": (Additive, tokens(), SAME, CAUSAL),
    "padding": (PaddingMask, tokens(), SAME, {"has_mask": True}),
    "softmax by hand": (HandWrittenSoftmax, tokens(), SAME, {}),
    "normalised after": (NormalisedAfter, tokens(), SAME, {}),
    "softcap": (Softcap, tokens(), SAME, CAUSAL),
    "sinks": (Sinks, tokens(), SAME, {}),
    "talking heads": (TalkingHeads, tokens(), SAME, {}),
    "relative shift": (RelativeShift, tokens(), SAME, {}),
    "disentangled": (Disentangled, tokens(), SAME, {}),
    "alibi": (Alibi, tokens(), SAME, {"has_mask": True}),
    "single head": (SingleHead, tokens(), (B, 1, 1, N, N, C), {}),
    "unbatched": (Unbatched, tokens(), (1, 1, 1, N, N, C), {}),
    "cross": (Cross, (tokens(), tokens(B, 48)), (B, H, H, N, 48, D), {}),
    "transposed": (Transposed, tokens(), SAME, {}),
    "sagan": (Sagan, pixels(), (B, 1, 1, 64, 64, 4), {}),
    "repeat_interleave": (lambda: RepeatInterleave(2), tokens(), GROUPED, {}),
    "expand, reshape": (lambda: ExpandReshape(2), tokens(), GROUPED, {}),
    "grouped einsum": (lambda: GroupedEinsum(2), tokens(), GROUPED, CAUSAL),
    "multi-query einsum": (lambda: MultiQueryEinsum(1), tokens(), (B, H, 1, N, N, D), CAUSAL),
    "multi-query": (lambda: MultiQuery(1), tokens(), (B, H, 1, N, N, D), {}),
    "enable_gqa": (lambda: GroupedSdpa(2), tokens(), GROUPED, {"form": "sdpa"}),
    "sdpa": (Sdpa, tokens(), SAME, {"form": "sdpa", "is_causal": True}),
    "chunked": (Chunked, tokens(), (B, H, H, N // 4, N, D), {"calls": 4}),
    "luong": (Luong, tokens(), (B, 1, 1, 1, N, C), {}),
    "decode": (
        KvCache, (tokens(B, 1), torch.randn(B, H, N, D), torch.randn(B, H, N, D)),
        (B, H, H, 1, N + 1, D), {},
    ),
    "pair bias, gated": (Gated, tokens(), SAME, {"has_mask": True}),
    "squared distance": (SquaredDistance, tokens(), SAME, {"has_mask": True}),
    "non-local": (PixelLogits, pixels(), (B, 1, 1, 64, 64, 8), {}),
    "latents": (Latents, tokens(), (B, H, H, 8, N, D), {}),
}  # fmt: skip


def shape(site: AttentionSite) -> tuple[int, ...]:
    return (
        site.batch, site.num_heads, site.num_kv_heads, site.seqlen_q, site.seqlen_k, site.head_dim
    )  # fmt: skip


def line_of_s(model: nn.Module) -> str:
    """`test_attention_forms.py:88`: where the model's class, or the one it extends, makes S."""
    for cls in type(model).__mro__:
        if cls.__module__ != type(model).__module__:
            continue
        lines, start = inspect.getsourcelines(cls)
        for offset, text in enumerate(lines):
            if text.rstrip().endswith("# S"):
                return f"test_attention_forms.py:{start + offset}"
    raise AssertionError("no line is marked")


def attention_bytes(report: Report) -> int:
    return sum(report.memory.categories.get(name, 0) for name in ATTENTION)


# -- not attention -----------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Classifier(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class VocabularySoftmax(nn.Module):
    """[vocab x vocab] similarities of an embedding's rows, averaged back over the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, C)

    def forward(self, x: Tensor) -> Tensor:
        w = self.embedding.weight
        return (w @ w.T).softmax(-1) @ w + x.mean()


class TiedHead(nn.Module):
    """Logits of a tied embedding, and a soft embedding of their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, C)
        self.mix = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.mix(x) @ self.embedding.weight.T
        return logits.softmax(-1) @ self.embedding.weight


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.encode = nn.Linear(C, 1), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        weights = self.score(y).softmax(1)
        return torch.bmm(weights.transpose(1, 2), y).squeeze(1) + (weights * y).sum(1)


class LearnedQueryPooling(Pooling):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        weights = (y @ self.query / math.sqrt(C)).softmax(-1)
        return (weights.unsqueeze(1) @ y).squeeze(1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 4), nn.Parameter(torch.randn(4, C, C))

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        return torch.einsum("bne,bned->bnd", p, torch.einsum("bnc,ecd->bned", x, self.experts))


class SoftMoe(nn.Module):
    """Dispatch and combine by a softmax over slots and over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.expert = nn.Parameter(torch.randn(8, C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.slots.T
        y = self.expert(logits.softmax(1).mT @ x)
        return logits.softmax(-1) @ y


class Contrastive(nn.Module):
    """CLIP's loss: similarities of two batches, cross entropy both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).flatten(0, 1), self.b(x).flatten(0, 1)
        logits, target = a @ b.T, torch.arange(len(a))
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


class LinearAttention(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


class SoftmaxedQk(Projected):
    """Efficient attention: softmax over q's features and k's tokens, no N x N."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class GatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Neighbours(nn.Module):
    """Softmax over negative distances (cdist), averaged labels: no product makes the distances."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        return torch.softmax(-(y.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1), -1)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(C, C, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x).softmax(-1)


class Gram(nn.Module):
    """Style transfer's Gram matrix: a product of activations, no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2)
        return y @ y.mT / y.shape[-1]


class Factorised(nn.Module):
    """A product of activations whose softmax is returned, never met by values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) @ self.b(x).mT).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(C, C, batch_first=True), nn.Linear(C, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0]).log_softmax(-1)


NOT_ATTENTION: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (Mlp, tokens()),
    "classifier": (Classifier, tokens()),
    "vocabulary": (VocabularySoftmax, tokens()),
    "tied head": (TiedHead, tokens()),
    "pooling": (Pooling, tokens()),
    "learned query": (LearnedQueryPooling, tokens()),
    "router": (Router, tokens()),
    "soft moe": (SoftMoe, tokens()),
    "contrastive": (Contrastive, tokens()),
    "linear attention": (LinearAttention, tokens()),
    "efficient attention": (SoftmaxedQk, tokens()),
    "gated unit": (GatedUnit, tokens()),
    "neighbours": (Neighbours, tokens()),
    "bilinear": (Bilinear, tokens()),
    "gram": (Gram, pixels()),
    "factorised": (Factorised, tokens()),
    "recurrent": (Recurrent, tokens()),
}


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_is_not_attention(name: str, mode: Any) -> None:
    build, inputs = NOT_ATTENTION[name]
    report = fa_advisor.profile(build(), inputs, mode=mode, optimizer="none")
    assert report.sites == ()
    assert attention_bytes(report) == 0
    assert sum(t.attention_bytes for t in report.memory.timeline) == 0


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", FORMS)
def test_is_attention(name: str, mode: Any) -> None:
    build, inputs, expected, flags = FORMS[name]
    model = build()
    report = fa_advisor.profile(model, inputs, mode=mode, optimizer="none", gpu="A100-80GB")
    (site,) = report.sites
    assert shape(site) == expected
    assert site.source == line_of_s(model)
    wanted = {
        "form": "eager", "calls": 1, "is_causal": False, "has_mask": False, "dropout_p": 0.0
    } | flags  # fmt: skip
    if mode == "infer":
        wanted["dropout_p"] = 0.0
    assert {name: getattr(site, name) for name in wanted} == wanted
    assert site.attention_bytes_at_peak == attention_bytes(report)
    if mode == "infer":
        assert site.saved_for_backward_bytes == 0
    else:
        assert site.saved_for_backward_bytes > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention() -> None:
    class Flex(Projected):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v)  # S

    report = fa_advisor.profile(Flex(), tokens(), mode="infer")
    (site,) = report.sites
    assert (site.form, site.backend, shape(site)) == ("flex", "flex", SAME)
    assert site.source == line_of_s(Flex())


def test_scores_into_a_buffer() -> None:
    report = fa_advisor.profile(IntoBuffer(), tokens(), mode="infer")
    (site,) = report.sites
    assert shape(site) == FOLDED and not site.has_mask
    assert site.source == line_of_s(IntoBuffer())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_module_is_one_call(use_reentrant: bool) -> None:
    report = fa_advisor.profile(Checkpointed(use_reentrant), tokens(), optimizer="none")
    (site,) = report.sites
    assert (site.fqn, shape(site), site.calls) == ("attention", SAME, 1)
    assert site.source == line_of_s(ScaleAfter())
    # The second run keeps what any run keeps: P, and copies of q, k and v.
    assert site.saved_for_backward_bytes == 4 * (B * H * N * N + 3 * B * H * N * D)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_is_one_call(use_reentrant: bool) -> None:
    report = fa_advisor.profile(CheckpointedCore(use_reentrant), tokens(), optimizer="none")
    (site,) = report.sites
    assert (site.fqn, shape(site), site.calls) == ("", SAME, 1)
    assert site.source == line_of_s(CheckpointedCore(use_reentrant))
    assert site.saved_for_backward_bytes == 4 * (B * H * N * N + 3 * B * H * N * D)
