"""The ledger of a run on CUDA: the op stream's labels on the allocator's own trace.

The trace is looked at only where a step's peak is the highest so far; after any other step it is
forgotten, so that a run may be as long as it likes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fa_advisor.attribution import chrome_trace
from fa_advisor.attribution.failure import Fallen, fallen, last_failure
from fa_advisor.attribution.join import Joiner
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.postmortem import Postmortem, explain
from fa_advisor.attribution.replay import Trace, above
from fa_advisor.attribution.steps import Kept, StepLog
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.probes.allocations import Allocations, obstacle
from fa_advisor.probes.cuda_peaks import CudaPeaks
from fa_advisor.probes.device import (
    allowed_bytes,
    outside_allocator_bytes,
    used_by_others_bytes,
)
from fa_advisor.probes.events import Event
from fa_advisor.probes.lines import LIBRARY
from fa_advisor.records import AllocatorState, DeviceSpec

# A loop without an optimizer has no steps: the log is cut after so many changes.
LONGEST_STEP = 200_000
# Events are read when their step has ended and its peak is known; of more than so many, before.
LONGEST_UNREAD = 50_000


@dataclass(frozen=True)
class Measured:
    """What CUDA's allocator said of the step; `None` in a model's stead."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_allocator_bytes: int | None
    allocator: AllocatorState | None


