"""What a memory snapshot tells, without the program that it is of.

A snapshot has sizes, addresses and stacks, but no tensors: what a block is, is read off the code
that allocated it, and said to be so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fa_advisor.attribution.arena import Given
from fa_advisor.attribution.frames import Frames, encodable, generated, in_backward, users
from fa_advisor.attribution.join import stamp_of
from fa_advisor.attribution.remedies import without_program
from fa_advisor.attribution.replay import Above, Replayed, Trace, above, replay
from fa_advisor.attribution.shortage import Shortage, diagnose
from fa_advisor.records import Cause, Remedy

POSTMORTEM_SCHEMA_VERSION = 1
LINES = 200
_STACK = 8

Moment = Literal["out_of_memory", "peak"]
Kind = Literal["weights", "optimizer", "forward", "backward", "workspace", "compiled", "unknown"]

_ATTENTION = re.compile(r"(?:^|_|\b)(?:attn|attention|sdpa|mha)(?:$|_|\b)|softmax|attention", re.I)
_WORKSPACE = re.compile(r"CUDABlas|cublas|Workspace|workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMemory:
    """Blocks alive at the moment that one line of code allocated.

    `kind` and `in_attention` are read off the stack: `stack` has the user's innermost frames as
    "file:line function". `bytes` is what was asked for, without the allocator's rounding.
    """

    source: str | None
    function: str
    kind: Kind
    in_attention: bool
    count: int
    bytes: int
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The request that found no memory. `needed_bytes`: what the driver was asked for;
    `missing_bytes` of it weren't there. `cause` says whose fault it was."""

    bytes: int
    needed_bytes: int
    missing_bytes: int
    device_free_bytes: int
    cause: Cause
    source: str | None
    function: str
    op: str
    in_attention: bool
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """A snapshot explained: sum of `kinds` + `slack_bytes` == `allocated_bytes`, and
    allocated + pending + cached + fragmented == reserved."""

    schema_version: int = POSTMORTEM_SCHEMA_VERSION
    snapshot: str
    device: int
    moment: Moment
    allocated_bytes: int
    reserved_bytes: int
    cached_bytes: int
    fragmented_bytes: int
    pending_bytes: int
    private_pools_bytes: int
    largest_free_bytes: int
    slack_bytes: int
    attention_bytes: int
    kinds: dict[str, int]
    request: FailedRequest | None
    remedies: tuple[Remedy, ...]
    lines: tuple[LineMemory, ...]
    events: int
    failures: int
    timeline: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = field(default=())


def explain(trace: Trace, *, snapshot: str, device: int) -> Postmortem:
    """The state at the last out-of-memory error, else at the highest peak in the trace."""
    replayed = replay(trace)
    failures = [at for at, event in enumerate(trace.events) if event["action"] == "oom"]
    if failures:
        moment: Moment = "out_of_memory"
        count = failures[-1]
        changes = sum(1 for c in replayed.changes if c.at < count)
    else:
        moment = "peak"
        _, changes = replayed.peak()
        count = replayed.changes[changes - 1].at + 1 if changes else 0
    state = above(trace, count)
    alive = alive_after(replayed, changes)
    frames_before = _frames_before(trace)
    groups: dict[tuple[Any, ...], list[int]] = {}
    kinds: Counter[str] = Counter()
    attention = 0
    for given in alive:
        event = trace.events[given.born] if given.born >= 0 else {}
        frames: Frames = event.get("frames") or frames_before.get(given.address, ())
        kind = _kind(event, frames)
        key = (*_place(event, frames), kind, _in_attention(kind, frames))
        group = groups.setdefault(key, [0, 0])
        group[0] += 1
        group[1] += given.requested
        kinds[kind] += given.requested
        attention += given.requested if key[-1] else 0
    request = _request(trace, failures[-1], state) if failures else None
    return Postmortem(
        snapshot=encodable(snapshot),
        device=device,
        moment=moment,
        allocated_bytes=state.allocated,
        reserved_bytes=state.reserved,
        cached_bytes=state.cached,
        fragmented_bytes=state.fragmented,
        pending_bytes=state.pending,
        private_pools_bytes=state.private_pools,
        largest_free_bytes=state.largest_free,
        slack_bytes=state.allocated - sum(kinds.values()),
        attention_bytes=attention,
        kinds=dict(kinds.most_common()),
        request=request,
        remedies=without_program(request_shortage(request), attention, dict(kinds), state)
        if request
        else (),
        lines=_lines(groups),
        events=len(trace.events),
        failures=len(failures),
        timeline=timeline(replayed, changes),
        notes=_notes(trace, replayed, kinds, state),
    )


