"""`record` in a user's own loop, and that nothing stays hooked after it or after `profile`."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules import transformer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import fa_advisor
from fa_advisor.errors import UsageError
from fa_advisor.measure import foresee
from fa_advisor.probes.modules import modules_of, parameters_of
from fa_advisor.report import Report

B, N, C, H = 2, 32, 24, 3
OVERRIDDEN = (
    "scaled_dot_product_attention",
    "dropout",
    "softmax.int",
    "log_softmax.int",
    "rms_norm",
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.dropout((q @ k.mT).softmax(-1), 0.1, self.training) @ v


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 16 * C), nn.Linear(16 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Fails(Wide):
    def forward(self, x: Tensor) -> Tensor:
        self.up(x)
        raise KeyError("inside")


def batch(n: int = B) -> Tensor:
    return torch.randn(n, N, C)


def hooks(*models: nn.Module) -> dict[str, Any]:
    """Everything that watching a run touches."""
    found: dict[str, Any] = {
        name: len(getattr(nn_module, name))
        for name in dir(nn_module)
        if name.startswith("_global_") and hasattr(getattr(nn_module, name), "__len__")
    }
    found |= {
        name: len(getattr(torch_optimizer, name))
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    }
    found["dispatch modes"] = len(_get_current_dispatch_mode_stack())
    found["function modes"] = len(_get_current_function_mode_stack())
    found["resize_"] = (torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage))
    found["Module.cuda"] = nn.Module.cuda
    found["mha fast path"] = torch.backends.mha.get_fastpath_enabled()
    found["causal detection"] = transformer._detect_is_causal_mask
    found |= {
        f"{name} {key}": torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        for name in OVERRIDDEN
        for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA", "CompositeImplicitAutograd")
    }
    for model in models:
        for name, module in model.named_modules():
            found[f"hooks of {name!r}"] = [
                len(hooked)
                for attribute, hooked in sorted(vars(module).items())
                if attribute.endswith("_hooks")
            ]
        for name, parameter in model.named_parameters():
            after = parameter._post_accumulate_grad_hooks
            found[f"hooks of {name}"] = (len(after or ()), len(parameter._backward_hooks or ()))
    return found


def check(report: Report) -> None:
    memory = report.memory
    assert sum(memory.categories.values()) == memory.peak_allocated_bytes
    assert memory.unattributed_bytes == 0


def test_nothing_stays_hooked() -> None:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks(model)
    with fa_advisor.record(model, optimizer) as recording:
        assert hooks(model) != before
        model(batch()).mean().backward()
        optimizer.step()
    assert hooks(model) == before
    fa_advisor.profile(model, batch())
    assert hooks(model) == before
    check(recording.report)


@pytest.mark.parametrize("train", [True, False])
def test_nothing_stays_hooked_after_an_exception(train: bool) -> None:
    model = Fails()
    before = hooks(model)
    with pytest.raises(KeyError, match="inside"), fa_advisor.record(model) as recording:
        model(batch())
    assert hooks(model) == before
    check(recording.report)
    assert recording.report.memory.categories["parameter"] == 4 * (2 * 16 * C * C + 17 * C)
    with pytest.raises(KeyError, match="inside"):
        fa_advisor.profile(model, batch(), mode="train" if train else "infer")
    assert hooks(model) == before
    with pytest.raises(RuntimeError):  # torch's own complaint of a wrong shape
        fa_advisor.profile(Wide(), torch.randn(2, C + 1))
    assert hooks(model) == before


def test_the_overridden_functions_do_as_before() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(B, H, N, 8)
        y = torch.randn(2, C)
        mha = nn.MultiheadAttention(C, H, batch_first=True).eval()
        with torch.inference_mode():
            fast = mha(batch(), batch(), batch(), need_weights=False)[0]
        return [
            F.scaled_dot_product_attention(x, x, x, is_causal=True),
            F.scaled_dot_product_attention(x, x, x, torch.zeros(N, N), dropout_p=0.3),
            F.dropout(y, 0.5),
            y.softmax(-1, torch.float64),
            y.log_softmax(-1),
            F.rms_norm(y, (C,)),
            fast,
        ]

    before = run()
    with fa_advisor.record() as recording:
        inside = run()
    after = run()
    for one, two, three in zip(before, inside, after, strict=True):
        assert torch.equal(one, three)
        torch.testing.assert_close(one, two)
    assert {s.form for s in recording.report.sites} == {"sdpa", "mha"}


def test_the_model_and_its_tensors_are_let_go() -> None:
    model = Attention()
    with fa_advisor.record(model) as recording:
        out = model(batch())
        out.mean().backward()
    gone = [weakref.ref(out), weakref.ref(model.qkv.weight)]
    check(recording.report)
    del model, out, recording
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_models_and_optimizers_are_found_when_they_run() -> None:
    one, two = Attention(), Wide()
    first = torch.optim.AdamW(one.parameters())
    second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    with fa_advisor.record() as recording:
        for _ in range(2):
            two(one(batch())).mean().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    report = recording.report
    check(report)
    sizes = [sum(p.numel() * 4 for p in m.parameters()) for m in (one, two)]
    assert report.memory.categories["parameter"] == sum(sizes)
    assert report.memory.categories["optimizer_state"] == 2 * sizes[0] + sizes[1]
    assert report.target.name == "Attention"
    assert [s.fqn for s in report.sites] == [""]
    assert {m.fqn for m in report.modules} >= {"qkv", "Wide.up", "Wide.down"}


def test_state_of_an_optimizer_that_has_stepped_before() -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).mean().backward()
    optimizer.step()
    with fa_advisor.record(model, optimizer) as recording:
        model(batch())
    size = sum(p.numel() * 4 for p in model.parameters())
    categories = recording.report.memory.categories
    assert categories["optimizer_state"] == 2 * size
    assert categories["gradient"] == categories["parameter"] == size
    check(recording.report)


def test_the_step_with_the_highest_peak_is_reported() -> None:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = (2, 16, 4)
    with fa_advisor.record(model, optimizer) as recording:
        for n in sizes:
            model(batch(n)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (site,) = recording.report.sites
    assert (site.batch, site.calls) == (16, 1)
    check(recording.report)


def test_gradient_accumulation_adds_up_in_one_step() -> None:
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters())
    with fa_advisor.record(model, optimizer) as recording:
        for _ in range(2):
            for _ in range(3):
                (model(batch()).mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    (site,) = recording.report.sites
    assert site.calls == 3
    size = sum(p.numel() * 4 for p in model.parameters())
    categories = recording.report.memory.categories
    assert categories["gradient"] == size  # added to in place, however often
    check(recording.report)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_or_dropped(set_to_none: bool) -> None:
    """Kept and zeroed, they are there in the next forward too."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fa_advisor.record(model, optimizer) as warm:
        model(batch()).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    with fa_advisor.record(model, optimizer) as recording, torch.no_grad():
        model(batch())
    size = sum(p.numel() * 4 for p in model.parameters())
    held = recording.report.memory.categories.get("gradient", 0)
    assert held == (0 if set_to_none else size)
    assert warm.report.target.mode == "train"
    assert recording.report.target.mode == "infer"
    check(warm.report)
    check(recording.report)


