"""Two reports compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.cells import cell_len

import samples
from fa_advisor.report import Report
from fa_advisor.views import diff as views

MIB = 2**20


def patched(report: Report, layers: int) -> Report:
    """`report` with its first `layers` sites on flash."""
    sites = tuple(
        replace(samples.site(i, backend="flash"), source="model.py:99") if i < layers else site
        for i, site in enumerate(report.sites)
    )
    categories = dict(report.memory.categories)
    categories["attention_score"] -= 24 * MIB * layers
    categories["attention_prob"] -= 24 * MIB * layers
    return replace(
        report,
        sites=sites,
        memory=replace(
            report.memory,
            categories=categories,
            peak_allocated_bytes=sum(categories.values()),
            peak_reserved_bytes=None,
        ),
        advice=replace(report.advice, verdict="activations-bound"),
    )


def test_equal_reports_have_no_change() -> None:
    change = views.diff(samples.report(), samples.report())
    assert change.setup == ()
    assert all(site.before == site.after for site in change.sites)
    text = views.to_text(change)
    assert "unchanged: parameter" in text
    assert "blocks.{0-11}.attn" in text


def test_patch_shows_by_category_and_site() -> None:
    change = views.diff(samples.report(), patched(samples.report(), 11))
    assert change.attention.before == 576 * MIB
    assert change.attention.after == 48 * MIB
    assert len(change.sites) == 12  # matched although their line moved
    text = views.to_text(change)
    assert "ATTENTION-BOUND → ACTIVATIONS-BOUND" in text
    assert "attention_score    288.00 MiB  24.00 MiB  -264.00 MiB  -91.7 %" in text
    assert "blocks.{0-10}.attn     11  eager → sdpa/flash  528.00 MiB        0 B" in text
    assert "peak reserved   2.54 GiB         -" in text


def test_a_site_of_one_report_only() -> None:
    report = samples.report(2)
    change = views.diff(report, replace(report, sites=report.sites[:1]))
    assert [site.after is None for site in change.sites] == [False, True]
    assert "eager → not there" in views.to_text(change)


def test_sites_of_one_module_are_matched_by_line() -> None:
    first, second = samples.site(0), replace(samples.site(0), source="model.py:99", head_dim=32)
    report = samples.report(1)
    change = views.diff(
        replace(report, sites=(first, second)), replace(report, sites=(second, first))
    )
    assert all(site.before == site.after for site in change.sites)


def test_different_runs_are_said() -> None:
    a = samples.report()
    b = replace(
        a,
        target=replace(a.target, batch_size=4),
        device=replace(a.device, name="[b]GPU"),
        schema_version=0,
    )
    text = views.to_text(views.diff(a, b))
    assert "target batch_size: 2 → 4" in text
    assert "[b]GPU" in text
    assert "schema_version: 1 → 0" in text


def test_json_has_integer_bytes() -> None:
    change = json.loads(views.to_json(views.diff(samples.report(), patched(samples.report(), 1))))
    assert change["peak_allocated"]["before"] - change["peak_allocated"]["after"] == 48 * MIB
    assert change["peak_reserved"]["after"] is None


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_asked(width: int, ascii: bool) -> None:
    change = views.diff(samples.renamed("x." * 60), patched(samples.report(), 5))
    text = views.to_text(change, width=width, ascii=ascii)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert text.isascii() == ascii
