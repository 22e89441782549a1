"""How far a profile has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from fa_advisor.records import Progress

STAGES = {
    "start": "starting",
    "load": "loading the target",
    "build": "building the model",
    "warmup": "running the first step",
    "measure": "measuring a step",
    "analyse": "attributing memory",
    "done": "done",
}
LINE_EVERY_S = 10.0


class Reporter(Protocol):
    """What `launch.run_child` reports to. `on_output` is `None` where it needn't be in the way."""

    on_output: Callable[[str], None] | None

    def on_progress(self, progress: Progress) -> None:
        """Show one step."""


@contextmanager
def reporter(*, silent: bool, bar: bool, stream: TextIO | None = None) -> Iterator[Reporter]:
    """The way to show progress on `stream` (default: stderr), for as long as the block runs.

    `bar`: the stream is a terminal. The target's own output is then printed above the bar.
    """
    stream = sys.stderr if stream is None else stream
    if silent:
        yield Silent()
    elif bar:
        with _bar(stream) as shown:
            yield shown
    else:
        yield Lines(stream)


@dataclass(slots=True)
class Silent:
    """Says nothing."""

    on_output: Callable[[str], None] | None = None

    def on_progress(self, progress: Progress) -> None:
        """Nothing."""


@dataclass(slots=True)
class Lines:
    """A plain line at each change of stage, and at most every ten seconds within one."""

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    on_output: Callable[[str], None] | None = None
    _stage: str = ""
    _last: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def on_progress(self, progress: Progress) -> None:
        """Print a line, if it is time for one."""
        now = self.clock()
        if progress.stage == self._stage and now - self._last < LINE_EVERY_S:
            return
        self._stage, self._last = progress.stage, now
        elapsed = f" [{now - self._began:.0f} s]"
        print(f"fa-advisor: {describe(progress)}{elapsed}", file=self.stream, flush=True)


def describe(progress: Progress) -> str:
    """One step in words: "measuring a step: layers.3 (120 of 400)"."""
    from fa_advisor.views.layout import plain

    text = STAGES[progress.stage]
    if progress.note:
        text += f": {plain(progress.note)}"
    if progress.total:
        text += f" ({progress.done} of {progress.total})"
    return text


@contextmanager
def _bar(stream: TextIO) -> Iterator[Reporter]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    shown = RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    @dataclass(slots=True)
    class Bar:
        on_output: Callable[[str], None] | None

        def on_progress(self, progress: Progress) -> None:
            shown.update(
                task,
                description=describe(progress),
                completed=progress.done if progress.total else 0,
                total=progress.total,
            )

    with shown:
        task = shown.add_task(STAGES["start"], total=None)
        yield Bar(on_output=lambda line: console.print(Text.from_ansi(line)))
