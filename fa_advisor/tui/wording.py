"""Foreign names in the room that there is, and counts as words."""

from __future__ import annotations

from rich.cells import cell_len, chop_cells


def shorten(text: str, width: int, ellipsis: str) -> str:
    """`text` in at most `width` cells; the middle goes, since a module name's end tells most."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ellipsis)
    if room <= 0:
        return ellipsis[: max(0, width)]
    head = room // 3
    start = chop_cells(text, head)[0] if head else ""
    end = chop_cells(text[::-1], room - cell_len(start))[0][::-1]
    return start + ellipsis + end


def counted(count: int, noun: str) -> str:
    """`1 site`, `12 sites`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: int | None) -> str:
    """An integer with thousands separated; `-` where there is none."""
    return "-" if value is None else f"{value:,}"
