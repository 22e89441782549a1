"""The kernels for compute capability 9.0 alone: their tiles aren't chosen, and have one row each.

docs/hopper.md says what they are. Nothing models their registers or their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fa_advisor.budgets.grid import Direction
from fa_advisor.budgets.occupancy import occupancy
from fa_advisor.budgets.table import ELEMENT_BYTES, Problem, own_warnings, textbook_smem_bytes
from fa_advisor.kernels.hopper.tiles import (
    BLOCK_N,
    CAPABILITY,
    ROWS_OF_A_CONSUMER,
    WIDE_QUERIES,
    tiles_of,
    value_stages,
    widths,
)
from fa_advisor.records import Compiled, DeviceSpec, TileBudget, TileConfig

NOTE = (
    "hopper: what compute capability 9.0 runs from 513 keys on (backward: queries, too), with the"
    " tiles that it has, unless FA_ADVISOR_KERNELS=portable is set. A launch has registers for the"
    " average thread: consumers get 240 (or 160) of them, who loads 24"
)
# Registers that a thread of 384, or of 512, is launched with.
_LAUNCHED = {12: 168, 16: 128}
_FP32 = 4
# A head dim up to this would be padded to 64.
_SMALLEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A kernel with the tile that it has. Who holds a block's memory, in bytes."""

    kernel: str
    direction: Direction
    tile: TileConfig
    in_smem: Mapping[str, int]
    in_registers: Mapping[str, int]


def given_on(
    problem: Problem, device: DeviceSpec, directions: Iterable[Direction]
) -> tuple[Given, ...]:
    """The kernels that take such calls on such a GPU."""
    dims = (problem.head_dim, problem.value_head_dim)
    if (
        device.capability != CAPABILITY
        or ELEMENT_BYTES[problem.dtype] != 2
        or max(dims) <= _SMALLEST
        or any(dim % 8 for dim in dims)
    ):
        return ()
    found: list[Given] = []
    for direction in directions:
        found += [_forward(problem)] if direction == "fwd" else _backward(problem)
    return tuple(found)


def _forward(problem: Problem) -> Given:
    cut = tiles_of(problem.head_dim, problem.value_head_dim)
    rows, wide = ROWS_OF_A_CONSUMER * cut.consumers, cut.part * cut.parts
    smem = {
        "Q": rows * wide * 2,
        "K": cut.stages * cut.block_n * wide * 2,
        "V": cut.stages * cut.block_n * cut.block_dv * 2,
    }
    if not cut.shared_out:
        smem["O"] = rows * cut.block_dv * 2
    return Given(
        kernel="hopper forward",
        direction="fwd",
        tile=_tile(rows, cut.block_n, 12 if cut.consumers == 2 else 16, cut.stages),
        in_smem=smem,
        in_registers={
            "O": rows * cut.block_dv * _FP32,
            "S": rows * cut.block_n * _FP32,
            "P": rows * cut.block_n * 2,
        },
    )


def _backward(problem: Problem) -> list[Given]:
    wide, wide_v, block_m = widths(problem.head_dim, problem.value_head_dim)
    streamed = {"Q": 2 * block_m * wide * 2, "dO": 2 * block_m * wide_v * 2}
    statistics = {"LSE, delta": 2 * 2 * block_m * _FP32}
    if wide <= 128:
        made = {
            "K": BLOCK_N * wide * 2,
            "V": BLOCK_N * wide_v * 2,
            "dS": 2 * BLOCK_N * block_m * 2,
            "dQ": 2 * 64 * 64 * _FP32,
        }
        return [
            Given(
                kernel="hopper backward",
                direction="bwd",
                tile=_tile(block_m, BLOCK_N, 12, 2),
                in_smem=streamed | made | statistics,
                in_registers={
                    "dK, dV": BLOCK_N * (wide + wide_v) * _FP32,
                    "S, dP": 2 * BLOCK_N * block_m * _FP32,
                },
            )
        ]
    keys = {"K": block_m * wide * 2, "V": block_m * wide_v * 2}
    kept = {"Q": WIDE_QUERIES * wide * 2, "dO": WIDE_QUERIES * wide_v * 2}
    passing = {"K": 2 * keys["K"], "V": value_stages(wide_v) * keys["V"]}
    return [
        Given(
            kernel="hopper keys",
            direction="bwd",
            tile=_tile(block_m, block_m, 12, 2),
            in_smem=streamed | keys | {"P, dS": 2 * 2 * block_m * block_m * 2} | statistics,
            in_registers={
                "dK, dV": block_m * (wide + wide_v) * _FP32,
                "S, dP": 2 * block_m * block_m * _FP32,
            },
        ),
        Given(
            kernel="hopper queries",
            direction="bwd",
            tile=_tile(WIDE_QUERIES, block_m, 12, 2),
            in_smem=kept | passing,
            in_registers={
                "dQ": WIDE_QUERIES * wide * _FP32,
                "S, dP": 2 * WIDE_QUERIES * block_m * _FP32,
            },
        ),
    ]


def _tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def row_of(
    one: Given, problem: Problem, device: DeviceSpec, compiled: Compiled | None = None
) -> TileBudget:
    """Its row: the compiler's figures where there are some, else what its buffers take."""
    exact = compiled is not None and compiled.error is None
    tile, modelled = one.tile, sum(one.in_smem.values())
    smem, registers, spilled = modelled, _LAUNCHED[tile.num_warps], None
    if compiled is not None and exact:
        smem, registers, spilled = compiled.smem_bytes, compiled.registers, compiled.stack_bytes
    resident = occupancy(
        device, num_warps=tile.num_warps, smem_bytes=smem, registers_per_thread=registers
    )
    fits = smem <= device.smem_per_block_optin_bytes and resident.ctas_per_sm > 0
    return TileBudget(
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        direction=one.direction,
        kernel=one.kernel,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        smem_bytes=smem,
        smem_textbook_bytes=textbook_smem_bytes(tile, problem.head_dim, problem.value_head_dim, 2),
        smem_modelled_bytes=modelled,
        registers_per_thread=registers,
        spill_bytes=spilled,
        ctas_per_sm=resident.ctas_per_sm if fits else 0,
        occupancy=resident.occupancy if fits else 0.0,
        limiter=resident.limiter,
        fits=fits,
        basis="compiled" if exact else "modelled",
        in_smem=dict(one.in_smem),
        in_registers=dict(one.in_registers),
        error=compiled.error if compiled is not None else None,
        warnings=own_warnings(smem, 0, spilled, False, device),
    )
