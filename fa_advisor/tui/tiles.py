"""Fourth screen: what candidate tiles take of an SM, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from fa_advisor.records import TileBudget
from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.pane import Pane
from fa_advisor.tui.table import Column, ReportTable, Row
from fa_advisor.tui.wording import counted, number
from fa_advisor.views.sizes import KIB, format_share

ORDERS: tuple[Callable[[TileBudget], float] | None, ...] = (
    None,
    lambda tile: tile.smem_bytes,
    lambda tile: -tile.occupancy,
    lambda tile: not tile.fits,
)


class TilesPane(Pane):
    """The budgets, one row a tile, and a sentence on the one under the cursor."""

    NAME = "tiles"
    TITLE = "Tiles"
    ABOUT = "shared memory and registers of candidate tiles on this GPU"
    SORTS = ("the report's order", "shared memory", "occupancy", "what fits first")

    def __init__(self, report: Report, glyphs: Glyphs) -> None:
        super().__init__(report, glyphs)
        self._table = ReportTable(glyphs, id="tiles")
        self._about = Static("", id="about", classes="note", markup=False)

    def compose(self) -> ComposeResult:
        """The limit, the table, the sentence."""
        device = self.report.device
        limit = device.smem_per_block_optin_bytes
        yield Static(
            f"{self.glyphs.name(device.name)}: {_kib(limit)} KiB of shared memory a block,"
            f" {_kib(device.smem_per_sm_bytes)} KiB an SM"
            if self.report.budgets
            else "This report has no tile budgets.",
            classes="note",
            markup=False,
        )
        yield self._table
        yield self._about

    def on_mount(self) -> None:
        """Fill the table."""
        self.show_sorted()

    def show_sorted(self) -> None:
        """List the tiles in the chosen order."""
        tiles = list(enumerate(self.report.budgets))
        order = ORDERS[self.sort]
        if order is not None:
            tiles.sort(key=lambda item: order(item[1]))
        columns = (
            Column(self.sorted_title("fits", 3)),
            Column("head_dim", right=True),
            Column("kernel"),
            Column("tile M,N"),
            Column(self.sorted_title("SMEM KiB", 1, descending=False), right=True),
            Column("of limit", right=True),
            Column("limiter"),
            Column(self.sorted_title("occupancy", 2), right=True),
            Column("CTAs/SM", right=True, optional=True),
            Column("warps", right=True, optional=True),
            Column("stages", right=True, optional=True),
            Column("textbook KiB", right=True, optional=True),
            Column("registers", right=True, optional=True),
            Column("spills B", right=True, optional=True),
            Column("dtype", optional=True),
            Column("pass", optional=True),
            Column("basis", optional=True),
        )
        self._table.fill(columns, [self._row(str(index), tile) for index, tile in tiles])
        self._describe()

    def _row(self, key: str, tile: TileBudget) -> Row:
        cells = (
            f"{self.glyphs.yes} yes" if tile.fits else f"{self.glyphs.no} no",
            str(tile.head_dim),
            self.glyphs.name(tile.kernel),
            f"{tile.block_m}{self.glyphs.times}{tile.block_n}",
            _kib(tile.smem_bytes),
            format_share(tile.smem_bytes, self.report.device.smem_per_block_optin_bytes),
            tile.limiter,
            format_share(tile.occupancy, 1),
            str(tile.ctas_per_sm),
            str(tile.num_warps),
            str(tile.num_stages),
            _kib(tile.smem_textbook_bytes),
            number(tile.registers_per_thread),
            number(tile.spill_bytes),
            self.glyphs.name(tile.dtype),
            tile.direction,
            tile.basis,
        )
        return Row(key, cells, mark="green" if tile.fits else "red")

    @on(DataTable.RowHighlighted)
    def _describe(self) -> None:
        key = self._table.current
        if key is None:
            return
        tile = self.report.budgets[int(key)]
        device, name = self.report.device, self.glyphs.name
        shape = (
            f"{name(tile.kernel)} {tile.direction}, {name(tile.dtype)}, head_dim {tile.head_dim},"
            f" {counted(tile.num_warps, 'warp')}, {counted(tile.num_stages, 'stage')}"
        )
        taken = (
            f"{_kib(tile.smem_bytes)} KiB of {_kib(device.smem_per_block_optin_bytes)} KiB"
            f" ({tile.basis}; textbook {_kib(tile.smem_textbook_bytes)} KiB)"
        )
        if tile.registers_per_thread is not None:
            taken += f", {counted(tile.registers_per_thread, 'register')} a thread"
        if tile.spill_bytes is not None:
            taken += f", {counted(tile.spill_bytes, 'byte')} spilled"
        runs = f"{counted(tile.ctas_per_sm, 'CTA')} an SM, limited by {tile.limiter}"
        fails = f"does not fit: too much {tile.limiter}"
        end = runs if tile.fits else fails
        warnings = "".join(f" {name(warning)}." for warning in tile.warnings)
        self._about.update(f"{shape}: {taken}; {end}.{warnings}")


def _kib(count: int) -> str:
    return f"{count / KIB:.1f}"
