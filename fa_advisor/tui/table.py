"""The table that every screen lists things in: one flexible column, keyed rows, our keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.binding import Binding
from textual.widgets import DataTable

from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.wording import shorten

MIN_FLEXIBLE = 14


@dataclass(frozen=True, slots=True)
class Column:
    """A column; the `flexible` one gets the width that the others leave.

    The `optional` ones go, the last first, where not all fit.
    """

    title: str
    right: bool = False
    flexible: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row; `key` finds it again after sorting. Cells are plain text.

    `style` is the row's in Rich's words, `mark` the first cell's.
    """

    key: str
    cells: tuple[str, ...]
    style: str = ""
    mark: str = ""


class ReportTable(DataTable[Text], inherit_bindings=False):
    """A DataTable over plain text that keeps its cursor on the same key when refilled."""

    BINDINGS = [
        Binding("up,k", "cursor_up", "Up", id="table.up", show=False, tooltip="Previous row"),
        Binding("down,j", "cursor_down", "Down", id="table.down", show=False, tooltip="Next row"),
        Binding(
            "left", "cursor_left", "Left", id="table.left", show=False, tooltip="Scroll to the left"
        ),
        Binding(
            "right",
            "cursor_right",
            "Right",
            id="table.right",
            show=False,
            tooltip="Scroll to the right",
        ),
        Binding(
            "pageup", "page_up", "Page up", id="table.page_up", show=False, tooltip="A page up"
        ),
        Binding(
            "pagedown",
            "page_down",
            "Page down",
            id="table.page_down",
            show=False,
            tooltip="A page down",
        ),
        Binding("home,g", "scroll_top", "First", id="table.first", show=False, tooltip="First row"),
        Binding("end,G", "scroll_bottom", "Last", id="table.last", show=False, tooltip="Last row"),
        Binding(
            "enter", "select_cursor", "Open", id="table.open", tooltip="Open or choose this row"
        ),
    ]

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False)
        self.glyphs = glyphs
        self._columns_shown: Sequence[Column] = ()
        self._rows_shown: Sequence[Row] = ()
        self._drawn: list[tuple[int, int]] = []

    @property
    def current(self) -> str | None:
        """The key of the row under the cursor."""
        row = self.cursor_row
        return self._rows_shown[row].key if 0 <= row < len(self._rows_shown) else None

    def fill(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Show these rows instead; the cursor stays on its key, else where it was."""
        key, row = self.current, self.cursor_row
        self._columns_shown, self._rows_shown = columns, rows
        self._draw()
        if rows:
            keys = [each.key for each in rows]
            self.move_cursor(row=keys.index(key) if key in keys else min(row, len(rows) - 1))

    def go_to(self, key: str) -> None:
        """Move the cursor to the row with this key, if it is listed."""
        for index, row in enumerate(self._rows_shown):
            if row.key == key:
                self.move_cursor(row=index)

    def on_resize(self, event: events.Resize) -> None:
        """Give the columns the new width."""
        if self._columns_shown and self._layout() != self._drawn:
            row = self.cursor_row
            self._draw()
            self.move_cursor(row=row)

    def _draw(self) -> None:
        self._drawn = self._layout()
        shown = [(i, self._columns_shown[i], width) for i, width in self._drawn]
        with self.prevent(DataTable.RowHighlighted):
            self.clear(columns=True)
            for _, column, width in shown:
                self.add_column(self._cell(column.title, column, width, "bold"), width=width)
            for row in self._rows_shown:
                self.add_row(
                    *(
                        self._cell(
                            row.cells[i], column, width, row.style if i else row.mark or row.style
                        )
                        for i, column, width in shown
                    )
                )

    def _cell(self, text: str, column: Column, width: int, style: str) -> Text:
        if column.flexible:
            text = shorten(text, width, self.glyphs.ellipsis)
        return Text(text, style, justify="right" if column.right else "left", no_wrap=True)

    def _layout(self) -> list[tuple[int, int]]:
        """The columns to draw and their widths: each its longest text, the flexible the rest."""
        lines = [[column.title for column in self._columns_shown]]
        lines += [list(row.cells) for row in self._rows_shown]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        shown = list(enumerate(widths))
        optional = [i for i in range(len(widths)) if self._columns_shown[i].optional]
        while optional and self._spare(shown) < 0:
            gone = optional.pop()
            shown = [(i, width) for i, width in shown if i != gone]
        most = MIN_FLEXIBLE + max(0, self._spare(shown))
        return [
            (i, min(width, most) if self._columns_shown[i].flexible else width)
            for i, width in shown
        ]

    def _spare(self, shown: Sequence[tuple[int, int]]) -> int:
        """The cells that are left of the width with the flexible column at its least."""
        room = self.size.width - self.scrollbar_size_vertical
        least = sum(
            min(width, MIN_FLEXIBLE) if self._columns_shown[i].flexible else width
            for i, width in shown
        )
        return room - least - 2 * self.cell_padding * len(shown)
