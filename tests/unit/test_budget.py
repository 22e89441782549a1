"""Modelled budgets: the textbook's formula, the compiler's figures, NVIDIA's occupancy rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_advisor.budget import (
    Direction,
    Occupancy,
    best_tile,
    modelled_budgets,
    occupancy,
    textbook_smem_bytes,
)
from fa_advisor.errors import UsageError
from fa_advisor.probes.gpus import KNOWN_GPUS, lookup
from fa_advisor.records import DeviceSpec, TileBudget, TileConfig

# Plain Triton kernels compiled with Triton 3.7.1: direction, sm, block_m, block_n, head dim,
# warps, stages, dtype -> bytes of shared memory, registers a thread.
COMPILED: tuple[tuple[Direction, int, int, int, int, int, int, str, int, int], ...] = (
    ("fwd", 80, 64, 64, 64, 4, 3, "fp16", 40960, 154),
    ("fwd", 120, 64, 64, 64, 4, 3, "fp16", 40960, 148),
    ("fwd", 90, 64, 64, 64, 4, 3, "fp16", 57344, 128),
    ("fwd", 80, 128, 128, 128, 8, 3, "fp16", 163840, 255),
    ("fwd", 90, 128, 128, 128, 8, 3, "fp16", 229376, 255),
    ("fwd", 80, 64, 64, 128, 4, 2, "fp16", 57344, 255),
    ("fwd", 86, 64, 32, 128, 4, 3, "fp16", 53248, 178),
    ("fwd", 86, 128, 64, 128, 8, 2, "fp16", 65536, 210),
    ("fwd", 90, 128, 64, 64, 4, 2, "fp16", 49152, 224),
    ("fwd", 90, 64, 32, 128, 4, 3, "fp16", 65536, 144),
    ("fwd", 120, 128, 32, 64, 4, 2, "fp16", 24576, 232),
    ("fwd", 120, 64, 64, 128, 4, 3, "fp16", 90112, 185),
    ("fwd", 89, 64, 64, 128, 4, 2, "fp16", 57344, 187),
    ("fwd", 80, 128, 64, 128, 4, 1, "fp16", 49152, 255),
    ("fwd", 90, 128, 64, 128, 4, 1, "fp16", 49152, 255),
    ("fwd", 80, 64, 64, 256, 4, 2, "fp16", 106496, 255),
    ("fwd", 90, 128, 64, 256, 8, 2, "fp16", 196608, 255),
    ("fwd", 80, 64, 64, 16, 4, 3, "fp16", 10240, 78),
    ("fwd", 75, 64, 64, 128, 4, 2, "fp16", 65536, 64),
    ("fwd", 75, 128, 128, 128, 8, 3, "fp16", 131072, 64),
    ("fwd", 80, 64, 32, 128, 4, 2, "fp32", 74752, 255),
    ("fwd", 90, 64, 64, 64, 4, 3, "fp32", 114688, 168),
    ("fwd", 80, 128, 64, 32, 4, 4, "bf16", 32768, 178),
    ("bwd", 80, 64, 64, 64, 4, 2, "fp16", 35328, 255),
    ("bwd", 80, 32, 64, 128, 4, 2, "fp16", 51456, 255),
    ("bwd", 80, 64, 128, 128, 8, 3, "fp16", 119808, 255),
    ("bwd", 90, 64, 64, 64, 4, 2, "fp16", 49664, 186),
    ("bwd", 90, 64, 128, 128, 8, 2, "fp16", 131584, 255),
    ("bwd", 90, 32, 64, 128, 4, 3, "fp16", 82432, 241),
    ("bwd", 120, 64, 128, 64, 8, 2, "fp16", 53760, 255),
    ("bwd", 120, 32, 64, 128, 4, 1, "fp16", 49152, 255),
)


def one(
    direction: Direction, tile: TileConfig, head_dim: int, dtype: str, gpu: DeviceSpec
) -> TileBudget:
    (budget,) = modelled_budgets(head_dim, dtype, gpu, directions=(direction,), tiles=(tile,))
    return budget


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def test_the_textbook_example() -> None:
    """D = 64, 64 x 64, fp16: five blocks of 64 x 64 x 2 bytes are 40 KiB."""
    assert textbook_smem_bytes(tile(64, 64, 4, 3), 64, 64, 2) == 40 * 1024
    budget = one("fwd", tile(64, 64, 4, 3), 64, "fp16", lookup("a100"))
    assert budget.smem_textbook_bytes == 40 * 1024


@pytest.mark.parametrize(
    ("direction", "sm", "m", "n", "head_dim", "warps", "stages", "dtype", "smem", "registers"),
    COMPILED,
)
def test_the_model_agrees_with_the_compiler(
    direction: Direction,
    sm: int,
    m: int,
    n: int,
    head_dim: int,
    warps: int,
    stages: int,
    dtype: str,
    smem: int,
    registers: int,
) -> None:
    gpu = lookup(f"sm_{sm}")
    budget = one(direction, tile(m, n, warps, stages), head_dim, dtype, gpu)
    assert budget.smem_bytes == smem
    if budget.registers_per_thread is None:
        assert sm < 80
    else:
        assert budget.registers_per_thread == pytest.approx(registers, abs=75)


def test_register_model_is_right_on_average() -> None:
    errors = []
    for direction, sm, m, n, head_dim, warps, stages, dtype, _, registers in COMPILED:
        budget = one(direction, tile(m, n, warps, stages), head_dim, dtype, lookup(f"sm_{sm}"))
        if budget.registers_per_thread is not None:
            errors.append(abs(budget.registers_per_thread - registers))
    assert sum(errors) / len(errors) < 15


def test_occupancy_by_hand() -> None:
    """sm_80: 48 KiB + 1 KiB a block, 3 fit in 164 KiB; 8 warps of 128 registers, 2 blocks fit."""
    a100 = lookup("a100")
    by_smem = occupancy(a100, num_warps=8, smem_bytes=48 * 1024, registers_per_thread=64)
    assert by_smem == Occupancy(ctas_per_sm=3, occupancy=24 / 64, limiter="smem")
    by_registers = occupancy(a100, num_warps=8, smem_bytes=1024, registers_per_thread=128)
    assert by_registers == Occupancy(ctas_per_sm=2, occupancy=16 / 64, limiter="registers")
    by_warps = occupancy(a100, num_warps=8, smem_bytes=1024, registers_per_thread=24)
    assert by_warps == Occupancy(ctas_per_sm=8, occupancy=1.0, limiter="warps")
    by_ctas = occupancy(lookup("3090"), num_warps=1, smem_bytes=0, registers_per_thread=16)
    assert by_ctas == Occupancy(ctas_per_sm=16, occupancy=16 / 48, limiter="ctas")


def test_register_granularity_is_a_quarter_of_the_sm() -> None:
    """168 registers: 5,376 a warp, 3 in each quarter, 12 an SM: one block of 12 warps."""
    resident = occupancy(lookup("h100"), num_warps=12, smem_bytes=0, registers_per_thread=168)
    assert (resident.ctas_per_sm, resident.limiter) == (1, "registers")


def test_a_tile_beyond_the_limit_does_not_fit() -> None:
    """128 x 128 at d 128 takes 163,840 bytes on sm_86, which has 101,376: out of resources."""
    budget = one("fwd", tile(128, 128, 8, 3), 128, "fp16", lookup("3090"))
    assert not budget.fits
    assert (budget.ctas_per_sm, budget.occupancy, budget.limiter) == (0, 0.0, "smem")
    # The whole SM's shared memory isn't a block's: 163 KiB of 164.
    assert one("fwd", tile(128, 128, 8, 3), 128, "fp16", lookup("a100")).fits
    assert best_tile((budget,)) is None


@pytest.mark.parametrize("gpu", KNOWN_GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_gpu_from_ampere_on_has_a_tile_for_every_head_dim(
    gpu: DeviceSpec, direction: Direction
) -> None:
    if gpu.capability < (8, 0):
        return
    for head_dim in (1, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256):
        budgets = modelled_budgets(head_dim, "bf16", gpu, directions=(direction,))
        best = best_tile(budgets)
        assert best is not None
        first = budgets[0]
        assert (first.block_m, first.block_n) == (best.block_m, best.block_n)
        assert first.fits and first.ctas_per_sm >= 1


def test_the_order_of_the_article_s_rule_of_thumb() -> None:
    """Blocks of 128 at a head dim up to 128, smaller ones beyond, where memory runs out."""
    best = best_tile(modelled_budgets(64, "bf16", lookup("a100"), directions=("fwd",)))
    assert best is not None and best.block_m == 128
    best = best_tile(modelled_budgets(256, "bf16", lookup("4090"), directions=("fwd",)))
    assert best is not None and best.block_m == 64


@pytest.mark.parametrize("head_dim", [0, -1, 257, 512])
def test_head_dims_out_of_range(head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"head dim {head_dim} is out of range"):
        modelled_budgets(head_dim, "bf16", lookup("a100"))
    with pytest.raises(UsageError, match="value head dim"):
        modelled_budgets(64, "bf16", lookup("a100"), value_head_dim=head_dim)


def test_dtypes() -> None:
    a100 = lookup("a100")
    assert modelled_budgets(64, "bfloat16", a100) == modelled_budgets(64, "bf16", a100)
    assert modelled_budgets(64, "float32", a100)[0].dtype == "fp32"
    with pytest.raises(UsageError, match="int8"):
        modelled_budgets(64, "int8", a100)


@given(
    head_dim=st.integers(1, 256),
    value_head_dim=st.integers(1, 256),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    gpu=st.sampled_from(KNOWN_GPUS),
)
def test_budgets_hold_together(
    head_dim: int, value_head_dim: int, dtype: str, gpu: DeviceSpec
) -> None:
    budgets = modelled_budgets(head_dim, dtype, gpu, value_head_dim=value_head_dim)
    assert {budget.direction for budget in budgets} == {"fwd", "bwd"}
    for budget in budgets:
        assert budget.basis == "modelled"
        assert budget.fits == (budget.smem_bytes <= gpu.smem_per_block_optin_bytes)
        assert budget.fits == (budget.ctas_per_sm > 0)
        assert 0 <= budget.occupancy <= 1
        assert budget.occupancy == budget.ctas_per_sm * budget.num_warps / gpu.max_warps_per_sm
        assert budget.ctas_per_sm <= gpu.max_ctas_per_sm
        assert budget.registers_per_thread is None or 1 <= budget.registers_per_thread <= 255
    for direction in ("fwd", "bwd"):
        fits = [budget.fits for budget in budgets if budget.direction == direction]
        assert fits == sorted(fits, reverse=True)


@given(head_dim=st.integers(1, 256), gpu=st.sampled_from(KNOWN_GPUS))
def test_more_shared_memory_never_hurts(head_dim: int, gpu: DeviceSpec) -> None:
    larger = replace(
        gpu,
        smem_per_block_optin_bytes=2 * gpu.smem_per_block_optin_bytes,
        smem_per_sm_bytes=2 * gpu.smem_per_sm_bytes,
    )
    resident = {
        (b.direction, b.block_m, b.block_n, b.num_warps, b.num_stages): b.ctas_per_sm
        for b in modelled_budgets(head_dim, "bf16", larger)
    }
    for b in modelled_budgets(head_dim, "bf16", gpu):
        key = (b.direction, b.block_m, b.block_n, b.num_warps, b.num_stages)
        assert resident[key] >= b.ctas_per_sm
