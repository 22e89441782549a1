"""`fa-advisor run` on a real GPU: the peak is the plain run's, and the script sees its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fa_advisor.report import load

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).parents[1] / "cli" / "scripts"
SAYS_ITS_PEAK = """
import atexit, runpy, sys, torch
atexit.register(lambda: print("peak", torch.cuda.max_memory_allocated()))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=300
    )
    *printed, peak = done.stdout.splitlines()
    return "\n".join(printed), int(peak.split()[1])


@pytest.mark.parametrize(
    "script",
    ["nano_gpt.py --batch-size 8 --block-size 256", "word_language_model.py", "vit_workers.py"],
)
def test_the_peak_is_the_plain_runs(script: str, tmp_path: Path) -> None:
    wrapper, saved = tmp_path / "says.py", tmp_path / "r.json"
    wrapper.write_text(SAYS_ITS_PEAK)
    name, *words = script.split()
    words = [str(wrapper), str(SCRIPTS / name), *words]
    plain, plain_peak = run(*words)
    followed, script_saw = run("-m", "fa_advisor", "run", "-o", str(saved), *words)
    memory = load(saved).memory
    assert followed == plain
    assert memory.basis == "measured"
    assert memory.peak_allocated_bytes == pytest.approx(plain_peak, rel=0.01)
    # What the script is told is the highest of all its steps, whoever reset the counter between.
    assert script_saw >= memory.peak_allocated_bytes
    assert script_saw == pytest.approx(plain_peak, rel=0.01)
