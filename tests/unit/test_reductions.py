"""What sums take while they run, by the rules of torch's kernel; one of them seen on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.limits import moments
from fa_advisor.attribution.reductions import Operand, scratch_bytes
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.watch import Watch

H200 = {"processors": 132, "threads": 2048}


def taken(
    shape: tuple[int, ...], reduced: tuple[int, ...] = (0,), dtype: torch.dtype = torch.bfloat16,
    into: torch.dtype | None = None, strides: tuple[int, ...] | None = None, offset: int = 0,
) -> list[int]:  # fmt: skip
    x = torch.empty(shape, dtype=dtype, device="meta")
    into = into or dtype
    operand = Operand(
        shape, strides or x.stride(), offset, reduced, str(dtype).removeprefix("torch."), x.itemsize
    )
    return scratch_bytes(operand, str(into).removeprefix("torch."), into.itemsize, **H200)


def test_the_gradient_of_a_bias() -> None:
    # Seen on an H200 in the allocator's trace (benchmarks/results/ledger.json, vit-sdpa-train).
    assert taken((3152, 3072)) == [78_643_200, 96]
    assert taken((16, 197, 3072), (0, 1)) == [78_643_200, 96]
    assert taken((16, 197, 3072), (-3, -2)) == [78_643_200, 96]
    assert taken((3152, 3072), into=torch.float32) == [78_643_200, 96]


def test_results_that_no_blocks_share() -> None:
    assert taken((8, 3072)) == []
    assert taken((3152, 3072), (1,)) == []
    assert taken((8192, 50257), dtype=torch.float32) == []
    assert taken((0, 3072)) == [] and taken((3072, 0)) == []
    assert taken((1, 1), ()) == [] and taken((), ()) == []


def test_all_into_one() -> None:
    assert taken((1_000_000,), (), torch.float32) == [4 * 123, 4]
    assert taken((1000, 1000), (), torch.float32) == [4 * 123, 4]


@pytest.mark.parametrize(
    ("offset", "width", "vector"), [(0, 768, 4), (2, 768, 2), (1, 768, 1), (0, 770, 2)]
)
def test_neighbours_together_as_far_as_they_are_aligned(
    offset: int, width: int, vector: int
) -> None:
    parts, counters = taken((4096, width), dtype=torch.float32, offset=offset)
    assert counters % 4 == 0 and parts % (4 * width * vector) == 0
    blocks = counters // 4
    assert blocks == -(-(width // vector) // 32)


def test_a_copy_in_another_dtype_comes_first() -> None:
    assert taken((64, 32), (), torch.bool, torch.int64) == [8 * 64 * 32]
    assert taken((64, 32), (), torch.bfloat16, torch.float64) == [8 * 64 * 32]


def test_beyond_32_bits_in_halves() -> None:
    whole = taken((2**17, 16_384))
    assert whole[0] == 4 * 16_384  # bf16 can't hold what the halves have summed
    assert whole[1:] == taken((2**16, 16_384))


def test_the_ledger_holds_them_while_the_sum_runs() -> None:
    device, _ = advise_for("h200")
    ledger = Ledger(
        modelled=True,
        total_memory_bytes=device.total_memory_bytes,
        workspaces=workspaces_on(device),
    )
    x = torch.randn(3152, 3072, dtype=torch.bfloat16)
    with Watch(ledger.feed, device, device_type="cpu") as watch:
        ledger.begin_step()
        total = x.sum(0)
        watch.stream.flush()
        ledger.end_step()
    step: Any = ledger.best
    assert total.shape == (3072,)
    (moment, *_) = moments(step, with_attention=True)
    assert moment.constant >= 78_643_200  # not larger with a longer sum
    held = [e.storage.nbytes for e in step.entries if e.block > 0 and e.storage.op == "sum"]
    assert held == [2 * 3072, 78_643_200, 96]
    assert sum(e.nbytes for e in step.entries if e.storage.op == "sum") == 2 * 3072
