"""Compiling in child processes: outcomes in order, faults that cost one request, what is kept."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fa_advisor.probes import compiler
from fa_advisor.probes.compiler import Request, compile_all
from fa_advisor.records import Compiled

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

KERNEL = """
import os, time
import triton
import triton.language as tl

@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    tl.store(nothing, x)

def plain(x):
    return x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA_ADVISOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def bundled(**given: object) -> Request:
    options = {
        "capability": 80, "kernel": "forward", "block_m": 16, "block_n": 16, "num_warps": 4,
        "num_stages": 1, "dim": 16, "dim_v": 16, "dtype": "bf16", "call": "plain",
    }  # fmt: skip
    return Request(**{**options, **given})  # type: ignore[arg-type]


def own(path: Path, function: str, **given: object) -> Request:
    options = {
        "capability": 90, "kernel": function, "block_m": 16, "block_n": 16, "num_warps": 4,
        "num_stages": 1, "path": str(path),
        "signature": {"x": "*fp32:16", "y": "*fp32", "n": "i32"},
        "constants": {"BLOCK": 64},
    }  # fmt: skip
    return Request(**{**options, **given})  # type: ignore[arg-type]


def test_compiled_once_and_kept(folder: Path) -> None:
    told: list[int] = []
    requests = [bundled(), bundled(kernel="queries")]
    assert compile_all(requests, only_kept=True) == [None, None]
    first = compile_all(requests, progress=told.append)
    assert all(o is not None and o.error is None and o.smem_bytes > 0 for o in first)
    assert told == [0, 1, 2]
    began = time.monotonic()
    assert compile_all(requests) == compile_all(requests, only_kept=True) == first
    assert time.monotonic() - began < 0.5  # Nothing was started: a child takes longer than that.
    (kept,) = (folder / "cache" / "compiled").iterdir()
    kept.write_text(json.dumps({name: "?" for name in json.loads(kept.read_text())}))
    assert compile_all(requests, only_kept=True) == [None, None]
    kept.write_text("[")
    assert compile_all(requests[:1]) == first[:1]


def test_a_cache_that_cannot_be_written_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("FA_ADVISOR_CACHE_DIR", str(folder / "file"))
    (outcome,) = compile_all([bundled()])
    assert outcome is not None and outcome.error is None


def test_somebodys_kernel(folder: Path) -> None:
    path = folder / "mine.py"
    path.write_text(KERNEL)
    copied, wrong, plain, missing, unknown = compile_all(
        [
            own(path, "copy"),
            own(path, "wrong", signature={"x": "i32"}),
            own(path, "plain"),
            own(path, "copy", signature={"x": "*fp32"}),
            own(path, "copy", constants={"BLOCK": 64, "EXTRA": 1}),
        ]
    )
    assert copied is not None and copied.error is None and copied.registers > 0
    assert wrong is not None and "nothing" in (wrong.error or "")
    assert plain is not None and "isn't a @triton.jit function" in (plain.error or "")
    assert missing is not None and "nothing was said of y, n" in (missing.error or "")
    assert unknown is not None and "it has no EXTRA" in (unknown.error or "")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("os.abort()", "the compiler's process ended"),
        ("time.sleep(60)", "not compiled within 3 s"),
        ("raise SystemExit", "the compiler's process ended"),
        ("import subprocess; subprocess.run(['sleep', '60'])", "not compiled within 3 s"),
        ("print('chatter')", None),
        ("os.system('echo chatter'); os.write(1, b'[')", None),
    ],
)
def test_what_ends_a_child_costs_one_request(
    folder: Path, statement: str, said: str | None
) -> None:
    bad, good = folder / "bad.py", folder / "good.py"
    bad.write_text(KERNEL.replace("import triton\n", f"{statement}\nimport triton\n", 1))
    good.write_text(KERNEL)
    requests = [own(bad, "copy"), own(good, "copy")]
    first, second = compile_all(requests, workers=1, timeout_s=3.0 if said else 60.0)
    assert first is not None and second is not None
    assert second.error is None
    assert first == second if said is None else said in (first.error or "")


def test_what_cannot_be_asked_is_an_outcome(folder: Path) -> None:
    (folder / "mine.py").write_text(KERNEL)
    (outcome,) = compile_all([own(folder / "mine.py", "copy", constants={"BLOCK": object()})])
    assert outcome is not None and "not JSON serializable" in (outcome.error or "")


def test_equal_requests_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def outcome_of(self: object, request: Request) -> Compiled:
        asked.append(request)
        return Compiled(registers=9, smem_bytes=7)

    monkeypatch.setattr(compiler._Child, "outcome_of", outcome_of)
    told: list[int] = []
    made = compile_all([bundled(), bundled(), bundled(kernel="keys")], progress=told.append)
    assert made == [Compiled(registers=9, smem_bytes=7)] * 3
    assert len(asked) == 2 and told[-1] == 3


@pytest.mark.parametrize("entry", [[0, 0, 0, 0], [-5, 0, 0, 0], "1234", [9.5, 0, 0, 0], [9, 0, 0]])
def test_entries_that_cannot_be_are_compiled_anew(folder: Path, entry: object) -> None:
    compiler._keep(bundled(), Compiled(registers=9))
    (kept,) = (folder / "cache" / "compiled").iterdir()
    kept.write_text(json.dumps({compiler._key(bundled()): entry}))
    assert compile_all([bundled()], only_kept=True) == [None]


def test_a_module_of_triton_s_name_beside_us_is_not_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "triton.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(folder)
    (outcome,) = compile_all([bundled()])
    assert outcome is not None and outcome.error is None


def test_the_source_decides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler._keep(bundled(), Compiled(registers=1, stack_bytes=2, smem_bytes=3))
    assert compile_all([bundled()], only_kept=True) == [
        Compiled(registers=1, stack_bytes=2, smem_bytes=3)
    ]
    monkeypatch.setattr(compiler, "_source", lambda: "another")
    assert compile_all([bundled()], only_kept=True) == [None]
