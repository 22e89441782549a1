"""Draw docs/hopper.svg from benchmarks/results/hopper.json: the kernels under the machine's roof.

    pip install matplotlib && python benchmarks/roofline.py

A call's intensity is its FLOP over the bytes that it must move at least: q, k, v and out, and in
backward their gradients too, once each. The roof is a plain product of matrices, as measured in
that run, and the device's copy rate.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results" / "hopper.json"
PAGE = Path(__file__).parents[1] / "docs" / "hopper.svg"
# Read and written, TB/s: an H200's, measured once and not kept. No call here is near that slope.
COPY_TBPS = 4.24
# Length and head dim by the cell's name.
SIZES = {"1k": (1024, 128), "4k": (4096, 128), "16k": (16384, 128),
         "4k, D 64": (4096, 64), "8k, D 256": (8192, 256)}  # fmt: skip
MARKERS = {"ours": ("o", "tab:red"), "fa4": ("s", "tab:blue"), "cudnn": ("^", "tab:green"),
           "flex": ("x", "tab:gray"), "fa2": ("+", "tab:gray")}  # fmt: skip


def intensity(length: int, causal: bool, direction: str) -> float:
    """FLOP a byte: 4 N^2 D of four N x D tensors of two bytes, or 10 N^2 D of eight."""
    flop, tensors = (4, 4) if direction == "forward" else (10, 8)
    return flop * length / (tensors * 2) * (0.5 if causal else 1.0)


def main() -> None:
    """Draw and save."""
    result = json.loads(RESULTS.read_text())
    roof = result["matmul_tflops"]
    matplotlib.rcParams["svg.hashsalt"] = "roofline"
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        ridge = roof / COPY_TBPS
        axis.plot([64, ridge, 20000], [64 * COPY_TBPS, roof, roof], color="black", linewidth=1)
        for peer, (marker, colour) in MARKERS.items():
            points = [
                (intensity(SIZES[row["name"]][0], row["causal"], direction),
                 row[peer][direction]["tflops"])
                for row in result["rows"] if row["name"] in SIZES and peer in row
            ]  # fmt: skip
            axis.scatter(*zip(*points, strict=True), marker=marker, color=colour, label=peer, s=28)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("FLOP a byte that must move")
        axis.set_title(direction)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("TFLOP/s")
    axes[0].set_ylim(0, roof * 1.08)
    axes[0].legend(loc="lower right", fontsize=8)
    where = result["provenance"]
    figure.suptitle(f"{where['gpu']}, bf16, {where['date']}; roof: {roof:.0f} TFLOP/s", fontsize=10)
    figure.tight_layout()
    figure.savefig(PAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
