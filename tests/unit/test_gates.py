"""The gates: pass at the limit, fail above it, and say why in a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

import samples
from fa_advisor.errors import ExitStatus, OverBudget
from fa_advisor.gates import check_increase, check_max_peak
from fa_advisor.report import Report

MIB = 2**20
GIB = 2**30


def with_peak(peak: int) -> Report:
    report = samples.report(1)
    return replace(report, memory=replace(report.memory, peak_allocated_bytes=peak))


def test_peak_at_the_limit_passes() -> None:
    check_max_peak(with_peak(24 * GIB), 24 * GIB)


def test_peak_above_the_limit_says_expected_and_got() -> None:
    with pytest.raises(OverBudget) as caught:
        check_max_peak(with_peak(32 * GIB), 24 * GIB)
    assert caught.value.status == ExitStatus.OVER_BUDGET
    assert caught.value.message == (
        "expected at most 24.00 GiB peak allocated, got 32.00 GiB "
        "(+8.00 GiB, +33.3 %; modelled, in backward)"
    )


def test_sizes_that_print_the_same_still_show_their_difference() -> None:
    with pytest.raises(OverBudget, match=r"\+1 B"):
        check_max_peak(with_peak(24 * GIB + 1), 24 * GIB)


@pytest.mark.parametrize(
    ("before", "after", "percent", "fails"),
    [
        (100 * MIB, 102 * MIB, 2.0, False),
        (100 * MIB, 102 * MIB + 1, 2.0, True),
        (100 * MIB, 90 * MIB, 0.0, False),
        (100 * MIB, 100 * MIB, 0.0, False),
        (0, 0, 0.0, False),
        (0, 1, 50.0, True),
    ],
)
def test_increase(before: int, after: int, percent: float, fails: bool) -> None:
    if not fails:
        check_increase(with_peak(after), with_peak(before), percent)
        return
    with pytest.raises(OverBudget, match="more peak allocated than the baseline's"):
        check_increase(with_peak(after), with_peak(before), percent)
