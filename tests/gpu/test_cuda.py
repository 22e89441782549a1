"""The engine on a real GPU: what it reports against what the allocator counted."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fa_advisor
from fa_advisor.probes.device import find

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


class Block(nn.Module):
    """Attention (hand-written or SDPA) and an MLP, with residuals."""

    def __init__(self, eager: bool, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.eager, self.heads = eager, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        if self.eager:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            y = scores.softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


def model(eager: bool) -> nn.Module:
    return nn.Sequential(*(Block(eager) for _ in range(3))).to("cuda", torch.bfloat16)


def inputs() -> torch.Tensor:
    return torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("eager", [True, False])
def test_the_peak_is_the_allocators_and_adds_up(eager: bool, mode: str) -> None:
    subject = model(eager)
    report = fa_advisor.profile(subject, inputs(), mode=mode)
    memory = report.memory
    assert memory.basis == "measured"
    assert (
        sum(memory.categories.values()) + memory.unattributed_bytes == memory.peak_allocated_bytes
    )
    assert memory.unattributed_bytes >= 0
    parameters = sum(p.numel() * p.element_size() for p in subject.parameters())
    assert memory.categories["parameter"] == parameters
    if mode == "train":
        assert memory.categories["optimizer_state"] == 2 * parameters
    assert [s.fqn for s in report.sites] == ["0", "1", "2"]
    fused = {"flash", "efficient", "cudnn"}
    assert all((s.backend == "eager") if eager else (s.backend in fused) for s in report.sites)
    if eager and mode == "train":
        # P alone is kept for backward in each layer; the peak holds all three.
        assert memory.categories["attention_prob"] == 3 * 2 * 4 * 512 * 512 * 2


@pytest.mark.parametrize("eager", [True, False])
def test_fake_tensors_foresee_what_the_gpu_does(eager: bool) -> None:
    found = find()
    assert found is not None
    for mode in ("infer", "train"):
        measured = fa_advisor.profile(model(eager), inputs(), mode=mode)
        modelled = fa_advisor.profile(model(eager).cpu(), inputs().cpu(), mode=mode)
        assert modelled.memory.basis == "modelled"
        for a, b in zip(measured.sites, modelled.sites, strict=True):
            assert (a.fqn, a.form, a.backend, a.seqlen_q, a.num_heads) == (
                b.fqn, b.form, b.backend, b.seqlen_q, b.num_heads,
            )  # fmt: skip
        for category in ("parameter", "optimizer_state", "attention_prob", "attention_score"):
            expected = modelled.memory.categories.get(category, 0)
            assert measured.memory.categories.get(category, 0) == expected


def test_the_model_is_left_as_it_was() -> None:
    subject = model(True)
    before = [p.detach().clone() for p in subject.parameters()]
    subject.eval()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    fa_advisor.profile(subject, inputs(), mode="train")
    gc.collect()
    assert not subject.training
    assert all(p.grad is None for p in subject.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, subject.parameters(), strict=True))
    # cuBLAS keeps its workspaces; nothing else may stay.
    assert torch.cuda.memory_allocated() - allocated <= 80 * 2**20


def test_a_loop_is_recorded_without_a_byte_on_the_gpu() -> None:
    subject = model(True)
    optimizer = torch.optim.AdamW(subject.parameters())
    x = inputs()

    def step() -> None:
        subject(x).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    with fa_advisor.record(subject, optimizer) as recording:
        assert torch.cuda.memory_allocated() == allocated
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    memory = recording.report.memory
    assert (
        sum(memory.categories.values()) + memory.unattributed_bytes == memory.peak_allocated_bytes
    )
    parameters = sum(p.numel() * p.element_size() for p in subject.parameters())
    assert memory.categories["optimizer_state"] == 2 * parameters
    assert recording.report.target.batch_size == 2


@pytest.mark.parametrize("example", ["nanogpt.py", "llama_gqa.py:sdpa", "transformer_encoder.py"])
def test_the_command_runs_on_the_gpu(example: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "fa_advisor", "profile", str(EXAMPLES / example)]
    done = subprocess.run(
        [*command, "--device", "cuda", "--no-tui", "-o", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["memory"]["basis"] == "measured"
    assert report["device"]["basis"] in ("nvml", "torch")
    assert report["memory"]["peak_reserved_bytes"] >= report["memory"]["peak_allocated_bytes"]


def test_a_gpu_that_is_not_there_is_status_5(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fa_advisor", "profile", "--device", "cuda:63", "--no-tui"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