def test_recordings_nest() -> None:
    one, two = Attention(), Wide()
    before = hooks(one, two)
    with fa_advisor.record(one) as outer:
        one(batch())
        with fa_advisor.record(two) as inner:
            two(batch())
        one(batch())
    assert hooks(one, two) == before
    check(outer.report)
    check(inner.report)
    assert [s.calls for s in outer.report.sites] == [2]
    assert inner.report.sites == ()
    assert outer.report.memory.peak_allocated_bytes > inner.report.memory.peak_allocated_bytes
    with fa_advisor.record(two) as alone:
        two(batch())
    assert inner.report.memory.categories == alone.report.memory.categories


def test_recordings_overlap() -> None:
    one, two = Attention(), Wide()
    before = hooks(one, two)
    first, second = fa_advisor.record(one), fa_advisor.record(two)
    first.__enter__()
    second.__enter__()
    one(batch())
    first.__exit__()
    two(batch())
    second.__exit__()
    assert hooks(one, two) == before
    check(first.report)
    check(second.report)
    assert not any("dispatch mode" in note for note in first.report.notes)


def test_a_recording_that_ends_under_another_mode() -> None:
    model = Wide()
    before = hooks(model)
    recording, other = fa_advisor.record(model), FlopCounterMode(display=False)
    recording.__enter__()
    other.__enter__()
    model(batch())
    recording.__exit__()
    model(batch())
    other.__exit__(None, None, None)
    assert any("under a dispatch mode" in note for note in recording.report.notes)
    with fa_advisor.record(model):
        model(batch())
    assert hooks(model) == before


