"""What a screen of the dashboard is. To add one: subclass Pane and list it in `panes.PANES`."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding
from textual.containers import ScrollableContainer, Vertical
from textual.widget import Widget

from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs


class Scroller(ScrollableContainer, can_focus=True, inherit_bindings=False):
    """Text longer than the screen, scrolled with the arrows."""

    BINDINGS = [
        Binding("up,k", "scroll_up", "Up", id="text.up", show=False, tooltip="A line up"),
        Binding("down,j", "scroll_down", "Down", id="text.down", show=False, tooltip="A line down"),
        Binding("pageup", "page_up", "Page up", id="text.page_up", show=False, tooltip="A page up"),
        Binding(
            "pagedown",
            "page_down",
            "Page down",
            id="text.page_down",
            show=False,
            tooltip="A page down",
        ),
        Binding("home,g", "scroll_home", "Top", id="text.top", show=False, tooltip="To the top"),
        Binding("end,G", "scroll_end", "End", id="text.end", show=False, tooltip="To the end"),
    ]


class Pane(Vertical):
    """One screen over a report. `NAME` is its id, `TITLE` what its tab says."""

    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    ABOUT: ClassVar[str]
    """One line for the help and the command palette."""
    SORTS: ClassVar[tuple[str, ...]] = ()
    """What `s` cycles through; empty where there is nothing to sort."""

    def __init__(self, report: Report, glyphs: Glyphs) -> None:
        super().__init__()
        self.report = report
        self.glyphs = glyphs
        self.sort = 0

    def focus_here(self) -> None:
        """Focus what the arrows should move, on coming to this screen."""
        for widget in self.query("*").results(Widget):
            if widget.focusable:
                widget.focus()
                return

    def next_sort(self) -> str:
        """Sort by the next of `SORTS`; returns its name."""
        self.sort = (self.sort + 1) % len(self.SORTS)
        self.show_sorted()
        return self.SORTS[self.sort]

    def show_sorted(self) -> None:
        """Fill the table in the order that `sort` says."""

    def sorted_title(self, title: str, sort: int, *, descending: bool = True) -> str:
        """A column's title with an arrow where the table is sorted by it."""
        arrow = self.glyphs.down if descending else self.glyphs.up
        return f"{title} {arrow}" if sort == self.sort else title
