"""Torch's memory snapshots as files: read without executing anything, and checked before use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa_advisor.attribution.frames import encodable
from fa_advisor.attribution.plain_pickle import NotPlain, loads
from fa_advisor.attribution.replay import Trace
from fa_advisor.errors import UsageError

_WHAT = "a snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes"
_LARGEST = 1 << 63
_STATES = frozenset(("active_allocated", "active_pending_free", "inactive", "active_awaiting_free"))


class _Foreign(Exception):
    """The data is plain, but no snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's devices, by their number."""

    traces: Mapping[int, Trace]

    def pick(self, device: int | None) -> int:
        """The device asked for; else the one that ran out of memory last, else the fullest.

        Raises: UsageError where the snapshot knows nothing of it.
        """
        if device is None:
            return max(self.traces, key=self._weight)
        if device not in self.traces:
            known = ", ".join(map(str, self.traces))
            raise UsageError(f"the snapshot has nothing of device {device}, only of {known}")
        return device

    def _weight(self, device: int) -> tuple[int, int]:
        trace = self.traces[device]
        failed = max((e["time_us"] + 1 for e in trace.events if e["action"] == "oom"), default=0)
        return failed, sum(s["total_size"] for s in trace.segments)


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read and check a snapshot's file.

    Raises: UsageError where it is missing, cut off, foreign, or asks for more than plain data.
    """
    name = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"can't read the snapshot {name}: {error.strerror or error}", hint=_WHAT
        ) from error
    try:
        return checked(loads(data))
    except NotPlain as error:
        raise UsageError(f"{name} is not a memory snapshot of torch: {error}", hint=_WHAT) from None
    except _Foreign as error:
        raise UsageError(
            f"{name} is a pickle but not a memory snapshot of torch: {error}", hint=_WHAT
        ) from None


def checked(value: Any) -> Snapshot:
    """The snapshot in an object, every field that is used checked for its type and range."""
    if not isinstance(value, dict):
        raise _Foreign(f"it holds a {type(value).__name__}, not a dict")
    segments, traces = value.get("segments"), value.get("device_traces", [])
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise _Foreign("it has no lists `segments` and `device_traces`")
    frames = _Frames()
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        made = _segment(segment, frames)
        by_device.setdefault(made["device"], []).append(made)
    events: dict[int, list[dict[str, Any]]] = {}
    for device, trace in enumerate(traces):
        if not isinstance(trace, list):
            raise _Foreign("a device's trace is no list")
        if trace:
            events[device] = [_event(event, frames) for event in trace]
    if not by_device and not events:
        raise _Foreign("it has no segments and no events: nothing was ever allocated")
    settings = value.get("allocator_settings")
    return Snapshot(
        {
            device: Trace(
                events.get(device, []),
                by_device.get(device, []),
                _settings(settings if isinstance(settings, dict) else {}),
            )
            for device in sorted({*by_device, *events})
        }
    )


def _segment(value: Any, frames: _Frames) -> dict[str, Any]:
    segment = _dict(value, "a segment")
    blocks = segment.get("blocks")
    if not isinstance(blocks, list):
        raise _Foreign("a segment has no list of blocks")
    pool = segment.get("segment_pool_id", (0, 0))
    if not (isinstance(pool, (tuple, list)) and len(pool) == 2 and all(map(_whole, pool))):
        raise _Foreign("a segment's pool is no pair of numbers")
    start = _number(segment, "address")
    made: list[dict[str, Any]] = []
    address = start
    for value in blocks:
        block = _dict(value, "a block")
        size, state = _number(block, "size"), block.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise _Foreign(f"a block's state is {_shown(state)}")
        address = _number(block, "address", address)
        made.append(
            {
                "address": address,
                "size": size,
                "requested_size": _number(block, "requested_size", size),
                "state": "active_pending_free" if state == "active_awaiting_free" else state,
                "frames": frames.of(block),
            }
        )
        address += size
    total = _number(segment, "total_size")
    parts = sum(b["size"] for b in made)
    if parts != total:
        raise _Foreign(f"a segment's blocks add up to {parts:,} bytes, its size is {total:,}")
    return {
        "device": _number(segment, "device", 0),
        "address": start,
        "total_size": total,
        "segment_pool_id": (pool[0], pool[1]),
        "blocks": made,
    }


def _event(value: Any, frames: _Frames) -> dict[str, Any]:
    event = _dict(value, "an event")
    action = event.get("action")
    if not isinstance(action, str):
        raise _Foreign("an event has no action")
    metadata = event.get("user_metadata")
    made: dict[str, Any] = {
        "action": action,
        "size": _number(event, "size", 0),
        "time_us": _number(event, "time_us", 0),
        "frames": frames.of(event),
        "user_metadata": encodable(metadata[:200]) if isinstance(metadata, str) else "",
    }
    if action == "oom":
        made["device_free"] = _number(event, "device_free", _number(event, "addr", 0))
    else:
        made["addr"] = _number(event, "addr", 0)
    return made


class _Frames:
    """Stacks, each frame checked once: snapshots share them."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._mended: dict[int, dict[str, Any]] = {}

    def of(self, holder: Mapping[str, Any]) -> list[dict[str, Any]]:
        frames = holder.get("frames", [])
        if not isinstance(frames, list):
            raise _Foreign("a stack is no list of frames")
        for frame in frames:
            if id(frame) not in self._known:
                if not _is_frame(frame):
                    raise _Foreign("a frame has no file, line and name")
                self._known.add(id(frame))
                mended = _mended(frame)
                if mended is not frame:
                    self._mended[id(frame)] = mended
        whole: list[dict[str, Any]] = frames
        return [self._mended.get(id(f), f) for f in whole] if self._mended else whole


def _mended(frame: dict[str, Any]) -> dict[str, Any]:
    """A frame whose names UTF-8 can carry. A backslash would part a path: `?` it is there."""
    file, name = frame["filename"], frame["name"]
    if file.isascii() and name.isascii():
        return frame
    file = file.encode("utf-8", "replace").decode("utf-8")
    return {**frame, "filename": file, "name": encodable(name)}


def _is_frame(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("filename"), str)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("line"), int)
        and abs(value["line"]) <= 2 * _LARGEST  # torch writes -1 without its sign
    )


def _settings(settings: dict[Any, Any]) -> dict[str, Any]:
    divisions = settings.get("roundup_power2_divisions")
    limit = settings.get("max_split_size")
    return {
        "expandable_segments": settings.get("expandable_segments") is True,
        "max_split_size": limit if _whole(limit) else -1,
        "roundup_power2_divisions": {
            key: number
            for key, number in (divisions.items() if isinstance(divisions, dict) else ())
            if _is_power(key) and _whole(number)
        },
    }


def _is_power(key: Any) -> bool:
    return isinstance(key, str) and key.isdecimal() and len(key) < 9


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Foreign(f"{what} is a {type(value).__name__}, not a dict")
    return value


def _number(holder: Mapping[Any, Any], key: str, otherwise: int | None = None) -> int:
    value = holder.get(key, otherwise)
    if not _whole(value) or not 0 <= value < _LARGEST:
        raise _Foreign(f"`{key}` isn't a number of bytes or an address: {_shown(value)}")
    return int(value)


def _shown(value: Any) -> str:
    """A value that nobody has checked, in a few words: a container may be deep, or without an end,
    once it is written out."""
    if isinstance(value, str):
        return repr(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
