"""One device's allocator trace, replayed: the state before it, every change, any moment of it.

What is read here are the plain containers of torch's memory snapshot, of a live run or of a file.
A block's identity is the event that gave it out, never its address, which is used again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fa_advisor.attribution.arena import SHARED_POOL, Arena, Given, Pool, Rules, State, pool_of
from fa_advisor.attribution.by_address import ByAddress

Event = Mapping[str, Any]
Segment = Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """`events` in order, and the segments after the last of them; those before the first, where
    they were looked at, make the sizes of what was alive then exact."""

    events: Sequence[Event]
    segments: Sequence[Segment]
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[Segment] | None = None


class Change(NamedTuple):
    """`given` began (`delta` > 0) or ceased to count as allocated, by the event `at`."""

    at: int
    given: Given
    delta: int


@dataclass(frozen=True)
class Above:
    """What the allocator holds beyond the allocated bytes, at one moment; bytes.

    `cached`: free segments, which `empty_cache` returns. `fragmented`: free blocks of segments
    that are in use. `pending`: freed, but another stream may still use them. `private_pools`: of
    `reserved`, what belongs to CUDA graphs and MemPools. `largest_free`: the largest block that a
    request could get of the shared pool without more memory from the driver.
    """

    allocated: int
    reserved: int
    cached: int
    fragmented: int
    pending: int
    private_pools: int
    largest_free: int


@dataclass(frozen=True)
class Replayed:
    """Every change of the allocated bytes, in order, from `start` bytes in `baseline` blocks."""

    baseline: tuple[Given, ...]
    start: int
    changes: tuple[Change, ...]
    strays: int

    def peak(self, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """The highest allocated bytes between two events, and how many changes lead there."""
        allocated, best, at = self.start, -1, 0
        for count, change in enumerate(self.changes, 1):
            if last is not None and change.at > last:
                break
            if change.at >= first and allocated > best:
                best, at = allocated, count - 1
            allocated += change.delta
            if change.at >= first and allocated > best:
                best, at = allocated, count
        return (best, at) if best >= 0 else (allocated, len(self.changes))


def rules_of(settings: Mapping[str, Any]) -> Rules:
    """The allocator's settings, as a snapshot tells them."""
    limit = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions", {})
    by_size = {int(mib) << 20: int(n) for mib, n in divisions.items()} if divisions else {}
    return Rules(
        expandable=bool(settings.get("expandable_segments", False)),
        max_split_size=limit if isinstance(limit, int) and limit > 0 else None,
        power2_divisions=by_size if any(n > 1 for n in by_size.values()) else {},
    )


def replay(trace: Trace) -> Replayed:
    """Run the whole trace."""
    arena = opened(trace)
    baseline = tuple(arena.live())
    start = arena.allocated
    changes = tuple(_run(arena, trace, len(trace.events)))
    return Replayed(baseline, start, changes, arena.strays)


def above(trace: Trace, count: int) -> Above:
    """What the allocator holds after the first `count` events."""
    arena = opened(trace)
    for _ in _run(arena, trace, count):
        pass
    return above_in(arena)


def above_in(arena: Arena) -> Above:
    """What an arena holds beyond its allocated bytes."""
    cached = fragmented = private = largest = 0
    for block in arena.blocks.values():
        if block.pool != SHARED_POOL:
            private += block.size
        if block.state is State.FREE:
            if block.previous is None and block.next is None:
                cached += block.size
            else:
                fragmented += block.size
            if block.pool == SHARED_POOL:
                largest = max(largest, block.size)
    return Above(
        allocated=arena.allocated,
        reserved=arena.reserved,
        cached=cached,
        fragmented=fragmented,
        pending=arena.pending,
        private_pools=private,
        largest_free=largest,
    )


def opened(trace: Trace) -> Arena:
    """The arena as it was before the first event."""
    arena = Arena(rules_of(trace.settings))
    if trace.before is not None:
        arena.load(trace.before)
    else:
        before, arena.strays = _unwound(trace, arena.rules)
        arena.load(before)
    return arena


