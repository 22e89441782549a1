"""The op stream joined with an allocator's trace.

There is no GPU here: the stream watches CPU tensors, and an allocator of the test's own writes the
trace that CUDA's would have, hidden allocations included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fa_advisor.attribution.failure import fallen, last_failure
from fa_advisor.attribution.frames import user_line
from fa_advisor.attribution.join import Joiner
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.peak import from_before, peak_of, rows
from fa_advisor.attribution.replay import Trace, replay
from fa_advisor.attribution.steps import StepLog
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.events import Code
from fa_advisor.probes.opstream import OpStream
from fa_advisor.probes.watch import Watch

WORKSPACE, LT_WORKSPACE, INNER = 8_519_680, 1 << 20, 70_000
B, N, C = 2, 64, 32
PRODUCT = 4 * B * N * N  # that CUDA makes for the kernel of softmax's backward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        y = weights @ v
        return self.out(y + x).sum()


class Allocator:
    """Gives each storage a segment of its own; matrix products take a workspace, once, and inner
    memory each time."""

    def __init__(self, stream: OpStream) -> None:
        self.stream = stream
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, int]] = {}
        self.before: list[dict[str, Any]] | None = []
        self.end = 1 << 40
        self.addresses: dict[int, int] = {}
        self.has_workspace = False
        self.stamp = ""

    def segments(self) -> list[dict[str, Any]]:
        return [
            {
                "address": address,
                "total_size": size,
                "blocks": [
                    {"address": address, "size": size, "requested_size": asked,
                     "state": "active_allocated"}
                ],
            }
            for address, (asked, size) in self.live.items()
        ]  # fmt: skip

    def cut(self) -> Trace:
        segments = self.segments()
        trace = Trace(self.events, segments, {}, self.before)
        self.events, self.before = [], segments
        return trace

    def allocate(self, nbytes: int) -> int:
        address, size = self.end, -(-nbytes // 512) * 512
        self.end += size + (1 << 20)
        self.live[address] = (nbytes, size)
        self._write("segment_alloc", address, size)
        self._write("alloc", address, nbytes)
        return address

    def free(self, address: int) -> None:
        nbytes, size = self.live.pop(address)
        self._write("free_requested", address, nbytes)
        self._write("free_completed", address, nbytes)
        self._write("segment_free", address, size)

    def _write(self, action: str, address: int, size: int) -> None:
        self.events.append(
            {"action": action, "addr": address, "size": size, "user_metadata": self.stamp}
        )

    # -- in the stream's stead --------------------------------------------------------------

    def stamped(self, text: str) -> None:
        self.stamp = text
        if text.partition(" ")[2] in ("mm", "bmm", "addmm"):
            if not self.has_workspace:
                self.allocate(WORKSPACE)
                self.has_workspace = True
            self.free(self.allocate(INNER))
        if text.endswith(" _softmax_backward_data"):
            self.free(self.allocate(PRODUCT))

    def locate(self, storage: Any, sid: int) -> None:
        # The stream numbers an output when its operator has run: the stamp is gone by then.
        self.stamp = f"{self.stream.number} op" if self.stream.number else ""
        if storage.nbytes():
            self.addresses[sid] = self.allocate(storage.nbytes())
        self.stamp = ""
        address = self.addresses.get(sid, 0)
        self.stream.emit((Code.BLOCK, sid, address, self.stream.number))

    def died(self, sid: int) -> None:
        address = self.addresses.get(sid)
        if address in self.live:
            self.free(address)


class Bench:
    """A model in training under the watch, with the test's allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = Ledger(modelled=False, closes=False)
        self.joiner = Joiner()
        self.watch = Watch(
            self.ledger.feed,
            advise_for("h200")[0],
            device_type="cpu",
            stamp=lambda text: self.allocator.stamped(text),
        )
        self.watch.on_step = lambda: None
        self.allocator = Allocator(self.watch.stream)
        died = OpStream.died

        def also_freed(stream: OpStream, ref: Any) -> None:
            died(stream, ref)
            self.allocator.died(ref.sid)

        monkeypatch.setattr(
            OpStream, "_locate", lambda stream, storage, sid: self.allocator.locate(storage, sid)
        )
        monkeypatch.setattr(OpStream, "died", also_freed)
        torch.manual_seed(0)
        self.model, self.x = Model(), torch.randn(B, N, C)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.model(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take(self) -> tuple[StepLog, Trace]:
        self.watch.stream.flush()
        return self.ledger.take_step(), self.allocator.cut()

    def join(self) -> tuple[StepLog, StepLog]:
        seen, trace = self.take()
        joined, replayed = self.joiner.join(seen, trace)
        assert replayed.strays == 0
        return seen, joined


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    with made.watch:
        made.watch.add_model(made.model)
        made.watch.add_inputs((made.x,))
        yield made


def bytes_of(step: StepLog) -> Counter[str]:
    return Counter(peak_of(step).categories)


def test_every_byte_of_the_trace_has_an_owner(bench: Bench) -> None:
    bench.step()
    seen, first = bench.join()
    bench.step()
    _, second = bench.join()
    for joined in (first, second):
        peak = peak_of(joined)
        assert sum(peak.categories.values()) == peak.bytes == joined.peak_bytes
    # The first peak is where the stream saw it, plus what only the allocator knows.
    hidden = bytes_of(first) - bytes_of(seen)
    assert set(hidden) <= {"workspace", "temporary", "allocator_slack"}
    assert bytes_of(first)["workspace"] == WORKSPACE
    weights = sum(p.nbytes for p in bench.model.parameters())
    assert bytes_of(second)["parameter"] == bytes_of(second)["optimizer_state"] == weights


def test_a_workspace_outlives_its_operator_and_inner_memory_does_not(bench: Bench) -> None:
    bench.step()
    _, joined = bench.join()
    hidden = {e.storage.nbytes: e.storage for e in joined.entries if e.storage.sid < 0}
    assert set(hidden) == {WORKSPACE, INNER, PRODUCT}
    assert hidden[WORKSPACE].category() == "workspace" and hidden[WORKSPACE].op == "addmm"
    assert hidden[WORKSPACE].scope.fqn == "qkv"
    assert hidden[INNER].category() == "temporary"


def test_who_owns_hidden_memory_is_remembered_over_steps(bench: Bench) -> None:
    bench.step()
    bench.join()
    bench.step()
    _, second = bench.join()
    workspace = [h.storage for h in second.baseline if h.storage.label == "workspace"]
    assert [s.op for s in workspace] == ["addmm"]
    assert not any(h.storage.unseen for h in second.baseline)


def test_the_product_inside_softmaxs_backward_is_attentions(bench: Bench) -> None:
    bench.step()
    _, joined = bench.join()
    taken = {id(e.storage): e.storage for e in joined.entries}.values()
    hidden = [s for s in taken if s.op == "_softmax_backward_data" and s.sid < 0]
    assert [s.nbytes for s in hidden] == [PRODUCT]
    assert all(s.category() == "attention_grad" and s.attention_call() for s in hidden)


def test_backward_has_the_forwards_lines(bench: Bench) -> None:
    bench.step()
    _, joined = bench.join()
    made = [row for row in rows(peak_of(joined).held) if row.op not in ("", "ones_like")]
    assert made and all(row.source and row.source.startswith("test_join.py:") for row in made)


def test_memory_that_nobody_can_be_named_for_is_unattributed(bench: Bench) -> None:
    bench.allocator.allocate(1000)
    bench.model(bench.x)
    _, joined = bench.join()
    assert joined.peak_bytes - peak_of(joined).bytes == 1024


def test_a_workspace_from_before_the_recording_is_known_by_its_size(bench: Bench) -> None:
    bench.joiner.workspaces = frozenset((WORKSPACE, LT_WORKSPACE))
    bench.allocator.allocate(LT_WORKSPACE)
    bench.allocator.allocate(WORKSPACE)
    bench.take()
    bench.model(bench.x)
    _, joined = bench.join()
    assert bytes_of(joined)["workspace"] == 2 * WORKSPACE + LT_WORKSPACE
    assert from_before(joined) == 0


def test_what_was_there_before_and_nobody_shows_is_told_apart(bench: Bench) -> None:
    bench.allocator.allocate(5000)
    bench.take()
    bench.allocator.allocate(1000)
    bench.model(bench.x)
    _, joined = bench.join()
    assert joined.peak_bytes - peak_of(joined).bytes == 5120 + 1024
    assert from_before(joined) == 5120
    _, later = bench.join()  # who holds it stays known
    assert from_before(later) == 5120


def test_a_failure_is_cut_off_at_the_request(bench: Bench) -> None:
    bench.step()
    bench.join()
    loss = bench.model(bench.x)
    stream = bench.watch.stream
    number = stream.number
    stream.flush()
    bench.allocator.events.append(
        {"action": "oom", "size": 4 * B * N * N, "device_free": 7, "user_metadata": f"{number} x"}
    )
    del loss
    seen, trace = bench.take()
    at = last_failure(trace)
    assert at is not None
    joined, replayed = bench.joiner.join(seen, trace)
    found = fallen(joined, seen, replayed, trace, at, ())
    assert found.device_free == 7 and found.requested == 4 * B * N * N
    peak = peak_of(found.step)
    assert peak.bytes == found.step.peak_bytes == found.state.allocated
    # P is alive for a backward that never came; its call was confirmed by the product with V.
    assert peak.categories["attention_prob"] == 4 * B * N * N
    assert peak.categories["activation"] > 0
    assert found.op == seen.runs[number].op.name


# -- the parts ------------------------------------------------------------------------------


def test_the_engine_adds_in_place_as_it_does_unwatched() -> None:
    """Three branches meet: without a mode two sums are in place, and under the stream's too."""
    events: list[Any] = []
    watch = Watch(events.extend, advise_for("h200")[0], device_type="cpu", stamp=lambda text: None)
    x = torch.randn(8, 8, requires_grad=True)
    with watch:
        y = x * 2
        (y.sin() + y.cos() + y.exp()).sum().backward()
    sums = [e for e in events if e[0] == Code.OP and e[1].name == "add" and e[3] == 1]
    assert len(sums) == 2
    assert not any(nbytes >= 0 for e in sums for *_, nbytes in e[6])
    plain = torch.autograd.grad((lambda y: (y.sin() + y.cos() + y.exp()).sum())(x * 2), x)[0]
    assert torch.equal(plain, x.grad)  # type: ignore[arg-type]


def test_a_sum_that_somebody_else_holds_is_left_alone() -> None:
    held: list[Tensor] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            held.append(grads[0] * 1)
            mine = grads[0] * 3
            return mine + held[-1]

    watch = Watch(lambda _: None, advise_for("h200")[0], device_type="cpu", stamp=lambda text: None)
    x = torch.ones(4, requires_grad=True)
    with watch:
        y = x * 1
        (Keep.apply(y) + y + Keep.apply(y)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.tolist() == [9.0] * 4
    assert all(h.tolist() == [1.0] * 4 for h in held)


@pytest.mark.parametrize(
    ("file", "mine"),
    [
        ("/home/me/train.py", True),
        ("/opt/torch/venv/lib/python3.12/site-packages/transformers/models/m.py", True),
        ("/opt/torch/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("C:\\py\\Lib\\site-packages\\torch\\_ops.py", False),
        ("/src/pytorch/torch/_tensor.py", False),
        ("/tmp/torchinductor_me/ab/cabc.py", False),
        ("<frozen runpy>", False),
        ("??", False),
        ("CUDACachingAllocator.cpp", False),
    ],
)
def test_whose_line_it_is(file: str, mine: bool) -> None:
    found = user_line([{"filename": file, "line": 3, "name": "f"}])
    assert found == ((file, 3) if mine else None)


def test_replaying_the_bench_agrees_with_it(bench: Bench) -> None:
    bench.step()
    _, trace = bench.take()
    replayed = replay(trace)
    assert replayed.start + sum(c.delta for c in replayed.changes) == sum(
        size for _, size in bench.allocator.live.values()
    )
