"""What is kept of a step: every change of the allocated bytes, and who owns what changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from fa_advisor.attribution.replay import Above
from fa_advisor.attribution.storage import Call, Storage
from fa_advisor.probes.events import Op, Phase, Scope


class Entry(NamedTuple):
    """One change of the allocated bytes: `block` as the allocator counts, `nbytes` as asked for."""

    storage: Storage
    block: int
    nbytes: int
    phase: Phase


class Claim(NamedTuple):
    """Storage `sid` lay at `address` when the stream's operator `number` ran."""

    number: int
    address: int
    sid: int


class Run(NamedTuple):
    """An operator's run, for what it allocates and never shows."""

    op: Op
    scope: Scope
    phase: Phase
    source: tuple[str, int] | None


class Held(NamedTuple):
    """A storage alive at some moment."""

    storage: Storage
    block: int
    nbytes: int


@dataclass
class StepLog:
    """One step: what was alive when it began, and every change since.

    `kind`: train or infer, empty where nothing said that it ended. `about`: what whoever said so
    wants to find again.
    """

    baseline: list[Held]
    start_bytes: int
    entries: list[Entry] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: int = 0  # the peak stands after this many entries
    peak_reserved_bytes: int = 0
    calls: list[Call] = field(default_factory=list)
    # Where the allocator's trace is recorded: what joins it with the storages (see `join`).
    claims: list[Claim] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)
    above: Above | None = None  # at the peak
    kind: str = ""
    about: object = None

    def alive_at(self, count: int) -> list[Held]:
        """What is alive after the first `count` entries."""
        alive = {id(held.storage): held for held in self.baseline}
        for storage, block, nbytes, _ in self.entries[:count]:
            held = alive.get(id(storage))
            block += held.block if held else 0
            nbytes += held.nbytes if held else 0
            if block:
                alive[id(storage)] = Held(storage, block, nbytes)
            else:
                alive.pop(id(storage), None)
        return list(alive.values())

    def phase_at(self, count: int) -> Phase:
        return self.entries[count - 1].phase if count else Phase.FORWARD


class Kept:
    """The steps that are worth keeping: of each kind the one with the highest peak; of equals the
    one that ended first. `warmup`: see `Ledger`."""

    def __init__(self, *, warmup: bool = False) -> None:
        self._warmup = warmup
        self._ended: Counter[str] = Counter()
        self._best: dict[str, StepLog] = {}

    @property
    def best(self) -> StepLog | None:
        """The step with the highest peak so far, whatever its kind."""
        return max(self._best.values(), key=lambda step: step.peak_bytes, default=None)

    def is_due(self, kind: str) -> bool:
        """Is the next step of this kind kept, whatever its peak?"""
        return kind not in self._best or self._is_steady(kind, self._ended[kind] + 1)

    def offer(self, step: StepLog) -> None:
        """A step has ended: keep it if it is worth it."""
        kind = step.kind
        self._ended[kind] += 1
        best = self._best.get(kind)
        higher = best is None or step.peak_bytes > best.peak_bytes
        if not self._best or (
            step.entries and (higher or self._is_steady(kind, self._ended[kind]))
        ):
            self._best[kind] = step

    def pass_over(self, kind: str) -> None:
        """A step has ended that is not worth it."""
        self._ended[kind] += 1

    def forget(self) -> None:
        """Keep none of the steps so far."""
        self._best.clear()

    def _is_steady(self, kind: str, ended: int) -> bool:
        return self._warmup and kind == "train" and ended == 2
