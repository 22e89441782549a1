"""From the step with the highest peak to the report's records: categories, modules, sites, rows."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fa_advisor.attribution.steps import Held, StepLog
from fa_advisor.attribution.storage import Call, Storage
from fa_advisor.probes.events import Phase as StreamPhase
from fa_advisor.records import (
    ATTENTION_CATEGORIES,
    CATEGORIES,
    AttentionSite,
    Category,
    Form,
    LedgerRow,
    ModuleMemory,
    Phase,
    TimelinePoint,
)

TIMELINE_POINTS = 400
LEDGER_ROWS = 200

PHASES: dict[StreamPhase, Phase] = {
    StreamPhase.FORWARD: "forward",
    StreamPhase.BACKWARD: "backward",
    StreamPhase.OPTIMIZER: "optimizer",
    StreamPhase.RECOMPUTE: "backward",
}

# `why_not` of a site, from its facts; the rules live with the probe of SDPA.
WhyNot = Callable[[Call, Form], dict[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Peak:
    """What is alive at the peak of a step."""

    bytes: int
    phase: Phase
    categories: dict[str, int]
    held: tuple[Held, ...]


def peak_of(step: StepLog) -> Peak:
    """The step's peak; sum(categories) is `bytes`, rounding and slack included.

    What nobody but the allocator knows of is left out.
    """
    held = tuple(h for h in step.alive_at(step.peak_at) if not h.storage.unseen)
    sums: Counter[Category] = Counter()
    for storage, block, nbytes in held:
        sums[storage.category()] += nbytes
        sums["allocator_slack"] += block - nbytes
    return Peak(
        bytes=sum(h.block for h in held),
        phase=PHASES[step.phase_at(step.peak_at)],
        categories={name: sums[name] for name in CATEGORIES if sums[name]},
        held=held,
    )


def from_before(step: StepLog) -> int:
    """Bytes at the peak that nobody but the allocator knows of because they were there before it
    was recorded."""
    return sum(h.block for h in step.alive_at(step.peak_at) if h.storage.earlier)


@dataclass(frozen=True)
class Counterfactual:
    """The same step replayed without attention's N x N storages: its peak, and what owns it."""

    peak_bytes: int
    phase: Phase
    largest: Storage | None


def without_attention(step: StepLog, *, keep_masks: bool = False) -> Counterfactual:
    """Replay the log, leaving out every storage that is attention's N x N memory.

    `keep_masks`: masks and biases stay, as they do for a kernel that is handed them.
    """
    attention = set(ATTENTION_CATEGORIES) - ({"attention_mask"} if keep_masks else set())
    left_out: dict[int, bool] = {}

    def counts(storage: Storage) -> bool:
        known = left_out.get(id(storage))
        if known is None:
            known = left_out[id(storage)] = storage.category() in attention
        return not known

    allocated = sum(h.block for h in step.baseline if counts(h.storage))
    peak, at = allocated, 0
    for index, entry in enumerate(step.entries, 1):
        if counts(entry.storage):
            allocated += entry.block
            if allocated > peak:
                peak, at = allocated, index
    alive = [h for h in step.alive_at(at) if counts(h.storage) and h.storage.label is None]
    largest = max(alive, key=lambda h: h.nbytes, default=None)
    return Counterfactual(peak, PHASES[step.phase_at(at)], largest.storage if largest else None)


def timeline(step: StepLog, points: int = TIMELINE_POINTS) -> tuple[TimelinePoint, ...]:
    """Allocated bytes over the step, at most `points` + 2 of them, the peak always among them."""
    wanted = _highest_of_each_stretch(step, points)
    sums: Counter[Category] = Counter()
    in_attention = 0
    for storage, block, nbytes in step.baseline:
        sums[storage.category()] += nbytes
        sums["allocator_slack"] += block - nbytes
        in_attention += block if storage.attention_call() is not None else 0
    allocated, module = step.start_bytes, ""

    def point(t: int, phase: StreamPhase) -> TimelinePoint:
        return TimelinePoint(
            t=t,
            phase=PHASES[phase],
            allocated_bytes=allocated,
            attention_bytes=in_attention,
            module=module,
            categories={name: sums[name] for name in CATEGORIES if sums[name]},
        )

    made = [point(0, StreamPhase.FORWARD)]
    for index, (storage, block, nbytes, phase) in enumerate(step.entries, 1):
        allocated += block
        sums[storage.category()] += nbytes
        sums["allocator_slack"] += block - nbytes
        if storage.attention_call() is not None:
            in_attention += block
        if block > 0:
            module = storage.scope.fqn
        if index in wanted:
            made.append(point(index, phase))
    return tuple(made)


