"""What must hold of the ledger for any model: random small ones, on the CPU and on fake tensors.

The op stream's raw events are replayed here in the plainest way, and the ledger must agree.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fa_advisor
import samples
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.peak import peak_of
from fa_advisor.probes.events import Code, Event
from fa_advisor.probes.watch import Watch
from fa_advisor.records import ATTENTION_CATEGORIES
from fa_advisor.report import Report

B, N, C, H = 2, 16, 24, 3
EXAMPLES = 25


# -- random models -----------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)


class Residual(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y *= 2
        y[:, 0] = 0
        return y.add_(x).relu_()


class Views(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(B, N, H, -1).permute(0, 2, 1, 3)
        return y.transpose(1, 2).reshape(B, N, C)[:, :, :].unsqueeze(0).squeeze(0)


class ChunkCat(Layer):
    def forward(self, x: Tensor) -> Tensor:
        one, two = self.linear(x).chunk(2, dim=1)
        parts = torch.stack([two, one]).unbind(0)
        return torch.cat(parts, dim=1).roll(1, 1)


class OutVariant(Layer):
    """`out=` into storages that are too small at first, and into one that fits."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            grown = y.new_empty(0)
            torch.mul(y, 0.5, out=grown)
            fits = torch.empty_like(grown)
            torch.add(grown, grown, out=fits)
        return y + fits


class Resized(Layer):
    """A storage that is emptied and filled again, as FSDP does."""

    def forward(self, x: Tensor) -> Tensor:
        held = self.linear.weight.new_zeros(64, C)
        size = held.untyped_storage().nbytes()
        held.untyped_storage().resize_(0)
        y = self.linear(x)
        held.untyped_storage().resize_(size)
        return y + held.zero_()[:N]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(C, C, 3, padding=1)
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.mT).mT)


class Dropout(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.25, self.training)


class RunningMean(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.linear(x - self.mean)


class Upcast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.double().softmax(-1).to(x.dtype))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, N, 3, H, -1).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).reshape(B, N, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -1e4)
        return F.dropout(scores.softmax(-1), 0.1, self.training) @ v


class Sdpa(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    Residual, InPlace, Views, ChunkCat, OutVariant, Resized, Convolution, Dropout, RunningMean,
    Upcast, Attention, Sdpa,
)  # fmt: skip


