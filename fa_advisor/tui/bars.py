"""A stacked bar of memory by category, and the legend that names its letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from fa_advisor.tui.look import COLORS, INK, LETTERS
from fa_advisor.views.sizes import format_bytes, format_share


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: a category, or any name with its own letter and colour."""

    name: str
    bytes: int
    letter: str
    color: str


def category_part(name: str, count: int) -> Part:
    """The part of a category; one that this version doesn't know is shown like unattributed."""
    return Part(name, count, LETTERS.get(name, "?"), COLORS.get(name, COLORS["unattributed"]))


def cells(counts: Sequence[int], scale: int, width: int) -> list[int]:
    """Cells for each part of a bar of `width` cells that stands for `scale` bytes.

    Ends are rounded, not widths, so the whole is right to half a cell and parts never overlap.
    """
    if scale <= 0 or width <= 0:
        return [0] * len(counts)
    out, total, start = [], 0, 0
    for count in counts:
        total += max(0, count)
        end = min(width, round(total * width / scale))
        out.append(end - start)
        start = end
    return out


class StackedBar(Widget):
    """One line: label, parts drawn to `scale` bytes, caption at the right."""

    def __init__(self, label: str, parts: Sequence[Part], scale: int, caption: str) -> None:
        super().__init__()
        self._label, self._parts, self._scale, self._caption = label, parts, scale, caption

    def render_line(self, y: int) -> Strip:
        """Draw the bar; without colour every cell has its letter, with colour one a part."""
        if y:
            return Strip.blank(self.size.width, self.rich_style)
        base = self.rich_style
        width = self.size.width - cell_len(self._label) - cell_len(self._caption) - 2
        segments = [Segment(self._label + " ", base)]
        filled = 0
        for part, count in zip(
            self._parts, cells([p.bytes for p in self._parts], self._scale, width), strict=True
        ):
            if count:
                text = part.letter * count if self.app.no_color else part.letter.center(count)
                segments.append(Segment(text, Style(color=INK, bgcolor=part.color)))
                filled += count
        segments.append(Segment(" " * max(0, width - filled) + " " + self._caption, base))
        return Strip(segments).adjust_cell_length(self.size.width, base)


class Legend(Widget):
    """The parts, largest first, in as many columns as fit: letter, name, bytes, share."""

    CELL = 38  # two columns in a terminal of 80

    def __init__(self, parts: Sequence[Part], whole: int) -> None:
        super().__init__()
        self._parts = sorted(parts, key=lambda part: -part.bytes)
        self._whole = whole

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Rows that the columns of this width need."""
        return -(-len(self._parts) // self._columns(width))

    def render(self) -> Text:
        """The parts down the columns, as a printed table reads."""
        rows = self.get_content_height(self.size, self.size, self.size.width)
        text = Text(no_wrap=True, overflow="crop")
        for row in range(rows):
            for part in self._parts[row::rows]:
                text.append(f" {part.letter} ", Style(color=INK, bgcolor=part.color))
                of_whole = format_share(part.bytes, self._whole)
                text.append(f" {part.name:<17.17}{format_bytes(part.bytes):>10} {of_whole:>6}")
            text.append("\n" if row < rows - 1 else "")
        return text

    def _columns(self, width: int) -> int:
        return max(1, width // self.CELL)
