"""What does the textbook's SRAM formula say of a tile, and what the compiler? And how long does
`fa-advisor budget` take to say so?

    python benchmarks/budgets.py            # writes benchmarks/results/budgets.json

The forward kernel in bf16, for GPUs that needn't be there. The command: head dim 128 on an H100,
the whole grid, with nothing on disk, with all on disk, and modelled; a process each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from statistics import median

from provenance import write

import fa_advisor

GPUS = ("a100", "4090", "h100")
# Head dim, block_m, block_n, warps, stages: the article's example first.
TILES = (
    (64, 64, 64, 4, 1),
    (64, 64, 64, 4, 3),
    (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 2),
    (128, 128, 64, 8, 2),
    (128, 128, 128, 8, 3),
    (256, 64, 64, 8, 1),
    (256, 128, 64, 8, 2),
)


def seconds() -> dict[str, float]:
    """Wall time of the command: cold, warm, and modelled (the median of five)."""
    command = [sys.executable, "-m", "fa_advisor", "budget", "--head-dim", "128", "--gpu", "h100"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FA_ADVISOR_CACHE_DIR": folder}

        def timed(*more: str) -> float:
            began = time.perf_counter()
            subprocess.run(
                [*command, "--no-progress", *more], env=environment, check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            return time.perf_counter() - began

        cold = timed()
        return {
            "cold": cold,
            "warm": median(timed() for _ in range(5)),
            "modelled": median(timed("--modelled") for _ in range(5)),
        }


def main() -> None:
    """Compile, print and write."""
    times = seconds()
    print(times)
    rows = []
    for head_dim, m, n, warps, stages in TILES:
        for gpu in GPUS:
            table = fa_advisor.budget(
                head_dim, gpu=gpu, direction="fwd", tiles=[(m, n)], num_warps=[warps],
                num_stages=[stages],
            )  # fmt: skip
            (row,) = table.budgets
            rows.append({"gpu": gpu, "limit": table.device.smem_per_block_optin_bytes,
                         **asdict(row)})  # fmt: skip
            print(gpu, head_dim, m, n, warps, stages, row.smem_textbook_bytes, row.smem_bytes)
    print(write("budgets", {"question": __doc__, "seconds": times, "rows": rows}))


if __name__ == "__main__":
    main()
