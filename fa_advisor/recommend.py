"""Which backend each attention site should use, and the reasons.

Rules of thumb (length under 512, 512 to 1,024, over 1,024; small models; weights that dominate)
follow the article that the project grew from; each is given as a reason where it was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fa_advisor.records import (
    AttentionSite,
    Basis,
    DeviceSpec,
    Predicted,
    Recommendation,
    Verdict,
)

SHORT, LONG = 512, 1024
SMALL_MODEL = 1_000_000_000
FUSED = frozenset(("flash", "efficient", "cudnn", "flash_attn", "flex", "fused", "native"))

# The backend that SDPA would take for a site's call on the GPU, and the codes against the faster
# ones; "math" where no fused one fits.
Eligible = Callable[[AttentionSite], tuple[str, dict[str, tuple[str, ...]]]]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the recommendations depend on beside the site."""

    verdict: Verdict
    device: DeviceSpec
    parameters: int
    basis: Basis
    peak_bytes: int
    without_bytes: int  # the peak without attention's N x N memory
    masked_bytes: int  # the same, but with its masks and biases


def recommendations(
    sites: tuple[AttentionSite, ...], situation: Situation, eligible: Eligible
) -> tuple[Recommendation, ...]:
    """One for each set of sites that the same is said of, in the order of the sites."""
    groups: dict[tuple[object, ...], tuple[Recommendation, list[str]]] = {}
    for site in sites:
        made = _recommend(site, situation, eligible)
        key = (
            made.backend, made.reasons, made.predicted, tuple(sorted(made.rejections.items()))
        )  # fmt: skip
        groups.setdefault(key, (made, []))[1].append(site.fqn or "(the model itself)")
    return tuple(replace(made, sites=tuple(names)) for made, names in groups.values())


def _recommend(site: AttentionSite, situation: Situation, eligible: Eligible) -> Recommendation:
    backend, rejections = eligible(site)
    reasons, keep = _why(site, backend, situation)
    if site.backend not in FUSED:
        reasons += _how_much(situation)
    return Recommendation(
        sites=(),
        backend="keep" if keep else backend,
        tile=None,  # torch's backends choose their own
        predicted=Predicted(
            peak_allocated_bytes=_predicted(site, keep, situation),
            time_ms=None,
        ),
        basis=situation.basis if keep else "modelled",
        reasons=tuple(reasons),
        rejections=rejections,
    )


def expressible(site: AttentionSite) -> bool:
    """Could the site's attention be said in a call of scaled_dot_product_attention?"""
    return not any("NOT_EXPRESSIBLE" in codes for codes in site.why_not.values())


def _predicted(site: AttentionSite, keep: bool, situation: Situation) -> int:
    """The step's peak: as it is, without N x N memory, or with a mask that SDPA is handed."""
    if keep:
        return situation.peak_bytes
    handed = site.has_mask and not (site.is_causal and site.seqlen_q == site.seqlen_k)
    return situation.masked_bytes if handed else situation.without_bytes


def _why(site: AttentionSite, backend: str, situation: Situation) -> tuple[list[str], bool]:
    """The reasons that decide, and whether to keep what runs."""
    if site.backend == "native":
        return ["runs in nn.MultiheadAttention's inference fast path, which hides its memory"], True
    if site.backend in FUSED:
        reasons = [f"runs on the fused {site.backend} backend, which keeps neither S nor P"]
        if site.attention_bytes_at_peak:
            reasons.append("the N x N memory it has is its mask or bias")
        return reasons, True
    if not expressible(site):
        return ["more than scale, mask and bias between QK^T and softmax: SDPA can't say it"], True
    if backend == "math":
        return ["no fused backend takes this call on this GPU"], True
    reason, keep = _length_rule(max(site.seqlen_q, site.seqlen_k), situation)
    reasons = [reason]
    if not keep and site.form == "eager":
        reasons.append(_how(site, backend))
    if not keep and site.form == "mha":
        reasons.append(
            "call nn.MultiheadAttention with need_weights=False where the weights are unused"
        )
    return reasons, keep


def _length_rule(length: int, situation: Situation) -> tuple[str, bool]:
    """The article's rule for the length, and whether to keep what runs."""
    owns = situation.verdict == "attention-bound"
    if length > LONG:
        return f"length {length} is over {LONG}: N x N memory grows with its square", False
    if length >= SHORT:
        between = f"length {length} is between {SHORT} and {LONG}"
        if situation.device.capability >= (8, 0):
            return f"{between}: worth it from compute capability 8.0 on", False
        return f"{between}: little to gain before compute capability 8.0", not owns
    if owns:
        return f"length {length} is under {SHORT}, but attention owns the peak all the same", False
    return f"length {length} is under {SHORT}: S is small, standard attention will do", True


def _how_much(situation: Situation) -> Iterator[str]:
    """What dampens the gain."""
    if situation.parameters < SMALL_MODEL:
        yield "under 1 B parameters: memory is rarely short, the gain is in length and batch"
    if situation.verdict == "weights-bound":
        yield "the weights own the peak: removing N x N memory gains little"
    elif situation.verdict == "optimizer-bound":
        yield "optimizer state owns the peak: removing N x N memory gains little"


def _how(site: AttentionSite, backend: str) -> str:
    mask = ""
    if site.is_causal and site.seqlen_q == site.seqlen_k:
        mask = " with is_causal=True, if the mask is causal and nothing else,"
    elif site.has_mask:
        mask = " with the mask as attn_mask"
    return f"hand-written: torch's scaled_dot_product_attention{mask} runs on {backend}"
