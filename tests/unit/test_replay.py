"""The allocator's trace replayed: against real snapshots' own statistics, and against the model of
the allocator on random requests."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_advisor.attribution.allocator import CachingAllocator
from fa_advisor.attribution.arena import Arena, Rules
from fa_advisor.attribution.replay import Trace, above, replay, rules_of

SNAPSHOTS = Path(__file__).parent / "snapshots"
MIB = 2**20


def snapshot(name: str) -> dict[str, Any]:
    """Of an H200, torch 2.11: two steps of a two-layer GPT-2, eager attention, stacks trimmed."""
    loaded: dict[str, Any] = pickle.loads(
        gzip.decompress((SNAPSHOTS / f"{name}.pickle.gz").read_bytes())
    )
    return loaded


def trace_of(loaded: dict[str, Any]) -> Trace:
    return Trace(loaded["device_traces"][0], loaded["segments"], loaded["allocator_settings"])


@pytest.mark.parametrize("name", ["train", "expand", "oom", "compile"])
def test_a_real_trace_comes_out_as_torch_counted(name: str) -> None:
    loaded = snapshot(name)
    trace, stats = trace_of(loaded), loaded["stats"]
    replayed = replay(trace)
    assert replayed.strays == 0
    assert replayed.peak()[0] == stats["allocated_bytes.all.peak"]
    end = above(trace, len(trace.events))
    assert end.allocated == stats["allocated_bytes.all.current"]
    assert end.reserved == stats["reserved_bytes.all.current"]
    if name != "expand":  # there torch counts no splits
        assert end.fragmented == stats["inactive_split_bytes.all.current"]


@pytest.mark.parametrize("name", ["train", "expand", "oom", "compile"])
def test_reserved_is_always_the_sum_of_its_parts(name: str) -> None:
    trace = trace_of(snapshot(name))
    for count in range(0, len(trace.events), 97):
        state = above(trace, count)
        parts = state.allocated + state.pending + state.cached + state.fragmented
        assert parts == state.reserved


def test_a_trace_that_begins_late_is_exact_but_for_what_ended_unseen() -> None:
    loaded = snapshot("train")
    whole = replay(trace_of(loaded))
    loaded["device_traces"][0] = loaded["device_traces"][0][800:]
    late = replay(trace_of(loaded))
    assert late.strays == 0
    assert whole.peak()[0] - late.peak()[0] in range(0, MIB + 1)


class Recorder:
    """The model of the allocator, whose calls are written down as torch's trace would be."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.events: list[dict[str, Any]] = []
        self.live: list[tuple[int, int]] = []
        self.counts: list[int] = []

    def allocate(self, nbytes: int) -> None:
        before = self.allocator.reserved
        address = self.allocator.allocate(nbytes)
        grown = self.allocator.reserved - before
        if grown:
            self._write("segment_alloc", address, grown)
        self._write("alloc", address, nbytes)
        self.live.append((address, nbytes))
        self.counts.append(self.allocator.allocated)

    def release(self, index: int) -> None:
        address, nbytes = self.live.pop(index % len(self.live))
        self.allocator.release(address)
        self._write("free_requested", address, nbytes)
        self._write("free_completed", address, nbytes)
        self.counts.append(self.allocator.allocated)

    def _write(self, action: str, address: int, nbytes: int) -> None:
        self.events.append({"action": action, "addr": address, "size": nbytes})


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(8 * MIB, 30 * MIB))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(SIZES, st.integers(-1000, -1)), max_size=120))
def test_every_step_of_the_model_is_found_again(calls: list[int]) -> None:
    recorder = Recorder()
    for call in calls:
        if call > 0:
            recorder.allocate(call)
        elif recorder.live:
            recorder.release(-call)
    replayed = replay(Trace(recorder.events, [], {}, before=[]))
    allocated, counts = replayed.start, []
    for change in replayed.changes:
        allocated += change.delta
        counts.append(allocated)
    assert replayed.strays == 0
    assert counts == recorder.counts


