"""A scrollbar of characters, for terminals without colour or without block elements."""

from __future__ import annotations

from rich.color import Color
from rich.segment import Segment, Segments
from rich.style import Style
from textual.scrollbar import ScrollBarRender

from fa_advisor.tui.look import Glyphs

BACK, BAR = Color.parse("#555555"), Color.parse("#c0c0c0")


def scrollbar(glyphs: Glyphs) -> type[ScrollBarRender]:
    """A renderer that draws thumb and track with these glyphs."""

    class GlyphScrollBar(ScrollBarRender):
        """Thumb and track differ by character, not by colour."""

        @classmethod
        def render_bar(
            cls,
            size: int = 25,
            virtual_size: float = 50,
            window_size: float = 20,
            position: float = 0,
            thickness: int = 1,
            vertical: bool = True,
            back_color: Color = BACK,
            bar_color: Color = BAR,
        ) -> Segments:
            """Whole cells only; a click beside the thumb moves a page."""
            thumb, start = size, 0
            if 0 < window_size < virtual_size:
                thumb = min(size, max(1, round(size * window_size / virtual_size)))
                start = round((size - thumb) * position / (virtual_size - window_size))
            width = thickness if vertical else 1
            before = Segment(glyphs.track * width, Style(meta={"@mouse.down": "scroll_up"}))
            after = Segment(glyphs.track * width, Style(meta={"@mouse.down": "scroll_down"}))
            held = Segment(glyphs.thumb * width, Style(meta={"@mouse.down": "grab"}))
            line = [before] * start + [held] * thumb + [after] * (size - start - thumb)
            if vertical:
                return Segments(line, new_lines=True)
            return Segments([*line, Segment.line()] * thickness, new_lines=False)

    return GlyphScrollBar
