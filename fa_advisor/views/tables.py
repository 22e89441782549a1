"""A report's tables as pandas DataFrames: one fact a column, sizes in bytes, names as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from fa_advisor.errors import UsageError
from fa_advisor.records import (
    ATTENTION_CATEGORIES,
    CATEGORIES,
    AttentionSite,
    BudgetTable,
    LedgerRow,
    ReportBody,
    TileBudget,
    TimelinePoint,
)

if TYPE_CHECKING:
    import pandas as pd

TableName = Literal["categories", "modules", "sites", "budgets", "timeline", "ledger"]
TABLES: tuple[TableName, ...] = TableName.__args__  # type: ignore[attr-defined]


def frames(report: ReportBody) -> dict[str, pd.DataFrame]:
    """Every table by name. Tables without rows keep their columns."""
    return {name: frame(report, name) for name in TABLES}


def frame(report: ReportBody, name: str) -> pd.DataFrame:
    """One table.

    Raises: UsageError where no table has that name.
    """
    import pandas as pd

    build = _BUILDERS.get(name)
    if build is None:
        raise UsageError(
            f"there is no table {name!r}", hint=f"a report has the tables {', '.join(TABLES)}"
        )
    columns, rows = build(report)
    return pd.DataFrame(rows, columns=columns)


Table = tuple[list[str], list[tuple[Any, ...]]]


def _categories(report: ReportBody) -> Table:
    """Every category that has bytes, and `unattributed`; their sum is the peak allocated."""
    memory = report.memory
    peak = memory.peak_allocated_bytes
    sizes = memory.categories | {"unattributed": memory.unattributed_bytes}
    rows = [
        (name, size, size / peak if peak else 0.0, name in ATTENTION_CATEGORIES)
        for name, size in sizes.items()
    ]
    return ["category", "bytes", "share_of_peak", "is_attention"], rows


def _modules(report: ReportBody) -> Table:
    """A row a module, a column a category: what the module itself holds at the peak."""
    rows = [
        (
            module.fqn,
            module.type,
            sum(module.categories.values()),
            sum(module.categories.get(name, 0) for name in ATTENTION_CATEGORIES),
            *(module.categories.get(name, 0) for name in CATEGORIES),
        )
        for module in report.modules
    ]
    columns = ["fqn", "type", "bytes", "attention_bytes", *(f"{name}_bytes" for name in CATEGORIES)]
    return columns, rows


def _sites(report: ReportBody) -> Table:
    return _flat(AttentionSite, report.sites)


def _budgets(report: ReportBody) -> Table:
    return _flat(TileBudget, report.budgets)


def budget_frame(tables: Iterable[BudgetTable]) -> pd.DataFrame:
    """The rows of budget tables, each with its GPU."""
    import pandas as pd

    tables = list(tables)
    names, rows = _flat(TileBudget, [row for table in tables for row in table.budgets])
    gpus = [table.device.name for table in tables for _ in table.budgets]
    return pd.DataFrame(
        [(gpu, *row) for gpu, row in zip(gpus, rows, strict=True)], columns=["gpu", *names]
    )


def _timeline(report: ReportBody) -> Table:
    """A row a point, a column a category."""
    columns, rows = _flat(TimelinePoint, report.memory.timeline)
    at = columns.index("categories")
    return [*columns[:at], *(f"{name}_bytes" for name in CATEGORIES), *columns[at + 1 :]], [
        (*row[:at], *(point.categories.get(name, 0) for name in CATEGORIES), *row[at + 1 :])
        for row, point in zip(rows, report.memory.timeline, strict=True)
    ]


def _ledger(report: ReportBody) -> Table:
    return _flat(LedgerRow, report.ledger)


def _flat(record: type, rows: Iterable[object]) -> Table:
    """The fields of a record as columns, in their order."""
    names = [field.name for field in fields(record)]
    return names, [tuple(_cell(getattr(row, name)) for name in names) for row in rows]


def _cell(value: Any) -> Any:
    """A value that one cell can hold: a shape as "2x12x64", reasons as "flash: MASK DTYPE", bytes
    by their holder as "Q: 8192"."""
    if isinstance(value, tuple):
        separator = "; " if any(isinstance(each, str) for each in value) else "x"
        return separator.join(map(str, value))
    if isinstance(value, dict):
        return "; ".join(
            f"{name}: {' '.join(each) if isinstance(each, tuple) else each}"
            for name, each in value.items()
        )
    return value


_BUILDERS: dict[str, Callable[[ReportBody], Table]] = {
    "categories": _categories,
    "modules": _modules,
    "sites": _sites,
    "budgets": _budgets,
    "timeline": _timeline,
    "ledger": _ledger,
}
