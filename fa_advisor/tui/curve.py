"""The timeline: memory in use over the measured step by category, the peak marked."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from fa_advisor.records import ATTENTION_CATEGORIES, CATEGORIES, TimelinePoint
from fa_advisor.tui.look import COLORS, UNATTRIBUTED, Glyphs
from fa_advisor.views.sizes import format_bytes

# What stands for attention and for the rest where nothing has a colour; and for attention where no
# category is known.
_ATTENTION, _REST = "attention_score", "parameter"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one column shows: the highest point that falls in it, its categories from the bottom."""

    allocated: int
    phase: str
    names: tuple[str, ...]
    tops: tuple[int, ...]  # in bytes, where each category ends


_ORDER = sorted(CATEGORIES, key=lambda name: name not in ATTENTION_CATEGORIES)


def stacked(point: TimelinePoint) -> Sample:
    """A point's categories, attention's at the bottom, what is unattributed on top."""
    counts: dict[str, int] = {
        name: n for name in _ORDER if (n := point.categories.get(name, 0)) > 0
    }
    if not counts:
        attention = min(point.attention_bytes, point.allocated_bytes)
        counts = {_ATTENTION: attention}
    counts[UNATTRIBUTED] = max(0, point.allocated_bytes - sum(counts.values()))
    return Sample(
        point.allocated_bytes, point.phase, tuple(counts), tuple(accumulate(counts.values()))
    )


def samples(points: Sequence[TimelinePoint], width: int) -> list[Sample]:
    """`points` in `width` columns. A column without a point repeats the point before it."""
    if not points or width <= 0:
        return []
    start, span = points[0].t, max(1, points[-1].t - points[0].t + 1)
    best: dict[int, TimelinePoint] = {}
    latest: dict[int, TimelinePoint] = {}
    for point in points:
        column = max(0, min(width - 1, (point.t - start) * width // span))
        latest[column] = point
        if column not in best or point.allocated_bytes > best[column].allocated_bytes:
            best[column] = point
    out, last = [], points[0]
    for column in range(width):
        out.append(stacked(best.get(column, last)))
        last = latest.get(column, last)
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
        scale = max(1, max(sample.allocated for sample in self._samples)) / height
        segments = [self._cell(sample, level * scale, scale) for sample in self._samples]
        return Strip(segments, len(segments))

    def _cell(self, sample: Sample, bottom: float, high: float) -> Segment:
        """One cell: the category at its bottom, and what fills most of it above that."""
        base, levels = self.rich_style, self._glyphs.levels
        names = [
            self._at(sample, bottom + (step + 0.5) * high / len(levels))
            for step in range(len(levels))
        ]
        lower = names[0]
        if lower is None:
            return Segment(" ", base)
        count = next((step for step, name in enumerate(names) if name != lower), len(names))
        if count == len(names):
            # Without colour (and in ASCII) the texture tells attention from the rest.
            textured = lower not in ATTENTION_CATEGORIES and (self.app.no_color or len(levels) == 1)
            glyph = self._glyphs.other if textured else levels[-1]
            return Segment(glyph, Style.from_color(Color.parse(COLORS[lower]), base.bgcolor))
        upper = Counter(names[count:]).most_common(1)[0][0]
        ground = base.bgcolor if upper is None else Color.parse(COLORS[upper])
        return Segment(levels[count - 1], Style.from_color(Color.parse(COLORS[lower]), ground))

    def _at(self, sample: Sample, nbytes: float) -> str | None:
        """The category that far up a column; without colour only whether it is attention's."""
        at = bisect_right(sample.tops, nbytes)
        if at == len(sample.tops):
            return None
        name = sample.names[at]
        if self.app.no_color:
            return _ATTENTION if name in ATTENTION_CATEGORIES else _REST
        return name

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