def test_a_module_that_cant_be_hashed() -> None:
    model = Wide()
    plain = [name for name, _ in model.named_modules()]
    assert [name for name, _ in modules_of(model)] == plain
    model.twice = model.down
    assert [name for name, _ in modules_of(model)] == plain
    assert len(list(parameters_of(model))) == 4

    class Unhashable(Wide):
        __hash__ = None  # type: ignore[assignment]

    with fa_advisor.record(Unhashable()) as recording:
        Unhashable()(batch())
    check(recording.report)
    assert recording.report.target.parameters == sum(p.numel() for p in model.parameters())


def test_a_recording_within_inference_mode() -> None:
    model = Wide()
    with torch.inference_mode():
        before = hooks(model)
        with fa_advisor.record(model) as recording:
            model(batch())
        assert hooks(model) == before
        model(batch())
    model(batch()).sum().backward()
    check(recording.report)


def test_an_exception_in_an_inner_recording_leaves_the_outer_one_running() -> None:
    one = Attention()
    before = hooks(one)
    with fa_advisor.record(one) as outer:
        with pytest.raises(KeyError), fa_advisor.record() as inner:
            Fails()(batch())
        one(batch())
    assert hooks(one) == before
    assert len(outer.report.sites) == 1
    check(outer.report)
    check(inner.report)


def test_a_profile_inside_a_recording() -> None:
    """Fake tensors have no memory: what profile runs is not the recording's."""
    model, big = Attention(), Wide()
    with fa_advisor.record(model) as recording:
        model(batch())
        inside = fa_advisor.profile(big, batch(64), mode="infer")
        model(batch())
    alone = fa_advisor.profile(big, batch(64), mode="infer")
    assert inside.memory.categories == alone.memory.categories
    check(recording.report)
    assert [s.calls for s in recording.report.sites] == [2]


def test_double_backward() -> None:
    """A gradient penalty runs backward with a graph of its own."""
    model = Attention()
    with fa_advisor.record(model) as recording:
        x = batch().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().mean().backward()
    (site,) = recording.report.sites
    assert site.calls == 1
    check(recording.report)


def test_use_of_a_recording() -> None:
    recording = fa_advisor.record(Wide())
    with pytest.raises(UsageError, match="hasn't ended"):
        _ = recording.report
    with recording, pytest.raises(UsageError, match="hasn't ended"):
        _ = recording.report
    with pytest.raises(UsageError, match="nothing ran"):
        _ = recording.report
    with pytest.raises(UsageError, match="has been used"):
        recording.__enter__()
    assert hooks()["dispatch modes"] == 0


def test_what_ran_in_another_thread_is_said() -> None:
    model = Wide()
    with fa_advisor.record(model) as recording:
        model(batch())
        other = threading.Thread(target=model, args=(batch(),))
        other.start()
        other.join()
    assert sum("calls of modules in other threads" in n for n in recording.report.notes) == 1
    with fa_advisor.record(model) as recording:
        model(batch())
    assert not any("threads" in note for note in recording.report.notes)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("how", ["whole", "in place", "a part", "a function"])
def test_that_what_is_compiled_ran_uncompiled_is_said(how: str) -> None:
    model: Any = Wide()
    if how == "whole":
        model = torch.compile(model)
    elif how == "in place":
        model.compile()
    elif how == "a part":
        model.up.compile()
    else:
        model.forward = torch.compile(model.forward)
    with fa_advisor.record(model) as recording:
        model(batch())
    profiled = fa_advisor.profile(model, batch())
    foreseen = foresee(
        model, (batch(),), {}, mode="train", optimizer="none", device=profiled.device
    )
    assert foreseen is not None
    for report in (recording.report, profiled, foreseen):
        assert sum("torch.compile" in note for note in report.notes) == 1
    plain = fa_advisor.profile(Wide(), batch())
    assert not any("torch.compile" in note for note in plain.notes)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_what_was_recorded_twice_is_compiled_afterwards() -> None:
    made = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal made
        made += 1
        return graph.forward

    model = torch.compile(Attention().eval(), backend=backend)
    model(batch())
    assert made == 1
    for _ in range(2):
        with fa_advisor.record(model) as recording:
            model(batch())
        assert made == 1 and any("torch.compile" in note for note in recording.report.notes)
    model(batch())
    assert made == 2
