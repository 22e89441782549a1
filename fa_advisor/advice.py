"""What to do about a peak: who owns it, what it would be without attention's N x N memory, and
which backend each site should use. Pure: facts in, advice out.

Rules of thumb (length under 512, 512 to 1,024, over 1,024; small models; weights that dominate)
follow the article that the project grew from; each is given as a reason where it was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fa_advisor.attribution.limits import largest_scale, moments
from fa_advisor.attribution.peak import Counterfactual, Peak, line, owner
from fa_advisor.attribution.ledger import StepLog
from fa_advisor.records import (
    ATTENTION_CATEGORIES,
    Advice,
    AttentionSite,
    Basis,
    DeviceSpec,
    Limit,
    Predicted,
    Recommendation,
    TileConfig,
    Verdict,
)

SHORT, LONG = 512, 1024
SMALL_MODEL = 1_000_000_000
FUSED = frozenset(("flash", "efficient", "cudnn", "flash_attn", "flex", "fused", "native"))

# The fused backend that SDPA would take for a site on the GPU, and the codes against the others;
# "math" where none fits.
Eligible = Callable[[AttentionSite], tuple[str, dict[str, tuple[str, ...]]]]
BestTile = Callable[[AttentionSite], TileConfig | None]


@dataclass(frozen=True)
class Facts:
    """What the advice is made from."""

    step: StepLog
    peak: Peak
    peak_bytes: int
    counterfactual: Counterfactual
    sites: tuple[AttentionSite, ...]
    device: DeviceSpec
    basis: Basis
    parameters: int
    seq_len: int | None
    batch_size: int | None
    unseen_bytes: int  # measured peak beyond what the op stream explains


def shares(peak: Peak) -> dict[Verdict, int]:
    """The peak's bytes by who could be blamed for them."""
    c = peak.categories

    def total(*names: str) -> int:
        return sum(c.get(name, 0) for name in names)

    return {
        "attention-bound": total(*ATTENTION_CATEGORIES),
        "weights-bound": total("parameter", "buffer", "gradient"),
        "activations-bound": total("activation", "temporary", "input", "kv_cache"),
        "optimizer-bound": total("optimizer_state"),
    }


def advise(facts: Facts, eligible: Eligible, best_tile: BestTile) -> Advice:
    """The verdict, the counterfactual, the limits and a recommendation for each kind of site."""
    owners = shares(facts.peak)
    verdict = max(owners, key=lambda name: owners[name])
    without = facts.counterfactual.peak_bytes + facts.unseen_bytes
    return Advice(
        verdict=verdict,
        summary=_summary(facts, verdict, owners, without),
        counterfactual_peak_bytes=without,
        max_seq_len=_limit(facts, facts.seq_len, quadratic=True),
        max_batch_size=_limit(facts, facts.batch_size, quadratic=False),
        recommendations=_recommendations(facts, verdict, without, eligible, best_tile),
    )


def _summary(facts: Facts, verdict: Verdict, owners: dict[Verdict, int], without: int) -> str:
    peak, attention = facts.peak_bytes, owners["attention-bound"]
    owner_words = {
        "attention-bound": "Attention's N x N intermediates own",
        "weights-bound": "Weights and their gradients own",
        "activations-bound": "Activations other than attention's own",
        "optimizer-bound": "Optimizer state owns",
    }[verdict]
    text = f"{owner_words} {_size(owners[verdict])} of the {_size(peak)} peak ({owners[verdict] / max(1, peak):.1%})."
    if not facts.sites:
        return f"{text} No attention was found."
    if verdict != "attention-bound":
        if attention:
            text += f" Attention's N x N intermediates: {_size(attention)} ({attention / max(1, peak):.1%})."
        else:
            text += " No N x N intermediate is alive at the peak."
    if without < peak:
        where = facts.counterfactual
        text += f" Without them the peak would be {_size(without)}, in {where.phase}"
        if where.largest is not None:
            shape = "x".join(map(str, where.largest.shape))
            at = owner(where.largest) or line(where.largest.source) or "the model itself"
            text += f", where the largest block is {at}'s {where.largest.op} [{shape}] {where.largest.dtype}"
        text += "."
    return text


def _size(nbytes: int) -> str:
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB"


