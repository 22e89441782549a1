"""The op stream's labels and the allocator's trace, joined: a step whose every block is real.

The trace says what is allocated and when, to the byte. The stream says what it is: a storage
claims the block that was given out at its address, by the operator that made it. What no storage
claims was allocated inside an operator (its stamp says which) or by code that Inductor generated
(its stack says so); the rest is unseen, and its bytes are shown as unattributed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from fa_advisor.attribution.arena import Given
from fa_advisor.attribution.frames import Frames, generated, in_backward, user_line
from fa_advisor.attribution.generated_code import GeneratedCode
from fa_advisor.attribution.ledger import WITH_A_PRODUCT
from fa_advisor.attribution.replay import Event, Replayed, Trace, replay
from fa_advisor.attribution.steps import Entry, Held, Run, StepLog
from fa_advisor.attribution.storage import Storage
from fa_advisor.probes.events import NOWHERE, Kind, Op, Phase

COMPILED = Op("compiled", Kind.OTHER, False, "")
UNSEEN = Op("", Kind.OTHER, False, "")


@dataclass
class Joiner:
    """Joins step after step. `owners` carries over who holds the blocks that no storage claims.

    `workspaces`: a block of just such a size that was there before anything was recorded, and that
    no tensor claims, is a workspace of cuBLAS's or cuBLASLt's. `ours`: path prefixes of frames that
    aren't the user's.
    """

    workspaces: frozenset[int] = frozenset()
    ours: tuple[str, ...] = ()
    owners: dict[int, Storage] = field(default_factory=dict)
    code: GeneratedCode = field(default_factory=GeneratedCode)
    _next_sid: int = -1

    def join(self, step: StepLog, trace: Trace) -> tuple[StepLog, Replayed]:
        """The step as the allocator saw it, with the storages that the stream knows."""
        replayed = replay(trace)
        owners = self._baseline(step, replayed, trace)
        claimed = _claims(step, trace, replayed)
        death = {id(c.given): c.at for c in replayed.changes if c.delta < 0}
        joined = StepLog(
            baseline=[Held(owners[id(g)], g.size, g.requested) for g in replayed.baseline],
            start_bytes=replayed.start,
            calls=step.calls,
            claims=step.claims,
            runs=step.runs,
        )
        phases = _Phases(step, trace)
        made = _made_by(step)

        def is_kept(phase: Phase, ended: int | None) -> bool:
            return phase is Phase.FORWARD and (
                ended is None or phases.at(ended) is not Phase.FORWARD
            )

        allocated = joined.start_bytes
        joined.peak_bytes = allocated
        for at, given, delta in replayed.changes:
            phase = phases.at(at)
            if delta > 0:
                event, ended = trace.events[at], death.get(id(given))
                number, name = stamp_of(event)
                frames: Frames = event.get("frames", ())
                run = step.runs.get(number)
                if number and run is None:  # an operator that makes nothing: an optimizer's
                    op = Op(name, Kind.OTHER, False, "")
                    run = Run(op, NOWHERE, phase, user_line(frames, self.ours))
                if run is None and in_backward(frames):
                    phase = Phase.BACKWARD
                storage = claimed.get(id(given))
                if storage is not None:
                    if _mend(storage, run, frames, phase, is_kept(phase, ended)):
                        self._read(storage, frames)
                elif run is not None:
                    storage = self._inside(given, run, frames)
                    output = made.get(number)
                    if output is not None and run.op.name in WITH_A_PRODUCT:
                        storage.call, storage.role = output.call, output.role
                    if ended is None or stamp_of(trace.events[ended])[0] != number:
                        storage.label = "workspace"  # it outlives the operator
                else:
                    storage = self._outside(given, frames, phase)
                    storage.read_in_backward = is_kept(phase, ended)
                owners[id(given)] = storage
                joined.entries.append(Entry(storage, delta, given.requested, phase))
            else:
                storage = owners.pop(id(given))
                joined.entries.append(Entry(storage, delta, -given.requested, phase))
            allocated += delta
            if allocated > joined.peak_bytes:
                joined.peak_bytes, joined.peak_at = allocated, len(joined.entries)
        alive = {id(g): g for g in (*replayed.baseline, *(c.given for c in replayed.changes))}
        self.owners = {alive[key].address: storage for key, storage in owners.items()}
        return joined, replayed

    # -- who owns a block -------------------------------------------------------------------

    def _baseline(self, step: StepLog, replayed: Replayed, trace: Trace) -> dict[int, Storage]:
        known = {h.storage.address: h.storage for h in step.baseline if h.storage.address}
        first = _first_seen(step)
        owners: dict[int, Storage] = {}
        frames = _frames_before(trace)
        for given in replayed.baseline:
            address = given.address
            owner = known.get(address) or self.owners.get(address) or first.get(address)
            if owner is not None and owner.sid < 0 and owner.nbytes != given.requested:
                owner = first.get(address)  # hidden memory that has gone; the address lives on
            if owner is None:
                owner = self._from_before(given, frames.get(address, ()))
            owners[id(given)] = owner
        return owners

    def _from_before(self, given: Given, frames: Frames) -> Storage:
        source = user_line(frames, self.ours)
        storage = self._made(given, Run(UNSEEN, NOWHERE, Phase.FORWARD, source))
        if given.requested in self.workspaces:
            storage.label = "workspace"
        else:
            storage.unseen = storage.earlier = True
        return storage

    def _inside(self, given: Given, run: Run, frames: Frames) -> Storage:
        """Memory that an operator took and that no tensor of the stream ever showed."""
        if run.source is None:
            run = run._replace(source=user_line(frames, self.ours))
        return self._made(given, run)

    def _outside(self, given: Given, frames: Frames, phase: Phase) -> Storage:
        """Memory taken while no operator ran: by generated code, or by who knows whom."""
        compiled = generated(frames)
        source = user_line(frames, self.ours)
        storage = self._made(given, Run(COMPILED if compiled else UNSEEN, NOWHERE, phase, source))
        storage.unseen = not compiled
        if compiled:
            self._read(storage, frames)
        return storage

    def _read(self, storage: Storage, frames: Frames) -> None:
        """What the generated code says of a block that it allocated."""
        buffer = self.code.buffer(frames)
        if buffer is None:
            return
        storage.op = f"{COMPILED.name} {buffer.op}".rstrip()
        if storage.label is None:
            storage.label = buffer.role
        if buffer.shape is not None:
            storage.shape, storage.dtype = buffer.shape, buffer.dtype

    def _made(self, given: Given, run: Run) -> Storage:
        sid, self._next_sid = self._next_sid, self._next_sid - 1
        return Storage(
            sid, (given.requested,), "uint8", given.requested,
            run.op.name, run.scope, run.phase, run.source,
        )  # fmt: skip


def stamp_of(event: Event) -> tuple[int, str]:
    """The operator that ran when the event happened: its number and name, (0, "") for none."""
    number, _, name = str(event.get("user_metadata", "")).partition(" ")
    return (int(number), name) if number.isdecimal() else (0, "")


class _Phases:
    """The phase at each event: that of the last stamped operator before it."""

    def __init__(self, step: StepLog, trace: Trace) -> None:
        self._at: list[int] = []
        self._phases: list[Phase] = []
        last = Phase.FORWARD
        for at, event in enumerate(trace.events):
            number = stamp_of(event)[0]
            if not number:
                continue
            run = step.runs.get(number)
            phase = run.phase if run is not None else Phase.OPTIMIZER  # it made nothing
            if phase is not last:
                last = phase
                self._at.append(at)
                self._phases.append(last)

    def at(self, event: int) -> Phase:
        index = bisect_right(self._at, event) - 1
        return self._phases[index] if index >= 0 else Phase.FORWARD


def _storages(step: StepLog) -> dict[int, Storage]:
    storages = {h.storage.sid: h.storage for h in step.baseline}
    storages.update((e.storage.sid, e.storage) for e in step.entries)
    return storages


def _made_by(step: StepLog) -> dict[int, Storage]:
    """The last storage that each operator made."""
    storages = _storages(step)
    return {number: storages[sid] for number, _, sid in step.claims if sid in storages}


def _first_seen(step: StepLog) -> dict[int, Storage]:
    """Storages by the address at which the step first met them: some were there before it."""
    storages = _storages(step)
    first: dict[int, Storage] = {}
    for claim in step.claims:
        storage = storages.get(claim.sid)
        if storage is not None and claim.address and storage.op == "":
            first.setdefault(claim.address, storage)
    return first


def _claims(step: StepLog, trace: Trace, replayed: Replayed) -> dict[int, Storage]:
    """The storage of each block that was given out in the step, where one claims it."""
    storages = _storages(step)
    given_at: dict[int, list[Given]] = {}
    for change in replayed.changes:
        if change.delta > 0:
            given_at.setdefault(change.given.address, []).append(change.given)
    later = _Numbers(trace)
    claimed: dict[int, Storage] = {}
    for number, address, sid in step.claims:
        candidates = given_at.get(address)
        storage = storages.get(sid)
        if not candidates or storage is None:
            continue
        mine = [g for g in candidates if stamp_of(trace.events[g.born])[0] == number]
        if not mine:
            end = later.first_event_after(number)
            mine = [g for g in candidates if g.born < end]
        if mine:
            key = id(mine[-1])
            known = claimed.get(key)
            if known is None or (known.label in (None, "input") and storage.label is not None):
                claimed[key] = storage
    return claimed


class _Numbers:
    """Where in the trace an operator had ended: at the first event of a later one."""

    def __init__(self, trace: Trace) -> None:
        self._numbers: list[int] = []
        self._events: list[int] = []
        for at, event in enumerate(trace.events):
            number = stamp_of(event)[0]
            if number and (not self._numbers or number > self._numbers[-1]):
                self._numbers.append(number)
                self._events.append(at)
        self._end = len(trace.events)

    def first_event_after(self, number: int) -> int:
        index = bisect_right(self._numbers, number)
        return self._events[index] if index < len(self._events) else self._end


def _mend(storage: Storage, run: Run | None, frames: Frames, phase: Phase, kept: bool) -> bool:
    """A storage first met as somebody's input, whose allocation was seen after all: by an
    operator that showed it late, or by generated code - then True. `kept`: it outlived the
    forward."""
    if storage.op or not (run is not None or generated(frames)):
        return False
    if storage.label == "input" and storage.fqn is None:
        storage.label = None
    if run is not None:
        storage.op, storage.scope, storage.source = run.op.name, run.scope, run.source
    else:
        storage.op = COMPILED.name
    storage.phase = phase
    storage.read_in_backward = storage.read_in_backward or kept
    storage.source = storage.source or user_line(frames)
    return run is None


def _frames_before(trace: Trace) -> Mapping[int, Frames]:
    """The stacks of blocks that were there before the first event, by address."""
    return {
        block["address"]: block.get("frames", ())
        for segment in trace.before or ()
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and "address" in block
    }
