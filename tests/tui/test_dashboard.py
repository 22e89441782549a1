"""The dashboard over a report: every screen and key, at every size, whatever the report holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App
from textual.binding import Binding
from textual.widgets import Input, Static, TabbedContent

import samples
from fa_advisor.report import Report, load
from fa_advisor.tui.app import Dashboard
from fa_advisor.tui.attention import AttentionPane
from fa_advisor.tui.help import HelpScreen
from fa_advisor.tui.module_table import ModuleTable
from fa_advisor.tui.pane import Scroller
from fa_advisor.tui.panes import PANES
from fa_advisor.tui.report_screen import ReportScreen
from fa_advisor.tui.run_screen import RunScreen
from fa_advisor.tui.save import SaveScreen
from fa_advisor.tui.table import ReportTable

Text = Callable[[App[None]], str]
SIZE = (80, 24)


def shown(app: Dashboard) -> str:
    return app.screen.query_one(TabbedContent).active


async def test_number_keys_and_tab_switch_screens() -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert shown(app) == "overview"
        for number, pane in enumerate(PANES, 1):
            await pilot.press(str(number))
            assert shown(app) == pane.NAME
        await pilot.press("tab")
        assert shown(app) == "overview"
        await pilot.press("shift+tab")
        assert shown(app) == PANES[-1].NAME
        await pilot.press("7")  # there is no such screen
        assert shown(app) == PANES[-1].NAME


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("1", ["attention-bound", "peak allocated 2.48 GiB", "no NxN", "attention_score", "peak"]),
        ("2", ["activation", "900.00 MiB", "blocks", "of peak", "outside any module"]),
        ("3", ["blocks.0.attn", "model.py:88", "[2, 12, 1024, 1024]", "not flash", "MASK"]),
        ("4", ["163.0 KiB", "128×64", "✓ yes", "smem", "textbook 64.0 KiB"]),
        ("5", ["use flash at 12 sites", "blocks.{0-11}.attn", "9,000", "30,000", "512 or more"]),
        ("6", ["NVIDIA A100-SXM4-80GB", "8.0", "2,039 GB/s", "312 TFLOP/s"]),
    ],
)
async def test_each_screen_says_what_it_should(key: str, words: list[str], text: Text) -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=(80, 70)) as pilot:
        await pilot.press(key)
        await pilot.pause(0.1)
        page = text(app)
        assert [word for word in words if word not in page] == []


async def test_a_step_that_ran_out_of_memory_says_so_first(
    reports: dict[str, Callable[[], Report]], text: Text
) -> None:
    app = Dashboard(reports["failed"]())
    async with app.run_test(size=(80, 50)) as pilot:
        await pilot.pause(0.1)
        page = text(app)
    words = ["OUT OF MEMORY", "fragmentation", "1.00 GiB in forward for bmm", "model.py:88",
             "98.00 MiB were missing", "without bmm it fits"]  # fmt: skip
    assert [word for word in words if word not in page] == []


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("sample", (80, 24)),
        ("empty", (40, 12)),
        ("zero", (80, 24)),
        ("large", (40, 12)),
        ("nasty", (40, 12)),
        ("nasty", (200, 60)),
        ("nasty", (20, 5)),
    ],
)
async def test_every_screen_at_every_size_on_every_report(
    name: str, size: tuple[int, int], reports: dict[str, Callable[[], Report]]
) -> None:
    app = Dashboard(reports[name]())
    async with app.run_test(size=size) as pilot:
        for number in range(1, len(PANES) + 1):
            await pilot.press(str(number), "s", "down", "right", "w", "enter", "escape")
        await pilot.resize_terminal(100, 30)
        await pilot.press("question_mark", "escape")
        assert isinstance(app.screen, ReportScreen)
        assert shown(app) == PANES[-1].NAME


@pytest.mark.parametrize("name", ["sample", "nasty", "empty"])
async def test_ascii_draws_ascii_only(
    name: str, reports: dict[str, Callable[[], Report]], text: Text
) -> None:
    app = Dashboard(reports[name](), ascii=True)
    async with app.run_test(size=SIZE) as pilot:
        for key in ("1", "2", "3", "4", "5", "6", "question_mark", "escape", "ctrl+s", "escape"):
            await pilot.press(key)
            await pilot.pause(0.05)
            assert [line for line in text(app).splitlines() if not line.isascii()] == []
        await pilot.press("2", "s")  # a toast
        await pilot.pause(0.1)
        assert [line for line in text(app).splitlines() if not line.isascii()] == []
        await pilot.press("ctrl+p")
        await pilot.pause(0.5)
        assert "Show Memory" in text(app)
        assert [line for line in text(app).splitlines() if not line.isascii()] == []


async def test_without_colour_nothing_is_told_by_colour(
    monkeypatch: pytest.MonkeyPatch, text: Text
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(0.1)
        page = text(app)
        assert "SSSSSS" in page and "PPPPPP" in page and "=====" in page
        assert "░" in page  # other memory under the curve; attention is solid
        await pilot.press("t")
        assert app.theme == "ansi-dark"


async def test_names_from_a_model_are_text(
    reports: dict[str, Callable[[], Report]], text: Text
) -> None:
    app = Dashboard(reports["nasty"]())
    async with app.run_test(size=(200, 60)) as pilot:
        for key in "235":
            await pilot.press(key)
            await pilot.pause(0.1)
            page = text(app)
            assert "[bold red]markup[/]" in page, key
            assert not any(char in page for char in "\x1b\u202e\t"), key


async def test_large_reports_open(reports: dict[str, Callable[[], Report]]) -> None:
    report = reports["large"]()
    app = Dashboard(report)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("2")
        await pilot.press("e", "end", "s")
        await pilot.pause()
        assert app.screen.query_one(ModuleTable).row_count > 2000


async def test_module_tree_opens_closes_and_sorts() -> None:
    app = Dashboard(samples.report(40))  # too many to be open at first
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("2")
        table = app.screen.query_one(ModuleTable)
        before = table.row_count
        await pilot.press("down", "right")
        assert table.current == "blocks"
        assert table.row_count == before + 40
        await pilot.press("down", "left")
        assert table.current == "blocks"
        await pilot.press("left")
        assert table.row_count == before
        await pilot.press("e")
        assert table.row_count == before + 80
        await pilot.press("s", "s", "s", "s", "down")
        assert table.current == "blocks.0"


async def test_a_category_can_be_followed_into_the_modules(text: Text) -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2", "w", "down", "down", "down", "down", "enter")
        assert app.screen.query_one(ModuleTable).chosen == "parameter"
        await pilot.pause(0.1)
        assert "60.00 MiB" in text(app)
        await pilot.press("enter")
        assert app.screen.query_one(ModuleTable).chosen is None


async def test_filter_finds_sites_from_any_screen(text: Text) -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("slash")
        await pilot.pause(0.1)
        assert isinstance(app.focused, Input)
        await pilot.press(*"blocks.1")
        await pilot.pause(0.1)
        table = app.screen.query_one("#sites", ReportTable)
        assert table.row_count == 3
        assert "3 of 12 sites" in text(app)
        await pilot.press("enter")
        assert app.focused is table
        await pilot.press("slash", "escape")
        assert table.row_count == 12
        await pilot.press("slash")
        await pilot.pause(0.1)
        await pilot.press(*"hand_written")
        assert table.row_count == 12
        await pilot.press(*"zz")
        assert table.row_count == 0
        await pilot.press("escape")
        assert table.row_count == 12


async def test_enter_opens_a_site_and_escape_goes_back() -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=(40, 12)) as pilot:
        await pilot.press("3", "down", "enter")
        pane = app.screen.query_one(AttentionPane)
        await pilot.pause(0.1)
        assert pane.query_one("#detail").display
        assert not pane.query_one("#sites").display
        await pilot.press("escape")
        await pilot.pause(0.1)
        assert app.focused is pane.query_one("#sites")
        assert pane.query_one("#sites", ReportTable).current == "1"


async def test_sort_keeps_the_cursor_on_its_site() -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("3", "down", "down", "s", "s", "s", "s")
        table = app.screen.query_one("#sites", ReportTable)
        assert table.current == "2"
        assert table.cursor_row == 4  # by name, 10 and 11 come before 2


async def test_help_lists_every_key_and_closes(text: Text) -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=(100, 80)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause(0.1)
        page = text(app)
        for words in (
            "Overview:",
            "Next screen",
            "Filter the attention sites",
            "Show or hide every module",
        ):
            assert words in page
        assert "what the target printed" not in page
        await pilot.press("q")
        assert not isinstance(app.screen, HelpScreen)


async def test_palette_goes_to_a_screen() -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+p")
        await pilot.pause(0.3)
        await pilot.press(*"show tiles")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.pause(0.3)
        assert shown(app) == "tiles"


async def test_saves_the_report_and_asks_before_it_replaces(tmp_path: Path) -> None:
    report = samples.report()
    app = Dashboard(report)
    file = tmp_path / "r.json"
    async with app.run_test(size=SIZE) as pilot:
        for times in (1, 2):
            await pilot.press("ctrl+s")
            await pilot.pause()
            app.screen.query_one(Input).value = str(file)
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, SaveScreen) == (times == 2)
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, ReportScreen)
        await pilot.press("ctrl+s")
        await pilot.pause()
        app.screen.query_one(Input).value = str(tmp_path / "no" / "r.json")
        await pilot.press("enter")
        await pilot.pause()
        assert "can't write" in str(app.screen.query_one("#answer", Static).content)
    assert load(file) == report


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_quits(key: str) -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running


async def test_theme_key_switches_light_and_dark() -> None:
    app = Dashboard(samples.report())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        assert not app.current_theme.dark
        await pilot.press("t")
        assert app.current_theme.dark


def test_every_binding_has_an_id_and_a_tooltip() -> None:
    places = (Dashboard, ReportScreen, RunScreen, HelpScreen, SaveScreen, ReportTable, ModuleTable)
    ids: list[str] = []
    for place in (*places, Scroller, *PANES):
        for binding in place.__dict__.get("BINDINGS", ()):
            assert isinstance(binding, Binding)
            assert binding.id and binding.tooltip and binding.description, binding
            ids.append(binding.id)
    assert len(ids) == len(set(ids))


def test_the_dashboard_loads_no_torch() -> None:
    code = "import sys, fa_advisor.tui.app; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
