"""Which steps the GPU's ledger looks at, with an allocator that only says how high it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_advisor import gpu_ledger
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.probes.device import advise_for


class Silent:
    """An allocator's recording in which nothing happened."""

    stamp = staticmethod(lambda text: None)

    def __init__(self, index: int) -> None:
        self.did: list[str] = []

    def start(self) -> None:
        self.did.append("start")

    def stop(self) -> None:
        self.did.append("stop")

    def skip(self) -> None:
        self.did.append("skip")

    def cut(self) -> dict[str, Any]:
        self.did.append("cut")
        return {"events": [], "segments": [], "before": [], "settings": {}, "whole": True}


class Peaks:
    def __init__(self) -> None:
        self.now = 0
        self.lent = True

    def take(self) -> tuple[int, int]:
        taken, self.now = self.now, 0
        return taken, 2 * taken

    def give_back(self) -> None:
        self.lent = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuLedger, Peaks]:
    peaks = Peaks()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(gpu_ledger, "obstacle", lambda: None)
    monkeypatch.setattr(gpu_ledger, "Allocations", Silent)
    monkeypatch.setattr(gpu_ledger.CudaPeaks, "borrow", lambda index: peaks)
    return GpuLedger(0, advise_for("h200")[0]), peaks


def test_only_higher_peaks_are_looked_at(made: tuple[GpuLedger, Peaks]) -> None:
    ledger, peaks = made
    with ledger:
        recorded: Any = ledger._allocations
        for height in (10, 20, 15, 20, 30):
            peaks.now = height
            ledger.end_step("train")
        looks = [what for what in recorded.did if what in ("cut", "skip")]
    # A kind's first and its steady step are kept whatever their peak: see `Kept`.
    assert looks[0] == "cut" and looks[-2:] == ["skip", "cut"]
    assert ledger.missed == 0
    assert recorded.did[-1] == "stop" and not peaks.lent
    assert ledger._peaks == [30, 60]
    ledger.begin_step()  # after the end nothing is recorded anew
    assert recorded.did[-1] == "stop"


def test_what_happens_unrecorded_is_told_apart(made: tuple[GpuLedger, Peaks]) -> None:
    ledger, peaks = made
    with ledger:
        peaks.now = 10
        ledger.end_step("train")
        ledger.pause()
        peaks.now = 50
        ledger.resume()
        peaks.now = 12
        ledger.end_step("train")
        ledger.pause()
        peaks.now = 70
    assert ledger.missed == 70
    assert ledger._peaks == [12, 24]
