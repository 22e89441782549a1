"""What to do about a peak: who owns it, what it would be without attention's N x N memory, how far
it could grow, and which backend each site should use. Pure: facts in, advice out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_advisor.attribution.limits import Moment, largest_scale, moments
from fa_advisor.attribution.peak import Counterfactual, Peak, line, owner
from fa_advisor.attribution.steps import StepLog
from fa_advisor.recommend import FUSED, Eligible, Situation, expressible, recommendations
from fa_advisor.records import (
    ATTENTION_CATEGORIES,
    Advice,
    AttentionSite,
    Basis,
    DeviceSpec,
    Limit,
    Verdict,
)


@dataclass(frozen=True)
class Facts:
    """What the advice is made from."""

    step: StepLog
    peak: Peak
    peak_bytes: int
    counterfactual: Counterfactual
    masked_peak_bytes: int  # the counterfactual's, had masks and biases stayed
    sites: tuple[AttentionSite, ...]
    device: DeviceSpec
    basis: Basis
    parameters: int
    seq_len: int | None
    batch_size: int | None
    max_positions: int | None  # the longest sequence that the model has positions for
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


def advise(facts: Facts, eligible: Eligible) -> Advice:
    """The verdict, the counterfactual, the limits and a recommendation for each kind of site."""
    owners = shares(facts.peak)
    verdict = max(owners, key=lambda name: owners[name])
    without = facts.counterfactual.peak_bytes + facts.unseen_bytes
    now = moments(facts.step, with_attention=True)
    advised = moments(facts.step, with_attention=False) if _avoidable(facts, eligible) else now
    return Advice(
        verdict=verdict,
        summary=_summary(facts, verdict, owners, without),
        counterfactual_peak_bytes=without,
        max_seq_len=_limit(facts, facts.seq_len, now, advised, quadratic=True),
        max_batch_size=_limit(facts, facts.batch_size, now, advised, quadratic=False),
        recommendations=recommendations(
            facts.sites,
            Situation(
                verdict=verdict,
                device=facts.device,
                parameters=facts.parameters,
                basis=facts.basis,
                peak_bytes=facts.peak_bytes,
                without_bytes=without,
                masked_bytes=facts.masked_peak_bytes + facts.unseen_bytes,
            ),
            eligible,
        ),
    )


def _summary(facts: Facts, verdict: Verdict, owners: dict[Verdict, int], without: int) -> str:
    peak, attention = facts.peak_bytes, owners["attention-bound"]
    owner_words = {
        "attention-bound": "Attention's N x N intermediates own",
        "weights-bound": "Weights and their gradients own",
        "activations-bound": "Activations other than attention's own",
        "optimizer-bound": "Optimizer state owns",
    }[verdict]
    owned = owners[verdict]
    text = f"{owner_words} {_size(owned)} of the {_size(peak)} peak ({owned / max(1, peak):.1%})."
    overhead = peak - sum(owners.values())
    if overhead > owned:
        text = (
            f"cuBLAS workspaces, the allocator's slack and what isn't attributed are"
            f" {_size(overhead)} of the {_size(peak)} peak. {text}"
        )
    if not facts.sites:
        return f"{text} No attention was found."
    if verdict != "attention-bound":
        if attention:
            share = attention / max(1, peak)
            text += f" Attention's N x N intermediates: {_size(attention)} ({share:.1%})."
        else:
            text += " No N x N intermediate is alive at the peak."
    if without < peak:
        where = facts.counterfactual
        text += f" Without them the peak would be {_size(without)}, in {where.phase}"
        if where.largest is not None:
            block = where.largest
            shape = "x".join(map(str, block.shape))
            at = owner(block) or line(block.source) or "the model itself"
            text += f", where the largest block is {at}'s {block.op} [{shape}] {block.dtype}"
        text += "."
    return text


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def _avoidable(facts: Facts, eligible: Eligible) -> bool:
    """Could some site do without N x N memory on this GPU?"""
    return any(
        site.backend not in FUSED and eligible(site)[0] != "math" and expressible(site)
        for site in facts.sites
    )


def _limit(
    facts: Facts,
    size: int | None,
    now: tuple[Moment, ...],
    advised: tuple[Moment, ...],
    *,
    quadratic: bool,
) -> Limit:
    """The largest length or batch that fits the GPU: the step as it ran, and as advised."""
    if not size:
        return Limit(now=None, advised=None)
    budget = facts.device.total_memory_bytes - facts.unseen_bytes

    def largest(step: tuple[Moment, ...]) -> int | None:
        scale = largest_scale(step, budget, quadratic=quadratic)
        if scale is None or math.isinf(scale):
            return None
        fits = int(scale * size)
        return min(fits, facts.max_positions or fits) if quadratic else fits

    return Limit(now=largest(now), advised=largest(advised))
