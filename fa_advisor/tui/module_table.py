"""The module tree as a table, so that bytes line up under each other."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.binding import Binding
from textual.widgets import DataTable

from fa_advisor.records import ModuleMemory
from fa_advisor.tui import moduletree
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.moduletree import Node
from fa_advisor.tui.table import Column, ReportTable, Row
from fa_advisor.tui.wording import shorten
from fa_advisor.views.sizes import format_bytes, format_share

SORTS = ("model order", "total", "own", "chosen category", "name")
FIRST_ROWS = 30
DEEPEST_INDENT = 12
LONGEST_TYPE = 32
OUTSIDE = "\0outside"  # a key that no module name can have


class ModuleTable(ReportTable):
    """Modules at the peak: one category's bytes, the module's own, and with its children's."""

    BINDINGS = [
        Binding("right", "open", "Open", id="modules.open", show=False, tooltip="Show children"),
        Binding(
            "left",
            "close",
            "Close",
            id="modules.close",
            show=False,
            tooltip="Hide children, or go to the parent",
        ),
        Binding(
            "e", "open_all", "Expand", id="modules.open_all", tooltip="Show or hide every module"
        ),
    ]

    def __init__(
        self, modules: tuple[ModuleMemory, ...], peak: int, glyphs: Glyphs, *, id: str
    ) -> None:
        super().__init__(glyphs, id=id)
        self.root = moduletree.build(modules)
        self.chosen: str | None = None
        self._peak = peak
        self._opened = moduletree.open_until(self.root, FIRST_ROWS)
        self._sort = 0
        self._listed: dict[str, Node] = {}

    @property
    def node(self) -> Node | None:
        """The module under the cursor; None on the row of what no module made."""
        return self._listed.get(self.current or "") if self.current != OUTSIDE else None

    def show(self, *, sort: int | None = None) -> None:
        """List the visible modules (sorted by `SORTS[sort]`), and what no module made."""
        self._sort = self._sort if sort is None else sort
        columns = (
            Column(self._title("module", 4), flexible=True),
            Column(self._title("total", 1), right=True),
            Column("of peak", right=True),
            Column(self._title("own", 2), right=True),
            Column(self._title(self.chosen or "attention", 3), right=True),
            Column("type", optional=True),
        )
        visible = moduletree.rows(self.root, self._opened, self._order())
        self._listed = {node.fqn: node for node, _ in visible}
        rows = [self._row(node, depth) for node, depth in visible]
        outside = self._peak - self.root.bytes
        if outside > 0:
            held = format_bytes(outside), format_share(outside, self._peak)
            cells = ("  outside any module", *held, "", "", "")
            rows.append(Row(OUTSIDE, cells, "dim"))
        self.fill(columns, rows)

    def action_open(self) -> None:
        """Show the children of the module under the cursor."""
        node = self.node
        if node is not None and node.children and node.fqn not in self._opened:
            self._opened.add(node.fqn)
            self.show()

    def action_close(self) -> None:
        """Hide the children; where there is nothing to hide, go to the parent."""
        node = self.node
        if node is None:
            return
        if node.fqn in self._opened:
            self._opened.remove(node.fqn)
            self.show()
        elif node.fqn:
            self.go_to(node.fqn.rpartition(".")[0])

    def action_open_all(self) -> None:
        """Open every module, or close all but the root where all are open."""
        every = moduletree.parents(self.root)
        self._opened = {""} if self._opened >= every else every
        self.show()

    @on(DataTable.RowSelected)
    def _toggle(self) -> None:
        node = self.node
        if node is not None and node.fqn in self._opened:
            self.action_close()
        else:
            self.action_open()

    def _row(self, node: Node, depth: int) -> Row:
        mark = self.glyphs.open if node.fqn in self._opened else self.glyphs.closed
        indent = "  " * min(depth, DEEPEST_INDENT)
        cells = (
            f"{indent}{mark if node.children else ' '} {self.glyphs.name(node.name)}",
            format_bytes(node.bytes),
            format_share(node.bytes, self._peak),
            format_bytes(node.own_bytes),
            format_bytes(self._chosen_bytes(node)),
            shorten(self.glyphs.name(node.type), LONGEST_TYPE, self.glyphs.ellipsis),
        )
        return Row(node.fqn, cells, "" if node.bytes else "dim")

    def _chosen_bytes(self, node: Node) -> int:
        return node.attention_bytes if self.chosen is None else node.total.get(self.chosen, 0)

    def _title(self, title: str, sort: int) -> str:
        arrow = self.glyphs.up if sort == SORTS.index("name") else self.glyphs.down
        return f"{title} {arrow}" if sort == self._sort else title

    def _order(self) -> Callable[[Node], int | str] | None:
        """What siblings are sorted by, in the order of `SORTS`."""
        orders: tuple[Callable[[Node], int | str] | None, ...] = (
            None,
            lambda node: -node.bytes,
            lambda node: -node.own_bytes,
            lambda node: -self._chosen_bytes(node),
            lambda node: node.name,
        )
        return orders[self._sort]
