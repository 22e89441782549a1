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

# Each part is a process, so that none takes two minutes.
PARTS = {
    "features and grids": "features or grid or packed",
    "the rest": "not features and not grid and not packed",
}

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        *(pytest.param("interpreted.py", words, id=part) for part, words in PARTS.items()),
        pytest.param("interpreted_hopper.py", "test", id="hopper"),
    ],
)
def test_kernels_under_the_interpreter(file: str, chosen: str) -> None:
    child = Path(__file__).with_name(file)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, str(child)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
