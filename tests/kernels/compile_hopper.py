"""Compile Hopper's kernels without a GPU; print what each needs.

echo '["forward", 128, 128, "bf16", "causal"]' | python compile_hopper.py

Each row stands beside its configuration, so that who reads can tell them from what else is printed.
"""

from __future__ import annotations

import json
import sys

from fa_advisor.kernels.hopper.ahead import (
    backward_usage,
    forward_usage,
    fp8_usage,
    queries_usage,
)


def main() -> None:
    """Read configurations as JSON lines, print rows."""
    rows, sys.stdout = sys.stdout, sys.stderr
    usages = {
        "forward": forward_usage,
        "backward": backward_usage,
        "queries": queries_usage,
        "fp8": fp8_usage,
    }
    for line in sys.stdin:
        kernel, *rest = config = json.loads(line)
        row = usages[kernel](*rest)._asdict()
        print(json.dumps([config, row]), file=rows, flush=True)


if __name__ == "__main__":
    main()
