"""What starting up may load. Each case is a process of its own: only there is nothing loaded yet.

`make contracts` holds who may import whom in the source; this holds what really gets imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import samples

# What takes long to import; `torch` alone is a second or more.
HEAVY = ("torch", "triton", "transformers", "textual", "pandas", "numpy")
HELP = ("-m", "fa_advisor", "--help")
COMMANDS = ("profile", "view", "export", "diff", "gpus")


def imported(*arguments: str) -> set[str]:
    """Top-level names of all modules that `python ARGUMENTS` imports; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", *arguments]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", done.stderr, re.MULTILINE)
    return {name.split(".")[0] for name in lines}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.json"
    samples.report().save(path)
    return str(path)


def test_the_method_sees_imports() -> None:
    assert {"json", "encodings"} <= imported("-c", "import json.decoder")


def test_import_loads_nothing_heavy() -> None:
    assert imported("-c", "import fa_advisor") & set(HEAVY) == set()


def test_help_loads_nothing_heavy() -> None:
    assert imported(*HELP) & set(HEAVY) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_nothing_heavy(command: str) -> None:
    assert imported("-m", "fa_advisor", command, "--help") & set(HEAVY) == set()


def test_view_loads_no_torch(report: str) -> None:
    loaded = imported("-m", "fa_advisor", "view", report, "--no-tui")
    assert loaded & {"torch", "triton", "transformers", "textual"} == set()


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_export_loads_no_torch(report: str, suffix: str, tmp_path: Path) -> None:
    out = str(tmp_path / f"out.{suffix}")
    loaded = imported("-m", "fa_advisor", "export", report, "-o", out)
    assert loaded & {"torch", "triton", "transformers"} == set()


def test_diff_loads_no_torch(report: str) -> None:
    loaded = imported("-m", "fa_advisor", "diff", report, report)
    assert loaded & {"torch", "triton", "transformers"} == set()


def test_dashboard_loads_no_torch() -> None:
    loaded = imported("-c", "import fa_advisor.tui.app")
    assert loaded & {"torch", "triton", "transformers"} == set()


def test_help_takes_at_most_four_bare_starts() -> None:
    """The best of several runs in turn: load makes a run slower, never faster."""
    times = [(seconds("-c", "pass"), seconds(*HELP)) for _ in range(9)]
    bare, ours = (min(column) for column in zip(*times, strict=True))
    assert ours <= 4 * bare, f"--help took {ours * 1e3:.0f} ms, python -c pass {bare * 1e3:.0f} ms"


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
