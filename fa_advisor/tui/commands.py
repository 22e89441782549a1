"""The command palette's entries over a report: the screens, and what the keys do there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

if TYPE_CHECKING:
    from fa_advisor.tui.report_screen import ReportScreen

Command = tuple[str, str, Callable[[], None]]


class ReportCommands(Provider):
    """Offers every screen and every action of a report."""

    async def discover(self) -> Hits:
        """All of them, before anything is typed."""
        for name, about, command in self._commands():
            yield DiscoveryHit(name, command, help=about)

    async def search(self, query: str) -> Hits:
        """Those that match what is typed."""
        matcher = self.matcher(query)
        for name, about, command in self._commands():
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), command, help=about)

    def _commands(self) -> Iterator[Command]:
        screen = cast("ReportScreen", self.screen)
        for number, pane in enumerate(screen.panes, 1):
            yield f"Show {pane.TITLE}", pane.ABOUT, partial(screen.action_show_pane, number)
        if screen.shown.SORTS:
            orders = ", ".join(screen.shown.SORTS)
            yield "Sort by the next column", orders, screen.action_sort
        yield "Filter attention sites", "by name, source, backend or reason", screen.action_filter
        yield "Save the report", "as JSON, for view, diff and export", screen.action_save
