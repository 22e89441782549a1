"""The kernels' numerics under Triton's interpreter, in a child process: no GPU is needed.

The child runs interpreted.py or interpreted_hopper.py, which the interpreter's switch must precede.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# So that several processes share them; what is in none of these is a part of its own.
PARTS = ("features", "grid", "packed", "dropout", "finfo", "op")

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")


@pytest.mark.parametrize(
    ("part", "file"),
    [
        *((part, "interpreted.py") for part in PARTS),
        (" and ".join(f"not {part}" for part in PARTS), "interpreted.py"),
        ("test", "interpreted_hopper.py"),
    ],
)
def test_kernels_under_the_interpreter(part: str, file: str) -> None:
    child = Path(__file__).with_name(file)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", part, str(child)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
