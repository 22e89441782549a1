"""The table of tiles as text: each kernel's tiles, the one to use first, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fa_advisor.records import BudgetTable, TileBudget
from fa_advisor.views.layout import (
    ASCII,
    MAX_WIDTH,
    MIN_WIDTH,
    UNICODE,
    Column,
    Page,
    Row,
    print_to_html,
    print_to_text,
    table,
)
from fa_advisor.views.sizes import KIB

_TITLES = {
    "forward": "forward: out and lse, a block of queries each",
    "keys": "backward: dK and dV, a block of keys each",
    "queries": "backward: dQ, a block of queries each",
    "hopper forward": "hopper, forward: out and lse, a block of queries each",
    "hopper backward": "hopper, backward: dK, dV and dQ, a block of keys each",
    "hopper keys": "hopper, backward: dK and dV, a block of keys each",
    "hopper queries": "hopper, backward: dQ, a block of queries each",
}


@dataclass(frozen=True, slots=True)
class BudgetView:
    """Tables that print themselves to a rich console, at `width` or the console's."""

    tables: tuple[BudgetTable, ...]
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = self.width or min(options.max_width, MAX_WIDTH)
        glyphs = ASCII if options.ascii_only else UNICODE
        page = Page(console, max(width, MIN_WIDTH), glyphs)
        for i, each in enumerate(self.tables):
            if i:
                yield Text("")
            yield from _table(each, page)


def to_text(
    tables: tuple[BudgetTable, ...], width: int = 100, color: bool = False, ascii: bool = False
) -> str:
    """The tables as lines of at most `width` columns (40 at least)."""
    return print_to_text(BudgetView(tables, width), width=width, color=color, ascii=ascii)


def to_html(tables: tuple[BudgetTable, ...], width: int = 100) -> str:
    """The tables as one HTML element."""
    return print_to_html(BudgetView(tables, width), width=width)


def _table(budgets: BudgetTable, page: Page) -> Iterator[Text]:
    device = budgets.device
    dims = str(budgets.head_dim)
    if budgets.value_head_dim != budgets.head_dim:
        dims += f"/{budgets.value_head_dim}"
    what = page.joined(
        f"head dim {dims}" if budgets.head_dim else "",
        budgets.dtype if budgets.head_dim else "",
        "causal" if budgets.is_causal else "",
        f"compute capability {device.compute_capability}",
        f"{device.smem_per_block_optin_bytes // KIB} KiB of shared memory a block,"
        f" {device.smem_per_sm_bytes // KIB} an SM",
    )
    yield from page.wrapped(Text(page.plain(device.name), style="bold"))
    yield from page.wrapped(Text(what, style="dim"))
    for kernel, run in groupby(budgets.budgets, key=lambda row: row.kernel):
        rows = list(run)
        yield Text("")
        # Somebody's own function may have a bundled kernel's name.
        bundled = rows[0].smem_modelled_bytes is not None
        title = _TITLES.get(kernel, kernel) if bundled else kernel
        yield from page.wrapped(Text(page.plain(title), style="bold"))
        yield from _rows(rows, page)
        if kernel in budgets.explanations:
            yield from page.wrapped(budgets.explanations[kernel])
        yield from _holders(rows[0], page)
    yield Text("")
    for note in budgets.notes:
        yield from page.wrapped(page.plain(note))
    yield from page.wrapped(Text(_legend(budgets), style="dim"))


def _rows(rows: list[TileBudget], page: Page) -> Iterator[Text]:
    timed = any(row.time_ms is not None for row in rows)
    modelled = any(row.smem_modelled_bytes is not None for row in rows)
    compiled = any(row.basis == "compiled" for row in rows)
    columns = (
        Column("M x N"),
        Column("warps", True),
        Column("stages", True),
        Column("textbook", True),
        *((Column("model", True),) if modelled else ()),
        *((Column("shared", True),) if compiled else ()),
        Column("regs", True),
        *((Column("spill", True),) if compiled else ()),
        Column("CTAs", True),
        Column("occup.", True),
        Column("limit"),
        *((Column("ms", True),) if timed else ()),
    )
    yield from table(
        page,
        columns,
        [_row(row, page, timed=timed, modelled=modelled, compiled=compiled) for row in rows],
    )


def _row(row: TileBudget, page: Page, *, timed: bool, modelled: bool, compiled: bool) -> Row:
    good, bad, careful = ("ok", "no", "!") if page.glyphs is ASCII else ("✓", "✗", "!")
    failed = row.error is not None
    glyph = bad if failed or not row.fits else careful if row.warnings else good
    style = "red" if failed or not row.fits else "yellow" if row.warnings else "green"
    exact = row.basis == "compiled"
    shown = not failed and (exact or row.smem_modelled_bytes is not None)
    # What spills shows in its own column, or as a plus sign.
    detail = [page.plain(warning) for warning in row.warnings if "spill" not in warning]
    if row.error is not None:
        detail.insert(0, page.plain(f"no figures: {row.error}"))
    return Row(
        (
            f"{glyph} {row.block_m} x {row.block_n}",
            str(row.num_warps),
            str(row.num_stages),
            _kib(row.smem_textbook_bytes),
            *((_kib(row.smem_modelled_bytes),) if modelled else ()),
            *((_kib(row.smem_bytes) if exact else "",) if compiled else ()),
            _registers(row, exact),
            *(("" if row.spill_bytes is None else str(row.spill_bytes),) if compiled else ()),
            str(row.ctas_per_sm) if shown else "",
            f"{row.occupancy:.0%}" if shown else "",
            row.limiter if shown else "",
            *(
                (f"{row.time_ms:.2f}" if shown and row.time_ms is not None else "",)
                if timed
                else ()
            ),
        ),
        style=style,
        detail=detail,
    )


def _registers(row: TileBudget, exact: bool) -> str:
    if row.registers_per_thread is None:
        return ""
    if exact:
        return str(row.registers_per_thread or "")
    over = "+" if any("spill" in warning for warning in row.warnings) else ""
    return f"~{row.registers_per_thread}{over}"


def _kib(size: int | None) -> str:
    return "" if size is None else f"{size / KIB:.1f}"


def _holders(row: TileBudget, page: Page) -> Iterator[Text]:
    """Who holds what of the first tile's shared memory and registers."""
    for where, held in (("shared memory", row.in_smem), ("registers", row.in_registers)):
        if held:
            parts = (f"{name} {size / KIB:.1f}" for name, size in held.items() if size)
            yield from page.wrapped(
                Text(f"{where}, KiB a block: {page.joined(*parts)}", style="dim"), 2
            )


def _legend(budgets: BudgetTable) -> str:
    bases = {row.basis for row in budgets.budgets}
    parts = [
        "KiB a block; textbook: Q, K, V, S and O in the input dtype",
        "CTAs: blocks on an SM, occup.: their share of its warps",
    ]
    if "compiled" in bases:
        parts.append("shared, regs and spill (bytes a thread): the compiler's")
    if "modelled" in bases:
        parts.append("~: modelled, not compiled; +: wants more registers, and spills")
    if any(row.time_ms is not None for row in budgets.budgets):
        parts.append(f"ms: predicted, for {budgets.workload}")
    return "; ".join(parts)