def _limit(facts: Facts, size: int | None, *, quadratic: bool) -> Limit:
    """The largest length or batch that fits the GPU: the step as it ran, and without N x N."""
    if not size:
        return Limit(now=None, advised=None)
    budget = facts.device.total_memory_bytes - facts.unseen_bytes

    def largest(with_attention: bool) -> int | None:
        scale = largest_scale(
            moments(facts.step, with_attention=with_attention), budget, quadratic=quadratic
        )
        return None if scale is None or math.isinf(scale) else int(scale * size)

    return Limit(now=largest(True), advised=largest(False))


def _recommendations(
    facts: Facts, verdict: Verdict, without: int, eligible: Eligible, best_tile: BestTile
) -> tuple[Recommendation, ...]:
    groups: dict[tuple[object, ...], list[Recommendation]] = {}
    for site in facts.sites:
        made = _recommend(site, facts, verdict, without, eligible, best_tile)
        key = (made.backend, made.tile, made.reasons, tuple(made.rejections.items()))
        groups.setdefault(key, []).append(made)
    return tuple(
        Recommendation(
            sites=tuple(name for r in group for name in r.sites),
            backend=group[0].backend,
            tile=group[0].tile,
            predicted=group[0].predicted,
            basis=group[0].basis,
            reasons=group[0].reasons,
            rejections=group[0].rejections,
        )
        for group in groups.values()
    )


def _recommend(
    site: AttentionSite,
    facts: Facts,
    verdict: Verdict,
    without: int,
    eligible: Eligible,
    best_tile: BestTile,
) -> Recommendation:
    backend, rejections = eligible(site)
    reasons: list[str] = []
    length = max(site.seqlen_q, site.seqlen_k)
    keep = True
    if site.backend == "native":
        reasons.append("runs in nn.MultiheadAttention's inference fast path, one operator that hides its own memory")
    elif site.backend in FUSED:
        reasons.append(f"runs on the fused {site.backend} backend, which keeps neither S nor P")
        if site.attention_bytes_at_peak:
            reasons.append("the N x N memory it has is its mask or bias")
    elif backend == "math":
        reasons.append("no fused backend takes this call on this GPU")
    else:
        keep = _length_rule(length, verdict, facts.device, reasons)
        if not keep and site.form == "eager":
            reasons.append(_how(site, backend))
        if not keep and site.form == "mha":
            reasons.append("call nn.MultiheadAttention with need_weights=False where the weights are unused")
    if site.backend not in FUSED:
        if facts.parameters < SMALL_MODEL:
            reasons.append("a model of under 1 B parameters: memory is rarely short, so the gain is in length and batch")
        if verdict == "weights-bound":
            reasons.append("the weights own the peak: removing attention's intermediates gains little")
        elif verdict == "optimizer-bound":
            reasons.append("optimizer state owns the peak: removing attention's intermediates gains little")
    return Recommendation(
        sites=(site.fqn or "(the model itself)",),
        backend="keep" if keep else backend,
        tile=None if keep else best_tile(site),
        predicted=Predicted(
            peak_allocated_bytes=facts.peak_bytes if keep else without, time_ms=None
        ),
        basis=facts.basis if keep else "modelled",
        reasons=tuple(reasons),
        rejections=rejections,
    )


def _length_rule(length: int, verdict: Verdict, device: DeviceSpec, reasons: list[str]) -> bool:
    """The article's rule for the length. True: keep what runs."""
    if length < SHORT:
        if verdict == "attention-bound":
            reasons.append(f"length {length} is under {SHORT}, but attention owns the peak all the same")
            return False
        reasons.append(f"length {length} is under {SHORT}: the score matrix is small, standard attention will do")
        return True
    if length <= LONG:
        if device.capability < (8, 0):
            reasons.append(f"length {length} is between {SHORT} and {LONG}: little to gain before compute capability 8.0")
            return verdict != "attention-bound"
        reasons.append(f"length {length} is between {SHORT} and {LONG}: worth it from compute capability 8.0 on")
        return False
    reasons.append(f"length {length} is over {LONG}: the N x N intermediates grow with its square")
    return False


def _how(site: AttentionSite, backend: str) -> str:
    mask = ""
    if site.is_causal and site.seqlen_q == site.seqlen_k:
        mask = " with is_causal=True in place of the mask, if the mask is causal and nothing else"
    elif site.has_mask:
        mask = " with the mask as attn_mask"
    return f"hand-written: torch's scaled_dot_product_attention{mask} runs on the {backend} backend"
