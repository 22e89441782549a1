"""The CUDA caching allocator's own trace: recorded, stamped, and handed on step by step.

Recording lives on the host: no tensor is put on the GPU. Each allocation carries a stamp, text
that says which operator was running in its thread (`OpStream` sets and clears it).
"""

from __future__ import annotations

from typing import Any

import torch

# Events of one step; a step with more can't be replayed (a 64-layer model's has about 30,000).
MAX_EVENTS = 1_000_000


def obstacle() -> str | None:
    """Why the trace can't be recorded here; `None` if it can."""
    if torch.cuda.memory.get_allocator_backend() != "native":
        return "the program doesn't use torch's own caching allocator, so there is no trace of it"
    if torch._C._cuda_isHistoryEnabled():
        return "the program records the allocator's history itself; its recording is left alone"
    return None


class Allocations:
    """Between `start` and `stop` the allocator of CUDA device `index` is recorded."""

    stamp = staticmethod(torch._C._cuda_setMemoryMetadata) if torch.cuda.is_available() else None

    def __init__(self, index: int) -> None:
        self._index = index
        self._before: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin to record."""
        torch.cuda.init()
        self.restart()
        self._before = self._segments(torch.cuda.memory._snapshot())

    def restart(self) -> None:
        """Forget the events so far."""
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
        )

    def stop(self) -> None:
        """End the recording, and clear the stamp, which would outlast it."""
        torch.cuda.memory._record_memory_history(None)
        if self.stamp is not None:
            self.stamp("")

    def cut(self) -> dict[str, Any]:
        """What happened since the last cut; the next begins here.

        `events`, the `segments` after and `before` them, the allocator's `settings`, and whether
        the events are `whole`.
        """
        snapshot = torch.cuda.memory._snapshot()
        events = snapshot["device_traces"][self._index]
        segments = self._segments(snapshot)
        before, self._before = self._before, segments
        self.restart()
        return {
            "events": events,
            "segments": segments,
            "before": before,
            "settings": snapshot.get("allocator_settings", {}),
            "whole": len(events) < MAX_EVENTS,
        }

    def skip(self) -> None:
        """Begin the next cut here, without looking at what happened since the last."""
        self.restart()
        self._before = []

    def _segments(self, snapshot: dict[str, Any]) -> list[dict[str, Any]]:
        return [s for s in snapshot["segments"] if s["device"] == self._index]
