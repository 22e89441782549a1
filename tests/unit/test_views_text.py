"""The text view: complete, within its width, and safe whatever a model calls its modules."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import samples
from fa_advisor import records as r
from fa_advisor.report import Report
from fa_advisor.views.text import render, render_html, to_text

MIB = 2**20
HOSTILE = "[red]x[/red]<script>alert(1)</script>\x1b[31m\x07\u202e"


def fused() -> Report:
    report = samples.report(2)
    categories = {"parameter": 100 * MIB, "activation": 300 * MIB}
    return replace(
        report,
        sites=tuple(samples.site(i, backend="flash") for i in range(2)),
        memory=replace(
            report.memory, categories=categories, peak_allocated_bytes=400 * MIB, timeline=()
        ),
        advice=replace(
            report.advice, verdict="activations-bound", counterfactual_peak_bytes=400 * MIB
        ),
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_asked(width: int, ascii: bool) -> None:
    for report in (samples.report(), fused(), samples.renamed("a.very.long.name." * 12)):
        for line in to_text(report, width=width, ascii=ascii).splitlines():
            assert cell_len(line) <= width
            assert line == line.rstrip()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_story_is_told_from_the_top(width: int) -> None:
    text = " ".join(to_text(samples.report(), width=width).split())
    told = [
        "model.py:model",
        "ATTENTION-BOUND",
        "peak allocated 2.48 GiB",
        "peak reserved 2.54 GiB",
        "without N x N 1.91 GiB",
        "attention N x N 576.00 MiB 22.7 %",
        "attention_score 288.00 MiB 11.4 %",
        "blocks.{0-11}.attn",
        "B 2, H 12, N 1024 x 1024, D 64",
        "WHY NOT",
        "not flash: it takes no attn_mask [MASK]",
        "WHAT TO DO",
        "Use flash at blocks.{0-11}.attn (12 sites)",
        "TILES",
        "128 x 64",
        "fa-advisor 0.1.0",
    ]
    places = [text.find(part) for part in told]
    assert -1 not in places, told[places.index(-1)]
    assert places == sorted(places)


def test_ascii_is_ascii() -> None:
    report = replace(samples.renamed("β-модель"), notes=("größe",))
    assert to_text(report, ascii=True).isascii()
    assert "█" in to_text(report)


def test_layers_that_differ_get_a_row_each_and_many_such_share_one() -> None:
    report = samples.report(12)
    one_off = (*report.sites[:11], samples.site(11, attention_bytes=96 * MIB))
    text = to_text(replace(report, sites=one_off))
    assert "blocks.{0-10}.attn" in text
    assert "blocks.11.attn" in text
    falling = tuple(samples.site(i, attention_bytes=(i + 1) * MIB) for i in range(12))
    text = to_text(replace(report, sites=falling))
    assert "blocks.{0-11}.attn" in text
    assert "1.00 MiB to 12.00 MiB each at the peak" in " ".join(text.split())


def test_many_kinds_of_sites_are_counted_not_dropped() -> None:
    sites = tuple(replace(samples.site(i), seqlen_k=64 + i) for i in range(40))
    text = to_text(replace(samples.report(1), sites=sites))
    assert "and 24 more sites: 1.12 GiB at the peak" in text


def test_fused_backends_are_said_to_have_no_intermediates() -> None:
    text = " ".join(to_text(fused()).split())
    assert "attention N x N 0 B 0.0 %" in text
    assert "All 2 attention sites run fused (flash)" in text
    assert "attention's intermediates don't set the peak" in text


def test_a_model_without_attention_says_so() -> None:
    report = fused()
    bare = replace(report, sites=(), budgets=(), ledger=(), modules=(), notes=("first", "second"))
    bare = replace(bare, advice=replace(bare.advice, recommendations=()))
    text = to_text(bare)
    assert "No attention call was seen in this model." in text
    assert "ATTENTION SITES" not in text
    assert "  - first\n  - second\n" in text


def test_unattributed_is_shown_where_measured_and_where_there_is_any() -> None:
    report = samples.report()
    assert "unattributed" not in to_text(report)
    measured = replace(report, memory=replace(report.memory, basis="measured"))
    assert "unattributed" in to_text(measured)
    rest = replace(report, memory=replace(report.memory, unattributed_bytes=5 * MIB))
    assert "unattributed           5.00 MiB" in to_text(rest)


def test_a_peak_that_does_not_fit_is_said() -> None:
    report = samples.report()
    small = replace(report, device=replace(report.device, total_memory_bytes=2**30))
    assert "it doesn't fit" in to_text(small, width=120)


@pytest.mark.parametrize("width", [40, 100])
def test_names_are_text(width: int) -> None:
    text = "".join(to_text(samples.renamed(HOSTILE), width=width).split())
    assert "[red]x[/red]<script>" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[31m\x07\u202e" in text


def test_html_is_escaped_and_self_contained() -> None:
    page = render_html(samples.renamed(HOSTILE))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    assert page.startswith("<pre") and page.endswith("</pre>")


def test_colour_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in to_text(samples.report())
    assert "\x1b[" in to_text(samples.report(), color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=80).print(render(samples.report()))
    assert "\x1b[3" not in file.getvalue()


def test_rich_and_notebooks_show_the_report() -> None:
    report = samples.report()
    file = io.StringIO()
    Console(file=file, width=80).print(report)
    assert "ATTENTION-BOUND" in file.getvalue()
    assert "ATTENTION-BOUND" in report._repr_html_()


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60), st.integers(1, 130))
def test_any_name_at_any_width(name: str, width: int) -> None:
    text = to_text(samples.renamed(name), width=width)
    assert all(cell_len(line) <= max(width, 40) for line in text.split("\n"))
    assert all(char.isprintable() or char == "\n" for char in text)


def test_timeline_keeps_its_peak_and_phases() -> None:
    points = tuple(
        r.TimelinePoint(
            t=t, phase="forward", allocated_bytes=8 if t == 777 else 1, attention_bytes=0
        )
        for t in range(1000)
    )
    report = samples.report(1)
    text = to_text(replace(report, memory=replace(report.memory, timeline=points)))
    assert text.count("█", text.index("OVER THE STEP"), text.index("|forward")) == 1
