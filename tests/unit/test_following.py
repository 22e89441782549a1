"""The parts that following a script is made of, each by itself."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fa_advisor
from fa_advisor.following.arrival import Arrival
from fa_advisor.following.boundaries import Boundaries
from fa_advisor.following.family import Family
from fa_advisor.following.schedule import wanted
from fa_advisor.following.wording import which_step
from fa_advisor.probes import scopes as module_of_scopes
from fa_advisor.probes.cuda_peaks import CudaPeaks
from fa_advisor.probes.scopes import Scopes
from fa_advisor.probes.watch import Cycle

# Where steps end


def forward(steps: Boundaries, *, graph: bool, trained: bool = False) -> bool:
    steps.begins(graph=graph, trained=trained)
    over = steps.forward_ends(graph=graph, trained=trained)
    if over:
        steps.ended("infer")
    return over


def test_a_forward_without_gradients_is_a_step() -> None:
    steps = Boundaries(lambda: False)
    assert [forward(steps, graph=False) for _ in range(3)] == [True] * 3
    assert steps.done == {"train": 0, "infer": 3}


def test_a_forward_without_gradients_within_a_training_step_is_none() -> None:
    steps = Boundaries(lambda: True)
    assert not forward(steps, graph=True, trained=True)
    assert not forward(steps, graph=False, trained=True)
    steps.ended("train")
    assert forward(steps, graph=False, trained=True)


def test_an_inference_that_forgot_no_grad() -> None:
    steps = Boundaries(lambda: False)
    assert [forward(steps, graph=True) for _ in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize("optimizer", [True, False])
def test_parameters_moved_by_hand(optimizer: bool) -> None:
    steps = Boundaries(lambda: optimizer)
    # Two parameters' gradients come in each backward; accumulation looks the same.
    assert [steps.by_hand(n) for n in (0, 2, 4, 4)] == [False, not optimizer, not optimizer, False]
    steps.optimizer_stepped()
    assert not steps.by_hand(6)


def test_a_limit_is_on_the_trainings_steps() -> None:
    steps = Boundaries(lambda: True)
    for _ in range(3):
        steps.ended("infer")
    assert not steps.over("infer", 2)  # a sanity check before the training
    steps.ended("train")
    assert not steps.over("train", 2)
    steps.ended("train")
    assert steps.over("train", 2)
    alone = Boundaries(lambda: False)
    alone.ended("infer")
    assert alone.over("infer", 1)


def test_optimizers_that_step_in_turn() -> None:
    a, b, c = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1) for _ in range(3))
    cycle = Cycle()

    def ends(*optimizers: Any) -> list[bool]:
        found = []
        for optimizer in optimizers:
            cycle.begins(optimizer)
            found.append(cycle.ends_with(optimizer))
        return found

    assert ends(a, b) == [True, True]
    assert cycle.surplus == 0
    assert ends(a, b, a, b) == [False, True, False, True]
    assert cycle.surplus == 1
    # Another takes over: it takes a cycle to see.
    ends(c, c)
    assert ends(c, c) == [True, True]
    del c
    gc.collect()
    assert ends(a, a) == [True, True]


def test_the_schedule_thins_out() -> None:
    assert [n for n in range(1, 200) if wanted("train", n)] == [*range(1, 17), 32, 64, 128]
    assert all(wanted("infer", n) for n in range(1, 1025))
    assert not wanted("infer", 1025)


@pytest.mark.parametrize(
    ("kind", "number", "done", "followed", "cut", "says"),
    [
        ("train", 1, 1, 1, "", "the only training step"),
        ("train", 3, 9, 9, "", "training step 3: the highest peak among all 9, the first left out"),
        ("infer", 2, 9, 4, "", "forward 2: the highest peak among the 4 that were followed of 9"),
        ("", 1, 0, 0, "KeyError", "KeyError ended the script in it"),
    ],
)
def test_which_step(kind: str, number: int, done: int, followed: int, cut: str, says: str) -> None:
    counts = {"train": 0, "infer": 0, kind or "train": done}
    seen = {"train": 0, "infer": 0, kind or "train": followed}
    assert says in which_step(kind, number, counts, seen, cut)  # type: ignore[arg-type]


# Modules


def test_gradients_without_an_optimizers_step_are_no_endless_accumulation() -> None:
    steps = Boundaries(lambda: True)
    steps.optimizer_stepped()
    ended = [steps.by_hand(gradients) for gradients in range(1, 1_040)]
    assert ended == [False] * 1_024 + [True] * 15
    steps.optimizer_stepped()
    assert not steps.by_hand(2_000)


def test_the_model_of_a_part() -> None:
    import copy

    family = Family()
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = nn.ModuleDict({"model": inner, "other": nn.Linear(3, 3)})
    copied = copy.deepcopy(outer)
    assert family.root_of(inner[0]) is outer
    assert family.root_of(copied["model"]) is copied
    alone = nn.Linear(2, 2)
    assert family.root_of(alone) is alone
    assert {id(outer), id(copied), id(alone)} <= {id(root) for root in family.roots()}
    del outer.model  # type: ignore[attr-defined]
    assert family.root_of(inner) is inner


def test_models_built_in_every_step_are_not_looked_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Net(nn.Linear):
        pass

    family, looks, look = Family(), [], Family.look
    monkeypatch.setattr(Family, "look", lambda self: (looks.append(1), look(self)))
    for _ in range(40):
        net = Net(2, 2)
        assert family.root_of(net) is net
    assert len(looks) == 16
    outer = nn.Sequential(nn.Linear(2, 2))
    assert family.root_of(outer[0]) is outer


def test_names_of_a_model_that_is_gone_go_to_the_next() -> None:
    scopes = Scopes()
    first, loss = nn.Sequential(nn.Linear(2, 2)), nn.MSELoss()
    assert scopes.add_root(first) == ""
    assert scopes.add_root(other := nn.Sequential(nn.Linear(2, 2))) == "Sequential"
    del first
    gc.collect()
    assert scopes.roots() == [other]
    assert scopes.add_root(nn.Sequential(nn.Linear(2, 2))) == ""
    scopes.install()
    try:
        for _ in range(3):
            loss(torch.ones(1), torch.ones(1))
    finally:
        scopes.remove()
    assert [name for name in scopes.types if "Loss" in name] == ["MSELoss"]


def test_what_belongs_to_past_steps_is_forgotten_where_it_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_of_scopes, "_KEPT", 8)
    scopes, model = Scopes(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    lengths, outs = [], []
    scopes.install()
    try:
        for _ in range(12):
            outs.append(model(torch.ones(1, 2)).grad_fn)
            scopes.mark_line(("model.py", 1))
            scopes.step_ends()
            lengths.append((len(scopes._numbers), len(scopes._lines)))
    finally:
        scopes.remove()
    assert max(lengths[6:]) == max(lengths[3:6])
    known = [scopes.place_of_node(node)[1] is not None for node in outs]
    assert known[-1] and known[-2] and not known[0]


def test_a_recording_keeps_no_model() -> None:
    with fa_advisor.record() as recording:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            model(torch.randn(4, 64)).sum().backward()
    size = 4 * (64 * 64 + 64)
    assert recording.report.memory.categories["parameter"] <= 2 * size
    assert recording.report.memory.categories["gradient"] <= 2 * size


def test_what_one_module_makes_for_another_is_no_input() -> None:
    body, head = nn.Linear(256, 256), nn.Linear(256, 256)
    x = torch.randn(32, 256)
    with fa_advisor.record() as recording, torch.no_grad():
        head(body(x))
    assert recording.report.memory.categories["input"] == x.nbytes


def test_parameters_that_no_module_holds() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    with fa_advisor.record() as recording:
        for _ in range(2):
            (torch.randn(8, 64) @ weight).square().mean().backward()
            optimizer.step()
    categories = recording.report.memory.categories
    assert categories["parameter"] == categories["gradient"] == weight.nbytes
    assert 0 <= categories["optimizer_state"] - 2 * weight.nbytes <= 4  # the step count


def test_silu_backward_runs_whole() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    names: list[str] = []
    with fa_advisor.record() as recording:
        recording._watch.stream._sink = lambda events: names.extend(
            event[1].name for event in events if event[0] == 0
        )
        nn.functional.silu(x).sum().backward()
    assert "silu_backward" in names
    assert "sigmoid" not in names


# What is waited for


def test_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fa_arrives").mkdir()
    (tmp_path / "fa_arrives" / "__init__.py").write_text("from fa_arrives import part\nx = 1\n")
    (tmp_path / "fa_arrives" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    seen: list[int] = []
    Arrival("fa_arrives", lambda: seen.append(sys.modules["fa_arrives"].x))
    assert seen == []
    importlib.import_module("fa_arrives")
    assert seen == [1]
    assert sys.meta_path == before
    Arrival("fa_arrives", lambda: seen.append(2))
    assert seen == [1, 2]
    for name in ("fa_arrives", "fa_arrives.part"):
        sys.modules.pop(name)


def test_the_script_doesnt_notice_that_peaks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator of one device that counts as CUDA's does."""
    now, peak = [0], [0]

    def stats(device: Any = None) -> dict[str, Any]:
        both = {"all": {"current": now[0], "peak": peak[0]}}
        return {"allocated_bytes": both, "reserved_bytes": both}

    def reset(device: Any = None) -> None:
        peak[0] = now[0]

    def hold(nbytes: int) -> None:
        now[0] = nbytes
        peak[0] = max(peak[0], nbytes)

    memory = torch.cuda.memory
    for module in (memory, torch.cuda):
        monkeypatch.setattr(module, "memory_stats_as_nested_dict", stats)
        monkeypatch.setattr(module, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda *_, **__: 0)

    def scripts_own() -> int:
        return int(torch.cuda.max_memory_allocated())

    hold(100), hold(10)
    peaks = CudaPeaks(0)
    assert scripts_own() == 100
    hold(50), hold(20)
    assert peaks.take() == (50, 50)
    assert scripts_own() == 100
    hold(300), hold(20)
    memory.reset_peak_memory_stats()
    assert scripts_own() == 20
    hold(40), hold(30)
    assert scripts_own() == 40
    assert peaks.take() == (300, 300)
    assert scripts_own() == 40
