"""Third screen: where attention runs, on what, and why not on something faster."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.widgets import DataTable, Input, Static

from fa_advisor.records import AttentionSite
from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.pane import Pane, Scroller
from fa_advisor.tui.site_detail import describe, shape
from fa_advisor.tui.table import Column, ReportTable, Row
from fa_advisor.tui.wording import counted
from fa_advisor.views.sizes import format_bytes

PLACEHOLDER = "part of a name, source line, backend or reason; enter: done, escape: all"
ORDERS: tuple[Callable[[AttentionSite], int | str] | None, ...] = (
    None,
    lambda site: -site.attention_bytes_at_peak,
    lambda site: -site.saved_for_backward_bytes,
    lambda site: site.backend,
    lambda site: site.fqn,
)


class AttentionPane(Pane):
    """The sites, and all about the one under the cursor; a short terminal opens it with enter."""

    NAME = "attention"
    TITLE = "Attention"
    ABOUT = "the attention sites, their backends, and why not a faster one"
    SORTS = ("model order", "bytes at the peak", "bytes saved", "backend", "name")
    BINDINGS = [
        Binding("escape", "back", "Back", id="attention.back", tooltip="Back to the list of sites"),
    ]

    def __init__(self, report: Report, glyphs: Glyphs) -> None:
        super().__init__(report, glyphs)
        self._shown: dict[str, AttentionSite] = {}
        self._filter = ""
        self._count = Static("", id="count", classes="note")
        self._line = Input(placeholder=PLACEHOLDER, id="filter")
        self._table = ReportTable(glyphs, id="sites")
        self._about = Static("", id="about")
        self._detail = Scroller(self._about, id="detail")

    def compose(self) -> ComposeResult:
        """Filter, table, detail."""
        yield self._count
        yield self._line
        yield Container(self._table, self._detail, id="split")

    def on_mount(self) -> None:
        """Fill the table."""
        self.show_sorted()

    def focus_here(self) -> None:
        """The list, or the detail where that is open."""
        self._table.focus() if not self.has_class("-detail") else self._detail.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`Back` is there when there is something to go back from."""
        return action != "back" or self.has_class("-detail") or bool(self._filter)

    def show_sorted(self) -> None:
        """List the sites that pass the filter."""
        sites = [item for item in enumerate(self.report.sites) if matches(item[1], self._filter)]
        order = ORDERS[self.sort]
        if order is not None:
            sites.sort(key=lambda item: order(item[1]))
        self._shown = {str(index): site for index, site in sites}
        columns = (
            Column(self.sorted_title("site", 4, descending=False), flexible=True),
            Column(self.sorted_title("runs on", 3, descending=False)),
            Column(self.sorted_title("NxN at peak", 1), right=True),
            Column(self.sorted_title("saved", 2), right=True),
            Column("form", optional=True),
            Column(f"B{self.glyphs.times}H{self.glyphs.times}N", optional=True),
        )
        self._table.fill(columns, [self._row(key, site) for key, site in self._shown.items()])
        self._say(len(sites))
        self._describe()

    def action_filter(self) -> None:
        """Open the filter's line."""
        self._close_detail()
        self._line.add_class("-shown")
        self._line.focus()

    def action_back(self) -> None:
        """Close the detail, else drop the filter."""
        if self.has_class("-detail"):
            self._close_detail()
        else:
            self._drop_filter()
        self._table.focus()

    def _row(self, key: str, site: AttentionSite) -> Row:
        cells = (
            self.glyphs.name(site.fqn) or "(the model itself)",
            self.glyphs.name(site.backend),
            format_bytes(site.attention_bytes_at_peak),
            format_bytes(site.saved_for_backward_bytes),
            site.form,
            shape(site, self.glyphs),
        )
        return Row(key, cells)

    def _say(self, shown: int) -> None:
        every = len(self.report.sites)
        if not every:
            text = "No attention was seen in the measured step."
        elif self._filter:
            text = f"{shown} of {counted(every, 'site')} match {self.glyphs.name(self._filter)!r}"
        else:
            text = f"{counted(every, 'attention site')}, by {self.SORTS[self.sort]}"
        self._count.update(Text(text))

    @on(DataTable.RowHighlighted, "#sites")
    def _describe(self) -> None:
        site = self._shown.get(self._table.current or "")
        self._about.update(describe(site, self.glyphs) if site else "")

    @on(DataTable.RowSelected, "#sites")
    def _open_detail(self) -> None:
        self.add_class("-detail")
        self._detail.scroll_home(animate=False)
        self._detail.focus()
        self.refresh_bindings()

    def _close_detail(self) -> None:
        self.remove_class("-detail")
        self.refresh_bindings()

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self._filter = event.value.strip().casefold()
        self.show_sorted()
        self.refresh_bindings()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self._line.set_class(bool(self._filter), "-shown")
        self._table.focus()

    def _drop_filter(self) -> None:
        self._line.value = ""
        self._line.remove_class("-shown")


def matches(site: AttentionSite, part: str) -> bool:
    """Whether the casefolded `part` is in something that the table or the detail shows."""
    codes = (code for backend, why in site.why_not.items() for code in (backend, *why))
    fields = (site.fqn, site.source or "", site.form, site.backend, site.dtype, *codes)
    return any(part in text.casefold() for text in fields)
