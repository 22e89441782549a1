"""A postmortem as text: what failed and why, what was alive, and what would have fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fa_advisor.attribution.postmortem import FailedRequest, LineMemory, Postmortem
from fa_advisor.views.layout import (
    ASCII,
    MAX_WIDTH,
    MIN_WIDTH,
    UNICODE,
    Column,
    Page,
    Row,
    bar,
    heading,
    print_to_text,
    sparkline,
    table,
)
from fa_advisor.views.sizes import format_bytes, format_share
from fa_advisor.views.text_failure import CAUSES, remedies

TOP_LINES = 15
KINDS = {
    "weights": "built or moved as part of a module",
    "optimizer": "allocated in torch.optim",
    "forward": "allocated in forward: activations, temporaries",
    "backward": "allocated by autograd, whose threads have no Python frames",
    "workspace": "cuBLAS and its like",
    "compiled": "allocated by Inductor's generated code",
    "unknown": "no stack was recorded",
}


@dataclass(frozen=True, slots=True)
class PostmortemView:
    """A postmortem that prints itself to a rich console."""

    found: Postmortem
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        page = Page(console, min(max(self.width, MIN_WIDTH), MAX_WIDTH), glyphs)
        first = True
        for section in (_title, _request, _remedies, _state, _kinds, _timeline, _lines, _notes):
            lines = list(section(self.found, page))
            if lines and not first:
                yield Text()
            first = first and not lines
            yield from lines


def to_text(found: Postmortem, width: int = 100, color: bool = False, ascii: bool = False) -> str:
    """The postmortem as lines of at most `width` columns (40 at least)."""
    return print_to_text(PostmortemView(found, width), width=width, color=color, ascii=ascii)


def _title(found: Postmortem, page: Page) -> Iterator[Text]:
    what = page.joined(
        page.plain(found.snapshot),
        f"cuda:{found.device}",
        f"{found.events:,} events of the allocator",
        f"{found.failures} out-of-memory errors, the last is shown" if found.failures > 1 else "",
    )
    title = Text("fa-advisor postmortem  ", style="bold").append(what, style="not bold")
    yield from page.filled(title, page.width)
    if found.request is not None:
        verdict = Text("OUT OF MEMORY", style="bold red")
        verdict.append(f"  {CAUSES[found.request.cause]}", style="not bold default")
    else:
        verdict = Text("PEAK", style="bold green")
        text = f"  {format_bytes(found.allocated_bytes)} allocated; the history has no failure"
        verdict.append(text, style="not bold default")
    yield from page.filled(verdict, page.width)


def _request(found: Postmortem, page: Page) -> Iterator[Text]:
    request = found.request
    if request is None:
        return
    yield from heading(page, "The request that failed")
    yield from page.wrapped(_requested(request, page))
    for frame in request.stack:
        yield from page.wrapped(Text(page.plain(frame), style="dim"), 2)


def _requested(request: FailedRequest, page: Page) -> str:
    text = f"{format_bytes(request.bytes)}"
    where = page.plain(request.op or request.function)
    if request.source:
        where = f"{where} at {page.plain(request.source)}" if where else page.plain(request.source)
    text += f" for {where}" if where else " by autograd or an operator without Python frames"
    if request.in_attention:
        text += ", in attention's code"
    text += (
        f". The driver was asked for {format_bytes(request.needed_bytes)} and had"
        f" {format_bytes(request.device_free_bytes)} free"
    )
    if request.missing_bytes:
        text += f": {format_bytes(request.missing_bytes)} were missing"
    return text + "."


def _remedies(found: Postmortem, page: Page) -> Iterator[Text]:
    yield from remedies(found.remedies, page)


def _state(found: Postmortem, page: Page) -> Iterator[Text]:
    aside = "when it failed" if found.request else "at the peak"
    yield from heading(page, "The allocator", aside)
    rows = [
        ("allocated", found.allocated_bytes, ""),
        ("freed, another stream may use it", found.pending_bytes, ""),
        ("cached: whole segments free", found.cached_bytes, ""),
        (
            "fragmented: free in segments in use",
            found.fragmented_bytes,
            f"largest piece {format_bytes(found.largest_free_bytes)}"
            if found.fragmented_bytes
            else "",
        ),
        ("reserved", found.reserved_bytes, ""),
        ("of it in private pools", found.private_pools_bytes, "CUDA graphs, MemPools"),
    ]
    for name, size, aside in rows:
        if size or name in ("allocated", "reserved"):
            line = Text(" " * page.margin).append(f"{name:<36} {format_bytes(size):>11}")
            yield line.append(f"  {aside}" if aside else "", style="dim")


def _kinds(found: Postmortem, page: Page) -> Iterator[Text]:
    yield from heading(page, "What was alive", "read off the code that allocated it")
    sizes = dict(found.kinds)
    if found.slack_bytes:
        sizes["allocator_slack"] = found.slack_bytes
    largest = max(sizes.values(), default=0)
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        share = format_share(size, found.allocated_bytes)
        line = Text(" " * page.margin)
        line.append(f"{name:<16} {format_bytes(size):>11} {share:>7}")
        if page.width >= 70:
            drawn = bar(page, size / max(1, largest), 16)
            line.append("  ").append(f"{drawn:<16}", style="blue")
            room = page.width - len(line) - 2
            gloss = KINDS.get(name, "the allocator's rounding and unsplit rests")
            if room >= len(gloss):
                line.append(f"  {gloss}", style="dim")
        yield line
    if found.attention_bytes:
        share = format_share(found.attention_bytes, found.allocated_bytes)
        text = f"in attention's code: {format_bytes(found.attention_bytes)}, {share}"
        yield from page.wrapped(Text(text, style="red"))


def _timeline(found: Postmortem, page: Page) -> Iterator[Text]:
    points = found.timeline
    if len(points) < 3:
        return
    yield from heading(page, "Allocated over the history", "each column's highest")
    first, last = points[0][0], points[-1][0]
    columns = min(page.width - page.margin, 76, len(points))
    heights = [0] * columns
    for at, allocated in points:
        column = min(columns - 1, (at - first) * columns // max(1, last - first + 1))
        heights[column] = max(heights[column], allocated)
    for column in range(1, columns):
        heights[column] = heights[column] or heights[column - 1]
    drawn = sparkline(page, heights, max(heights))
    yield Text(" " * page.margin).append(drawn, style="blue")


def _lines(found: Postmortem, page: Page) -> Iterator[Text]:
    if not found.lines:
        return
    yield from heading(page, "By source line")
    columns = (
        Column("bytes", True),
        Column("share", True),
        Column("count", True),
        Column("kind"),
        Column("line"),
    )
    shown = found.lines[:TOP_LINES]
    rows = [
        Row(
            (
                format_bytes(line.bytes),
                format_share(line.bytes, found.allocated_bytes),
                f"{page.glyphs.times}{line.count}",
                line.kind,
                _where(line, page),
            ),
            style="red" if line.in_attention else "",
        )
        for line in shown
    ]
    yield from table(page, columns, rows)
    rest = found.lines[TOP_LINES:]
    if rest:
        count, size = len(rest), format_bytes(sum(line.bytes for line in rest))
        yield from page.wrapped(Text(f"and {count} smaller: {size}", style="dim"))


def _where(line: LineMemory, page: Page) -> str:
    if line.source is None:
        return page.plain(line.function) or "(no Python frames)"
    return f"{page.plain(line.source)} {page.plain(line.function)}".strip()[:60]


def _notes(found: Postmortem, page: Page) -> Iterator[Text]:
    if not found.notes:
        return
    yield from heading(page, "Notes")
    for note in found.notes:
        yield from page.wrapped(Text(page.plain(note)), 2)
