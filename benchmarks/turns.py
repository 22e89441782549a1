"""Timing on a GPU where it matters who went before: a kernel that draws much power leaves a lower
clock. In each round all take turns in another order, with a rest before each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import triton

ROUNDS = 7
REST_SECONDS = 0.1
Key = TypeVar("Key", bound=Hashable)


def milliseconds(run: Callable[[], Any]) -> float:
    """One round's median of CUDA-event times."""
    return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def in_turns(
    runs: Mapping[Key, Callable[[], Any]],
    seed: str,
    is_due: Callable[[Key, int, Mapping[Key, float]], bool] = lambda key, turn, first: True,
) -> dict[Key, list[float]]:
    """Milliseconds of each, a round each, after a first, cold one that doesn't count.

    seed: of the order. is_due: whether a key is timed in the turn-th round; its last argument are
    the first round's.
    """
    first = {key: milliseconds(run) for key, run in runs.items()}
    times: dict[Key, list[float]] = {key: [] for key in runs}
    draw = random.Random(seed)
    for turn in range(ROUNDS):
        for key in draw.sample(list(runs), len(runs)):
            if is_due(key, turn, first):
                time.sleep(REST_SECONDS)
                times[key].append(milliseconds(runs[key]))
    return times
