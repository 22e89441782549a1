"""Sizes written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_advisor.errors import UsageError
from fa_advisor.views import sizes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (163 * 1024, "163.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**30 - 2**20, "1023.00 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (2**50 - 1, "1.00 PiB"),
        (2**63 - 1, "8.00 EiB"),
        (2**73, "8192.00 EiB"),
        (-576 * 2**20, "-576.00 MiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert sizes.format_bytes(size) == text


@given(st.integers(min_value=1, max_value=2**63))
def test_a_printed_size_reads_back_within_its_rounding(size: int) -> None:
    text = sizes.format_bytes(size)
    unit = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(text.split()[1])
    assert abs(sizes.parse_size(text) - size) <= 0.005 * unit + 1
    assert float(text.split()[0]) < 1024


@given(st.integers(1, 10**6), st.sampled_from(["", " "]), st.sampled_from(["gib", "GiB", "GIB"]))
def test_parse_size_is_exact(number: int, space: str, unit: str) -> None:
    assert sizes.parse_size(f"{number}{space}{unit}") == number * 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("800MB", 800 * 10**6),
        ("4096", 4096),
        ("4096 bytes", 4096),
        ("0.1 GB", 10**8),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GiB", "-1GiB", "1.5", "GiB", "1 GiBs", "1e9", "nan", "٣GiB"]
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        sizes.parse_size(text)


@given(st.text())
def test_parse_size_never_raises_anything_else(text: str) -> None:
    try:
        assert sizes.parse_size(text) > 0
    except UsageError as error:
        assert "24GiB" in error.hint


@pytest.mark.parametrize(("text", "value"), [("2%", 2.0), ("0.5 %", 0.5), ("0%", 0.0)])
def test_parse_percent(text: str, value: float) -> None:
    assert sizes.parse_percent(text) == value


@pytest.mark.parametrize("text", ["2", "-2%", "two%", "%", ""])
def test_parse_percent_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="is not a percentage"):
        sizes.parse_percent(text)


def test_shares_and_changes() -> None:
    assert sizes.format_share(1, 4) == "25.0 %"
    assert sizes.format_share(1, 10**6) == "<0.1 %"
    assert sizes.format_share(0, 0) == "-"
    assert sizes.format_change(2**20) == "+1.00 MiB"
    assert sizes.format_change(0) == "0 B"
    assert sizes.format_relative(100, 102) == "+2.0 %"
    assert sizes.format_relative(0, 5) == "new"
    assert sizes.format_relative(0, 0) == "0.0 %"
    assert sizes.format_count(124_439_808) == "124.4 M"
    assert sizes.format_count(12) == "12"
