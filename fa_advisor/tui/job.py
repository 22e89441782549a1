"""A profile run as the dashboard sees it: what to show while it runs, and how it ended.

The run blocks a worker thread; the screen only polls. So a target that prints without end costs
the screen one read of a bounded buffer every tenth of a second.
"""

from __future__ import annotations

import threading
from collections import deque

from rich.text import Text

from fa_advisor.errors import Interrupted
from fa_advisor.records import ProfileRequest, Progress
from fa_advisor.report import Report

LINES_KEPT = 5000


class ProfileJob:
    """Runs a request in the child process; everything but `run` may be read from any thread."""

    def __init__(self, request: ProfileRequest) -> None:
        self.request = request
        self.cancel = threading.Event()
        self.progress = Progress(stage="start")
        self.report: Report | None = None
        self.error: BaseException | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._fresh: list[str] = []
        self._count = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run the target to its end; never raises, `report` or `error` is set afterwards."""
        from fa_advisor import launch

        try:
            report = launch.run_child(
                self.request, self._on_progress, self._on_output, cancel=self.cancel
            )
        except BaseException as error:
            self.error = error
        else:
            self.report = report
        if self.cancel.is_set() and not isinstance(self.error, Interrupted):
            self.error = Interrupted("interrupted as the run ended")

    @property
    def ended(self) -> bool:
        """Whether the run is over, one way or the other."""
        return self.report is not None or self.error is not None

    def lines(self) -> list[str]:
        """What the target printed, its last LINES_KEPT lines, the number of others first."""
        with self._lock:
            gone = self._count - len(self._lines)
            return [*([f"({gone:,} earlier lines)"] if gone else []), *self._lines]

    def fresh_lines(self) -> list[str]:
        """What was printed since the last call."""
        with self._lock:
            fresh, self._fresh = self._fresh[-LINES_KEPT:], []
            return fresh

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress

    def _on_output(self, line: str) -> None:
        shown = readable(line)
        with self._lock:
            self._count += 1
            self._lines.append(shown)
            self._fresh.append(shown)
            if len(self._fresh) > 2 * LINES_KEPT:
                del self._fresh[:-LINES_KEPT]


def readable(line: str) -> str:
    """A printed line without colours and cursor moves; a bar that was redrawn, as it was last."""
    last = line.rstrip("\r\n").rpartition("\r")[2]
    text = Text.from_ansi(last).plain.expandtabs(8)
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
