"""Faults that a tester met, each kind once."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fa_advisor
import samples
from fa_advisor.errors import UsageError
from fa_advisor.report import parse

HEADS, WIDTH, LENGTH = 4, 64, 640


class Attention(nn.Module):
    """Hand-written attention; `between` stands between QK^T and the softmax."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1)
        if self.between is not None:
            scores = self.between(scores)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


def tokens() -> Tensor:
    return torch.randn(1, LENGTH, WIDTH)


@pytest.mark.parametrize("wrong", [[nn.Linear(2, 2)], 42, "model"])
def test_a_recording_that_cannot_begin_leaves_nothing(wrong: Any) -> None:
    hooks = dict(nn_module._global_forward_hooks)
    with pytest.raises(UsageError, match="record takes an"), fa_advisor.record(wrong):
        pass
    assert not _get_current_dispatch_mode_stack()
    assert dict(nn_module._global_forward_hooks) == hooks


def test_a_model_can_be_copied_and_pickled_while_it_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with fa_advisor.record(model):
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        for each in (model, twin, again):
            each(torch.randn(2, 4))
    assert not model._forward_pre_hooks


def test_lazy_parameters_are_said() -> None:
    with pytest.raises(UsageError, match="without a shape"):
        fa_advisor.profile(nn.LazyLinear(4), torch.randn(2, 4))


def test_a_model_built_on_meta_is_profiled() -> None:
    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(2048, 2048, device="meta")
            self.scale = torch.ones(2048, device="meta")  # never registered

        def forward(self, x: Tensor) -> Tensor:
            return self.big(x) * self.scale

    report = fa_advisor.profile(Meta(), torch.randn(2, 2048), mode="infer")
    assert report.memory.categories["parameter"] == 4 * (2048 * 2048 + 2048)


def test_what_sdpa_cannot_say_is_kept() -> None:
    report = fa_advisor.profile(Attention(torch.tanh), tokens())
    (recommendation,) = report.advice.recommendations
    assert recommendation.backend == "keep"
    assert report.sites[0].why_not["flash"][0] == "NOT_EXPRESSIBLE"
    assert report.advice.max_seq_len.now == report.advice.max_seq_len.advised


def test_a_mask_that_stays_is_in_the_prediction() -> None:
    bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
    doubled = Attention(lambda scores: scores + bias * 2.0)
    report = fa_advisor.profile(doubled, tokens(), mode="infer")
    (recommendation,) = report.advice.recommendations
    predicted = recommendation.predicted.peak_allocated_bytes
    assert predicted is not None and report.advice.counterfactual_peak_bytes is not None
    assert predicted >= report.advice.counterfactual_peak_bytes
    assert recommendation.backend != "keep"


def test_a_report_that_does_not_add_up_is_refused() -> None:
    document = json.loads(samples.report().to_json())
    document["memory"]["categories"]["parameter"] += 1
    with pytest.raises(UsageError, match="add up"):
        parse(json.dumps(document).encode(), "r.json")


def test_a_report_whose_timeline_goes_back_is_refused() -> None:
    document = json.loads(samples.report().to_json())
    points = document["memory"]["timeline"]
    assert len(points) > 1
    points.reverse()
    with pytest.raises(UsageError, match="back in time"):
        parse(json.dumps(document).encode(), "r.json")


@pytest.mark.skipif(sys.platform == "win32", reason="closes file descriptors as a shell does")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    command = f"{sys.executable} -m fa_advisor gpus {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0
