"""Which steps of a run are followed operator by operator."""

from __future__ import annotations

from typing import Literal

Kind = Literal["train", "infer"]

# Then the powers of two, so that what following costs is spread ever thinner. A generation's
# forwards belong together, because each finds the last one's keys and values in the cache.
AT_FIRST: dict[Kind, int] = {"train": 16, "infer": 1024}


def wanted(kind: Kind, number: int) -> bool:
    """Whether the `number`-th step of a kind is followed, counted from 1."""
    return number <= AT_FIRST[kind] or number & (number - 1) == 0
