"""What the dashboard's tests share: text off the screen, and reports that are hard to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.app import App

import samples
from fa_advisor import records as r
from fa_advisor.report import Report

MIB = 2**20


@pytest.fixture(autouse=True)
def colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same look whatever the environment of the test run asks for."""
    monkeypatch.delenv("NO_COLOR", raising=False)


def screen_text(app: App[None]) -> str:
    """What the terminal would show, line by line."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in lines)


@pytest.fixture
def text() -> Callable[[App[None]], str]:
    return screen_text


def empty_report() -> Report:
    """No sites, no timeline, no modules, no budgets, nothing to advise, a peak of zero."""
    base = samples.report(1)
    memory = replace(
        base.memory,
        peak_allocated_bytes=0,
        peak_reserved_bytes=None,
        categories={},
        timeline=(),
    )
    nothing = r.Limit(now=None, advised=None)
    advice = replace(
        base.advice,
        summary="",
        counterfactual_peak_bytes=None,
        max_seq_len=nothing,
        max_batch_size=nothing,
        recommendations=(),
    )
    target = replace(base.target, path=None, batch_size=None, seq_len=None, inputs=())
    return replace(
        base,
        memory=memory,
        advice=advice,
        target=target,
        modules=(),
        sites=(),
        budgets=(),
        ledger=(),
    )


def zero_report() -> Report:
    """Every category there is, at zero bytes; a timeline of one point at zero."""
    base = empty_report()
    point = r.TimelinePoint(t=0, phase="forward", allocated_bytes=0, attention_bytes=0)
    memory = replace(base.memory, categories=dict.fromkeys(r.CATEGORIES, 0), timeline=(point,))
    return replace(base, memory=memory, advice=replace(base.advice, counterfactual_peak_bytes=0))


def large_report() -> Report:
    """2,000 modules and 200 sites."""
    base = samples.report(200)
    modules = tuple(
        r.ModuleMemory(
            fqn=f"layers.{i // 10}.block.{i % 10}",
            type="Linear",
            categories={"parameter": MIB, "attention_prob": i * 1024},
        )
        for i in range(2000)
    )
    return replace(base, modules=modules)


NASTY = (
    "[bold red]markup[/] [link=x]",
    "x" * 300,
    "层.注意力.日本語" * 12,
    "tab\tline\nescape\x1b[31m\u202egnp",
    "",
    "..",
)


def failure(name: str = "bmm", place: str = "blocks.0.attn") -> r.OutOfMemory:
    """A request for S that found no memory."""
    return r.OutOfMemory(
        requested_bytes=1024 * MIB,
        needed_bytes=1024 * MIB,
        missing_bytes=98 * MIB,
        device_free_bytes=926 * MIB,
        capacity_bytes=1024 * MIB,
        cause="fragmentation",
        phase="forward",
        fqn=place,
        op=name,
        source="model.py:88",
        shape=(16, 4096, 4096),
        dtype="float32",
        category="attention_score",
        step_peak_bytes=4096 * MIB,
        remedies=(
            r.Remedy(kind="patch", text=f"without {name} it fits", saves_bytes=1, enough=True),
            r.Remedy(kind="length", text=name, saves_bytes=None, enough=False, value=301),
        ),
        message=name,
        traceback=name,
    )


def nasty_report() -> Report:
    """Names that are markup, too long, wide, invisible or empty."""
    base = samples.report(len(NASTY))
    return replace(
        base,
        target=replace(base.target, name=NASTY[0], path=NASTY[1]),
        sites=tuple(
            replace(site, fqn=name, source=name, backend=name, why_not={name: (name,)})
            for site, name in zip(base.sites, NASTY, strict=True)
        ),
        modules=tuple(
            r.ModuleMemory(fqn=name, type=name, categories={"parameter": 1, name: 2})
            for name in NASTY
        ),
        advice=replace(
            base.advice,
            summary=NASTY[0],
            recommendations=(
                replace(
                    base.advice.recommendations[0],
                    sites=NASTY,
                    backend=NASTY[0],
                    reasons=NASTY,
                    rejections={NASTY[0]: NASTY},
                ),
            ),
        ),
        notes=NASTY,
        out_of_memory=failure(NASTY[0], NASTY[2]),
    )


def failed_report() -> Report:
    """A step that ran out of memory."""
    return replace(samples.report(), out_of_memory=failure())


REPORTS: dict[str, Callable[[], Report]] = {
    "sample": samples.report,
    "empty": empty_report,
    "zero": zero_report,
    "large": large_report,
    "nasty": nasty_report,
    "failed": failed_report,
}


@pytest.fixture
def reports() -> dict[str, Callable[[], Report]]:
    return REPORTS
