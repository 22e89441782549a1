"""Is the budget right on the GPU itself, and is the tile that it puts first the fastest?

    python benchmarks/tiles.py --warm       # compile all there is, on every core, measure nothing
    python benchmarks/tiles.py              # writes benchmarks/results/tiles.json
    python benchmarks/tiles.py --summary    # its rows in today's order, its summary anew; no GPU

For every tile of the grid, of every kernel: what the loaded kernel says it takes against what was
compiled ahead, the driver's own count of blocks an SM against ours, whether it launches; and its
time over 40 shapes, against the tile that the budget puts first. bf16. Needs a CUDA device, but for
--summary. A tile that spills more than a launch accepts counts neither as first nor as fastest.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from attention import ours, random_tensors
from provenance import RESULTS, provenance
from triton.runtime.errors import OutOfResources

import fa_advisor
from fa_advisor.budgets.grid import Candidate
from fa_advisor.budgets.table import LAUNCHED_STACK_BYTES, Problem, budget_of, budget_table
from fa_advisor.kernels import launch, launcher
from fa_advisor.kernels.tiles import Tile
from fa_advisor.probes.gpus import lookup
from fa_advisor.records import Compiled, TileConfig

# Heads by head dim, batches by length: 8 to 16 thousand tokens times heads in each.
HEADS = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
LENGTHS = {1024: 16, 2048: 8, 4096: 4, 16384: 1}
SHAPES = [(d, n, causal) for d, n, causal in itertools.product(HEADS, LENGTHS, (False, True))]  # 40


def grabbed(d: int, n: int, causal: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The launches that a call makes, with their pointers, by kernel."""
    tensors = random_tensors(LENGTHS[n], HEADS[d], n, d)
    leaves = [t.requires_grad_() for t in tensors]
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    original = launcher.Launch.__call__

    def spy(self: Any, device: int, *pointers: Any) -> None:
        found[self._name] = (self, pointers)
        original(self, device, *pointers)

    launch._plans.clear()
    launcher.Launch.__call__ = spy  # type: ignore[method-assign]
    try:
        out = ours(*leaves, is_causal=causal)(*leaves)
        torch.autograd.grad(out, leaves, torch.randn_like(out))
    finally:
        launcher.Launch.__call__ = original  # type: ignore[method-assign]
    return {name: found[name] for name in ("forward", "keys", "queries")}


def blocks_per_sm(function: int, threads: int, smem: int) -> int:
    """The driver's word for it."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(function), threads, ctypes.c_size_t(smem)
    )
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: {status}")
    return count.value


def measured(d: int, n: int, causal: bool, *, warm: bool) -> Iterator[dict[str, Any]]:
    """A row for each kernel and tile."""
    table = fa_advisor.budget(d, is_causal=causal, progress=None)
    launches = grabbed(d, n, causal)
    for budget in table.budgets:
        one, pointers = launches[budget.kernel]
        tile = Tile(budget.block_m, budget.block_n, budget.num_warps, budget.num_stages)
        row: dict[str, Any] = {
            "head_dim": d, "length": n, "causal": causal, "kernel": budget.kernel,
            "tile": list(tile), "fits": budget.fits, "smem": budget.smem_bytes,
            "registers": budget.registers_per_thread, "spill": budget.spill_bytes,
            "ctas": budget.ctas_per_sm, "predicted_ms": budget.time_ms, "basis": budget.basis,
        }  # fmt: skip
        try:
            ready = one._prepare(tile, pointers)
        except OutOfResources:
            yield {**row, "launches": False}
            continue
        if warm:
            continue
        compiled = ready.compiled
        row |= {
            "launches": True,
            "loaded": [compiled.metadata.shared, compiled.n_regs, ready.stack_bytes],
            "driver_ctas": blocks_per_sm(
                compiled.function, 32 * tile.num_warps, compiled.metadata.shared
            ),
            "ms": float(
                triton.testing.do_bench(
                    lambda ready=ready, pointers=pointers: launcher._launch(ready, 0, pointers),
                    warmup=5, rep=25, return_mode="median",
                )
            ),
        }  # fmt: skip
        yield row


def kinds(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each shape and kernel."""
    key = ("head_dim", "length", "causal", "kernel")
    for _, run in itertools.groupby(rows, key=lambda row: [row[name] for name in key]):
        yield list(run)


