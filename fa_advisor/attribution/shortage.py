"""Why a request found no memory: which of the reasons it was, and how much was missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fa_advisor.attribution.allocator import (
    LARGE_SEGMENT,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
)
from fa_advisor.attribution.replay import Above, rules_of
from fa_advisor.records import Cause


@dataclass(frozen=True)
class Shortage:
    """`needed` is what the driver was asked for, `missing` how much of it wasn't there."""

    cause: Cause
    requested: int
    needed: int
    missing: int


def segment_for(requested: int, settings: Mapping[str, Any]) -> int:
    """The memory that the allocator asks the driver for where no free block fits."""
    size = rules_of(settings).rounded(requested)
    if settings.get("expandable_segments"):
        page = SMALL_SEGMENT if size <= SMALL_SIZE else LARGE_SEGMENT
        return -(-size // page) * page
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def diagnose(
    requested: int,
    device_free: int,
    state: Above,
    settings: Mapping[str, Any],
    *,
    others: int | None = None,
    allowed: int | None = None,
) -> Shortage:
    """`state` is the allocator's at the failure, `device_free` what the driver had left, `others`
    what other processes held, `allowed` what torch may reserve by a limit of the process's own
    (`None`: not known). Bytes."""
    needed = segment_for(requested, settings)
    short = max(0, needed - device_free)
    beyond = max(0, state.reserved + needed - allowed) if allowed is not None else 0
    missing = max(short, beyond)
    cause: Cause = "memory"
    if short == 0:
        cause = "limit"
    elif state.fragmented + state.cached >= missing:
        cause = "fragmentation"
    elif others is not None and others >= short and not beyond:
        cause = "other_processes"
    return Shortage(cause, requested, needed, missing)
