"""First screen: the verdict, what the peak is made of, and when it happens."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from fa_advisor.records import OutOfMemory
from fa_advisor.report import Report
from fa_advisor.tui.bars import Legend, Part, StackedBar, category_part
from fa_advisor.tui.curve import Timeline
from fa_advisor.tui.look import OTHER_COLOR, UNATTRIBUTED, Glyphs
from fa_advisor.tui.pane import Pane, Scroller
from fa_advisor.views.sizes import format_bytes, format_share
from fa_advisor.views.text_failure import CAUSES, request


class OverviewPane(Pane):
    """Verdict, bars now and without attention's N x N tensors, timeline."""

    NAME = "overview"
    TITLE = "Overview"
    ABOUT = "the verdict, the peak by category, the timeline"

    def compose(self) -> ComposeResult:
        """The page, scrolled where it doesn't fit."""
        memory = self.report.memory
        parts = peak_parts(self.report)
        gone = self.report.advice.counterfactual_peak_bytes
        scale = max(memory.peak_allocated_bytes, gone or 0)
        with Scroller():
            if self.report.out_of_memory is not None:
                yield Static(ran_out(self.report.out_of_memory, self.glyphs))
            yield Static(verdict(self.report, self.glyphs))
            yield Static(peak_lines(self.report), classes="note", markup=False)
            yield Static("")
            yield StackedBar(
                "now    ", parts, scale, f"{format_bytes(memory.peak_allocated_bytes):>10}        "
            )
            if gone is not None:
                saved = gone - memory.peak_allocated_bytes
                less = [Part("without attention's N x N", gone, "=", OTHER_COLOR)]
                change = format_share(abs(saved), memory.peak_allocated_bytes)
                sign = "-" if saved < 0 else "+" if saved > 0 else " "
                yield StackedBar(
                    "no NxN ", less, scale, f"{format_bytes(gone):>10} {sign}{change:<6}"
                )
            yield Legend([part for part in parts if part.bytes], memory.peak_allocated_bytes)
            yield Timeline(memory.timeline, self.glyphs)


def peak_parts(report: Report) -> list[Part]:
    """The peak's categories in the report's order, what is unattributed last."""
    parts = [category_part(name, count) for name, count in report.memory.categories.items()]
    if report.memory.unattributed_bytes:
        parts.append(category_part(UNATTRIBUTED, report.memory.unattributed_bytes))
    return parts


def ran_out(failed: OutOfMemory, glyphs: Glyphs) -> Text:
    """What was asked for, why it wasn't there, what would make it fit; green what would alone."""
    text = (
        Text().append(" OUT OF MEMORY ", "bold red reverse").append(f"  {CAUSES[failed.cause]}\n")
    )
    place = f" {glyphs.dot} ".join(
        glyphs.name(part) for part in (failed.fqn, failed.source or "") if part
    )
    text.append(request(failed, glyphs.name, place) + "\n")
    for remedy in failed.remedies:
        text.append(
            f"{glyphs.bullet} {glyphs.name(remedy.text)}\n", "green" if remedy.enough else ""
        )
    return text


def verdict(report: Report, glyphs: Glyphs) -> Text:
    """The verdict and its sentence."""
    text = Text().append(f" {report.advice.verdict} ", "bold reverse")
    return text.append("  " + glyphs.name(report.advice.summary))


def peak_lines(report: Report) -> str:
    """The peak, its phase and basis beside the GPU's memory; what the allocator reserved."""
    memory, whole = report.memory, report.device.total_memory_bytes
    held = format_share(memory.peak_allocated_bytes, whole)
    text = (
        f"peak allocated {format_bytes(memory.peak_allocated_bytes)} in {memory.peak_phase}"
        f" ({memory.basis}), {held} of the GPU's {format_bytes(whole)}"
    )
    if memory.peak_reserved_bytes is None:
        return text
    return f"{text}\npeak reserved {format_bytes(memory.peak_reserved_bytes)}"
