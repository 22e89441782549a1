"""The tabs over a report, and the keys that work on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static, TabbedContent, TabPane
from textual.widgets.tabbed_content import ContentTabs

from fa_advisor.records import TargetSpec
from fa_advisor.report import Report
from fa_advisor.tui.attention import AttentionPane
from fa_advisor.tui.commands import ReportCommands
from fa_advisor.tui.help import PALETTE, Section
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.module_table import ModuleTable
from fa_advisor.tui.output import OutputPane
from fa_advisor.tui.pane import Pane, Scroller
from fa_advisor.tui.panes import PANES
from fa_advisor.tui.save import SaveScreen
from fa_advisor.tui.table import ReportTable

POSSIBLE: tuple[type[Pane], ...] = (*PANES, OutputPane)
"""Every pane there may be; a report that was loaded has no output."""


class ReportScreen(Screen[None]):
    """One tab a pane; number keys and tab switch, `s` and `/` act on what is shown."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]
    COMMANDS = {ReportCommands}
    AUTO_FOCUS = ""
    BINDINGS = [
        *(
            Binding(
                str(number),
                f"show_pane({number})",
                f"Screen {number}",
                id=f"report.pane_{number}",
                show=False,
                tooltip=f"{pane.TITLE}: {pane.ABOUT}",
            )
            for number, pane in enumerate(POSSIBLE, 1)
        ),
        Binding("tab", "step_pane(1)", "Next", id="report.next", show=False, tooltip="Next screen"),
        Binding(
            "shift+tab",
            "step_pane(-1)",
            "Previous",
            id="report.previous",
            show=False,
            tooltip="Previous screen",
        ),
        Binding("s", "sort", "Sort", id="report.sort", tooltip="Sort by the next column"),
        Binding(
            "slash", "filter", "Filter", id="report.filter", tooltip="Filter the attention sites"
        ),
        Binding(
            "ctrl+s",
            "save",
            "Save",
            id="report.save",
            show=False,
            tooltip="Save the report as JSON",
        ),
        Binding(
            "t", "app.other_theme", "Theme", id="report.theme", show=False, tooltip="Light or dark"
        ),
        Binding("question_mark", "app.help", "Help", id="report.help", tooltip="Every key"),
        Binding("q", "app.quit", "Quit", id="report.quit", tooltip="Leave the dashboard"),
        Binding(
            "ctrl+c",
            "app.quit",
            "Quit",
            id="report.interrupt",
            show=False,
            tooltip="Leave the dashboard",
        ),
    ]

    def __init__(self, report: Report, glyphs: Glyphs, output: Sequence[str] = ()) -> None:
        super().__init__()
        self.report, self.glyphs = report, glyphs
        self.panes: list[Pane] = [pane(report, glyphs) for pane in PANES]
        if output:
            self.panes.append(OutputPane(report, glyphs, output))

    def compose(self) -> ComposeResult:
        """Heading, tabs, footer."""
        heading = f"fa-advisor  {summary(self.report, self.glyphs)}"
        yield Static(heading, classes="heading", markup=False)
        with TabbedContent():
            for number, pane in enumerate(self.panes, 1):
                with TabPane(Content(f"{number} {pane.TITLE}"), id=pane.NAME):
                    yield pane
        yield Footer()

    def on_mount(self) -> None:
        """Leave the arrows to the pane: the tabs are switched with tab and numbers."""
        self.query_one(ContentTabs).can_focus = False
        self.call_after_refresh(self.shown.focus_here)

    @property
    def shown(self) -> Pane:
        """The pane on the screen."""
        active = self.query_one(TabbedContent).active
        return next((pane for pane in self.panes if active == pane.NAME), self.panes[0])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`s` where there is something to sort; a number where there is a screen."""
        if action == "sort":
            return not self.is_mounted or bool(self.shown.SORTS)
        if action == "show_pane":
            return isinstance(parameters[0], int) and parameters[0] <= len(self.panes)
        return True

    def action_show_pane(self, number: int) -> None:
        """Show the pane with this number, from 1."""
        self.query_one(TabbedContent).active = self.panes[number - 1].NAME

    def action_step_pane(self, step: int) -> None:
        """Show the next pane, or the previous one; the last leads to the first."""
        at = self.panes.index(self.shown)
        self.action_show_pane((at + step) % len(self.panes) + 1)

    def action_sort(self) -> None:
        """Sort the shown table by its next order, and say which."""
        self.notify(f"sorted by {self.shown.next_sort()}", timeout=2, markup=False)

    def action_filter(self) -> None:
        """Open the sites' filter, wherever the user is."""
        pane = self.query_one(AttentionPane)
        self.query_one(TabbedContent).active = pane.NAME
        self.call_after_refresh(pane.action_filter)

    def action_save(self) -> None:
        """Ask for a file and write the report."""

        def done(path: str | None) -> None:
            if path is not None:
                self.notify(f"saved to {path}", markup=False)

        self.app.push_screen(SaveScreen(self.report), done)

    def help_sections(self) -> list[Section]:
        """The keys by where they work."""
        numbers, others = self.BINDINGS[: len(self.panes)], self.BINDINGS[len(POSSIBLE) :]
        return [
            ("Everywhere", [*numbers, *others, PALETTE]),
            *((f"On {pane.TITLE}", pane.BINDINGS) for pane in self.panes if pane.BINDINGS),
            ("In the module tree", ModuleTable.BINDINGS),
            ("In a table", ReportTable.BINDINGS),
            ("In a text", Scroller.BINDINGS),
        ]

    @on(TabbedContent.TabActivated)
    def _switched(self) -> None:
        self.shown.focus_here()


def summary(report: Report, glyphs: Glyphs) -> str:
    """What was run, on what, in a line."""
    target = report.target
    sizes = [str(size) for size in (target.batch_size, target.seq_len) if size is not None]
    parts = [target_name(target), target.mode, target.dtype, glyphs.times.join(sizes)]
    parts = [part for part in (*parts, report.device.name) if part]
    return f" {glyphs.dot} ".join(glyphs.name(part) for part in parts)


def target_name(target: TargetSpec) -> str:
    """`model.py:name` as it would be typed."""
    if not target.path or target.path == target.name:
        return target.name
    return f"{target.path}:{target.name}"
