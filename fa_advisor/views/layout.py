"""How the text view is set: headings, tables, bars, and what stands in for them in ASCII.

Everything is made of `rich.text.Text`, so no name from a model is ever read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that a terminal may lack."""

    dot: str
    times: str
    arrow: str
    bar: str  # a bar's last cell, from empty to full
    levels: str  # a sparkline's cell, from empty to full


UNICODE = Glyphs(dot="·", times="×", arrow="→", bar=" ▏▎▍▌▋▊▉█", levels=" ▁▂▃▄▅▆▇█")
ASCII = Glyphs(dot="|", times="x", arrow="->", bar=" #", levels=" .:-=+*#")

MIN_WIDTH, MAX_WIDTH = 40, 120

HARD_SPACE = "\ue000"
"""Stands for a space at which no line breaks, until the line is set. (rich breaks at U+00A0.)"""


@dataclass(frozen=True, slots=True)
class Page:
    """Where a section is set: the columns it may fill, and the characters it may use."""

    console: Console
    width: int
    glyphs: Glyphs

    @property
    def margin(self) -> int:
        """The columns left of a section's body."""
        return 2 if self.width >= 60 else 1

    def joined(self, *parts: str) -> str:
        """The parts that aren't empty, with dots between them; lines break at dots if they can."""
        kept = (
            part.replace(" ", HARD_SPACE) if len(part) <= 32 else part for part in parts if part
        )
        return f" {self.glyphs.dot} ".join(kept)

    def plain(self, name: str) -> str:
        """A name from a model, as this page may show it."""
        shown = plain(name)
        return shown.encode("ascii", "backslashreplace").decode() if self.glyphs is ASCII else shown

    def wrapped(self, text: Text | str, extra: int = 0) -> Iterator[Text]:
        """`text` in lines that fit, all `extra` columns right of the margin; long words fold."""
        margin = self.margin + extra
        for line in self.filled(text, self.width - margin):
            yield Text(" " * margin).append_text(line)

    def filled(self, text: Text | str, width: int) -> Iterator[Text]:
        """`text` in lines of at most `width` columns."""
        text = Text(text) if isinstance(text, str) else text
        for line in text.wrap(self.console, max(width, 10)):
            line.rstrip()
            line.plain = line.plain.replace(HARD_SPACE, " ")
            yield line


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; numbers stand on the right."""

    title: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A table's row: a cell a column, and lines of detail below it.

    `stacked` is what stands below the first cell where the columns don't fit; by default every
    other cell after its column's title.
    """

    cells: Sequence[str]
    style: str = ""
    detail: Sequence[str] = ()
    stacked: str = ""


def plain(name: str) -> str:
    """`name` with control characters, escapes and bidirectional overrides made visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def heading(page: Page, title: str, aside: str = "") -> Iterator[Text]:
    """A section's title and, less loudly, what it is about."""
    line = Text(title.upper(), style="bold")
    if aside and len(title) + 2 + cell_len(aside) <= page.width:
        yield line.append(f"  {aside}", style="not bold dim")
        return
    yield line
    if aside:
        yield from page.wrapped(Text(aside, style="dim"))


def table(page: Page, columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[Text]:
    """Aligned columns where they fit; else each row as a block: its first cell, then the others."""
    lines = [[column.title for column in columns], *(row.cells for row in rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    if page.margin + sum(widths) + 2 * (len(widths) - 1) > page.width:
        yield from _stacked(page, columns, rows)
        return
    yield _aligned(page, columns, widths, lines[0], "dim")
    for row in rows:
        yield _aligned(page, columns, widths, row.cells, row.style)
        for detail in row.detail:
            yield from page.wrapped(Text(detail, style="dim"), 2)


def _aligned(
    page: Page, columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str], style: str
) -> Text:
    padded = (
        " " * (width - cell_len(cell)) + cell
        if column.right
        else cell + " " * (width - cell_len(cell))
        for column, width, cell in zip(columns, widths, cells, strict=True)
    )
    return Text(" " * page.margin).append("  ".join(padded).rstrip(), style=style)


def _stacked(page: Page, columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[Text]:
    for row in rows:
        yield from page.wrapped(Text(row.cells[0], style=row.style or "bold"))
        pairs = zip(columns[1:], row.cells[1:], strict=True)
        facts = (f"{column.title} {cell}" for column, cell in pairs if cell)
        stacked = row.stacked or page.joined(*facts)
        yield from page.wrapped(Text(stacked, style=row.style), 2)
        for detail in row.detail:
            yield from page.wrapped(Text(detail, style="dim"), 2)


def bar(page: Page, share: float, width: int) -> str:
    """A bar that fills `share` (0 to 1) of `width` cells, to a fraction of a cell where it can."""
    glyphs = page.glyphs.bar
    steps = len(glyphs) - 1
    filled = round(max(0.0, min(share, 1.0)) * width * steps)
    if share > 0:
        filled = max(filled, 1)  # something that is there is seen
    full, part = divmod(filled, steps)
    return glyphs[-1] * full + (glyphs[part] if part else "")


def sparkline(page: Page, values: Iterable[float], top: float) -> str:
    """One character a value, its height the value's share of `top`."""
    levels = page.glyphs.levels
    steps = len(levels) - 1
    return "".join(
        levels[max(1 if value > 0 else 0, min(steps, round(value / top * steps)))]
        if top
        else levels[0]
        for value in values
    )


def print_to_text(view: object, *, width: int, color: bool = False, ascii: bool = False) -> str:
    """What a rich console would show of `view`, with ANSI escapes if `color`."""
    file = _Ascii() if ascii else io.StringIO()
    console = Console(
        file=file,
        width=max(width, MIN_WIDTH),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
    )
    console.print(view)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


class _Ascii(io.StringIO):
    """Memory that a rich console takes for a terminal without Unicode."""

    encoding = "ascii"


def print_to_html(view: object, *, width: int) -> str:
    """What a rich console would show of `view`, as one HTML element: no scripts, no links, every
    name escaped."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(view)
    return console.export_html(
        inline_styles=True,
        code_format=(
            '<pre style="line-height:1.25;overflow-x:auto;padding:1em;color:{foreground};'
            "background:{background};font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',"
            'monospace"><code style="font-family:inherit">{code}</code></pre>'
        ),
    )