class Drawn(NamedTuple):
    """How a random model is built; hypothesis prints it."""

    layers: tuple[str, ...]
    dtype: torch.dtype
    tied: bool
    frozen: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        by_name = {make.__name__: make for make in LAYERS}
        model = nn.Sequential(*(by_name[name]() for name in self.layers)).to(self.dtype)
        weights = [layer for layer in model if hasattr(layer, "linear")]
        if self.tied and len(weights) > 1:
            weights[-1].linear.weight = weights[0].linear.weight
        if self.frozen:
            next(model.parameters()).requires_grad_(False)
        return model

    def inputs(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(B, N, C, dtype=self.dtype)


MODELS = st.builds(
    Drawn,
    layers=st.lists(
        st.sampled_from([m.__name__ for m in LAYERS]), min_size=1, max_size=5
    ).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    tied=st.booleans(),
    frozen=st.booleans(),
)  # fmt: skip


def trains(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """One training step that leaves the gradients where they are."""
    if optimizer is None:
        with torch.no_grad():
            model(x)
        return
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, shared ones once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# -- the plainest replay -----------------------------------------------------------------------


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


class Replay:
    """Bytes by storage number, after each event; the highest moment of the highest step."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.alive: dict[int, int] = {}
        self.peak = -1
        self.at_peak: dict[int, int] = {}
        for event in events:
            code = event[0]
            if code == Code.OP:
                for sid, _, _, nbytes in event[6]:
                    if nbytes >= 0:
                        self.put(sid, nbytes)
            elif code == Code.EXTERNAL:
                self.put(event[1], event[4])
            elif code == Code.RESIZE:
                self.put(event[1], event[2])
            elif code == Code.FREE or (code == Code.LABEL and event[2] == "host"):
                self.alive.pop(event[1], None)

    def put(self, sid: int, nbytes: int) -> None:
        self.alive[sid] = nbytes
        total = sum(map(rounded, self.alive.values()))
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.alive)


# -- properties --------------------------------------------------------------------------------


def check(report: Report, model: nn.Module) -> None:
    """What any report must satisfy, whatever ran."""
    memory = report.memory
    assert memory.unattributed_bytes == 0
    assert sum(memory.categories.values()) == memory.peak_allocated_bytes
    assert all(nbytes > 0 for nbytes in memory.categories.values())
    assert memory.categories["parameter"] == storage_bytes(model.parameters())
    assert memory.peak_allocated_bytes >= memory.categories["parameter"]
    assert memory.peak_reserved_bytes is not None
    assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    assert max(p.allocated_bytes for p in memory.timeline) == memory.peak_allocated_bytes
    assert all(0 <= p.attention_bytes <= p.allocated_bytes for p in memory.timeline)
    assert all(sum(p.categories.values()) == p.allocated_bytes for p in memory.timeline)
    top = max(memory.timeline, key=lambda p: p.allocated_bytes)
    assert top.categories == memory.categories
    without_slack = {k: v for k, v in memory.categories.items() if k != "allocator_slack"}
    by_module: Counter[str] = Counter()
    for module in report.modules:
        by_module.update(module.categories)
    assert dict(by_module) == without_slack
    by_row: Counter[str] = Counter()
    for row in report.ledger:
        by_row[row.category] += row.bytes
    assert dict(by_row) == without_slack
    attention = sum(memory.categories.get(name, 0) for name in ATTENTION_CATEGORIES)
    assert sum(s.attention_bytes_at_peak for s in report.sites) == attention
    without = report.advice.counterfactual_peak_bytes
    assert without is not None
    assert memory.peak_allocated_bytes - attention <= without + 512 * len(report.sites) * 8
    assert without <= memory.peak_allocated_bytes


@settings(max_examples=EXAMPLES)
@given(
    drawn=MODELS,
    mode=st.sampled_from(["infer", "train"]),
    optimizer=st.sampled_from(["adamw", "sgd", "none"]),
)
def test_profile_on_fake_tensors_adds_up(drawn: Drawn, mode: Any, optimizer: Any) -> None:
    model = drawn.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if not trains(model):
        mode = "infer"
    report = fa_advisor.profile(model, drawn.inputs(), mode=mode, optimizer=optimizer)
    check(report, model)
    sites = sum(name in ("Attention", "Sdpa") for name in drawn.layers)
    assert len(report.sites) == sites
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@settings(max_examples=EXAMPLES)
@given(drawn=MODELS, train=st.booleans(), steps=st.integers(1, 3))
def test_the_ledger_agrees_with_a_plain_replay(drawn: Drawn, train: bool, steps: int) -> None:
    model, x = drawn.model(), drawn.inputs()
    train = train and trains(model)
    optimizer = torch.optim.AdamW(model.parameters()) if train else None
    events: list[Event] = []
    ledger = Ledger(modelled=False)

    def sink(batch: list[Event]) -> None:
        events.extend(batch)
        ledger.feed(batch)

    with Watch(sink, samples.device()) as watch:
        watch.add_model(model)
        for _ in range(steps):
            step(model, x, optimizer)
    ledger.end_step()
    replay = Replay(events)
    best = ledger.best
    assert best is not None
    assert best.peak_bytes == replay.peak
    peak = peak_of(best)
    assert peak.bytes == sum(peak.categories.values()) == replay.peak
    assert {h.storage.sid: h.nbytes for h in peak.held} == {
        sid: nbytes for sid, nbytes in replay.at_peak.items() if nbytes
    }
    # What is left is the model, the input, and what training left behind.
    left: Counter[str] = Counter()
    for sid, nbytes in replay.alive.items():
        storage = ledger.storage(sid)
        assert storage is not None and storage.nbytes == nbytes
        left[storage.category()] += nbytes
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    states = [
        value
        for state in (optimizer.state.values() if optimizer else ())
        for name, value in state.items()
        if name != "step"
    ]
    assert left["parameter"] == storage_bytes(model.parameters())
    assert left["gradient"] == storage_bytes(gradients)
    assert left["optimizer_state"] == storage_bytes(states)
    assert left["buffer"] == storage_bytes(model.buffers())
    assert left["input"] == storage_bytes([x])
    assert set(left) <= {"parameter", "gradient", "optimizer_state", "buffer", "input"}


@settings(max_examples=EXAMPLES)
@given(drawn=MODELS, train=st.booleans())
def test_recording_changes_nothing_that_it_records(drawn: Drawn, train: bool) -> None:
    """Losses, gradients, weights and the generator's state are what they are without it."""
    x = drawn.inputs()
    outcomes = []
    for recorded in (False, True):
        model = drawn.model()
        train = train and trains(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if train else None
        torch.manual_seed(2)
        if recorded:
            with fa_advisor.record(model, optimizer) as recording:
                step(model, x, optimizer)
            check(recording.report, model)
        else:
            step(model, x, optimizer)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        outcomes.append([*model.state_dict().values(), *gradients, torch.get_rng_state()])
    plain, recorded_values = outcomes
    assert len(plain) == len(recorded_values)
    for one, other in zip(plain, recorded_values, strict=True):
        assert torch.equal(one, other)


def from_numpy(t: Tensor) -> Tensor:
    """A storage that is made where no mode sees it."""
    return torch.from_numpy(np.ones(t.numel() + 1, dtype=np.float32))


def resized_storage(t: Tensor, nbytes: int) -> Tensor:
    t.untyped_storage().resize_(nbytes)
    return t


def pointed_elsewhere(t: Tensor) -> Tensor:
    t.data = torch.zeros(t.numel() + 3)
    return t


# Each takes a tensor of one dimension, and returns one that is kept.
POOL_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda t: torch.zeros(t.numel() + 1),
    "slice": lambda t: t[1:],
    "view": lambda t: t.view(1, -1)[0],
    "detach": lambda t: t.detach(),
    "add": lambda t: t + 1,
    "add_": lambda t: t.add_(1),
    "clone": lambda t: t.clone(),
    "double": lambda t: t.double().float(),
    "cat": lambda t: torch.cat([t, t]),
    "chunks": lambda t: torch.cat(t.split(2)) if t.numel() else t,
    "grow": lambda t: t.clone().resize_(2 * t.numel() + 4),
    "shrink": lambda t: t.clone().resize_(0),
    "out": lambda t: torch.add(t, 1, out=torch.empty(0)),
    "emptied": lambda t: resized_storage(t.clone(), 0).detach(),
    "refilled": lambda t: resized_storage(resized_storage(torch.zeros(t.numel()), 0), 64),
    "set": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "data": lambda t: pointed_elsewhere(t.clone()),
    "numpy": from_numpy,
    "copy": copy.deepcopy,
}


@settings(max_examples=EXAMPLES)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(sorted(POOL_OPS)), st.integers(0, 99), st.booleans()), max_size=20
    )
)
def test_what_is_alive_is_what_the_tensors_hold(program: list[tuple[str, int, bool]]) -> None:
    """After every operation, on a pool of tensors that are added to and let go."""
    ledger = Ledger(modelled=False)
    events: list[Event] = []

    def sink(batch: list[Event]) -> None:
        events.extend(batch)
        ledger.feed(batch)

    with Watch(sink, samples.device()) as watch:
        pool = [torch.zeros(5)]
        for name, index, let_go in program:
            source = pool[index % len(pool)]
            if source.untyped_storage().nbytes() < source.numel() * 4:
                source = torch.zeros(3)  # emptied: nothing to compute with
            pool.append(POOL_OPS[name](source))
            del source
            if let_go:
                del pool[index % len(pool)]
            pool = pool or [torch.zeros(5)]
            for t in pool:
                watch.stream.sid(t)  # what no operator has seen yet
            watch.stream.flush()
            sizes = {watch.stream.sid(t): t.untyped_storage().nbytes() for t in pool}
            assert {k: v for k, v in Replay(events).alive.items() if v} == {
                k: v for k, v in sizes.items() if v
            }
            assert all(ledger.storage(k).nbytes == v for k, v in sizes.items())  # type: ignore[union-attr]


