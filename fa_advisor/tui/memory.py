"""Second screen: every byte at the peak, by category and by module."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.widgets import DataTable, Static

from fa_advisor.report import Report
from fa_advisor.tui.look import COLORS, INK, LETTERS, UNATTRIBUTED, Glyphs
from fa_advisor.tui.module_table import SORTS, ModuleTable
from fa_advisor.tui.pane import Pane
from fa_advisor.tui.table import Column, ReportTable, Row
from fa_advisor.views.sizes import format_bytes, format_share

COLUMNS = (
    Column(""),
    Column("category", flexible=True),
    Column("bytes", right=True),
    Column("of peak", right=True),
)


class MemoryPane(Pane):
    """The category table beside the module tree; a short terminal shows one at a time."""

    NAME = "memory"
    TITLE = "Memory"
    ABOUT = "bytes at the peak by category and by module"
    SORTS = SORTS
    BINDINGS = [
        Binding("w", "other_table", "Panel", id="memory.other", tooltip="Go to the other table")
    ]

    def __init__(self, report: Report, glyphs: Glyphs) -> None:
        super().__init__(report, glyphs)
        peak = report.memory.peak_allocated_bytes
        self._categories = ReportTable(glyphs, id="categories")
        self._modules = ModuleTable(report.modules, peak, glyphs, id="modules")
        self._subject = Static("", id="subject", classes="note", markup=False)

    def compose(self) -> ComposeResult:
        """Two tables and the line about the module under the cursor."""
        yield Container(self._categories, self._modules, id="tables")
        yield self._subject

    def on_mount(self) -> None:
        """Fill both tables."""
        self._categories.fill(COLUMNS, category_rows(self.report, self.glyphs))
        self.show_sorted()

    def focus_here(self) -> None:
        """Where the user was; at first the module tree."""
        (self._categories if self.has_class("-categories") else self._modules).focus()

    def show_sorted(self) -> None:
        """Sort the modules; the categories are by bytes always."""
        self._modules.show(sort=self.sort)
        self._describe()

    def action_other_table(self) -> None:
        """Move the focus between the two tables."""
        self.toggle_class("-categories")
        self.focus_here()

    @on(DataTable.RowHighlighted, "#modules")
    def _describe(self) -> None:
        """The full name and the categories of the module under the cursor."""
        node = self._modules.node
        if node is None:
            text = "Bytes at the peak that the report gives to no module."
        else:
            counts = sorted(node.total.items(), key=lambda item: -item[1])
            named = ((self.glyphs.name(name), count) for name, count in counts if count)
            parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in named)
            title = f"{self.glyphs.name(node.fqn) or node.name} {self.glyphs.name(node.type)}"
            text = f"{title.rstrip()}: {parts or 'nothing at the peak'}"
        self._subject.update(text)

    @on(DataTable.RowSelected, "#categories")
    def _choose(self) -> None:
        """Show the chosen category's column; the same again: back to attention's."""
        key = self._categories.current
        self._modules.chosen = None if key == self._modules.chosen or key not in LETTERS else key
        self.show_sorted()


def category_rows(report: Report, glyphs: Glyphs) -> list[Row]:
    """The categories by bytes, then what is unattributed and what the allocator doesn't see."""
    memory = report.memory
    peak = memory.peak_allocated_bytes
    counts = sorted(memory.categories.items(), key=lambda item: -item[1])
    counts.append((UNATTRIBUTED, memory.unattributed_bytes))
    rows = [_category_row(name, count, format_share(count, peak), glyphs) for name, count in counts]
    outside = memory.outside_allocator_bytes
    if outside is not None:
        rows.append(_category_row("besides: outside the allocator", outside, "", glyphs))
    return rows


def _category_row(name: str, count: int, share: str, glyphs: Glyphs) -> Row:
    cells = (
        f" {LETTERS[name]} " if name in LETTERS else "",
        glyphs.name(name),
        format_bytes(count),
        share,
    )
    mark = f"{INK} on {COLORS[name]}" if name in COLORS else ""
    return Row(name, cells, "" if count else "dim", mark)
