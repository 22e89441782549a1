"""Last screen, after a run: what the target itself printed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.widgets import Log

from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.pane import Pane


class OutputPane(Pane):
    """The target's own lines, as text."""

    NAME = "output"
    TITLE = "Output"
    ABOUT = "what the target printed"

    def __init__(self, report: Report, glyphs: Glyphs, lines: Sequence[str]) -> None:
        super().__init__(report, glyphs)
        self._lines = lines

    def compose(self) -> ComposeResult:
        """The log."""
        yield Log(auto_scroll=False)

    def on_mount(self) -> None:
        """Write it once."""
        self.query_one(Log).write_lines(self._lines)
