"""Do the constants of the budget's predicted times hold where they weren't fitted?

    python benchmarks/tiles_fit.py          # writes benchmarks/results/tiles_fit.json; five minutes

Fits them to what benchmarks/tiles.py measured, always from one start: with all, and with some
lengths or head dims left out, which then show how far the tile that would be put first is from the
fastest, and how far the predicted times are off. No GPU.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from provenance import RESULTS, write

from fa_advisor.budgets import model
from fa_advisor.budgets.table import BATCH, HEADS, LAUNCHED_STACK_BYTES, LENGTH
from fa_advisor.probes.gpus import lookup

Row = dict[str, Any]
Constants = dict[str, float]

# Heads and batches of benchmarks/tiles.py.
MEASURED_HEADS = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
BATCHES = {1024: 16, 2048: 8, 4096: 4, 16384: 1}
# What is left out; the padded head dims of 96 and 128, and of 192 and 256, are the same.
LEFT_OUT: dict[str, Callable[[Row], bool]] = {
    "nothing": lambda row: False,
    "2,048 and 16,384 tokens": lambda row: row["length"] in (2048, 16384),
    "1,024 and 4,096 tokens": lambda row: row["length"] in (1024, 4096),
    "head dim 64": lambda row: row["head_dim"] == 64,
    "head dim 96": lambda row: row["head_dim"] == 96,
    "head dim 128": lambda row: row["head_dim"] == 128,
    "head dim 192": lambda row: row["head_dim"] == 192,
    "head dim 256": lambda row: row["head_dim"] == 256,
    "head dims 96 and 128": lambda row: row["head_dim"] in (96, 128),
    "head dims 192 and 256": lambda row: row["head_dim"] in (192, 256),
}
# Where the search starts, and what it may not leave.
START: dict[str, tuple[float, float, float]] = {
    "forward": (8, 6, 14), "backward": (8, 3, 20), "statistics": (8, 1, 20),
    "waiting": (150e-9, 50e-9, 600e-9), "stall of one stage": (0.13, 0, 0.6),
    "stall of two": (0.06, 0, 0.3), "block": (5e-6, 1e-6, 8e-6), "free stack": (80, 0, 128),
    "spill": (1, 1, 4),
}  # fmt: skip
ROUNDS = 1000
# Tiles predicted this close together share the weight of being first; it makes the search smooth.
CLOSE = 0.015


def put(constants: Constants) -> None:
    """Make them the model's."""
    model._WEIGHT["forward"] = constants["forward"]
    model._WEIGHT["keys"] = model._WEIGHT["queries"] = constants["backward"]
    model._STATISTICS = constants["statistics"]
    model._WAITING_S = constants["waiting"]
    model._STALLS[1], model._STALLS[2] = constants["stall of one stage"], constants["stall of two"]
    model._BLOCK_S = constants["block"]
    model._FREE_STACK = constants["free stack"]  # type: ignore[assignment]
    model._SPILL = constants["spill"]


def shapes() -> list[list[Row]]:
    """What was measured of the tiles that a launch accepts: a list for each shape and kernel."""
    rows = [
        row
        for row in json.loads((RESULTS / "tiles.json").read_text())["rows"]
        if row["launches"] and row["loaded"][2] <= LAUNCHED_STACK_BYTES[row["kernel"]]
    ]
    key = ("head_dim", "length", "causal", "kernel")
    runs = itertools.groupby(rows, key=lambda row: [row[name] for name in key])
    return [sorted(run, key=lambda row: row["tile"][:4]) for _, run in runs]


