"""The report as text, told from the top: the verdict, the peak, what it is made of, what to do.

People paste it into issues: it needs no colour, fits 40 columns and up, and has an ASCII form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fa_advisor.records import ReportBody
from fa_advisor.views import text_attention, text_failure, text_memory, text_owners
from fa_advisor.views.layout import (
    ASCII,
    MAX_WIDTH,
    MIN_WIDTH,
    UNICODE,
    Page,
    heading,
    print_to_html,
    print_to_text,
)
from fa_advisor.views.sizes import format_count

Section = Callable[[ReportBody, Page], Iterator[Text]]


@dataclass(frozen=True, slots=True)
class TextView:
    """A report that prints itself to a rich console, at `width` or the console's."""

    report: ReportBody
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = self.width or min(options.max_width, MAX_WIDTH)
        glyphs = ASCII if options.ascii_only else UNICODE
        page = Page(console, max(width, MIN_WIDTH), glyphs)
        yield from sections(self.report, page)


def render(report: ReportBody, width: int | None = None) -> TextView:
    """The report for a rich console, `width` columns wide (default: the console's, up to 120)."""
    return TextView(report, width)


def to_text(report: ReportBody, width: int = 100, color: bool = False, ascii: bool = False) -> str:
    """The report as lines of at most `width` columns (40 at least), without trailing spaces."""
    return print_to_text(render(report, width), width=width, color=color, ascii=ascii)


def render_html(report: ReportBody, width: int = 100) -> str:
    """The text view as one HTML element: no scripts, no links, every name escaped."""
    return print_to_html(render(report, width), width=width)


def sections(report: ReportBody, page: Page) -> Iterator[Text]:
    """Every section's lines, with an empty line between two sections."""
    story: tuple[Section, ...] = (
        _title,
        text_failure.failure,
        text_memory.peak,
        text_memory.categories,
        text_memory.timeline,
        text_attention.sites,
        text_attention.why_not,
        text_attention.advice,
        text_owners.modules,
        text_owners.tensors,
        text_attention.tiles,
        _notes,
        _environment,
    )
    first = True
    for section in story:
        lines = list(section(report, page))
        if lines and not first:
            yield Text()
        first = first and not lines
        yield from lines


def _title(report: ReportBody, page: Page) -> Iterator[Text]:
    """What was run, and the verdict in a sentence."""
    target = report.target
    root = next((module.type for module in report.modules if not module.fqn), "")
    name = f"{target.path}:{target.name}" if target.path else target.name
    parameters = format_count(target.parameters)
    if target.trainable_parameters != target.parameters:
        parameters += f" ({format_count(target.trainable_parameters)} trainable)"
    described = page.joined(
        page.plain(name),
        page.plain(root) if root != target.name else "",
        f"{parameters.rstrip()} parameters",
        target.mode,
        page.plain(target.dtype),
        "" if target.batch_size is None else f"batch {target.batch_size}",
        "" if target.seq_len is None else f"sequence {target.seq_len}",
    )
    title = Text("fa-advisor  ", style="bold").append(described, style="not bold")
    yield from page.filled(title, page.width)
    verdict = Text(report.advice.verdict.upper(), style=_verdict_style(report))
    if report.advice.summary:
        verdict.append(f"  {page.plain(report.advice.summary)}", style="not bold default")
    yield from page.filled(verdict, page.width)


def _verdict_style(report: ReportBody) -> str:
    return "bold red" if report.advice.verdict == "attention-bound" else "bold green"


def _notes(report: ReportBody, page: Page) -> Iterator[Text]:
    if not report.notes:
        return
    yield from heading(page, "Notes")
    for note in report.notes:
        for index, line in enumerate(page.wrapped(Text(page.plain(note)), 2)):
            if index == 0:
                line = Text(" " * page.margin).append("- ").append_text(line[page.margin + 2 :])
            yield line


def _environment(report: ReportBody, page: Page) -> Iterator[Text]:
    environment, device = report.environment, report.device
    facts = page.joined(
        f"fa-advisor {page.plain(environment.fa_advisor)}",
        f"python {page.plain(environment.python)}",
        f"torch {page.plain(environment.torch or 'none')}",
        f"triton {page.plain(environment.triton or 'none')}",
        f"CUDA {page.plain(environment.cuda or 'none')}",
        f"driver {page.plain(environment.driver)}" if environment.driver else "",
        f"GPU limits from {_BASES.get(device.basis, device.basis)}",
    )
    yield from page.filled(Text(facts, style="dim"), page.width)


_BASES = {"nvml": "NVML", "torch": "torch", "table": "the table of GPUs"}
