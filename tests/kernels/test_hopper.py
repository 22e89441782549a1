"""Hopper's kernels without a Hopper GPU: they compile for one, fit, and are chosen as told.

What they compute is tested where one is: tests/gpu.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType, SimpleNamespace
from typing import IO, Any

import pytest
import torch

from fa_advisor.budgets.given import given_on
from fa_advisor.budgets.table import Problem
from fa_advisor.kernels import kinds
from fa_advisor.kernels import launch as launches
from fa_advisor.kernels.fp8 import E4M3, Descales
from fa_advisor.kernels.hopper import dealing, fp8_plan, plan
from fa_advisor.kernels.hopper.tiles import fp8_tiles_of
from fa_advisor.kernels.kinds import Inputs, Options
from fa_advisor.kernels.launcher import Launch
from fa_advisor.probes.gpus import lookup

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

COMPILER = Path(__file__).with_name("compile_hopper.py")
LIMIT = 227 * 1024
# A few values of a thread kept in L1, in those of `ahead.CALLS` that have a mask: 96 B at most, 152
# under Triton 3.9. Windows on packed sequences with a softcap, all at once, take up to 200 there.
MOST_STACK_BYTES = 160
TRITONS = Path(__file__).parents[2] / ".triton"


Row = dict[str, Any]


class Compiler:
    """What a kernel, its head dims, dtype and call need, under one Triton.

    To start a process takes as long as a compilation, so one does all, until it dies of one. Each
    configuration is compiled once.
    """

    def __init__(self, triton: Path | None = None) -> None:
        self._environment = {**os.environ, "TRITON_INTERPRET": "0"}
        if path := triton or os.environ.get("FA_ADVISOR_TRITON_PATH"):
            self._environment["PYTHONPATH"] = str(path)
        self._running: tuple[subprocess.Popen[str], IO[str]] | None = None
        self._rows: dict[tuple[str | int, ...], Row] = {}

    def _start(self) -> tuple[subprocess.Popen[str], IO[str]]:
        said = TemporaryFile("w+")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, str(COMPILER)], env=self._environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
        )  # fmt: skip
        return process, said

    def __call__(self, *config: str | int) -> Row:
        if config not in self._rows:
            process, _ = self._running = self._running or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                print(json.dumps(config), file=process.stdin, flush=True)
                answered, row = json.loads(process.stdout.readline())
                assert answered == list(config), "an answer to another question"
            except (OSError, ValueError, AssertionError):
                self.end()
                raise
            self._rows[config] = row
        return self._rows[config]

    def end(self) -> None:
        """Let the process end; raises what it said if it didn't end well."""
        if self._running is not None:
            (process, said), self._running = self._running, None
            process.communicate()
            said.seek(0)
            assert process.returncode == 0, f"{process.returncode}: {said.read()[-3000:]}"


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.end()


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "call"),
    [
        (64, 64, "fp16", "plain"),
        (64, 64, "bf16", "causal"),
        (96, 96, "bf16", "window"),
        (64, 64, "bf16", "left, bottom-right"),
        (128, 128, "bf16", "causal"),
        (128, 128, "bf16", "packed"),
        (128, 128, "fp16", "padding"),
        (192, 128, "bf16", "causal"),
        (128, 64, "bf16", "ragged"),
        (256, 256, "bf16", "softcap, sinks"),
    ],
)
def test_the_forward_compiles_for_hopper(
    compiled: Compiler, dim: int, dim_v: int, dtype: str, call: str
) -> None:
    row = compiled("forward", dim, dim_v, dtype, call)
    assert row["smem_bytes"] <= LIMIT
    assert row["stack_bytes"] <= MOST_STACK_BYTES


@pytest.mark.parametrize(
    ("dim", "dim_v", "call"),
    [
        (128, 128, "plain"),
        (128, 128, "causal"),
        (64, 64, "packed"),
        (128, 64, "ragged"),
        (96, 128, "window"),
        (128, 128, "softcap, sinks"),
    ],
)
def test_the_forward_on_eight_bits_compiles_for_hopper(
    compiled: Compiler, dim: int, dim_v: int, call: str
) -> None:
    row = compiled("fp8", dim, dim_v, "fp8e4nv", call)
    assert row["smem_bytes"] <= LIMIT
    assert row["stack_bytes"] <= (MOST_STACK_BYTES if call != "plain" else 0)


