"""Fifth screen: what to do, why, and what it would bring."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from fa_advisor.records import Recommendation
from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.overview import verdict
from fa_advisor.tui.pane import Pane, Scroller
from fa_advisor.tui.wording import counted, number
from fa_advisor.views.groups import compress
from fa_advisor.views.sizes import format_bytes, format_change
from fa_advisor.views.wording import explain

NAMES_SHOWN = 4


class AdvicePane(Pane):
    """The verdict, the limits now and as advised, the recommendations."""

    NAME = "advice"
    TITLE = "Advice"
    ABOUT = "recommendations with their reasons, limits now and as advised"

    def compose(self) -> ComposeResult:
        """The page."""
        with Scroller():
            yield Static(verdict(self.report, self.glyphs))
            yield Static(limits(self.report))
            recommendations = self.report.advice.recommendations
            if not recommendations:
                yield Static("Nothing to change.", classes="note")
            for index, recommendation in enumerate(recommendations, 1):
                yield Static(recommended(index, recommendation, self.report, self.glyphs))


def limits(report: Report) -> Group:
    """The largest sequence length and batch size that the GPU's memory holds, and the peak."""
    advice, peak = report.advice, report.memory.peak_allocated_bytes
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", justify="right")
    table.add_column(overflow="fold", justify="right")
    table.add_row(*(Text(title, "dim") for title in ("", "now", "as advised")))
    length, batch = advice.max_seq_len, advice.max_batch_size
    table.add_row("longest sequence that fits", number(length.now), number(length.advised))
    table.add_row("largest batch that fits", number(batch.now), number(batch.advised))
    without = ""
    if advice.counterfactual_peak_bytes is not None:
        gone = advice.counterfactual_peak_bytes
        without = (
            f"peak allocated without attention's N x N tensors: {format_bytes(gone)}"
            f" ({format_change(gone - peak)})"
        )
    return Group(Text(), table, Text(without), Text())


def recommended(index: int, advised: Recommendation, report: Report, glyphs: Glyphs) -> Text:
    """One recommendation: what, where, what it brings, why, and why not something else."""
    keep = advised.backend == "keep"
    what = "keep what runs now" if keep else f"use {glyphs.name(advised.backend)}"
    text = Text().append(f"{index}  {what}", "bold" if keep else "bold green")
    if advised.sites:
        text.append(f" at {counted(len(advised.sites), 'site')}", "bold")
    text.append("\n")
    for name in _names(advised.sites, glyphs):
        text.append(f"   {name}\n")
    if advised.tile is not None:
        tile = advised.tile
        text.append(
            f"   tile {tile.block_m}{glyphs.times}{tile.block_n},"
            f" {counted(tile.num_warps, 'warp')}, {counted(tile.num_stages, 'stage')}\n"
        )
    peak, time = advised.predicted.peak_allocated_bytes, advised.predicted.time_ms
    if peak is not None:
        change = format_change(peak - report.memory.peak_allocated_bytes)
        text.append(
            f"   peak allocated {glyphs.arrow} {format_bytes(peak)} ({change}), {advised.basis}\n"
        )
    if time is not None:
        text.append(f"   attention {glyphs.arrow} {time:.3g} ms, {advised.basis}\n")
    for reason in advised.reasons:
        text.append(f"   {glyphs.bullet} {glyphs.name(reason)}\n")
    for backend, codes in advised.rejections.items():
        for code in codes:
            said = explain(code)
            text.append(f"   {glyphs.no} not {glyphs.name(backend)}: {glyphs.name(said)}")
            text.append(f" [{glyphs.name(code)}]\n" if said != code else "\n", "dim")
    return text


def _names(sites: tuple[str, ...], glyphs: Glyphs) -> list[str]:
    """The sites, equal layers once, and how many more there are."""
    names = [glyphs.name(name) or "(the model itself)" for name in compress(sites)]
    more = len(names) - NAMES_SHOWN
    return names if more <= 0 else [*names[:NAMES_SHOWN], f"and {more} more"]
