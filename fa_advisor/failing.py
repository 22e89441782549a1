"""What a report says of a step that ran out of memory: the request, its cause, the remedies."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from fa_advisor.attribution.failure import Fallen
from fa_advisor.attribution.peak import PHASES, line
from fa_advisor.attribution.remedies import by_cause, from_model, without_program
from fa_advisor.attribution.shortage import diagnose
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.probes.device import used_by_others_bytes
from fa_advisor.records import ATTENTION_CATEGORIES, Advice, DeviceSpec, OutOfMemory
from fa_advisor.report import Report

# The whole step on fake tensors, for a GPU with so much memory; `None` where that can't be run.
Foresee = Callable[[DeviceSpec], Report | None]

_GROWING = ("activation", "temporary", "kv_cache", *ATTENTION_CATEGORIES)


@dataclass(frozen=True)
class Raised:
    """An error's text, kept instead of the error, whose frames keep tensors alive."""

    message: str
    traceback: str


def raised(error: BaseException, shown: str | None = None) -> Raised:
    """`shown`: the traceback as it is to be shown, where it isn't Python's own."""
    text = shown if shown is not None else "".join(traceback.format_exception(error)).rstrip()
    return Raised(str(error).split(" See documentation for Memory")[0].strip(), text)


def with_failure(
    report: Report, fallen: Fallen, error: Raised, gpu: GpuLedger, foresee: Foresee
) -> Report:
    """The report of what was alive at the failure, with the failure in it."""
    others = used_by_others_bytes(gpu.index)
    state = fallen.state
    allowed = gpu.allowed
    shortage = diagnose(
        fallen.requested, fallen.device_free, state, gpu.settings, others=others, allowed=allowed
    )
    # What torch could have at most. A limit that isn't known is where it stood, or close to it.
    capacity = state.reserved + fallen.device_free
    if allowed is not None:
        capacity = min(capacity, allowed)
    elif shortage.cause == "limit":
        capacity = state.reserved
    modelled = foresee(replace(report.device, total_memory_bytes=capacity))
    categories = report.memory.categories
    if modelled is not None:
        remedies = by_cause(shortage, state, others=others) + from_model(
            modelled.memory.peak_allocated_bytes,
            modelled.advice,
            capacity,
            report.target.batch_size,
            report.target.seq_len,
        )
    else:
        attention = sum(categories.get(name, 0) for name in ATTENTION_CATEGORIES)
        attention += fallen.requested if fallen.category is not None else 0
        growing = {"forward": sum(categories.get(name, 0) for name in _GROWING)}
        remedies = list(without_program(shortage, attention, growing, state, others=others))
    storage = fallen.storage
    assumed = () if modelled is None else (n for n in modelled.notes if n not in report.notes)
    return replace(
        report,
        advice=_advice(report, modelled),
        notes=(*report.notes, *(f"of the whole step, as it was modelled: {n}" for n in assumed)),
        out_of_memory=OutOfMemory(
            requested_bytes=fallen.requested,
            needed_bytes=shortage.needed,
            missing_bytes=shortage.missing,
            device_free_bytes=fallen.device_free,
            capacity_bytes=capacity,
            cause=shortage.cause,
            phase=PHASES[fallen.phase],
            fqn=fallen.scope.fqn,
            op=fallen.op,
            source=line(fallen.source),
            shape=tuple(storage.shape) if storage is not None else (),
            dtype=storage.dtype if storage is not None else "",
            category=fallen.category,
            step_peak_bytes=modelled.memory.peak_allocated_bytes if modelled else None,
            remedies=tuple(remedies),
            message=error.message,
            traceback=error.traceback,
        ),
    )


def _advice(report: Report, modelled: Report | None) -> Advice:
    """The whole step's limits and counterfactual, where they could be modelled: what ran until the
    failure has none of its own."""
    if modelled is None:
        return report.advice
    return replace(
        report.advice,
        counterfactual_peak_bytes=modelled.advice.counterfactual_peak_bytes,
        max_seq_len=modelled.advice.max_seq_len,
        max_batch_size=modelled.advice.max_batch_size,
    )
