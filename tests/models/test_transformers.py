"""Architectures of transformers: each attention call is found, nothing else is taken for one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from models.factories import SAME_EVERYWHERE, mixtral
from models.zoo import ARCHITECTURES, Architecture

import fa_advisor
from fa_advisor.pipeline import profile_target
from fa_advisor.records import ATTENTION_CATEGORIES, Mode, ProfileRequest
from fa_advisor.report import Report

MODES: tuple[Mode, ...] = ("train", "infer")
FUSED = ("flash", "efficient", "cudnn")
CASES = [
    pytest.param(architecture, implementation, id=f"{architecture.name}-{implementation}")
    for architecture in ARCHITECTURES
    for implementation in architecture.implementations
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)


def _profiles(architecture: Architecture, implementation: str) -> dict[Mode, Report]:
    model = architecture.build(implementation)
    inputs = architecture.inputs()
    return {
        mode: fa_advisor.profile(model, inputs, mode=mode, optimizer="none", gpu="a100")
        for mode in MODES
    }


def _attention_bytes(report: Report) -> int:
    return sum(report.memory.categories.get(name, 0) for name in ATTENTION_CATEGORIES)


@pytest.mark.parametrize(("architecture", "implementation"), CASES)
def test_architecture(architecture: Architecture, implementation: str) -> None:
    reports = _profiles(architecture, implementation)
    expected = Counter(
        {(a.heads, a.kv_heads, a.q, a.k, a.head_dim): a.count for a in architecture.attention}
    )
    for report in reports.values():
        memory = report.memory
        assert memory.unattributed_bytes == 0
        assert sum(memory.categories.values()) == memory.peak_allocated_bytes
        found = Counter(
            (s.num_heads, s.num_kv_heads, s.seqlen_q, s.seqlen_k, s.head_dim) for s in report.sites
        )
        assert found == expected
        assert sum(s.attention_bytes_at_peak for s in report.sites) == _attention_bytes(report)
        assert {s.form for s in report.sites} <= {implementation}
        fused = all(s.backend in FUSED for s in report.sites)
        if fused:  # masks that are built for a kernel are N x N memory all the same
            kept = set(memory.categories) & set(ATTENTION_CATEGORIES)
            assert kept <= {"attention_mask"}
    if architecture.attention and implementation == "eager":
        assert any(_attention_bytes(report) for report in reports.values())


def _profile_target(name: str, device: str, mode: Mode) -> Report:
    target = f"{Path(__file__).with_name('factories.py')}:{name}"
    request = ProfileRequest(target=target, device=device, mode=mode, gpu="a100")
    return profile_target(request, lambda _: None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [factory.__name__ for factory in SAME_EVERYWHERE])
def test_fake_tensors_give_the_ledger_of_a_run_on_the_cpu(name: str, mode: Mode) -> None:
    fake, real = (_profile_target(name, device, mode) for device in ("fake", "cpu"))
    assert fake.memory.categories == real.memory.categories
    assert fake.memory.peak_allocated_bytes == real.memory.peak_allocated_bytes
    assert fake.memory.peak_phase == real.memory.peak_phase
    # What the sites say; the kernels that the other device would take are not theirs to say.
    assert [s.attention_bytes_at_peak for s in fake.sites] == [
        s.attention_bytes_at_peak for s in real.sites
    ]
    assert [s.saved_for_backward_bytes for s in fake.sites] == [
        s.saved_for_backward_bytes for s in real.sites
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_over_experts_runs_on_fake_tensors_as_if_tokens_were_spread_evenly(
    mode: Mode,
) -> None:
    fake, real = (_profile_target(mixtral.__name__, device, mode) for device in ("fake", "cpu"))
    assert fake.memory.peak_allocated_bytes == pytest.approx(
        real.memory.peak_allocated_bytes, rel=0.02
    )
    assert len(fake.sites) == len(real.sites) == 2
