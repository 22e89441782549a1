"""The text view's sections on owners: the largest modules and the largest tensors."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from fa_advisor.records import LedgerRow, ModuleMemory, ReportBody
from fa_advisor.views.groups import Group, group_layers
from fa_advisor.views.layout import Column, Page, Row, heading, table
from fa_advisor.views.sizes import format_bytes, format_share

TOP_MODULES = 8
TOP_TENSORS = 10


def modules(report: ReportBody, page: Page) -> Iterator[Text]:
    """The modules that own most of the peak; equal layers in one row."""
    groups = group_layers(
        report.modules,
        name=lambda module: module.fqn,
        equal=lambda module: (module.type, tuple(sorted(module.categories.items()))),
    )
    sized = sorted(((_module_bytes(group), group) for group in groups), key=lambda pair: -pair[0])
    sized = [pair for pair in sized if pair[0]]
    if not sized:
        return
    total = report.memory.peak_allocated_bytes
    yield from heading(page, "Largest modules", "what each made itself, alive at the peak")
    columns = (Column("module"), Column("bytes", True), Column("share", True), Column("mostly"))
    rows = [
        Row(
            (
                page.plain(_named(group)),
                format_bytes(size),
                format_share(size, total),
                _mostly(group.members[0]),
            )
        )
        for size, group in sized[:TOP_MODULES]
    ]
    yield from table(page, columns, rows)
    yield from _elided(page, len(sized) - len(rows), sum(size for size, _ in sized[TOP_MODULES:]))


def _module_bytes(group: Group[ModuleMemory]) -> int:
    return sum(sum(module.categories.values()) for module in group.members)


def _named(group: Group[ModuleMemory]) -> str:
    return f"{group.name or '(the model itself)'} {group.members[0].type}"


def _mostly(module: ModuleMemory) -> str:
    """The one or two categories that a module's bytes are in."""
    ranked = sorted(module.categories.items(), key=lambda item: -item[1])
    return ", ".join(name for name, size in ranked[:2] if size)


def tensors(report: ReportBody, page: Page) -> Iterator[Text]:
    """The largest rows of the ledger; equal layers in one row."""
    groups = group_layers(
        report.ledger,
        name=lambda row: row.fqn,
        equal=lambda row: (
            row.category,
            row.op,
            row.source,
            row.shape,
            row.dtype,
            row.count,
            row.bytes,
        ),
    )
    sized = sorted(
        ((sum(row.bytes for row in group.members), group) for group in groups), key=lambda p: -p[0]
    )
    if not sized:
        return
    total = report.memory.peak_allocated_bytes
    yield from heading(page, "Largest tensors at the peak")
    columns = (
        Column("bytes", True),
        Column("share", True),
        Column("count", True),
        Column("category"),
        Column("shape"),
        Column("dtype"),
    )
    rows = [
        Row(
            (
                format_bytes(size),
                format_share(size, total),
                f"{page.glyphs.times}{sum(row.count for row in group.members)}",
                group.members[0].category,
                _shape(group.members[0]),
                page.plain(group.members[0].dtype),
            ),
            detail=(_origin(page, group),),
        )
        for size, group in sized[:TOP_TENSORS]
    ]
    yield from table(page, columns, rows)
    yield from _elided(page, len(sized) - len(rows), sum(size for size, _ in sized[TOP_TENSORS:]))


def _shape(row: LedgerRow) -> str:
    return f"[{', '.join(map(str, row.shape))}]"


def _origin(page: Page, group: Group[LedgerRow]) -> str:
    row = group.members[0]
    return page.joined(
        page.plain(group.name or "(the model itself)"),
        page.plain(row.op),
        page.plain(row.source or ""),
    )


def _elided(page: Page, rows: int, size: int) -> Iterator[Text]:
    """What a table left out is said, so that nothing vanishes silently."""
    if rows > 0:
        yield from page.wrapped(Text(f"and {rows} smaller: {format_bytes(size)}", style="dim"))