def _highest_of_each_stretch(step: StepLog, points: int) -> set[int]:
    """Where the timeline has its points: the highest entry of every stretch, and the peak."""
    stride = max(1, -(-len(step.entries) // max(1, points)))
    wanted = {step.peak_at} - {0}
    allocated, highest, at = step.start_bytes, -1, 0
    for index, entry in enumerate(step.entries, 1):
        allocated += entry.block
        if allocated > highest:
            highest, at = allocated, index
        if index % stride == 0 or index == len(step.entries):
            if not index - stride < step.peak_at <= index:
                wanted.add(at)
            highest = -1
    return wanted


def modules(held: Iterable[Held], types: dict[str, str]) -> tuple[ModuleMemory, ...]:
    """Bytes at the peak by the module that owns or made them, in the model's own order."""
    sums: dict[str, Counter[Category]] = defaultdict(Counter)
    for storage, _, nbytes in held:
        sums[owner(storage)][storage.category()] += nbytes
    order = {fqn: index for index, fqn in enumerate(types)}
    return tuple(
        ModuleMemory(
            fqn=fqn,
            type=types.get(fqn, ""),
            categories={name: sums[fqn][name] for name in CATEGORIES if sums[fqn][name]},
        )
        for fqn in sorted(sums, key=lambda f: (order.get(f, len(order)), f))
        if sum(sums[fqn].values())
    )


def owner(storage: Storage) -> str:
    """The module whose bytes these are: a parameter's holder, else the module that made them."""
    if storage.fqn is not None:
        return storage.fqn
    return storage.scope.fqn


def rows(held: Iterable[Held], limit: int = LEDGER_ROWS) -> tuple[LedgerRow, ...]:
    """The ledger at the peak, equal blocks together, largest first; the tail as one row each
    category, so that nothing vanishes."""
    groups: dict[tuple[Category, str, str, str | None, tuple[int, ...], str], list[int]] = {}
    for storage, _, nbytes in held:
        key = (
            storage.category(),
            owner(storage),
            storage.op,
            line(storage.source),
            tuple(storage.shape),
            storage.dtype,
        )
        group = groups.setdefault(key, [0, 0])
        group[0] += 1
        group[1] += nbytes
    ranked = sorted(groups.items(), key=lambda item: -item[1][1])
    made = [
        LedgerRow(
            category=c, fqn=f, op=o, source=s, shape=shape, dtype=d, count=count, bytes=nbytes
        )
        for (c, f, o, s, shape, d), (count, nbytes) in ranked[:limit]
    ]
    tail: dict[Category, list[int]] = {}
    for (category, *_), (count, nbytes) in ranked[limit:]:
        rest = tail.setdefault(category, [0, 0])
        rest[0] += count
        rest[1] += nbytes
    made += [
        LedgerRow(
            category=c, fqn="", op="(others)", source=None, shape=(), dtype="", count=n, bytes=b
        )
        for c, (n, b) in tail.items()
    ]
    return tuple(made)


def sites(step: StepLog, held: Iterable[Held], why_not: WhyNot) -> tuple[AttentionSite, ...]:
    """Every attention call of the step, those of one module and line together.

    Bytes of a mask that several sites share stand at the first of them, so that the sites' sum
    is the attention categories' sum.
    """
    at_peak: Counter[int] = Counter()
    for storage, _, nbytes in held:
        call = storage.attention_call()
        if call is not None:
            at_peak[id(call)] += nbytes
    groups: dict[tuple[object, ...], list[Call]] = {}
    seen: set[int] = set()
    calls = []
    for call in step.calls:
        found = call.find()
        if id(found) not in seen:
            seen.add(id(found))
            calls.append(found)
    first_run = {_line_key(c): _site_key(c) for c in calls if c.phase is StreamPhase.FORWARD}
    for call in calls:
        # A checkpointed function runs again inside another module's backward: the same site.
        again = call.phase is StreamPhase.RECOMPUTE
        key = _site_key(call)
        if again and key not in groups:
            key = first_run.get(_line_key(call), key)
        groups.setdefault(key, []).append(call)
    # Checkpointing runs a forward twice: count the first run, but add up both runs' bytes.
    made = []
    for calls in groups.values():
        first = calls[0]
        form = form_of(first)
        forward = [c for c in calls if c.phase is StreamPhase.FORWARD]
        made.append(
            AttentionSite(
                fqn=first.scope.fqn,
                source=line(first.source),
                form=form,
                backend=backend_of(first),
                why_not=why_not(first, form),
                calls=len(forward) or len(calls),
                batch=first.sdpa.batch if first.sdpa else first.batch,
                num_heads=first.sdpa.num_heads if first.sdpa else first.heads,
                num_kv_heads=kv_heads_of(first),
                seqlen_q=first.m,
                seqlen_k=first.n,
                head_dim=first.head_dim,
                dtype=first.dtype,
                is_causal=first.causal or bool(first.sdpa and first.sdpa.is_causal),
                has_mask=first.sdpa.has_mask if first.sdpa else first.has_mask,
                dropout_p=first.sdpa.dropout_p if first.sdpa else first.dropout_p,
                attention_bytes_at_peak=sum(at_peak[id(c)] for c in calls),
                saved_for_backward_bytes=sum(c.saved_bytes for c in calls),
            )
        )
    return tuple(made)


def _site_key(call: Call) -> tuple[object, ...]:
    return (call.scope.fqn, *_line_key(call))


def _line_key(call: Call) -> tuple[object, ...]:
    return (
        call.source,
        backend_of(call),
        call.batch,
        call.heads,
        call.m,
        call.n,
        call.head_dim,
    )


def form_of(call: Call) -> Form:
    """How the model asks for attention."""
    if call.scope.type == "MultiheadAttention" or call.fused == "native":
        return "mha"
    if call.fused in ("flex", "flash_attn"):
        return call.fused  # type: ignore[return-value]
    return "sdpa" if call.sdpa is not None or call.fused else "eager"


def backend_of(call: Call) -> str:
    """What computes it: a fused kernel's name, SDPA's math path, or the model itself (eager)."""
    if call.fused:
        return call.fused
    return call.sdpa.backend if call.sdpa is not None else "eager"


def kv_heads_of(call: Call) -> int:
    """Distinct key/value heads; repeated ones (repeat_kv) count once."""
    heads = call.sdpa.num_heads if call.sdpa else call.heads
    kv_heads = call.sdpa.num_kv_heads if call.sdpa else call.kv_heads
    if call.kv_heads < 0:
        kv_heads = call.kv_heads
    if kv_heads < 0:
        repeat = -kv_heads
        return heads // repeat if heads % repeat == 0 else heads
    return kv_heads or heads


def line(source: tuple[str, int] | None) -> str | None:
    """`model.py:88`: the file's name alone, as the user would look for it."""
    return None if source is None else f"{os.path.basename(source[0])}:{source[1]}"
