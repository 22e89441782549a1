"""A profile inside the dashboard: progress, the target's output, and every way that it can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from textual.app import App

import samples
from fa_advisor import launch
from fa_advisor.errors import FaAdvisorError, Interrupted, TargetError
from fa_advisor.records import ProfileRequest, Progress
from fa_advisor.report import Report
from fa_advisor.tui import app as tui
from fa_advisor.tui.app import Dashboard, run_profile
from fa_advisor.tui.job import LINES_KEPT, ProfileJob, readable
from fa_advisor.tui.report_screen import ReportScreen
from fa_advisor.tui.run_screen import RunScreen

OnProgress = Callable[[Progress], None]
OnOutput = Callable[[str], None]
Text = Callable[[App[None]], str]
REQUEST = ProfileRequest(target="model.py:[bold]net")


class FakeChild:
    """Stands in for run_child: says what it is told to, then waits for `go` or `cancel`."""

    def __init__(self, error: BaseException | None = None, lines: tuple[str, ...] = ()) -> None:
        self.error, self.lines = error, lines
        self.go = threading.Event()

    def __call__(
        self,
        request: ProfileRequest,
        on_progress: OnProgress,
        on_output: OnOutput,
        cancel: threading.Event,
    ) -> Report:
        on_progress(Progress(stage="measure", note="step [b]2[/b]", done=3, total=4))
        for line in self.lines:
            on_output(line)
        while not self.go.wait(0.01):
            if cancel.is_set():
                raise Interrupted("interrupted")
        if self.error is not None:
            raise self.error
        return samples.report()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeChild]:
    def install(error: BaseException | None = None, lines: tuple[str, ...] = ()) -> FakeChild:
        fake = FakeChild(error, lines)
        monkeypatch.setattr(launch, "run_child", fake)
        return fake

    return install


async def test_shows_progress_and_output_then_the_report(
    child: Callable[..., FakeChild], text: Text
) -> None:
    fake = child(lines=("loading [red]weights[/red]", "\x1b[32mgreen\x1b[0m", "10%\r100%"))
    job = ProfileJob(REQUEST)
    app = Dashboard(job)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.4)
        page = text(app)
        for words in ("model.py:[bold]net", "▸ measure", "3/4", "step [b]2[/b]"):
            assert words in page
        for words in ("loading [red]weights[/red]", "green", "100%"):
            assert words in page
        await pilot.press("question_mark")  # help is open when the run ends
        fake.go.set()
        await pilot.pause(0.4)
        assert isinstance(app.screen, ReportScreen)
        await pilot.press("7")
        await pilot.pause(0.2)
        assert "loading [red]weights[/red]" in text(app)
        await pilot.press("q")
    assert job.report == samples.report()


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_stopping_cancels_the_child(key: str, child: Callable[..., FakeChild]) -> None:
    child()
    job = ProfileJob(REQUEST)
    app = Dashboard(job)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert isinstance(app.screen, RunScreen)
        await pilot.press(key)
        await pilot.pause(0.4)
        assert job.cancel.is_set()
        assert not app.is_running
    assert isinstance(job.error, Interrupted)


async def test_small_terminal_and_ascii(child: Callable[..., FakeChild], text: Text) -> None:
    fake = child(lines=("x" * 500,))
    app = Dashboard(ProfileJob(REQUEST), ascii=True)
    async with app.run_test(size=(40, 12)) as pilot:
        await pilot.pause(0.4)
        assert text(app).isascii()
        fake.go.set()
        await pilot.pause(0.3)


def headless(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[Dashboard], None] | None = None
) -> None:
    """Let the entry points run their app without a terminal; leave a report at once."""

    async def until_left(app: Dashboard) -> None:
        while app.is_running:
            await asyncio.sleep(0.05)
            if then is not None:
                app.call_later(then, app)
            elif isinstance(app.screen, ReportScreen):
                app.exit()

    def run(app: Dashboard) -> None:
        App.run(app, headless=True, size=(80, 24), auto_pilot=lambda _: until_left(app))

    monkeypatch.setattr(Dashboard, "run", run)


def test_run_profile_returns_the_report(
    child: Callable[..., FakeChild],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    child(lines=("hello",)).go.set()
    headless(monkeypatch)
    assert run_profile(REQUEST) == samples.report()
    out, err = capsys.readouterr()
    assert out == "" and "hello\n" in err


@pytest.mark.parametrize(
    "error", [TargetError("the target raised", detail="Traceback"), ValueError("a fault of ours")]
)
def test_run_profile_raises_what_the_run_raised(
    error: Exception,
    child: Callable[..., FakeChild],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    child(error, lines=("last words",)).go.set()
    headless(monkeypatch)
    with pytest.raises(type(error)) as raised:
        run_profile(REQUEST)
    assert raised.value is error
    assert "last words\n" in capsys.readouterr().err


def test_run_profile_raises_interrupted(
    child: Callable[..., FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    child()
    headless(monkeypatch, lambda app: app.simulate_key("q"))
    with pytest.raises(Interrupted):
        run_profile(REQUEST)


def test_a_fault_of_the_dashboard_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(app: Dashboard) -> None:
        raise RuntimeError("a fault of ours")

    headless(monkeypatch, fail)
    with pytest.raises(FaAdvisorError, match="dashboard failed") as raised:
        tui.show(samples.report())
    assert raised.value.status == 1


def test_keeps_the_last_lines_and_says_how_many_went() -> None:
    job = ProfileJob(REQUEST)
    for number in range(LINES_KEPT + 10):
        job._on_output(str(number))
    lines = job.lines()
    assert lines[0] == "(10 earlier lines)"
    assert lines[-1] == str(LINES_KEPT + 9)
    assert len(lines) == LINES_KEPT + 1
    assert len(job.fresh_lines()) <= LINES_KEPT
    assert job.fresh_lines() == []


def test_printed_lines_are_made_readable() -> None:
    assert readable("\x1b[31mred\x1b[0m\ta\x07") == "red     a"
    assert readable(" 10%|#  \r 99%|## \n") == " 99%|## "