def _run(arena: Arena, trace: Trace, count: int) -> Iterator[Change]:
    pools = {int(s["address"]): pool_of(s) for s in trace.segments}
    for at in range(count):
        event = trace.events[at]
        action = event["action"]
        if action == "alloc":
            given = arena.allocate(event["addr"], event["size"], at)
            yield Change(at, given, given.size)
        elif action == "free_requested":
            freed = arena.request_free(event["addr"])
            if freed is not None:
                yield Change(at, freed, -freed.size)
        elif action == "free_completed":
            arena.complete_free(event["addr"])
        elif action == "segment_alloc":
            address = event["addr"]
            arena.add(address, event["size"], _pool(event, pools, address))
        elif action == "segment_map":
            address = event["addr"]
            arena.add(address, event["size"], _pool(event, pools, address), grows=True)
        elif action in ("segment_free", "segment_unmap"):
            arena.remove(event["addr"], event["size"])


def _pool(event: Event, pools: Mapping[int, Pool], address: int) -> Pool:
    told = event.get("pool_id", event.get("segment_pool_id"))
    return (int(told[0]), int(told[1])) if told else pools.get(address, SHARED_POOL)


def _unwound(trace: Trace, rules: Rules) -> tuple[list[dict[str, Any]], int]:
    """The segments before the first event, from those after the last: every event undone; and how
    many of them can't have been, because they overlap.

    Exact, but for the slack of blocks that were alive before and are no longer.
    """
    live: dict[int, tuple[int, int, str]] = {}
    spans: ByAddress[tuple[int, Pool]] = ByAddress()
    for segment in trace.segments:
        spans[segment["address"]] = (segment["total_size"], pool_of(segment))
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] in ("active_allocated", "active_pending_free"):
                asked = block.get("requested_size", block["size"])
                live[address] = (block["size"], asked, block["state"])
            address += block["size"]
    twice = len(trace.segments) - len(spans)
    for event in reversed(trace.events):
        action, address, size = event["action"], event.get("addr", 0), event["size"]
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_completed":
            live[address] = (rules.rounded(size), size, "active_pending_free")
        elif action == "free_requested":
            block_size = live[address][0] if address in live else rules.rounded(size)
            live[address] = (block_size, size, "active_allocated")
        elif action in ("segment_alloc", "segment_map"):
            _cut_out(spans, address, size)
        elif action in ("segment_free", "segment_unmap"):
            spans[address] = (size, SHARED_POOL)
    apart, overlaps = _apart(spans)
    if rules.expandable:
        apart = _joined(apart)
    addresses = sorted(live)
    return [
        _segment(start, size, pool, _within(addresses, start, size), live)
        for start, (size, pool) in apart.items()
    ], twice + overlaps


def _cut_out(spans: ByAddress[tuple[int, Pool]], address: int, size: int) -> None:
    start = spans.floor(address)
    if start is None or address >= start + spans[start][0]:
        return
    length, pool = spans[start]
    del spans[start]
    if address > start:
        spans[start] = (address - start, pool)
    if address + size < start + length:
        spans[address + size] = (start + length - address - size, pool)


def _apart(spans: Mapping[int, tuple[int, Pool]]) -> tuple[dict[int, tuple[int, Pool]], int]:
    """In order, each ending where the next begins at the latest; how many had to be cut."""
    apart: dict[int, tuple[int, Pool]] = {}
    last, overlaps = -1, 0
    for start in sorted(spans):
        if last >= 0 and last + apart[last][0] > start:
            apart[last] = (start - last, apart[last][1])
            overlaps += 1
        apart[start], last = spans[start], start
    return apart, overlaps


def _within(addresses: list[int], start: int, size: int) -> list[int]:
    return addresses[bisect_left(addresses, start) : bisect_left(addresses, start + size)]


def _joined(spans: dict[int, tuple[int, Pool]]) -> dict[int, tuple[int, Pool]]:
    joined: dict[int, tuple[int, Pool]] = {}
    last = -1
    for start in sorted(spans):
        size, pool = spans[start]
        if last >= 0 and last + joined[last][0] == start:
            joined[last] = (joined[last][0] + size, joined[last][1])
        else:
            joined[start], last = (size, pool), start
    return joined


def _segment(
    start: int,
    size: int,
    pool: Pool,
    addresses: list[int],
    live: Mapping[int, tuple[int, int, str]],
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at, end = start, start + size
    for address in addresses:
        length, asked, state = live[address]
        if address > at:
            blocks.append({"address": at, "size": address - at, "state": "inactive"})
        length = min(length, end - address)
        blocks.append({"address": address, "size": length, "requested_size": asked, "state": state})
        at = address + length
    if at < end:
        blocks.append({"address": at, "size": end - at, "state": "inactive"})
    return {"address": start, "total_size": size, "segment_pool_id": pool, "blocks": blocks}
