"""The step that ran out of memory, cut off at the request that failed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa_advisor.attribution.frames import Frames, user_line
from fa_advisor.attribution.join import stamp_of
from fa_advisor.attribution.replay import Above, Event, Replayed, Trace, above
from fa_advisor.attribution.steps import StepLog
from fa_advisor.attribution.storage import Storage
from fa_advisor.probes.events import NOWHERE, Kind, Op, Phase, Scope
from fa_advisor.records import ATTENTION_CATEGORIES, Category


@dataclass(frozen=True)
class Fallen:
    """A step up to its failure. `storage`: what the request was to be, where the stream knows."""

    step: StepLog
    requested: int
    device_free: int
    state: Above
    op: str
    scope: Scope
    phase: Phase
    source: tuple[str, int] | None
    storage: Storage | None

    @property
    def category(self) -> Category | None:
        """What of attention's the request would have been; `None`: nothing."""
        storage = self.storage
        if storage is None or storage.call is None or storage.role not in ATTENTION_CATEGORIES:
            return None
        return storage.category() if storage.call.find().confirmed else storage.role


def last_failure(trace: Trace) -> int | None:
    """The index of the last out-of-memory event."""
    for at in range(len(trace.events) - 1, -1, -1):
        if trace.events[at]["action"] == "oom":
            return at
    return None


def fallen(
    joined: StepLog,
    seen: StepLog,
    replayed: Replayed,
    trace: Trace,
    at: int,
    sids: tuple[int, ...],
) -> Fallen:
    """`joined` and `seen`: the step with and without the allocator's trace; `at`: the failure's
    event; `sids`: the storages that the operator was about to make."""
    event = trace.events[at]
    count = sum(1 for change in replayed.changes if change.at < at)
    step = replace(joined, entries=joined.entries[:count], peak_at=count)
    step.peak_bytes = step.start_bytes + sum(e.block for e in step.entries)
    step.above = above(trace, at)
    wanted = {e.storage.sid: e.storage for e in seen.entries if e.storage.sid in sids}
    storage = next((s for s in wanted.values() if s.nbytes == event["size"]), None)
    run = seen.runs.get(stamp_of(event)[0])
    _settle(step, storage)
    if run is None:
        frames: Frames = event.get("frames", ())
        op = Op(stamp_of(event)[1], Kind.OTHER, False, "")
        return _made(step, event, op, NOWHERE, step.phase_at(count), user_line(frames), None)
    return _made(step, event, run.op, run.scope, run.phase, run.source, storage)


def _made(
    step: StepLog,
    event: Event,
    op: Op,
    scope: Scope,
    phase: Phase,
    source: tuple[str, int] | None,
    storage: Storage | None,
) -> Fallen:
    assert step.above is not None
    return Fallen(
        step=step,
        requested=event["size"],
        device_free=event.get("device_free", 0),
        state=step.above,
        op=op.name,
        scope=scope,
        phase=phase,
        source=source,
        storage=storage,
    )


def _settle(step: StepLog, request: Storage | None) -> None:
    """What the rest of the step would have told of what is alive: a score that has met its softmax
    is attention's, and what a forward left behind waits for backward."""
    alive = [held.storage for held in step.alive_at(len(step.entries))]
    for storage in (*alive, *([request] if request is not None else [])):
        if storage.call is not None and storage.role is not None:
            call = storage.call.find()
            if not call.confirmed and (call.softmaxed or storage is request):
                call.confirmed = True
                step.calls.append(call)
        elif storage.phase is Phase.FORWARD and storage.label is None:
            storage.escaped = True
