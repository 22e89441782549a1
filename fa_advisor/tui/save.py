"""Asks where to write the report."""

from __future__ import annotations

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from fa_advisor.errors import UsageError
from fa_advisor.report import Report

SUGGESTED = "fa-report.json"


class SaveScreen(ModalScreen[str | None]):
    """Writes the report to the file typed; a file that exists takes a second enter."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel", id="save.cancel", tooltip="Don't save")
    ]

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._confirmed: str | None = None

    def compose(self) -> ComposeResult:
        """A line to type, a line to answer."""
        with Vertical():
            yield Static("Save the report (JSON) to", classes="subject")
            yield Input(SUGGESTED)
            yield Static("enter: save, escape: cancel", id="answer", classes="note", markup=False)

    @on(Input.Submitted)
    def _save(self, event: Input.Submitted) -> None:
        name = event.value.strip()
        path = Path(name).expanduser()
        if not name:
            return
        if path.exists() and self._confirmed != name:
            self._confirmed = name
            self._say(f"{name} exists. enter: replace it, escape: cancel")
            return
        try:
            self._report.save(path)
        except UsageError as error:
            self._say(error.message)
        else:
            self.dismiss(str(path))

    def _say(self, answer: str) -> None:
        self.query_one("#answer", Static).update(answer)