@pytest.mark.parametrize("kernel", ["backward", "queries"])
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "call"),
    [
        (256, 256, "bf16", "plain"),
        (256, 256, "fp16", "causal"),
        (192, 128, "bf16", "causal"),
        (256, 256, "bf16", "packed"),
        (192, 192, "bf16", "window"),
        (256, 256, "bf16", "softcap, sinks"),
    ],
)
def test_the_backward_of_wide_heads_compiles_for_hopper(
    compiled: Compiler, kernel: str, dim: int, dim_v: int, dtype: str, call: str
) -> None:
    row = compiled(kernel, dim, dim_v, dtype, call)
    assert row["smem_bytes"] <= LIMIT
    assert row["stack_bytes"] <= MOST_STACK_BYTES


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_every_kernel_compiles_under_other_tritons(version: str) -> None:
    """Gluon's names change between them; 3.7.1 is the one that everything else runs under."""
    if not (TRITONS / version).is_dir():
        pytest.skip(f"make .triton/{version} puts it there")
    configs = [
        ("forward", 128, 128, "bf16", "packed"),
        ("forward", 64, 64, "fp16", "causal"),
        ("fp8", 128, 128, "fp8e4nv", "causal"),
        ("backward", 128, 128, "bf16", "causal"),
        ("backward", 256, 256, "bf16", "causal"),
        ("queries", 256, 256, "bf16", "causal"),
    ]
    other = Compiler(TRITONS / version)
    for config in configs:
        row = other(*config)
        assert row["smem_bytes"] <= LIMIT, config
        assert row["stack_bytes"] <= MOST_STACK_BYTES, config
    other.end()


@pytest.mark.parametrize("call", ["plain", "causal", "ragged"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 128), (128, 128)])
def test_the_backward_compiles_for_hopper(
    compiled: Compiler, dims: tuple[int, int], call: str
) -> None:
    row = compiled("backward", *dims, "bf16", call)
    assert row["smem_bytes"] <= LIMIT
    assert row["stack_bytes"] <= MOST_STACK_BYTES


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [(64, 64, "bf16"), (128, 128, "bf16"), (192, 128, "bf16"), (256, 256, "fp16")],
)
def test_the_budget_counts_the_buffers_that_are_compiled(
    compiled: Compiler, dim: int, dim_v: int, dtype: str
) -> None:
    problem = Problem(head_dim=dim, value_head_dim=dim_v, dtype=dtype, is_causal=True)
    names = {
        "hopper forward": "forward", "hopper backward": "backward", "hopper keys": "backward",
        "hopper queries": "queries",
    }  # fmt: skip
    for one in given_on(problem, lookup("h100"), ("fwd", "bwd")):
        row = compiled(names[one.kernel], dim, dim_v, dtype, "causal")
        counted = sum(one.in_smem.values())
        assert counted <= row["smem_bytes"] <= 1.01 * counted


