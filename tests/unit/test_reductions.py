"""What sums take while they run, by the rules of torch's kernel; one of them seen on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fa_advisor
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.limits import moments
from fa_advisor.attribution.reductions import Machine, Operand, scratch_bytes
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.watch import Watch

H200 = Machine(processors=132, threads=2048)


def taken(
    shape: tuple[int, ...], reduced: tuple[int, ...] = (0,), dtype: torch.dtype = torch.bfloat16,
    into: torch.dtype | None = None, strides: tuple[int, ...] | None = None, offset: int = 0,
) -> list[int]:  # fmt: skip
    x = torch.empty(shape, dtype=dtype, device="meta")
    into = into or dtype
    operand = Operand(
        shape, strides or x.stride(), offset, reduced, str(dtype).removeprefix("torch.")
    )
    return scratch_bytes(operand, str(into).removeprefix("torch."), H200)


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


def test_what_is_expanded() -> None:
    """A stride of 0 says nothing of the order in which dimensions are gone through."""
    assert taken((64, 2048, 768), (0, 1), torch.float32, strides=(0, 768, 1)) == [138_412_032, 24]
    assert taken((8, 197, 3072), (0, 1), strides=(0, 3072, 1)) == [39_321_600, 96]
    # A copy is dense, in the operand's order.
    copied = taken((4096, 3072), (0,), torch.bool, torch.int64, strides=(3073, 1), offset=3074)
    assert copied == [8 * 4096 * 3072, *taken((4096, 3072), dtype=torch.int64)]


def test_the_accumulator_is_as_wide_as_the_dtype_says() -> None:
    half, single = (
        taken((2048, 2048), dtype=torch.float16),
        taken((2048, 2048), dtype=torch.float32),
    )
    assert half == single
    small = taken((2048, 2048), dtype=torch.float16, into=torch.int8)
    assert small[1:] == [single[0] // 4, single[1]]
    assert taken((3152, 4096), dtype=torch.complex128)[0] == 830_472_192


def test_a_number_has_no_dimensions() -> None:
    assert taken((), (0,)) == taken((), (-1,)) == []


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


def test_sums_of_odd_things_are_followed() -> None:
    """Numbers along a dimension, into what was empty, of nested tensors."""
    device, _ = advise_for("h200")
    with fa_advisor.record(gpu="h200") as recording:
        x = torch.randn(2048, 768)
        assert torch.tensor(3.0).mean(0) == 3
        into = torch.empty(0, dtype=torch.float64)
        torch.sum(x, 0, dtype=torch.float64, out=into)
        nested = torch.nested.as_nested_tensor([x[:3], x[:7]])
        assert nested.sum(-1, keepdim=True).is_nested
        assert nn.Linear(768, 8)(nested).is_nested
    assert recording.report.memory.peak_allocated_bytes < 64 * 2**20
    assert device.name == recording.report.device.name
