"""What does the textbook's SRAM formula say of a tile, and what the compiler?

    python benchmarks/budgets.py            # writes benchmarks/results/budgets.json

The forward kernel in bf16, for GPUs that needn't be there.
"""

from __future__ import annotations

from dataclasses import asdict

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


def main() -> None:
    """Compile, print and write."""
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
    print(write("budgets", {"question": __doc__, "rows": rows}))


if __name__ == "__main__":
    main()