def predicted(row: Row, *, as_measured: bool) -> float:
    """By the model as it is now: of the workload that was measured, or of the budget's own."""
    m, n, warps, stages, _ = row["tile"]
    head_dim, length = row["head_dim"], row["length"]
    batch, heads, length = (
        (BATCHES[length], MEASURED_HEADS[head_dim], length)
        if as_measured
        else (BATCH, HEADS, LENGTH)
    )
    return model.predicted_ms(
        row["kernel"], block_m=m, block_n=n, num_warps=warps, num_stages=stages,
        head_dim=head_dim, value_head_dim=head_dim, element_bytes=2, precision="ieee",
        capability=(9, 0), causal=row["causal"], registers=row["registers"],
        stack_bytes=row["spill"], smem_bytes=row["smem"], ctas_per_sm=row["ctas"],
        device=lookup("h200"), batch=batch, heads=heads, seqlen=length,
    )  # fmt: skip


def loss(own: list[list[Row]]) -> float:
    """What being first costs, more where it costs much; and how far the times are off, the fast
    tiles' more."""
    cost = squares = weights = 0.0
    orders: dict[tuple[Any, ...], list[float]] = {}
    for rows in own:
        kind = (
            rows[0]["kernel"], rows[0]["head_dim"], rows[0]["causal"],
            *(tuple(row["tile"]) for row in rows),
        )  # fmt: skip
        if kind not in orders:  # The same for every length.
            orders[kind] = [predicted(row, as_measured=False) for row in rows]
        least, best = min(orders[kind]), min(row["ms"] for row in rows)
        firsts = [math.exp(-math.log(time / least) / CLOSE) for time in orders[kind]]
        behind = sum(
            first * math.log(row["ms"] / best) for first, row in zip(firsts, rows, strict=True)
        ) / sum(firsts)
        cost += behind + 10 * max(0.0, behind - 0.06)
        for row in rows:
            weight = (best / row["ms"]) ** 2
            off = math.log(predicted(row, as_measured=True) / row["ms"])
            squares, weights = squares + weight * off * off, weights + weight
    return 20 * cost / len(own) + 3 * math.sqrt(squares / weights)


def fitted(own: list[list[Row]]) -> Constants:
    """A random walk downhill, with steps that grow where it gets on."""
    generator = random.Random(0)
    best = {name: start for name, (start, _, _) in START.items()}
    put(best)
    least, step, in_vain = loss(own), 0.3, 0
    for _ in range(ROUNDS):
        tried = dict(best)
        for name in generator.sample(sorted(START), generator.choice((1, 1, 2, 3))):
            _, low, high = START[name]
            tried[name] = min(max(tried[name] * math.exp(generator.gauss(0, step)), low), high)
        put(tried)
        found = loss(own)
        if found < least:
            best, least, step, in_vain = tried, found, min(0.5, step * 1.3), 0
        else:
            in_vain += 1
            step = max(0.02, step * 0.7) if in_vain % 60 == 0 else step
    return best


def held_out(name: str) -> dict[str, Any]:
    """Fitted without; and what that comes to there (with all, where nothing is left out)."""
    every, left_out = shapes(), LEFT_OUT[name]
    constants = fitted([rows for rows in every if not left_out(rows[0])])
    put(constants)
    behind: dict[str, list[float]] = {}
    off: list[float] = []
    for rows in [rows for rows in every if left_out(rows[0])] or every:
        best = min(row["ms"] for row in rows)
        first = min(rows, key=lambda row: predicted(row, as_measured=False))
        behind.setdefault(first["kernel"], []).append(first["ms"] / best)
        off += [
            math.log(predicted(row, as_measured=True) / row["ms"])
            for row in rows
            if row["ms"] <= 1.5 * best
        ]
    return {
        "left_out": name,
        "first_over_best": {
            kernel: {
                "geometric mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                "worst": max(ratios),
                "shapes": len(ratios),
            }
            for kernel, ratios in behind.items()
        },
        "times_off_rms": math.sqrt(sum(each * each for each in off) / len(off)),
        "constants": {key: float(f"{value:.3g}") for key, value in constants.items()},
    }


def main() -> None:
    """Fit side by side, print and write."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(held_out, LEFT_OUT))
    for row in rows:
        print(row)
    write("tiles_fit", {"question": __doc__, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