def test_a_block_that_another_stream_uses_is_pending_until_it_is_done() -> None:
    arena = Arena(Rules())
    arena.add(0, 20 * MIB, (0, 0))
    arena.allocate(0, 3 * MIB, 0)
    arena.allocate(3 * MIB, 3 * MIB, 1)
    arena.request_free(0)
    assert (arena.allocated, arena.pending) == (3 * MIB, 3 * MIB)
    arena.request_free(3 * MIB)
    arena.complete_free(3 * MIB)
    # The neighbour is pending: what is free on the other side has nothing to merge with.
    assert arena.blocks[3 * MIB].size == 17 * MIB
    arena.complete_free(0)
    assert arena.blocks[0].size == 20 * MIB and arena.strays == 0


def test_expandable_segments_grow_shrink_and_split_to_the_last_512_bytes() -> None:
    arena = Arena(Rules(expandable=True))
    arena.add(0, 20 * MIB, (0, 0), grows=True)
    arena.allocate(0, 12 * MIB, 0)
    arena.add(20 * MIB, 20 * MIB, (0, 0), grows=True)
    given_block = arena.allocate(12 * MIB, 27 * MIB + 100, 1)
    assert given_block.size == 27 * MIB + 512
    arena.request_free(12 * MIB)
    arena.complete_free(12 * MIB)
    arena.remove(20 * MIB, 20 * MIB)
    assert arena.reserved == 20 * MIB and arena.blocks[12 * MIB].size == 8 * MIB
    assert arena.strays == 0


def test_settings_decide_the_size() -> None:
    rules = rules_of(
        {
            "max_split_size": 32 * MIB,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 4, "2": 4, "1024": 0},
        }
    )
    assert rules.rounded(5 * MIB) == 5 * MIB and rules.rounded(5 * MIB + 1) == 6 * MIB
    assert rules.rounded(2000 * MIB + 1) == 2000 * MIB + 512
    assert rules.splits(2 * MIB, 31 * MIB) and not rules.splits(2 * MIB, 32 * MIB)


def test_a_cuda_graphs_private_pool() -> None:
    """As torch writes it: the segments say whose they are (`segment_pool_id`), the events don't."""
    shared, private = 1 << 40, 2 << 40

    def segment(address: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        made, at = [], address
        for size, state in blocks:
            made.append({"address": at, "size": size, "requested_size": size, "state": state})
            at += size
        return {
            "device": 0, "address": address, "total_size": at - address, "stream": 0,
            "segment_type": "large", "segment_pool_id": pool, "blocks": made,
        }  # fmt: skip

    segments = [
        segment(shared, (0, 0), (4 * MIB, "active_allocated"), (16 * MIB, "inactive")),
        # What a graph made and let go while it was captured stays the graph's.
        segment(private, (0, 3), (6 * MIB, "active_allocated"), (14 * MIB, "inactive")),
    ]
    events = [
        {"action": "segment_alloc", "addr": shared, "size": 20 * MIB},
        {"action": "alloc", "addr": shared, "size": 4 * MIB},
        {"action": "segment_alloc", "addr": private, "size": 20 * MIB},
        {"action": "alloc", "addr": private, "size": 6 * MIB},
        {"action": "alloc", "addr": private + 6 * MIB, "size": 8 * MIB},
        {"action": "free_requested", "addr": private + 6 * MIB, "size": 8 * MIB},
        {"action": "free_completed", "addr": private + 6 * MIB, "size": 8 * MIB},
    ]
    trace = Trace(events, segments)
    replayed = replay(trace)
    assert replayed.strays == 0
    assert replayed.peak()[0] == 18 * MIB
    end = above(trace, len(events))
    assert (end.allocated, end.reserved) == (10 * MIB, 40 * MIB)
    assert end.private_pools == 20 * MIB
    assert end.fragmented == 30 * MIB and end.cached == 0
    assert end.largest_free == 16 * MIB  # nobody else gets the 14 MiB
    replayed_graph = Trace([], segments)  # from the segments alone: a graph that is replayed
    assert above(replayed_graph, 0) == end
