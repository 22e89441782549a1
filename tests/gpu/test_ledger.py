"""The ledger on a real GPU: to the byte, whatever runs, and after an out-of-memory error."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fa_advisor
from fa_advisor.attribution.postmortem import explain
from fa_advisor.attribution.snapshots import read
from fa_advisor.report import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
WIDTH, HEADS, LENGTH, BATCH = 256, 4, 512, 2


class Layer(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        probs = F.dropout((q @ k.transpose(-2, -1) * 0.125).softmax(-1), 0.1, self.training)
        y = x + self.out((probs @ v).transpose(1, 2).flatten(2))
        return y + self.mlp(y)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


def model(recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(recompute) for _ in range(3))).to("cuda", torch.bfloat16)


def batch(size: int = BATCH) -> Tensor:
    return torch.randn(size, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)


def forget_models() -> None:
    """What outlives a model: Dynamo's caches, which hold compiled ones, and the traceback of a test
    that failed."""
    torch._dynamo.reset()
    for name in ("last_value", "last_traceback", "last_exc"):
        setattr(sys, name, None)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    forget_models()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert not torch._C._cuda_isHistoryEnabled()


def plain_peak(subject: nn.Module, x: Tensor, mode: str) -> int:
    """The second step's peak, without the tool."""
    optimizer = torch.optim.AdamW(subject.parameters(), lr=0.0)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if mode == "train":
            subject(x).mean().backward()
            optimizer.step()
            subject.zero_grad()
        else:
            with torch.no_grad():
                subject(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def check(report: Report) -> None:
    memory = report.memory
    parts = sum(memory.categories.values()) + memory.unattributed_bytes
    assert parts == memory.peak_allocated_bytes
    assert memory.unattributed_bytes <= memory.peak_allocated_bytes // 1000, report.notes
    state = memory.allocator
    assert state is not None
    beyond = state.pending_bytes + state.cached_bytes + state.fragmented_bytes
    assert memory.peak_allocated_bytes + beyond == state.reserved_bytes


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("how", ["eager", "checkpoint", "compile", "autocast"])
def test_the_peak_is_the_plain_runs_and_all_of_it_is_explained(how: str, mode: str) -> None:
    x = batch()

    def build() -> nn.Module:
        made = model(how == "checkpoint")
        if how == "autocast":
            made = made.float()
            inner = made.forward
            made.forward = lambda y: torch.autocast("cuda", torch.bfloat16)(inner)(y.float())  # type: ignore[method-assign]
        return torch.compile(made) if how == "compile" else made  # type: ignore[return-value]

    subject = build()
    subject.train(mode == "train")
    expected = plain_peak(subject, x, mode)
    del subject
    forget_models()
    subject = build()
    report = fa_advisor.profile(subject, x, mode=mode)  # type: ignore[arg-type]
    check(report)
    # Blocks come from elsewhere than in the plain run, and may have other rests.
    assert abs(report.memory.peak_allocated_bytes - expected) <= 2 * MIB
    parameters = sum(p.nbytes for p in subject.parameters())
    assert report.memory.categories["parameter"] == parameters
    if mode == "train":
        assert report.memory.categories["optimizer_state"] == 2 * parameters


def test_backward_blocks_have_the_forwards_lines() -> None:
    report = fa_advisor.profile(model(), batch())
    made = [r for r in report.ledger if r.op and r.category in ("temporary", "attention_grad")]
    assert made and sum(r.bytes for r in made if r.source) >= 0.9 * sum(r.bytes for r in made)


def test_a_recording_of_many_steps_keeps_the_highest_and_grows_nothing() -> None:
    subject = model()
    optimizer = torch.optim.AdamW(subject.parameters())
    with fa_advisor.record(subject, optimizer) as recording:
        for size in (1, 1, 2, 4, 2, 1, 1):
            subject(batch(size)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = recording.report
    check(report)
    assert report.memory.categories["attention_prob"] >= 3 * 4 * HEADS * LENGTH * LENGTH * 2
    torch.cuda.memory._record_memory_history()
    block = torch.empty(512, device="cuda")
    stamped = torch.cuda.memory._snapshot()["device_traces"][0][-1].get("user_metadata", "")
    torch.cuda.memory._record_memory_history(None)
    del block
    assert stamped == ""


def test_a_programs_own_history_is_left_alone() -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        subject = model()
        report = fa_advisor.profile(subject, batch(), mode="infer")
        assert any("its recording is left alone" in note for note in report.notes)
        assert torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_running_out_of_memory_is_reported(phase: str) -> None:
    subject, x = model(), batch(64)
    _, total = torch.cuda.mem_get_info()

    def limit(more: int) -> None:
        fraction = (torch.cuda.memory_reserved() + more * MIB) / total
        torch.cuda.set_per_process_memory_fraction(fraction)

    torch.cuda.empty_cache()
    limit(200 if phase == "forward" else 20_000)
    recording = fa_advisor.record(subject)
    with pytest.raises(torch.OutOfMemoryError), recording:
        y = subject(x).mean()
        limit(8)
        y.backward()
    report = recording.report
    failed = report.out_of_memory
    assert failed is not None and failed.phase == phase and failed.cause == "limit" and failed.op
    assert failed.source is not None and failed.source.startswith("test_ledger.py:")
    assert failed.step_peak_bytes and {r.kind for r in failed.remedies} >= {"limit", "patch"}
    memory = report.memory
    assert (
        sum(memory.categories.values()) + memory.unattributed_bytes == memory.peak_allocated_bytes
    )
    assert memory.unattributed_bytes <= memory.peak_allocated_bytes // 1000


TARGET = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.mem_get_info()[1])
model = nn.Sequential(Attention(), Attention())
inputs = torch.randn(16, 4096, 64)
"""


def test_the_command_writes_the_report_and_exits_with_3(tmp_path: Path) -> None:
    target, out = tmp_path / "model.py", tmp_path / "r.json"
    target.write_text(TARGET)
    command = [sys.executable, "-m", "fa_advisor", "profile", str(target), "-o", str(out)]
    done = subprocess.run([*command, "--no-tui"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "OUT OF MEMORY" in done.stdout and "ran out of memory" in done.stderr
    failed = json.loads(out.read_text())["out_of_memory"]
    # S of a layer: 1 GiB in fp32, which is all that there is.
    assert failed["requested_bytes"] == 16 * 4096 * 4096 * 4
    assert failed["category"] == "attention_score" and failed["source"] == "model.py:12"
    assert any(r["kind"] == "patch" and r["enough"] for r in failed["remedies"])


def test_a_snapshot_of_this_torch_is_understood(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    torch.cuda.reset_peak_memory_stats()
    model()(batch()).mean().backward()
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    found = explain(read(tmp_path / "s.pickle").traces[0], snapshot="s", device=0)
    assert found.allocated_bytes == torch.cuda.max_memory_allocated()
    assert sum(found.kinds.values()) + found.slack_bytes == found.allocated_bytes
