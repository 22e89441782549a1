"""The dashboard's two ways in: over a report, and over a run that makes one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.screen import Screen
from textual.scrollbar import ScrollBar, ScrollBarRender

from fa_advisor.errors import FaAdvisorError, Interrupted
from fa_advisor.records import ProfileRequest
from fa_advisor.report import Report
from fa_advisor.tui.help import HelpScreen
from fa_advisor.tui.job import ProfileJob
from fa_advisor.tui.look import ASCII, CSS, UNICODE
from fa_advisor.tui.report_screen import ReportScreen
from fa_advisor.tui.run_screen import RunScreen
from fa_advisor.tui.scrollbar import scrollbar

DARK, LIGHT, COLORLESS = "textual-dark", "textual-light", "ansi-dark"


def show(report: Report, *, ascii: bool = False) -> None:
    """Open the dashboard over `report` and return when the user leaves it.

    `ascii`: draw with ASCII characters only.
    Raises: Interrupted on SIGINT or SIGTERM; FaAdvisorError where the dashboard itself fails.
    """
    _run(Dashboard(report, ascii=ascii))


def run_profile(request: ProfileRequest, *, ascii: bool = False) -> Report:
    """Run a profile with its progress and output on the screen, then show its report.

    The target runs in a child process. Returns the report once the user leaves the dashboard.
    What the target printed is on stderr afterwards, as it would be without a dashboard.
    Raises: the run's FaAdvisorError; Interrupted where the user stopped it.
    """
    job = ProfileJob(request)
    try:
        _run(Dashboard(job, ascii=ascii))
    finally:
        for line in job.lines():
            print(line, file=sys.stderr)
    if job.error is not None:
        raise job.error
    assert job.report is not None
    return job.report


class Dashboard(App[None]):
    """The app: a screen for the run, if there is one, then the report's."""

    TITLE = "fa-advisor"
    CSS = CSS
    ENABLE_COMMAND_PALETTE = True
    BINDINGS = [
        Binding(
            "ctrl+q",
            "quit",
            "Quit",
            id="app.quit",
            show=False,
            priority=True,
            tooltip="Leave the dashboard",
        )
    ]

    def __init__(self, source: Report | ProfileJob, *, ascii: bool = False) -> None:
        self.glyphs = ASCII if ascii else UNICODE
        # Textual's own NO_COLOR look is shades of grey; without colour means the terminal's own.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self._source = source
        self.interrupted = False
        ScrollBar.renderer = scrollbar(self.glyphs) if ascii or self.no_color else ScrollBarRender
        self.set_class(ascii, "-ascii")
        if self.no_color:
            self.theme = COLORLESS

    def on_mount(self) -> None:
        """Show the report, or the run that will make one."""
        self._catch_signals()
        if isinstance(self._source, ProfileJob):
            self.push_screen(RunScreen(self._source, self.glyphs))
        else:
            self.push_screen(ReportScreen(self._source, self.glyphs))

    def _catch_signals(self) -> None:
        """Leave in order, and take the child along, where a signal ends us."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            with contextlib.suppress(AttributeError, NotImplementedError):  # not on Windows
                loop.add_signal_handler(getattr(signal, name), self._interrupt)

    def _interrupt(self) -> None:
        self.interrupted = True
        self.run_worker(self.action_quit())

    async def action_quit(self) -> None:
        """Leave; a run that isn't over is stopped first."""
        if isinstance(self._source, ProfileJob) and not self._source.ended:
            self._source.cancel.set()
        else:
            self.exit()

    def action_help(self) -> None:
        """Show the keys of the screen below."""
        if isinstance(self.screen, (ReportScreen, RunScreen)):
            self.push_screen(HelpScreen(self.screen.help_sections()))

    def action_command_palette(self) -> None:
        """Textual's palette, with words that every terminal can show."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(placeholder="part of a command's name"))

    def action_other_theme(self) -> None:
        """Go from dark to light and back; without colour there is only one look."""
        if not self.no_color:
            self.theme = LIGHT if self.current_theme.dark else DARK

    def get_key_display(self, binding: Binding) -> str:
        """A key as the footer shows it: by its name where arrows and the like can't be drawn."""
        shown = super().get_key_display(binding)
        return shown if self.glyphs is not ASCII or shown.isascii() else binding.key

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette's entries that hold on every screen."""
        yield SystemCommand("Show every key", "What each key does, and where", self.action_help)
        yield SystemCommand("Choose a theme", "Colours of the dashboard", self.action_change_theme)
        yield SystemCommand("Light or dark", "The other of the two", self.action_other_theme)
        yield SystemCommand("Quit", "Leave the dashboard", self.action_quit)

    def on_run_screen_ended(self) -> None:
        """Go on to the report; without one there is nothing left to show."""
        job = self._source
        if not isinstance(job, ProfileJob) or job.report is None or job.error is not None:
            self.exit()
            return
        while len(self.screen_stack) > 2:  # a help page left open
            self.pop_screen()
        self.switch_screen(ReportScreen(job.report, self.glyphs, job.lines()))


def _run(app: Dashboard) -> None:
    app.run()
    if app.interrupted:
        raise Interrupted("interrupted")
    if app.return_code:
        raise FaAdvisorError(
            "the dashboard failed; the error is above",
            hint="--no-tui prints the report instead",
        )
