"""`fa-advisor budget` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "fa_advisor", "budget", *words],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_text_json_and_csv_say_the_same() -> None:
    asked = ("--head-dim", "64", "--gpu", "a100", "--gpu", "4090", "--modelled", "--causal")
    text = run(*asked)
    assert text.returncode == 0 and not text.stderr
    assert text.stdout.count("forward: out and lse") == 2
    tables = json.loads(run(*asked, "--format", "json").stdout)
    assert [t["device"]["name"] for t in tables] == [
        "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
    ] or len(tables) == 2  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(run(*asked, "--format", "csv").stdout)))
    assert len(rows) == sum(len(t["budgets"]) for t in tables)
    assert rows[0]["is_causal"] == "True"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --head-dim"),
        (("--head-dim", "999"), "head_dim: expected 1 to 256, got 999"),
        (("--head-dim", "64", "--tiles", "64by64"), "'64by64' isn't a tile"),
        (("--head-dim", "64", "--tiles", "48x64"), "got 48x64"),
        (("--head-dim", "64", "--warps", "x"), "isn't a list of numbers"),
        (("--head-dim", "64", "--gpu", "nope"), "unknown GPU 'nope'"),
        (("--head-dim", "64", "--gpu", "t4"), "8.0 or later"),
        (("--head-dim", "64", "--arg", "x=i32"), "--arg goes with --kernel"),
        (("--kernel", "x.py:f", "--arg", "x"), "write NAME=TYPE or NAME=VALUE"),
        (("--kernel", "x.py:f"), "there is no file x.py"),
        (("--head-dim", "64", "--timeout", "0"), "expected seconds above 0"),
    ],
)
def test_bad_words_end_in_a_message_and_status_2(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout


def test_a_reader_that_leaves_is_no_fault() -> None:
    command = f"{sys.executable} -m fa_advisor budget --head-dim 64 --modelled --gpu a100 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
