"""Steps that aren't reported: only what outlives them is read. And the collector, left alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.peak import peak_of
from fa_advisor.attribution.steps import StepLog
from fa_advisor.probes.collector import Allowance
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.events import Event
from fa_advisor.probes.watch import Watch


def told(step: StepLog) -> Any:
    """What a report would read of a step."""
    peak = peak_of(step)
    return (
        [(h.storage.sid, h.storage.label, h.storage.fqn, h.nbytes) for h in step.baseline],
        [(e.storage.sid, e.nbytes, e.phase) for e in step.entries],
        peak.categories,
    )


def test_the_step_after_a_skimmed_one_is_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    events: list[Event] = []
    read, skimmed = (Ledger(modelled=False, closes=False) for _ in range(2))
    watch = Watch(events.extend, advise_for("h200")[0], device_type="cpu", stamp=lambda text: None)
    steps: list[list[Event]] = []
    with watch:
        watch.add_model(layer)
        kept = []
        for number in range(4):
            x = torch.randn(2, 8, 16)
            out = layer(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)  # once the gradients outlive the step
            kept.append(out.detach()[:, :1])  # views keep whole storages
            del out
            watch.look_again()
            watch.stream.flush()
            steps.append(list(events))
            events.clear()
    logs = []
    for ledger in (read, skimmed):
        for number, each in enumerate(steps):
            if ledger is skimmed and number in (1, 2):
                ledger.skim(each)
                ledger.begin_step()
            else:
                ledger.feed(each)
                logs.append(ledger.take_step())
    assert told(logs[3]) == told(logs[-1])
    assert len(logs) == 6


def test_the_collectors_threshold_is_theirs_and_ours() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(500, 5, 5)
        allowance = Allowance()
        allowance.allow(3000)
        assert gc.get_threshold() == (3500, 5, 5)
        allowance.allow(100)
        assert gc.get_threshold() == (600, 5, 5)
        gc.set_threshold(900, 5, 5)  # the user's own
        allowance.allow(200)
        assert gc.get_threshold() == (1100, 5, 5)
        nested = Allowance()
        for count in (10, 20):
            nested.allow(count)
            allowance.allow(200)
        assert gc.get_threshold() == (1120, 5, 5)
        nested.close()
        assert gc.get_threshold() == (1100, 5, 5)
        gc.set_threshold(0, 5, 5)  # switched off
        allowance.allow(300)
        assert gc.get_threshold() == (0, 5, 5)
        gc.set_threshold(700, 5, 5)
        allowance.allow(50)
        allowance.close()
        assert gc.get_threshold() == (700, 5, 5)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("count", [1, 3])
def test_watching_doesnt_collect(count: int) -> None:
    """A training that makes no cycles is collected as seldom as unwatched."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    ledger = Ledger(modelled=False, closes=False)
    watch = Watch(ledger.feed, advise_for("h200")[0], device_type="cpu", stamp=lambda text: None)
    watch.on_end = lambda kind, about: ledger.take_step()
    before = gc.get_threshold()
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    with watch:
        gc.collect()
        gc.callbacks.append(note)
        for _ in range(count):
            layer(torch.randn(2, 8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.callbacks.remove(note)
    assert len(collected) <= 2
    assert gc.get_threshold() == before
