"""While the target runs: how far it is, and what it prints."""

from __future__ import annotations

import time
from typing import get_args, get_type_hints

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Log, Static

from fa_advisor.records import Progress
from fa_advisor.tui.help import Section
from fa_advisor.tui.job import LINES_KEPT, ProfileJob
from fa_advisor.tui.look import ATTENTION_COLOR, Glyphs

STAGES: tuple[str, ...] = get_args(get_type_hints(Progress)["stage"])
REFRESH_S = 0.1


class RunScreen(Screen[None]):
    """Stages, a bar where the length is known, the target's own output."""

    BINDINGS = [
        Binding("q", "stop", "Stop", id="run.stop", tooltip="Stop the target and leave"),
        Binding(
            "ctrl+c",
            "stop",
            "Stop",
            id="run.interrupt",
            show=False,
            tooltip="Stop the target and leave",
        ),
        Binding("question_mark", "app.help", "Help", id="run.help", tooltip="Every key"),
    ]

    class Ended(Message):
        """The run is over; the job says how."""

    def __init__(self, job: ProfileJob, glyphs: Glyphs) -> None:
        super().__init__()
        self._job, self._glyphs = job, glyphs
        self._started = time.monotonic()
        self._stages = Static("", id="stages")
        self._bar = Static("", id="bar")
        self._log = Log(max_lines=LINES_KEPT)

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        target = self._glyphs.name(self._job.request.target or "the bundled example")
        yield Static(f"fa-advisor  profiling {target}", classes="heading", markup=False)
        yield self._stages
        yield self._bar
        yield Static("output of the target", id="title")
        yield self._log
        yield Footer()

    def help_sections(self) -> list[Section]:
        """The keys that work here."""
        return [("While the target runs", self.BINDINGS)]

    def on_mount(self) -> None:
        """Start the target and the clock."""
        self._tick()
        self.set_interval(REFRESH_S, self._tick)
        self._run()

    def action_stop(self) -> None:
        """Kill the child; the screen stays until it is gone."""
        self._job.cancel.set()
        self._tick()

    @work(thread=True, exclusive=True, exit_on_error=False, group="profile")
    def _run(self) -> None:
        self._job.run()
        self.post_message(self.Ended())

    def _tick(self) -> None:
        progress = self._job.progress
        self._stages.update(self._stage_marks(progress))
        self._bar.update(self._how_far(progress))
        fresh = self._job.fresh_lines()
        if fresh:
            self._log.write_lines(fresh)

    def _stage_marks(self, progress: Progress) -> Text:
        """Each stage with its mark: done, running, to come."""
        now = STAGES.index(progress.stage)
        text = Text()
        for index, stage in enumerate(STAGES[:-1]):
            done, running = index < now, index == now
            mark = self._glyphs.yes if done else self._glyphs.now if running else self._glyphs.dot
            text.append(f"{mark} {stage}  ", "green" if done else "bold" if running else "dim")
        return text

    def _how_far(self, progress: Progress) -> Text:
        """The bar of this stage, its note and the time since the start."""
        elapsed = int(time.monotonic() - self._started)
        clock = f"{elapsed // 60}:{elapsed % 60:02d}"
        if self._job.cancel.is_set():
            return Text(f"{clock}  stopping the target", "bold", no_wrap=True)
        text = Text(f"{clock}  ", no_wrap=True, overflow="crop")
        if progress.total:
            width = max(8, min(40, self.size.width // 3))
            filled = round(width * min(1.0, progress.done / progress.total))
            text.append(self._glyphs.thumb * filled, ATTENTION_COLOR)
            text.append(self._glyphs.track * (width - filled), "dim")
            text.append(f" {progress.done:,}/{progress.total:,}  ")
        elif progress.done:
            text.append(f"{progress.done:,}  ")
        return text.append(self._glyphs.name(progress.note))
