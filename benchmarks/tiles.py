"""Is the budget right on the GPU itself, and is the tile that it puts first the fastest?

    python benchmarks/tiles.py --warm       # compile all there is, on every core, measure nothing
    python benchmarks/tiles.py              # writes benchmarks/results/tiles.json

For every tile of the grid, of every kernel: what the loaded kernel says it takes against what was
compiled ahead, the driver's own count of blocks an SM against ours, whether it launches; and its
time over 40 shapes, against the tile that the budget puts first. bf16. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from attention import ours, random_tensors
from provenance import write
from triton.runtime.errors import OutOfResources

import fa_advisor
from fa_advisor.kernels import launch, launcher
from fa_advisor.kernels.tiles import Tile

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


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the two agree, and how far the first tile is from the best."""
    loaded = [row for row in rows if row["launches"] and row["basis"] == "compiled"]
    behind: dict[str, list[float]] = {}
    key = ("head_dim", "length", "causal", "kernel")
    for _, run in itertools.groupby(rows, key=lambda row: [row[name] for name in key]):
        own = list(run)
        timed = [row for row in own if row["launches"]]
        first = next(row for row in own if row["fits"])  # In the budget's order.
        if timed and first["launches"]:
            ratio = first["ms"] / min(row["ms"] for row in timed)
            behind.setdefault(first["kernel"], []).append(ratio)
    return {
        "tiles": len(rows),
        "equal": sum(
            [row["smem"], row["registers"], row["spill"]] == row["loaded"] for row in loaded
        ),
        "of_compiled": len(loaded),
        "ctas_equal": sum(row["ctas"] == row["driver_ctas"] for row in loaded),
        "said_to_fit_but_failed": sum(row["fits"] and not row["launches"] for row in rows),
        "said_not_to_fit_but_ran": sum(not row["fits"] and row["launches"] for row in rows),
        "first_over_best": {
            kernel: {
                "geometric mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                "worst": max(ratios),
                "shapes": len(ratios),
            }
            for kernel, ratios in behind.items()
        },
    }


def warm() -> None:
    """Compile in as many processes as there are cores: a head dim and causality each."""
    kinds = list(itertools.product(HEADS, (False, True)))
    running = [
        subprocess.Popen([sys.executable, __file__, "--warm", str(d), str(int(causal))])
        for d, causal in kinds
    ]
    for each in running:
        each.wait()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", nargs="*")
    given = parser.parse_args().warm
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
        figures = {"question": __doc__, "summary": summary(rows), "rows": rows}
        write("tiles", figures)
        print(d, n, "causal" if causal else "full", figures["summary"]["first_over_best"])
    print(summary(rows))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_ALWAYS_COMPILE", "0")
    main()