def to_json(found: Postmortem) -> bytes:
    """As UTF-8 JSON (schema: `fa_advisor/postmortem.schema.json`), indented by two."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def json_schema_text() -> str:
    """The schema as it is checked in at `fa_advisor/postmortem.schema.json`."""
    return json.dumps(msgspec.json.schema(Postmortem), indent=2) + "\n"


def request_shortage(request: FailedRequest) -> Shortage:
    """The shortage that a request met."""
    return Shortage(request.cause, request.bytes, request.needed_bytes, request.missing_bytes)


def alive_after(replayed: Replayed, changes: int) -> list[Given]:
    """What is allocated after so many changes."""
    alive = {id(g): g for g in replayed.baseline}
    for change in replayed.changes[:changes]:
        if change.delta > 0:
            alive[id(change.given)] = change.given
        else:
            alive.pop(id(change.given), None)
    return list(alive.values())


def timeline(replayed: Replayed, keep: int, points: int = 400) -> tuple[tuple[int, int], ...]:
    """(event, allocated bytes), each stretch's highest, the moment `keep` always among them."""
    allocated, stride = replayed.start, max(1, -(-len(replayed.changes) // points))
    made: list[tuple[int, int]] = [(0, allocated)]
    best: tuple[int, int] | None = None
    for count, change in enumerate(replayed.changes, 1):
        allocated += change.delta
        if best is None or allocated > best[1]:
            best = (change.at, allocated)
        if count == keep:
            made.append((change.at, allocated))
        if count % stride == 0 or count == len(replayed.changes):
            made.append(best)
            best = None
    return tuple(sorted(set(made)))


# -- what a stack tells ---------------------------------------------------------------------


def _kind(event: Any, frames: Frames) -> Kind:
    files = [frame["filename"] for frame in frames]
    names = [frame["name"] for frame in frames]
    if any(_WORKSPACE.search(name) and "at::" in name for name in names):
        return "workspace"
    if any("/torch/optim/" in file for file in files):
        return "optimizer"
    if any(
        name in ("_apply", "convert") and file.endswith("nn/modules/module.py")
        for file, name in zip(files, names, strict=True)
    ) or any("/nn/modules/" in f and n == "__init__" for f, n in zip(files, names, strict=True)):
        return "weights"
    if generated(frames):
        return "backward" if in_backward(frames) else "compiled"
    if in_backward(frames) or any("torch::autograd::Engine" in name for name in names):
        return "backward"
    if next(users(frames), None) is None:
        # Autograd's own threads have no frames of anybody's; without an event nobody knows.
        return "backward" if event.get("action") in ("alloc", "oom") else "unknown"
    return "forward"


def _in_attention(kind: Kind, frames: Frames) -> bool:
    if kind in ("weights", "optimizer", "workspace"):
        return False
    inner = list(frames[:4])
    first = next(users(frames), None)
    if first is not None:
        inner.append(first)
    return any(_ATTENTION.search(frame["name"]) for frame in inner)


def _place(event: Any, frames: Frames) -> tuple[str | None, str, tuple[str, ...]]:
    own = list(users(frames))[:_STACK]
    stack = tuple(f"{_short(f)} {f['name']}" for f in own)
    if own:
        return _short(own[0]), own[0]["name"], stack
    number, op = stamp_of(event) if event else (0, "")
    if number:
        return None, op, ()
    return None, "", ()


def _short(frame: Any) -> str:
    name = frame["filename"].replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{frame['line']}"


def _lines(groups: dict[tuple[Any, ...], list[int]]) -> tuple[LineMemory, ...]:
    ranked = sorted(groups.items(), key=lambda item: -item[1][1])
    made = [
        LineMemory(
            source=source, function=function, kind=kind, in_attention=attention,
            count=count, bytes=nbytes, stack=stack,
        )
        for (source, function, stack, kind, attention), (count, nbytes) in ranked[:LINES]
    ]  # fmt: skip
    rest = ranked[LINES:]
    if rest:
        made.append(
            LineMemory(
                source=None, function="(others)", kind="unknown", in_attention=False,
                count=sum(c for _, (c, _) in rest), bytes=sum(b for _, (_, b) in rest), stack=(),
            )
        )  # fmt: skip
    return tuple(made)


def _request(trace: Trace, at: int, state: Above) -> FailedRequest:
    event = trace.events[at]
    frames: Frames = event["frames"]
    shortage = diagnose(event["size"], event["device_free"], state, trace.settings)
    kind = _kind(event, frames)
    source, function, stack = _place(event, frames)
    return FailedRequest(
        bytes=event["size"],
        needed_bytes=shortage.needed,
        missing_bytes=shortage.missing,
        device_free_bytes=event["device_free"],
        cause=shortage.cause,
        source=source,
        function=function,
        op=stamp_of(event)[1],
        in_attention=_in_attention(kind, frames),
        stack=stack,
    )


def _frames_before(trace: Trace) -> dict[int, Frames]:
    """Stacks of blocks that are older than the trace, where the snapshot kept them."""
    given_out = {event["addr"] for event in trace.events if event["action"] == "alloc"}
    return {
        block["address"]: block["frames"]
        for segment in trace.segments
        for block in segment["blocks"]
        if block["state"] != "inactive" and block["address"] not in given_out
    }


def _notes(trace: Trace, replayed: Replayed, kinds: Counter[str], state: Above) -> tuple[str, ...]:
    notes = []
    if not trace.events:
        notes.append(
            "the snapshot has no history, only what was alive when it was taken: record with"
            " torch.cuda.memory._record_memory_history() from the start"
        )
    elif replayed.baseline and kinds.get("unknown"):
        notes.append(
            "some memory is older than the recorded history (`unknown`): record from the start, or"
            " raise max_entries"
        )
    if replayed.strays:
        notes.append(
            f"the history contradicts itself in {replayed.strays} places: parts of it are missing"
        )
    elif not _adds_up(state, kinds):
        notes.append(
            "the history contradicts itself: what it gave out and what was reserved don't add up"
        )
    return tuple(notes)


def _adds_up(state: Above, kinds: Counter[str]) -> bool:
    free = state.cached + state.fragmented
    whole = state.allocated + state.pending + free == state.reserved
    return whole and min(state.pending, free) >= 0 and sum(kinds.values()) <= state.allocated