@pytest.mark.parametrize("layer", [m.__name__ for m in LAYERS])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_fake_and_cpu_agree(layer: str, mode: Any) -> None:
    """The same ledger where the device's behaviour is the same.

    CUDA's dropout keeps bytes where the CPU's keeps floats, its softmax's backward takes a tensor
    more, and SDPA has other backends.
    """
    if layer in ("Sdpa",) or (mode == "train" and layer in ("Dropout", "Attention", "Upcast")):
        pytest.skip("the devices differ here")
    drawn = Drawn((layer, layer), torch.float32, False, False)
    fake = fa_advisor.profile(drawn.model(), drawn.inputs(), mode=mode, optimizer="none")
    model, x = drawn.model(), drawn.inputs()
    model.train(mode == "train")
    with fa_advisor.record(model) as recording:
        for _ in range(2):
            if mode == "train":
                model(x).mean().backward()
                model.zero_grad()
            else:
                with torch.no_grad():
                    model(x)
    real = recording.report
    ours = {
        k: v for k, v in fake.memory.categories.items() if k not in ("workspace", "allocator_slack")
    }
    theirs = {k: v for k, v in real.memory.categories.items() if k != "allocator_slack"}
    assert ours == theirs


def test_out_into_a_small_tensor_of_the_users() -> None:
    """Small tensors are real among fake ones; `out=` gives one a new shape all the same."""

    class Grows(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                out = torch.empty(0)
                torch.mul(self.linear(x), 2, out=out)
            assert out.shape == x.shape
            return out + x

    check(fa_advisor.profile(Grows(), torch.randn(B, N, C), mode="infer"), Grows())
