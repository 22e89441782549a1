"""How long does `fa-advisor --help` take, beside `python -c pass`?  (python benchmarks/startup.py)

The two run in turn, so that the machine's load falls on both; the medians are compared. The
requirement is a ratio of at most 4.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import provenance

LIMIT = 4.0


def seconds(command: list[str]) -> float:
    """Wall-clock time of one run of `command`, which must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float | int]:
    """Median milliseconds of both commands over `rounds` runs in turn, and their ratio."""
    baseline = [sys.executable, "-c", "pass"]
    subject = [str(Path(sys.executable).with_name("fa-advisor")), "--help"]
    for command in (baseline, subject):  # byte code is written once, by the first run
        seconds(command)
    times = [(seconds(baseline), seconds(subject)) for _ in range(rounds)]
    bare, ours = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return {
        "rounds": rounds,
        "python_pass_ms": round(bare, 2),
        "fa_advisor_help_ms": round(ours, 2),
        "ratio": round(ours / bare, 3),
        "limit": LIMIT,
    }


def main() -> int:
    """Print the figures, save them, and fail where the ratio is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    figures = measure(parser.parse_args().rounds)
    path = provenance.write("startup", figures)
    print(
        f"python -c pass {figures['python_pass_ms']} ms, "
        f"fa-advisor --help {figures['fa_advisor_help_ms']} ms: "
        f"{figures['ratio']} x (limit {LIMIT}), saved to {path}"
    )
    return int(figures["ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
