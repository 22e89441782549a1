"""The gates of `profile`: is the peak under its limit, and not above a baseline's?

A gate that isn't met raises OverBudget with a one-line reason; the report itself is complete.
"""

from __future__ import annotations

from fa_advisor.errors import OverBudget
from fa_advisor.records import ReportBody
from fa_advisor.views.sizes import format_bytes, format_change, format_relative


def check_max_peak(report: ReportBody, limit_bytes: int) -> None:
    """Raise OverBudget where the peak allocated is above `limit_bytes`."""
    peak = report.memory.peak_allocated_bytes
    if peak > limit_bytes:
        raise OverBudget(
            f"expected at most {format_bytes(limit_bytes)} peak allocated, got "
            f"{format_bytes(peak)} ({_excess(limit_bytes, peak)}; "
            f"{report.memory.basis}, in {report.memory.peak_phase})"
        )


def check_increase(report: ReportBody, baseline: ReportBody, max_percent: float) -> None:
    """Raise OverBudget where the peak allocated grew by more than `max_percent` of `baseline`'s."""
    before, after = baseline.memory.peak_allocated_bytes, report.memory.peak_allocated_bytes
    # Without division: a baseline of zero bytes allows no increase at all.
    if (after - before) * 100 > max_percent * before:
        raise OverBudget(
            f"expected at most {max_percent:g} % more peak allocated than the baseline's "
            f"{format_bytes(before)}, got {format_bytes(after)} ({_excess(before, after)})"
        )


def _excess(limit: int, got: int) -> str:
    """How far `got` is above `limit`; bytes too, as two sizes can round to the same text."""
    change = format_change(got - limit)
    return f"{change}, {format_relative(limit, got)}" if limit else change