def in_order(
    rows: list[dict[str, Any]], gpu: str, *, modelled: bool = False
) -> list[dict[str, Any]]:
    """The rows as the budget of today predicts and puts them, from what was compiled then; or
    `modelled`, as where nothing is."""
    device, found = lookup(gpu), []
    for own in kinds(rows):
        head_dim, causal = own[0]["head_dim"], own[0]["causal"]
        problem = Problem(
            head_dim=head_dim, value_head_dim=head_dim, dtype="bf16", is_causal=causal
        )
        by_tile, budgets = {}, []
        for row in own:
            tile = TileConfig(
                **dict(
                    zip(
                        ("block_m", "block_n", "num_warps", "num_stages"), row["tile"], strict=False
                    )
                )
            )
            compiled = Compiled(
                registers=row["registers"], stack_bytes=row["spill"] or 0, smem_bytes=row["smem"]
            )
            exact = compiled if row["basis"] == "compiled" and not modelled else None
            budgets.append(budget_of(Candidate(row["kernel"], tile), problem, device, exact))
            by_tile[tuple(row["tile"][:4])] = row
        for each in budget_table(budgets, problem, device).budgets:
            row = by_tile[each.block_m, each.block_n, each.num_warps, each.num_stages]
            time = None if each.time_ms is None else round(each.time_ms, 5)
            found.append({**row, "predicted_ms": time})
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the two agree, and how far the first tile is from the best."""
    ran = [row for row in rows if row["launches"]]
    loaded = [row for row in ran if row["basis"] == "compiled"]
    return {
        "tiles": len(rows),
        "equal": sum(
            [row["smem"], row["registers"], row["spill"]] == row["loaded"] for row in loaded
        ),
        "of_compiled": len(loaded),
        "ctas_equal": sum(row["ctas"] == row["driver_ctas"] for row in loaded),
        "said_to_fit_but_failed": sum(row["fits"] and not row["launches"] for row in rows),
        "said_not_to_fit_but_ran": sum(not row["fits"] and row["launches"] for row in rows),
        "spilling_more_than_a_launch_accepts": sum(map(refused, ran)),
        "first_over_best": first_over_best(rows),
    }


def first_over_best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kernel, how far the first tile is from the fastest that a launch accepts; and how often a
    launch wouldn't accept the first itself, which has no say in that."""
    behind: dict[str, list[float]] = {}
    turned_down: dict[str, int] = {}
    for own in kinds(rows):
        accepted = [row for row in own if row["launches"] and not refused(row)]
        first = next(row for row in own if row["fits"])  # In the budget's order.
        if not accepted or not first["launches"]:
            continue
        kernel = first["kernel"]
        behind.setdefault(kernel, [])
        if refused(first):
            turned_down[kernel] = turned_down.get(kernel, 0) + 1
        else:
            behind[kernel].append(first["ms"] / min(row["ms"] for row in accepted))
    return {
        kernel: {
            "geometric mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            "worst": max(ratios),
            "shapes": len(ratios),
            "refused": turned_down.get(kernel, 0),
        }
        for kernel, ratios in behind.items()
    }


def refused(row: dict[str, Any]) -> bool:
    """Whether a launch leaves the tile, as it was loaded, for a lighter one."""
    return bool(row["loaded"][2] > LAUNCHED_STACK_BYTES[row["kernel"]])


def save(figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """A line a row: there are two thousand."""
    head = json.dumps(figures, indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    (RESULTS / "tiles.json").write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def summarise() -> None:
    """What was measured, held against the budget of today."""
    figures = json.loads((RESULTS / "tiles.json").read_text())
    measured_rows, gpu = figures.pop("rows"), figures["provenance"]["gpu"]
    rows = in_order(measured_rows, gpu)
    modelled = first_over_best(in_order(measured_rows, gpu, modelled=True))
    figures["summary"] = {**summary(rows), "modelled_first_over_best": modelled}
    now = provenance()
    figures["budget"] = {name: now[name] for name in ("date", "commit")}
    save(figures, rows)
    print(figures["summary"])


def warm() -> None:
    """Compile in as many processes as there are cores: a head dim and causality each."""
    calls = list(itertools.product(HEADS, (False, True)))
    running = [
        subprocess.Popen([sys.executable, __file__, "--warm", str(d), str(int(causal))])
        for d, causal in calls
    ]
    for each in running:
        each.wait()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", nargs="*")
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    if arguments.summary:
        summarise()
        return
    given = arguments.warm
    if given == []:
        warm()
        return
    if given:
        d, causal = int(given[0]), given[1] == "1"
        list(measured(d, 1024, causal, warm=True))
        return
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for d, n, causal in SHAPES:
        rows += measured(d, n, causal, warm=False)
        found = summary(rows)
        save({"question": __doc__, "summary": found, "provenance": provenance()}, rows)
        print(d, n, "causal" if causal else "full", found["first_over_best"])
    summarise()


if __name__ == "__main__":
    os.environ.setdefault("TRITON_ALWAYS_COMPILE", "0")
    main()
