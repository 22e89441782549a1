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


RUNS_OUT = """
import torch
from torch import nn

where = {where!r}
_, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(600 * 2**20 / total)
if where == "build":
    kept = [nn.Linear(4096, 4096, device="cuda") for _ in range(20)]
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    big = where == "step" and step == 2
    x = torch.randn(65536 if big else 64, 1024, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("options", [["--steps", "4"], []])
def test_a_step_that_runs_out_of_memory(options: list[str], tmp_path: Path) -> None:
    script, saved = tmp_path / "runs_out.py", tmp_path / "r.json"
    script.write_text(RUNS_OUT.format(where="step"))
    command = [sys.executable, "-m", "fa_advisor", "run", *options, "-o", str(saved), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "OutOfMemoryError" in done.stderr.splitlines()[-1]
    report = load(saved)
    failed = report.out_of_memory
    if failed is None:  # the step wasn't followed
        assert not options and any("out of memory" in note for note in report.notes)
        return
    assert failed.phase == "forward" and failed.cause == "limit"
    assert failed.source is not None and failed.source.startswith("runs_out.py:")
    assert report.memory.unattributed_bytes < 0.001 * report.memory.peak_allocated_bytes


@pytest.mark.parametrize("command", [["run"], ["profile", "--no-tui", "--device", "cuda"]])
def test_a_model_that_doesnt_fit(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "runs_out.py"
    script.write_text(RUNS_OUT.format(where="build"))
    done = subprocess.run(
        [sys.executable, "-m", "fa_advisor", *command, str(script)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == (1 if command == ["run"] else 3)
    assert "out of memory at runs_out.py:9" in done.stderr
    assert "set_per_process_memory_fraction" in done.stderr
