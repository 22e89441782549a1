"""Where and when a benchmark's figures come from: what stands at the head of every result file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: dict[str, Any]) -> Path:
    """Save `figures` and their provenance as benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({**figures, "provenance": provenance()}, indent=2) + "\n")
    return path


def provenance() -> dict[str, Any]:
    """Date (UTC), commit, machine and versions. `None`: not there."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "textual", "fa-advisor")},
    }


def _commit() -> str | None:
    """The commit measured, with a plus sign where the tree differed from it.

    FA_ADVISOR_COMMIT says it where the tree was copied to a machine without its history.
    """
    if told := os.environ.get("FA_ADVISOR_COMMIT"):
        return told
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "--", ":!benchmarks/results")
    return f"{commit}+" if commit and changed else commit


def _gpu() -> str | None:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join(names.splitlines()) if names else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """stdout of a command, or `None` where it isn't there, fails or says nothing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