class GpuLedger:
    """A context manager: inside it the allocator of CUDA device `index` is recorded.

    Give `feed` to a `Watch` as its sink and `stamp` as its stamp. `notes` says what couldn't be
    had; the report then falls back on what the op stream alone explains. `keep_trace`: for
    `snapshot` and `chrome_trace`.
    """

    def __init__(
        self, index: int, device: DeviceSpec, *, warmup: bool = False, keep_trace: bool = False
    ) -> None:
        self.index = index
        self._keep_trace = keep_trace
        self._cut: dict[str, Any] | None = None
        self._ledger = Ledger(modelled=False, closes=False)
        workspaces = workspaces_on(device)
        sizes = frozenset((workspaces.cublas, workspaces.cublaslt))
        self._joiner = Joiner(workspaces=sizes, ours=LIBRARY)
        self._allocations: Allocations | None = None
        self._unread: list[Event] = []
        self._kept = Kept(warmup=warmup)
        self._stats: CudaPeaks | None = None
        self._peaks = [0, 0]  # allocated and reserved
        self._paused = False
        self.missed = 0  # the allocator's highest peak while nothing was recorded
        self.notes: list[str] = []
        # The allocator's, once a step has fallen, and how much it could reserve then.
        self.settings: Mapping[str, Any] = {}
        self.allowed: int | None = None

    def __enter__(self) -> GpuLedger:
        torch.cuda.init()
        why_not = obstacle()
        if why_not is None:
            self._allocations = Allocations(self.index)
            self._allocations.start()
        else:
            self.notes.append(f"{why_not}: workspaces and rounding are among the unattributed")
        self._stats = CudaPeaks.borrow(self.index)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._paused:
            self._forget_peaks()
        else:
            self.bank_peaks()
        if self._allocations is not None:
            self._allocations.stop()
            self._allocations = None
        if self._stats is not None:
            self._stats.give_back()
            self._stats = None

    @property
    def stamp(self) -> Callable[[str], None] | None:
        """What says to the allocator which operator runs; `None` where nothing is recorded."""
        return self._allocations.stamp if self._allocations is not None else None

    def feed(self, events: list[Event]) -> None:
        """Take in the stream's events."""
        self._unread += events
        if len(self._unread) > LONGEST_UNREAD:
            self._read()
            if self._ledger.entries > LONGEST_STEP:
                self.end_step()

    def _read(self) -> None:
        events, self._unread = self._unread, []
        self._ledger.feed(events)

    def _take_step(self) -> StepLog:
        self._read()
        return self._ledger.take_step()

    def pause(self) -> None:
        """Record nothing, until `resume`: of what happens in between only the peak is kept."""
        self._paused = True
        if self._allocations is not None:
            self._allocations.stop()

    def resume(self) -> None:
        """Record on; say `begin_step` once the stream has been told what is alive now."""
        if self._allocations is not None:
            self._allocations.start()
        self._paused = False
        self._forget_peaks()

    # -- steps ------------------------------------------------------------------------------

    @property
    def best(self) -> StepLog | None:
        """The step with the highest peak so far."""
        return self._kept.best

    def start_measuring(self) -> None:
        """Forget the steps so far (warm-up); who owns what is alive stays known."""
        torch.cuda.synchronize(self.index)
        self._join(self._take_step())
        self._kept.forget()
        self._peaks = [0, 0]
        self._forget_peaks()
        self.missed = 0

    def begin_step(self) -> None:
        """Forget what was seen since the last step ended; who owns what is alive stays known."""
        self._join(self._take_step())

    def end_step(self, kind: str = "", about: object = None) -> None:
        """A step has ended, and every event of it been fed: `kind` and `about` are its log's."""
        before = self._peaks[0]
        self.bank_peaks()
        if self._peaks[0] <= before and not self._kept.is_due(kind):
            events, self._unread = self._unread, []
            self._ledger.skim(events)
            self._ledger.begin_step()
            self._kept.pass_over(kind)
            if self._allocations is not None:
                self._allocations.skip()
            return
        step = self._join(self._take_step())
        step.kind, step.about = kind, about
        self._kept.offer(step)

    def fall(self, sids: tuple[int, ...]) -> Fallen | None:
        """The step that has just run out of memory, up to then; `None` where the trace doesn't
        tell. `sids`: the storages that the operator was about to make (`OpStream.failed`)."""
        if self._allocations is None:
            return None
        self.allowed = allowed_bytes(self.index)
        seen = self._take_step()
        cut = self._allocations.cut()
        self._cut = cut if self._keep_trace else None
        trace = _trace(cut)
        at = last_failure(trace)
        if at is None:
            return None
        joined, replayed = self._joiner.join(seen, trace)
        if replayed.strays:
            return None
        self.settings = trace.settings
        found = fallen(joined, seen, replayed, trace, at, sids)
        self._kept.forget()
        self._kept.offer(found.step)
        self._peaks[1] = max(self._peaks[1], found.state.reserved)
        return found

    def explain(self) -> Postmortem | None:
        """What ran out of memory where no step was followed; `None` where nothing did."""
        if self._allocations is None:
            return None
        trace = _trace(self._allocations.cut())
        if last_failure(trace) is None:
            return None
        return explain(trace, snapshot="", device=self.index)

    def bank_peaks(self) -> None:
        """Keep the allocator's peaks since the last time."""
        if self._stats is not None:
            self._peaks = [*map(max, self._peaks, self._stats.take())]

    def _forget_peaks(self) -> None:
        if self._stats is not None:
            self.missed = max(self.missed, self._stats.take()[0])

    def _join(self, step: StepLog) -> StepLog:
        if self._allocations is None:
            return step
        cut = self._allocations.cut()
        self._cut = cut if self._keep_trace else None
        trace = _trace(cut)
        joined, replayed = self._joiner.join(step, trace)
        if not cut["whole"] or replayed.strays:
            note = (
                "the allocator's trace has gaps: workspaces and rounding are among the unattributed"
            )
            self.notes += [note] if note not in self.notes else []
            return step
        at = joined.peak_at
        joined.above = above(trace, replayed.changes[at - 1].at + 1 if at else 0)
        return joined

    # -- the trace itself -------------------------------------------------------------------

    def snapshot(self) -> bytes | None:
        """The last step's trace as torch's memory_viz reads it (`_dump_snapshot`'s pickle)."""
        if self._cut is None:
            return None
        traces: list[Any] = [[] for _ in range(self.index)]
        return pickle.dumps(
            {
                "segments": self._cut["segments"],
                "device_traces": [*traces, self._cut["events"]],
                "allocator_settings": self._cut["settings"],
                "external_annotations": [],
            }
        )

    def chrome_trace(self) -> bytes | None:
        """The last step's trace as a Chrome trace."""
        return chrome_trace.encode(_trace(self._cut), self.index) if self._cut else None

    # -- what was measured ------------------------------------------------------------------

    def measured(self) -> Measured:
        """The allocator's figures of the step with the highest peak."""
        torch.cuda.synchronize(self.index)
        self.bank_peaks()
        best = self.best
        state = best.above if best is not None else None
        outside = outside_allocator_bytes(self.index, torch.cuda.memory_reserved(self.index))
        return Measured(
            peak_allocated_bytes=self._peaks[0] if state is None else state.allocated,
            peak_reserved_bytes=self._peaks[1],
            outside_allocator_bytes=outside,
            allocator=None
            if state is None
            else AllocatorState(
                reserved_bytes=state.reserved,
                cached_bytes=state.cached,
                fragmented_bytes=state.fragmented,
                pending_bytes=state.pending,
                private_pools_bytes=state.private_pools,
                other_processes_bytes=used_by_others_bytes(self.index),
            ),
        )


def _trace(cut: dict[str, Any]) -> Trace:
    return Trace(cut["events"], cut["segments"], cut["settings"], cut["before"] or None)
