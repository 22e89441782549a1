"""The look itself, kept as SVG; `pytest --snapshot-update` after a change that is meant."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import textual

import samples
from fa_advisor.tui.app import Dashboard

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or textual.__version__ != "8.2.8",
    reason="snapshots are of one version of Python and Textual",
)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("overview", []), ("memory", ["2"]), ("attention", ["3"]), ("help", ["question_mark"])],
)
def test_looks_the_same(name: str, keys: list[str], snap_compare: Callable[..., bool]) -> None:
    assert snap_compare(Dashboard(samples.report()), press=keys, terminal_size=(80, 24))


def test_looks_the_same_in_ascii_without_colour(
    monkeypatch: pytest.MonkeyPatch, snap_compare: Callable[..., bool]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = Dashboard(samples.report(), ascii=True)
    assert snap_compare(app, press=[], terminal_size=(80, 24))
