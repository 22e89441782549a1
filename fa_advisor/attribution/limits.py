"""How far a step could grow: the recorded step replayed at other lengths and batch sizes.

Every storage of the step is one of three: constant (weights, gradients, optimizer state,
workspaces), linear in the length, or attention's N x N, quadratic in it. The peak at a scale is
the maximum over the moments of the step; which moment that is changes with the scale.
"""

from __future__ import annotations

from typing import NamedTuple

from fa_advisor.attribution.reductions import REDUCTIONS
from fa_advisor.attribution.steps import StepLog
from fa_advisor.attribution.storage import Storage

_CONSTANT = frozenset(
    ("parameter", "buffer", "gradient", "optimizer_state", "workspace", "communication")
)
# The scales at which the highest moment is looked for; between them one of those stays close.
_PROBES = tuple(2.0 ** (k / 2) for k in range(-12, 21))


class Moment(NamedTuple):
    """Bytes alive at one moment, by how they grow with the length."""

    constant: int
    linear: int
    quadratic: int

    def at(self, linear_scale: float, quadratic_scale: float) -> float:
        return self.constant + linear_scale * self.linear + quadratic_scale * self.quadratic


def moments(step: StepLog, *, with_attention: bool) -> tuple[Moment, ...]:
    """The moments that are the highest at some scale."""
    classes: dict[int, int] = {}

    def growth(storage: Storage) -> int:
        known = classes.get(id(storage))
        if known is None:
            if storage.attention_call() is not None:
                known = 2
            elif storage.label in _CONSTANT or _of_the_weights(storage) or _of_a_sum(storage):
                known = 0
            else:
                known = 1
            classes[id(storage)] = known
        return known

    alive = [0, 0, 0]
    for held in step.baseline:
        alive[growth(held.storage)] += held.block
    corners: dict[Moment, None] = {}
    _add_corner(corners, alive, with_attention)
    for entry in step.entries:
        alive[growth(entry.storage)] += entry.block
        if entry.block > 0:
            _add_corner(corners, alive, with_attention)
    highest: dict[Moment, None] = {}
    for scale in _PROBES:
        highest[max(corners, key=lambda m: m.at(scale, scale * scale))] = None
        highest[max(corners, key=lambda m: m.at(scale, scale))] = None
    return tuple(highest)


def _add_corner(corners: dict[Moment, None], alive: list[int], with_attention: bool) -> None:
    corners[Moment(alive[0], alive[1], alive[2] if with_attention else 0)] = None


def _of_the_weights(storage: Storage) -> bool:
    """The optimizer's own temporaries are as large as the weights, whatever the length."""
    return storage.phase == 2


def _of_a_sum(storage: Storage) -> bool:
    """A sum's parts: as many as the GPU has blocks for, however much is summed (nearly)."""
    return storage.op in REDUCTIONS and storage.dtype == "uint8"


def largest_scale(moments: tuple[Moment, ...], budget: int, *, quadratic: bool) -> float | None:
    """The largest factor by which length (`quadratic`) or batch can grow within `budget` bytes.

    `None` where the constant part alone is over it; infinity where nothing grows.
    """

    def peak(scale: float) -> float:
        return max(m.at(scale, scale * scale if quadratic else scale) for m in moments)

    if peak(0.0) > budget:
        return None
    if all(m.linear == 0 and m.quadratic == 0 for m in moments):
        return float("inf")
    low, high = 0.0, 1.0
    while peak(high) <= budget:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle)
    return low
