"""Compile kernels for GPUs that aren't there, one after another; print what each needs.

Configurations come as JSON lines on stdin, rows go as JSON lines to stdout.

echo '[80, "forward", [128, 64, 8, 2, null], 128, 128, "bf16", "causal"]' | python compile_tiles.py
"""

from __future__ import annotations

import json
import sys

import triton

from fa_advisor.kernels.ahead import Config, usage_of
from fa_advisor.kernels.tiles import Tile


def main() -> None:
    """Read configurations, print rows; what doesn't compile has a row with its error."""
    rows, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        capability, kernel, numbers, *rest = json.loads(line)
        config = Config(capability, kernel, Tile(*numbers), *rest)
        row = {**config._asdict(), "triton": triton.__version__}
        try:
            row |= usage_of(config)._asdict()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
