"""An allocator's trace as a Chrome trace, for Perfetto and chrome://tracing.

Allocated and reserved bytes as counters, failures as instants, and the larger blocks as slices
from their allocation to their release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fa_advisor.attribution.frames import users
from fa_advisor.attribution.join import stamp_of
from fa_advisor.attribution.replay import Trace, replay

# Blocks from this size on get a slice of their own.
SMALLEST_SLICE = 1 << 20


def encode(trace: Trace, device: int, smallest: int = SMALLEST_SLICE) -> bytes:
    """The trace as JSON in Chrome's trace event format; times are microseconds."""
    events = list(_events(trace, device, smallest))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _events(trace: Trace, device: int, smallest: int) -> Iterator[dict[str, Any]]:
    pid = device
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"cuda:{device}"}}
    times = _times(trace)
    replayed = replay(trace)
    allocated, changes = replayed.start, iter(replayed.changes)
    change = next(changes, None)
    reserved = sum(s["total_size"] for s in trace.segments) - _net_reserved(trace)
    for at, event in enumerate(trace.events):
        action, moment = event["action"], times[at]
        counted = False
        while change is not None and change.at == at:
            allocated, counted = allocated + change.delta, True
            change = next(changes, None)
        if counted:
            yield _counter(pid, moment, "allocated", allocated)
        if action in _RESERVING:
            reserved += _RESERVING[action] * event["size"]
            yield _counter(pid, moment, "reserved", reserved)
        elif action == "oom":
            yield {
                "ph": "i", "pid": pid, "tid": 0, "ts": moment, "s": "p",
                "name": f"out of memory: {event['size']} bytes",
            }  # fmt: skip
    ends = {id(c.given): c.at for c in replayed.changes if c.delta < 0}
    last = times[-1] if times else 0
    for number, change in enumerate(replayed.changes):
        given = change.given
        if change.delta <= 0 or given.size < smallest:
            continue
        event = trace.events[given.born]
        end = ends.get(id(given))
        common = {
            "cat": "block", "id": number, "pid": pid, "tid": 0, "name": _name(event),
        }  # fmt: skip
        yield {**common, "ph": "b", "ts": times[given.born], "args": {"bytes": given.requested}}
        yield {**common, "ph": "e", "ts": times[end] if end is not None else last}


_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _net_reserved(trace: Trace) -> int:
    return sum(_RESERVING.get(e["action"], 0) * e["size"] for e in trace.events)


def _times(trace: Trace) -> list[int]:
    """Times that never go back: threads write events in the order of the allocator's lock."""
    times: list[int] = []
    for event in trace.events:
        moment = event.get("time_us", 0)
        times.append(max(moment, times[-1]) if times else moment)
    start = times[0] if times else 0
    return [moment - start for moment in times]


def _counter(pid: int, moment: int, name: str, value: int) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "ts": moment, "name": name, "args": {"bytes": value}}


def _name(event: Any) -> str:
    """The line that allocated a block, and the operator, as far as either is known."""
    op = stamp_of(event)[1]
    frame = next(users(event.get("frames", ())), None)
    if frame is None:
        return op or "(no Python frames)"
    file = frame["filename"].replace("\\", "/").rsplit("/", 1)[-1]
    line = f"{file}:{frame['line']} {frame['name']}"
    return f"{op} {line}" if op else line
