"""The timeline: memory in use over the measured step, attention's part, the peak marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from fa_advisor.records import TimelinePoint
from fa_advisor.tui.look import ATTENTION_COLOR, OTHER_COLOR, Glyphs
from fa_advisor.views.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """What one column shows: the highest point that falls in it."""

    allocated: int
    attention: int
    phase: str


def samples(points: Sequence[TimelinePoint], width: int) -> list[Sample]:
    """`points` in `width` columns. A column without a point repeats the one before it."""
    if not points or width <= 0:
        return []
    start, span = points[0].t, max(1, points[-1].t - points[0].t + 1)
    best: dict[int, TimelinePoint] = {}
    for point in points:
        column = max(0, min(width - 1, (point.t - start) * width // span))
        if column not in best or point.allocated_bytes > best[column].allocated_bytes:
            best[column] = point
    out, last = [], points[0]
    for column in range(width):
        last = best.get(column, last)
        out.append(Sample(last.allocated_bytes, last.attention_bytes, last.phase))
    return out


class Timeline(Widget):
    """Top line: the peak's mark. Then the curve. Bottom line: the phases."""

    def __init__(self, points: Sequence[TimelinePoint], glyphs: Glyphs) -> None:
        super().__init__()
        self._points, self._glyphs = points, glyphs
        self._samples: list[Sample] = []
        self._rows: list[Strip] = []
        self._drawn: tuple[int, int] | None = None

    def render_line(self, y: int) -> Strip:
        """Draw line `y`, from columns worked out once a size."""
        if self._drawn != self.size:
            self._samples, self._drawn = samples(self._points, self.size.width), self.size
        if not self._samples:
            text = "no timeline in this report" if y == 0 else ""
            return Strip([Segment(text, self.rich_style)]).adjust_cell_length(
                self.size.width, self.rich_style
            )
        if y == 0:
            return self._plain(self._peak_line())
        if y == self.size.height - 1:
            return self._plain(self._phase_line())
        return self._curve_line(self.size.height - 2 - y)

    def _plain(self, text: str) -> Strip:
        return Strip([Segment(text, self.rich_style)]).adjust_cell_length(
            self.size.width, self.rich_style
        )

    def _curve_line(self, level: int) -> Strip:
        """The cells between `level` and `level + 1` of the curve's height, 0 at the bottom."""
        height = self.size.height - 2
        top = max(1, max(sample.allocated for sample in self._samples))
        segments = []
        for sample in self._samples:
            total = sample.allocated * height / top - level
            attention = min(sample.attention, sample.allocated) * height / top - level
            segments.append(self._cell(total, attention))
        return Strip(segments, len(segments))

    def _cell(self, total: float, attention: float) -> Segment:
        """One cell, `total` and `attention` cells high from its bottom."""
        base, levels = self.rich_style, self._glyphs.levels
        part = attention if attention >= min(0.5, total) else total
        red, step = part is attention and attention > 0, round(min(1.0, part) * len(levels))
        if total <= 0 or step == 0:
            return Segment(" ", base)
        color = ATTENTION_COLOR if red else OTHER_COLOR
        whole = step == len(levels)
        # Without colour (and in ASCII) the texture tells attention from the rest.
        textured = not red and whole and (self.app.no_color or len(levels) == 1)
        glyph = self._glyphs.other if textured else levels[step - 1]
        over = red and not whole and total >= 1
        ground = Color.parse(OTHER_COLOR) if over else base.bgcolor
        return Segment(glyph, Style.from_color(Color.parse(color), ground))

    def _peak_line(self) -> str:
        at = max(range(len(self._samples)), key=lambda i: self._samples[i].allocated)
        label = f"peak {format_bytes(self._samples[at].allocated)}"
        mark = self._glyphs.peak
        if at + len(label) + 2 <= self.size.width:
            return " " * at + f"{mark} {label}"
        return " " * max(0, at - len(label) - 1) + f"{label} {mark}"

    def _phase_line(self) -> str:
        """Each run of a phase from where it begins, its name where there is room."""
        line, start = "", 0
        for i in range(1, len(self._samples) + 1):
            if i == len(self._samples) or self._samples[i].phase != self._samples[start].phase:
                name = self._glyphs.phase + self._samples[start].phase
                line += name[: i - start].ljust(i - start, self._glyphs.rule)
                start = i
        return line
