"""A report from what was seen: the ledger's best step, the device, and what was run."""

from __future__ import annotations

from fa_advisor.advice import Facts, advise
from fa_advisor.attribution import peak as peaks
from fa_advisor.attribution.steps import StepLog
from fa_advisor.budgets.api import OLDEST, kept_budgets
from fa_advisor.budgets.table import MAX_HEAD_DIM, Problem
from fa_advisor.eligibility import Eligibility
from fa_advisor.gpu_ledger import Measured
from fa_advisor.kernels.tiles import SHORT
from fa_advisor.probes.device import environment
from fa_advisor.records import (
    AttentionSite,
    DeviceSpec,
    Memory,
    PatchOutcome,
    TargetSpec,
    TileBudget,
)
from fa_advisor.report import Report

# Of each kernel, for each kind of site.
TILES_SHOWN = 4
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def assemble(
    *,
    step: StepLog,
    types: dict[str, str],
    device: DeviceSpec,
    target: TargetSpec,
    torch_version: tuple[int, int],
    measured: Measured | None = None,
    max_positions: int | None = None,
    notes: tuple[str, ...] = (),
    patch: PatchOutcome | None = None,
) -> Report:
    """The whole report. `types`: every module's class by its fully qualified name."""
    peak = peaks.peak_of(step)
    eligibility = Eligibility(device, torch_version, target.mode)
    sites = peaks.sites(step, peak.held, eligibility.why_not)
    budgets = _budgets(sites, device)
    peak_bytes = max(peak.bytes, measured.peak_allocated_bytes) if measured else peak.bytes
    facts = Facts(
        step=step,
        peak=peak,
        peak_bytes=peak_bytes,
        counterfactual=peaks.without_attention(step),
        masked_peak_bytes=peaks.without_attention(step, keep_masks=True).peak_bytes,
        sites=sites,
        device=device,
        basis="measured" if measured else "modelled",
        parameters=target.parameters,
        seq_len=target.seq_len,
        batch_size=target.batch_size,
        max_positions=max_positions,
        unseen_bytes=max(0, peak_bytes - step.peak_bytes),
    )

    return Report(
        environment=environment(),
        device=device,
        target=target,
        memory=Memory(
            basis=facts.basis,
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=(
                measured.peak_reserved_bytes if measured else step.peak_reserved_bytes
            ),
            peak_phase=peak.phase,
            categories=peak.categories,
            unattributed_bytes=peak_bytes - peak.bytes,
            outside_allocator_bytes=measured.outside_allocator_bytes if measured else None,
            timeline=peaks.timeline(step),
            allocator=measured.allocator if measured else None,
        ),
        modules=peaks.modules(peak.held, types),
        sites=sites,
        budgets=budgets,
        advice=advise(facts, eligibility.best),
        patch=patch,
        ledger=peaks.rows(peak.held),
        notes=(*notes, *_earlier(step)),
    )


def _earlier(step: StepLog) -> tuple[str, ...]:
    unseen = peaks.from_before(step)
    if not unseen:
        return ()
    return (
        f"{unseen:,} of the unattributed bytes were there before the recording began, and neither"
        " the model nor the step shows a tensor that has them: the program holds them, or a library"
        " does",
    )


def _budgets(sites: tuple[AttentionSite, ...], device: DeviceSpec) -> tuple[TileBudget, ...]:
    """The best few tiles for every kind of site that was seen and that a kernel can take."""
    if device.capability < OLDEST:
        return ()
    wanted: dict[Problem, bool] = {}
    for site in sites:
        if site.dtype in _SHORT and 1 <= site.head_dim <= MAX_HEAD_DIM:
            problem = Problem(
                head_dim=site.head_dim, value_head_dim=site.head_dim, dtype=_SHORT[site.dtype],
                is_causal=site.is_causal,
            )  # fmt: skip
            long = min(site.seqlen_q, site.seqlen_k) > SHORT
            wanted[problem] = wanted.get(problem, False) or long
    return tuple(
        row
        for problem, long in wanted.items()
        for row in kept_budgets(problem, device, TILES_SHOWN, long=long)
    )
