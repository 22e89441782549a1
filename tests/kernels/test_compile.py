"""Every shipped tile, compiled for the GPUs it is meant for: it fits, and it doesn't spill.

No GPU is needed. The compiler can abort the interpreter, so it runs in a child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

COMPILER = Path(__file__).with_name("compile_tiles.py")
# Shared memory that one block may have, by target (bytes).
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# A frame this small is a register or two kept in L1, which is what the fastest tiles do.
MOST_STACK_BYTES = 96
# No tile holds dK and dV of 256 features in fp32 in registers: the least of those tried.
UNAVOIDABLE = {("keys", 4, 256): 512}
# Every test run compiles the first; FA_ADVISOR_COMPILE_ALL=1 the second.
TARGETS = {
    "quick": {80: (64, 128), 86: (128,), 90: (64, 128), 120: (128,)},
    "full": {cc: (16, 32, 64, 128, 256) for cc in LIMITS},
}


def _compiled(targets: dict[int, tuple[int, ...]], sizes: tuple[int, ...]) -> list[dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(COMPILER), json.dumps([list(targets.items()), sizes])],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(rows: list[dict]) -> None:
    assert rows
    for row in rows:
        assert row["smem"] <= LIMITS[row["cc"]] * 1024, row
        most = UNAVOIDABLE.get((row["kernel"], row["bytes"], row["dim"]), MOST_STACK_BYTES)
        assert row["stack"] <= most, row


def test_the_commonest_tiles_fit_and_do_not_spill() -> None:
    _check(_compiled(TARGETS["quick"], (2,)))


@pytest.mark.slow
@pytest.mark.skipif("FA_ADVISOR_COMPILE_ALL" not in os.environ, reason="twenty minutes: set it")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cc", LIMITS)
def test_every_tile_fits_and_does_not_spill(cc: int, size: int) -> None:
    _check(_compiled({cc: TARGETS["full"][cc]}, (size,)))
