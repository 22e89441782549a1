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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_advisor.kernels import kinds
from fa_advisor.kernels.hopper import plan
from fa_advisor.kernels.kinds import Inputs, Options

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

COMPILER = Path(__file__).with_name("compile_hopper.py")
LIMIT = 227 * 1024
# A few values of a thread kept in L1, in calls with a mask.
MOST_STACK_BYTES = 96


def compiled(configs: list[tuple[str, int, int, str, str]]) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    if path := os.environ.get("FA_ADVISOR_TRITON_PATH"):
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, str(COMPILER)],
        input="".join(json.dumps(config) + "\n" for config in configs),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "call"),
    [
        (64, 64, "bf16", "plain"),
        (64, 64, "fp16", "causal"),
        (96, 96, "bf16", "window"),
        (128, 128, "bf16", "causal"),
        (128, 128, "bf16", "packed"),
        (128, 128, "fp16", "padding"),
        (192, 128, "bf16", "ragged"),
        (256, 256, "bf16", "softcap, sinks"),
    ],
)
def test_the_forward_compiles_for_hopper(dim: int, dim_v: int, dtype: str, call: str) -> None:
    (row,) = compiled([("forward", dim, dim_v, dtype, call)])
    assert row["smem_bytes"] <= LIMIT
    assert row["stack_bytes"] <= MOST_STACK_BYTES


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
        cut = plan.tiles_of(dim, other, uneven=False)
        assert cut.part * cut.parts >= dim
        assert cut.block_dv >= other
        rows = plan.ROWS_OF_A_CONSUMER * cut.consumers
        wide = cut.part * cut.parts
        smem = rows * wide + cut.stages * cut.block_n * (wide + cut.block_dv)
        smem += 0 if cut.shared_out else rows * cut.block_dv
        assert 2 * smem + 1024 <= LIMIT


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
        words = plan.schedule_of(costs, heads, side_by_side, grid)
        offsets, dealt = words[: grid + 1], words[grid + 1 : -1]
        assert sorted(dealt) == list(range(pieces * heads))
        assert offsets[0] == grid + 1 and offsets[-1] == len(words) - 1
        loads = [
            sum(costs[piece % pieces] for piece in words[begin:end])
            for begin, end in itertools.pairwise(offsets)
        ]
        assert max(loads) <= sum(loads) / grid + max(costs)


def test_a_kernel_that_does_not_compile_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def ready(self, device: int, pointers: tuple[Any, ...]) -> None:
            raise AttributeError("module 'tma' has no attribute 'store'")

    plan._say_once.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert not plan.compiles(Broken(), torch.device("cuda", 0), ())  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "no attribute 'store'" in record.message and "portable" in record.message