def query(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def kind(q: torch.Tensor, k: torch.Tensor, **options: Any) -> tuple[kinds.Kind, Options]:
    plain: dict[str, Any] = {
        "scale": 1.0, "is_causal": False, "bottom_right": False, "window_left": None,
        "window_right": None, "softcap": 0.0, "dropout_p": 0.0, "max_seqlen_q": q.shape[2],
        "max_seqlen_k": k.shape[2],
    }  # fmt: skip
    tensors = {name: options.pop(name, None) for name in Inputs._fields[3:]}
    given = Options(**{**plain, **options})
    return kinds.kind_of(Inputs(q, k, k, **tensors), given), given


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with tensor maps."""
    monkeypatch.setattr(plan, "by_descriptor", lambda *_: True)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"is_causal": True, "softcap": 3.0, "window_left": 4}, None),
        ({"sinks": torch.empty(2)}, None),
        ({"bias": torch.empty(1, 1, 1, 700, dtype=torch.bool)}, None),
        ({"bias": torch.empty(1, 1, 700, 700, dtype=torch.bool)}, "each query"),
        ({"bias": torch.empty(1, 1, 1, 700)}, "additive"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"alibi_slopes": torch.empty(2)}, "ALiBi"),
    ],
)
def test_what_the_forward_takes(options: dict[str, Any], reason: str | None) -> None:
    q = query(1, 2, 700, 64)
    told = plan.refusal(*kind(q, q, **options), q, q, q)
    assert (told is None) if reason is None else (told is not None and reason in told)


@pytest.mark.parametrize(
    ("dim", "dim_v", "options", "reason"),
    [
        (64, 64, {}, None),
        (128, 72, {"is_causal": True, "softcap": 3.0, "sinks": torch.empty(2)}, None),
        (128, 128, {"window_left": 4, "max_seqlen_q": 1}, None),
        (128, 128, {"max_seqlen_k": 0}, "nothing"),
        (144, 128, {}, "registers"),
        (64, 192, {}, "registers"),
        (64, 36, {}, "16 bytes"),
        (64, 64, {"bias": torch.empty(1, 1, 1, 700, dtype=torch.bool)}, "masks"),
        (64, 64, {"dropout_p": 0.1}, "dropout"),
        (64, 64, {"alibi_slopes": torch.empty(2)}, "ALiBi"),
    ],
)
def test_what_the_forward_on_eight_bits_takes(
    dim: int, dim_v: int, options: dict[str, Any], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fp8_plan, "by_descriptor", lambda *_: True)
    q, v = query(1, 2, 700, dim, dtype=E4M3), query(1, 2, 700, dim_v, dtype=E4M3)
    of, o = kind(q, q, **options)
    told = fp8_plan.refusal(of._replace(dim_v=dim_v), o, q, q, v)
    assert (told is None) if reason is None else (told is not None and reason in told)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("q", "k"),
    [
        (query(1, 2, 700, 64, dtype=torch.float32), query(1, 2, 700, 64, dtype=torch.float32)),
        (query(1, 2, 1, 64), query(1, 2, 700, 64)),
        (query(1, 2, 700, 64), query(1, 2, 300, 64)),
        (query(1, 2, 700, 16), query(1, 2, 700, 16)),
        (query(1, 2, 700, 44), query(1, 2, 700, 44)),
    ],
)
def test_what_the_forward_leaves(q: torch.Tensor, k: torch.Tensor) -> None:
    assert plan.refusal(*kind(q, k), q, k, k) is not None


@pytest.mark.parametrize("dim", range(33, 257))
def test_the_tiles_hold_every_head_dim(dim: int) -> None:
    for other in (33, 64, 96, 128, 192, 256):
        cut = plan.tiles_of(dim, other)
        assert cut.part * cut.parts >= dim
        assert cut.block_dv >= other
        rows = plan.ROWS_OF_A_CONSUMER * cut.consumers
        wide = cut.part * cut.parts
        smem = rows * wide + cut.stages * cut.block_n * (wide + cut.block_dv)
        smem += 0 if cut.shared_out else rows * cut.block_dv
        assert 2 * smem + 1024 <= LIMIT


@pytest.mark.parametrize("dim", range(16, 129, 16))
def test_the_tiles_of_eight_bits_hold_every_head_dim(dim: int) -> None:
    for other in (8, 64, 72, 128):
        cut = fp8_tiles_of(dim, other)
        assert cut.part >= dim and cut.block_dv >= other
        rows = plan.ROWS_OF_A_CONSUMER * cut.consumers
        smem = rows * (cut.part + 2 * cut.block_dv)
        assert smem + cut.stages * cut.block_n * (cut.part + cut.block_dv) + 1024 <= LIMIT


def test_a_packed_sequence_is_bounded_by_its_own_end() -> None:
    """Every row's address, and what is out of bounds, by the arithmetic of tensor maps."""
    packed = torch.empty(1000, 3, 64, dtype=torch.bfloat16)
    for t in (packed, packed[:, :1], packed.transpose(0, 1).contiguous().transpose(0, 1)):
        shape, strides, *_ = plan.describe(t, True, 64, 64)
        for first, length in ((0, 1000), (0, 1), (17, 400), (999, 1), (300, 0)):
            for row in (0, 1, 63, length - 1, length, length + 63):
                if row < 0:
                    continue
                at = (plan.FAR, first + length, 0, plan.FAR - length + row, 0)
                inside = all(0 <= c < n for c, n in zip(at, shape, strict=True))
                assert inside == (row < length)
                offset = sum(c * s * 2 for c, s in zip(at, strides, strict=True)) % 2**64
                if inside:
                    assert offset == (first + row) * t.stride(0) * 2


def test_a_schedule_deals_out_every_piece_once_and_evenly() -> None:
    draw = random.Random(0)
    for _ in range(50):
        pieces, heads = draw.randint(1, 40), draw.randint(1, 40)
        side_by_side, grid = draw.randint(1, heads), draw.randint(1, min(132, pieces * heads))
        costs = [draw.choice((0.7, 1.7, 5.7, 20.7)) for _ in range(pieces)]
        together = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
        words = dealing.schedule_of(costs, heads, side_by_side, grid, together)
        offsets, dealt = words[: grid + 1], words[grid + 1 : -1]
        assert sorted(dealt) == list(range(pieces * heads))
        assert offsets[0] == grid + 1 and offsets[-1] == len(words) - 1
        loads = [
            sum(costs[piece % pieces] for piece in words[begin:end])
            for begin, end in itertools.pairwise(offsets)
        ]
        assert max(loads) <= sum(loads) / grid + max(costs)


@pytest.mark.parametrize(("causal", "blocks_a_head"), [(False, None), (True, 6)])
def test_without_a_schedule_only_uneven_rows_leave_the_persistent_grid(
    causal: bool, blocks_a_head: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of rows, if it isn't full, is no reason to."""
    monkeypatch.setattr(dealing, "processors", lambda _: 132)
    q = query(8, 16, 700, 128)
    k, o = kind(q, q, is_causal=causal)
    for capturing, most in ((True, 2**16), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        monkeypatch.setattr(dealing, "_MOST_SCHEDULED", most)
        pieces = dealing.deal(k, o, plan.tiles_of(128, 128), q)
        assert pieces.schedule is None
        assert pieces.grid == (blocks_a_head * 8 * 16 if blocks_a_head else 132)


def test_a_kernel_that_does_not_compile_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

    class Broken:
        def ready(self, device: int, pointers: tuple[Any, ...]) -> None:
            raise AttributeError("module 'tma' has no attribute 'store'")

    plan._say_once.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert not plan.compiles(Broken(), torch.device("cuda", 0), ())  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "no attribute 'store'" in record.message and "portable" in record.message


def seen_by_triton(number: int) -> tuple[bool, bool]:
    """For what it compiles a kernel anew, where it isn't told not to."""
    return number == 1, number % 16 == 0


class Launched:
    """In the place of `Launch.__call__`: what was launched, with which arguments."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.specialised: list[dict[str, Any]] = []

    def of(self, x: Inputs, o: Options) -> list[dict[str, Any]]:
        """What a call's forward and backward are compiled for."""
        self.specialised = []
        out, lse, _ = launches.forward(x, o)(x)
        launches.backward(x, o, out, None, out, lse, None, False)
        return self.specialised

    def note(self, launch: Any, pointers: tuple[Any, ...]) -> None:
        _, static = launch._geometry(launch._tile)
        names = launch._kernel.arg_names
        assert len(pointers) + len(static) == len(names), launch._name
        self.names.append(launch._name)
        given = dict(zip(names, (*pointers, *static), strict=True))
        self.arguments.append(given)
        self.specialised.append({
            p.name: value if p.is_constexpr or value is None else seen_by_triton(value)
            for p in launch._kernel.params
            if (value := given[p.name]) is None
            or (isinstance(value, int) and not p.do_not_specialize)
        })  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """As if there were a Hopper GPU on which nothing runs."""
    seen = Launched()

    def ready(launch: Any, _: Any, pointers: tuple[Any, ...]) -> bool:
        described = launch._descriptors and launch._descriptors(launch._tile)
        for position, description in (described or {}).items():
            made = launch._describe(pointers[position], *description)
            assert len(made.block_shape) == len(made.shape)
        seen.note(launch, pointers)
        return True

    for module in (plan, fp8_plan, launches):
        monkeypatch.setattr(module, "by_descriptor", lambda *_: True)
    monkeypatch.setattr(plan, "available", lambda _: True)
    monkeypatch.setattr(dealing, "processors", lambda _: 132)
    monkeypatch.setattr(plan, "compiles", ready)
    monkeypatch.setattr(launches, "_check_device", lambda _: None)
    monkeypatch.setattr(launches, "_on", lambda _: nullcontext())
    monkeypatch.setattr(launches, "_plans", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(Launch, "__call__", lambda self, _, *pointers: seen.note(self, pointers))
    return seen


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 96), (192, 128), (256, 256)])
def test_every_launch_has_the_arguments_of_its_kernel(
    launched: Launched, dim: int, dim_v: int, packed: bool, exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    heads, group = (1400, 4) if packed else (1, 4, 700), 2
    kv_heads = (1400, 2) if packed else (1, 2, 700)
    q, k, v = query(*heads, dim), query(*kv_heads, dim), query(*kv_heads, dim_v)
    cu = torch.tensor([0, 700, 1400], dtype=torch.int32) if packed else None
    sinks = torch.empty(4) if exact else None
    x = Inputs(q, k, v, None, sinks, None, cu, cu, None)
    o = Options(0.25, True, False, 300, None, 7.0, 0.0, 700, 700)
    out, lse, _ = launches.forward(x, o)(x)
    order = ["hopper_order"] if packed else []
    tried = ["hopper_forward", *order]
    assert launched.names == [*tried, *order, "hopper_forward"]
    launched.names.clear()
    up = torch.empty_like(lse)
    gradients = launches.backward(x, o, torch.empty_like(out), up, out, lse, None, False)
    if max(dim, dim_v) > 128:
        first = ["hopper_wide_keys", "hopper_wide_queries"]
        then = ["hopper_prepare", *first]
    else:
        first, then = ["hopper_backward"], ["hopper_prepare", "hopper_backward"]
        then = ["delta", "queries", *then] if exact else [*then, "hopper_finish"]
    assert launched.names == first + then
    for given in (a for a in launched.arguments if "EVEN" in a or "EVEN_K" in a):
        assert (given["len_q"], given["len_k"], given["group"]) == (700, 700, group)
        assert (given["scale"], given["softcap"], given["left"]) == (0.25, 7.0, 300)
        assert given["VARLEN"] is packed
        assert given["HAS_LEFT"] and given["HAS_RIGHT"] and not given["BOTTOM_RIGHT"]
    for t, gradient in zip((q, k, v), gradients, strict=False):
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == (t.shape, t.dtype)


@pytest.mark.parametrize("kernels", ["hopper", "eight bits", "portable"])
def test_packed_sequences_of_other_lengths_are_no_other_kernels(
    launched: Launched, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose compilation would hold up a training step now and then, for seconds."""
    if kernels == "portable":
        monkeypatch.setattr(plan, "available", lambda _: False)
    eight_bits = kernels == "eight bits"
    found = []
    for batch, length in ((1, 576), (16, 2048), (1, 16640)):
        x = query(batch * length, 2, 64, dtype=E4M3 if eight_bits else torch.bfloat16)
        cu = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        inputs = Inputs(x, x, x, None, None, None, cu, cu, None)
        o = Options(0.25, True, False, None, None, 0.0, 0.0, length, length)
        if eight_bits:
            launched.specialised = []
            assert launches.forward_fp8(inputs, o, Descales(None, None, None)) is not None
            found.append(launched.specialised)
        else:
            found.append(launched.of(inputs, o))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_other_lengths_are_no_other_kernels(
    launched: Launched, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lengths decide is whether the last tile is full.

    And without a mask, on Hopper, whether the last block of rows is: then there is a schedule.
    """
    monkeypatch.setattr(plan, "available", lambda _: kernels == "hopper")
    found = []
    for length in (514, 777, 1000, 1008, 2041):
        x = query(2, 4, length, 64)
        inputs = Inputs(x, x, x, None, None, None, None, None, None)
        o = Options(0.25, True, False, None, None, 0.0, 0.0, length, length)
        found.append(launched.of(inputs, o))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("packed", [False, True])
def test_every_launch_on_eight_bits_has_the_arguments_of_its_kernel(
    launched: Launched, packed: bool
) -> None:
    rows, kv_rows = ((1400, 4), (1400, 2)) if packed else ((2, 4, 700), (2, 2, 700))
    q, k = (query(*shape, 96, dtype=E4M3) for shape in (rows, kv_rows))
    v = query(*kv_rows, 40, dtype=E4M3)
    cu = torch.tensor([0, 700, 1400], dtype=torch.int32) if packed else None
    x = Inputs(q, k, v, None, torch.empty(4), None, cu, cu, None)
    o = Options(0.25, True, True, 300, None, 7.0, 0.0, 700, 700)
    descales = Descales(torch.ones(4).expand(2, 4), None, torch.ones(2, 2))
    found = launches.forward_fp8(x, o, descales)
    assert found is not None
    assert (found[0].shape, found[0].dtype) == ((*q.shape[:-1], 40), torch.bfloat16)
    assert found[1].shape == ((4, 1400) if packed else (2, 4, 700))
    assert launched.names == ["hopper_transpose", "hopper_fp8_forward"] * 2
    turned, attended = launched.arguments[-2:]
    assert (turned["dim"], turned["WIDTH"], turned["BLOCK"]) == (40, 64, 128)
    assert (turned["len_k"], turned["heads"], turned["blocks"]) == (700, 2, 6)
    # 1400 rows are 10 whole tiles, and each sequence may have one more.
    slots = 12 * 128 if packed else 6 * 128
    assert attended["transposed"].shape == (1 if packed else 2, 2, 64, slots)
    assert (turned["out_d"], turned["out_h"]) == (slots, 64 * slots)
    assert (attended["stride_qb"], attended["stride_qh"]) == (0, 1)
    assert (attended["stride_kb"], attended["stride_kh"]) == (0, 0)
    assert (attended["stride_vb"], attended["stride_vh"]) == (2, 1)
    assert attended["k_descale"] is None
    assert (attended["scale"], attended["softcap"], attended["left"]) == (0.25, 7.0, 300)
    assert attended["HAS_LEFT"] and attended["HAS_RIGHT"] and attended["BOTTOM_RIGHT"]
    assert (attended["VARLEN"], attended["EVEN_K"]) == (packed, False)


def plainly(function: Any, program: int = 0) -> Any:
    """A Gluon function that only reckons with integers, as Python's.

    Its divisions round down here and towards nought there: the same for what isn't negative.
    """
    gl = SimpleNamespace(maximum=max, minimum=min, program_id=lambda _: program)
    bare = function.fn
    known = {"gl": gl}
    if "owned" in bare.__code__.co_names:
        known["owned"] = plainly(bare.__globals__["owned"], program)
    return FunctionType(bare.__code__, known)


class Masks:
    """Random lengths and limits, and which rows see which columns."""

    def __init__(self, draw: random.Random, block_n: int) -> None:
        lengths = (0, 1, 63, 64, 65, 127, 128, 129, 200, 256, 300, 384)
        self.len_q, self.len_k = draw.choice(lengths), draw.choice(lengths)
        self.has_left, self.has_right, self.bottom_right = (draw.random() < 0.5 for _ in range(3))
        limits = (-1, 0, 1, 5, 63, 64, 100, 128, 250, 400, 2**30)
        self.left = draw.choice(limits) if self.has_left else 0
        self.right = draw.choice(limits) if self.has_right else 0
        self.even = self.len_k > 0 and self.len_k % block_n == 0 and draw.random() < 0.7
        self.hides = self.has_left or self.has_right or not self.even

    def seen(self, rows: range, columns: range) -> torch.Tensor:
        """[rows, columns]; what is past the keys' end isn't."""
        r, c = torch.tensor(rows)[:, None], torch.tensor(columns)[None, :]
        place = r + (self.len_k - self.len_q if self.bottom_right else 0)
        seen = (c < self.len_k).expand(len(rows), -1)
        if self.has_left:
            seen = seen & (c >= place - self.left)
        if self.has_right:
            seen = seen & (c <= place + self.right)
        return seen


@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), (64, 128), (64, 64)])
def test_a_block_of_keys_visits_what_sees_it_and_masks_what_does_not(
    block_m: int, block_n: int
) -> None:
    from fa_advisor.kernels.hopper.backward import bounds

    draw = random.Random(block_m + block_n)
    for _ in range(1500):
        m = Masks(draw, block_n)
        for first in range(0, max(m.len_k, 1) + block_n, block_n):
            if m.even and first >= m.len_k:
                continue  # Only packed sequences have blocks past their end.
            begin, plain, edge, count, _ = plainly(bounds)(
                first, m.len_q, m.len_k, m.left, m.right, block_m, block_n, m.even, m.has_left,
                m.has_right, m.bottom_right,
            )  # fmt: skip
            seen = m.seen(range(m.len_q), range(first, first + block_n))
            assert begin % block_m == 0 <= plain <= edge <= count
            # The statistics of rows are read to their tile's end, and no tile without a row.
            assert not count or begin + (count - 1) * block_m < m.len_q
            for tile in range(-(-m.len_q // block_m)):
                part = seen[tile * block_m : (tile + 1) * block_m]
                j = tile - begin // block_m
                if not 0 <= j < count:
                    assert not part.any(), (vars(m), first, tile)
                elif not (m.hides and (j < plain or (m.has_left and j >= edge))):
                    assert part.all(), (vars(m), first, tile)


def test_a_block_of_queries_visits_what_it_sees_and_masks_what_it_does_not() -> None:
    from fa_advisor.kernels.hopper.wide import seen_bounds

    block_m, block_n = plan.WIDE_QUERIES, plan.widths(256, 256)[2]
    draw = random.Random(0)
    for _ in range(3000):
        m = Masks(draw, block_n)
        for first in range(0, m.len_q + block_m, block_m):
            begin, plain, edge, count, _ = plainly(seen_bounds)(
                first, m.len_q, m.len_k, m.left, m.right, block_m, block_n, m.has_left,
                m.has_right, m.bottom_right,
            )  # fmt: skip
            if first >= m.len_q:
                assert count == 0
                continue
            assert begin % block_n == 0 <= plain <= edge <= count
            rows = range(first, min(first + block_m, m.len_q))
            seen = m.seen(rows, range(-(-m.len_k // block_n) * block_n))
            for tile in range(-(-m.len_k // block_n)):
                part = seen[:, tile * block_n : (tile + 1) * block_n]
                j = tile - begin // block_n
                if not 0 <= j < count:
                    assert not part.any(), (vars(m), first, tile)
                elif not (m.hides and (j < plain or j >= edge)):
                    assert part.all(), (vars(m), first, tile)


def test_every_block_of_the_backward_is_owned_once() -> None:
    from fa_advisor.kernels.hopper.backward import owned
    from fa_advisor.kernels.hopper.wide import owned_keys, owned_queries

    draw = random.Random(0)
    for _ in range(100):
        batches, heads, blocks = (draw.randint(1, 6) for _ in range(3))
        side, right = draw.choice((1, 4, 8)), draw.random() < 0.5
        place = heads, batches * heads, blocks, side
        for of, rows in (
            (lambda i, place: plainly(owned)(i, place), 128),
            (lambda i, place: plainly(owned_keys, i)(*place), 64),
            (lambda i, place: plainly(owned_queries, i)(*place, 128, right), 128),  # noqa: B023
        ):
            found = sorted(of(i, place) for i in range(blocks * batches * heads))
            assert found == [
                (block * rows, batch, head) for block in range(blocks)
                for batch in range(batches) for head in range(heads)
            ]  # fmt: skip
