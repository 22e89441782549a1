"""The budget of somebody's own kernel: what the compiler says of it, and nothing modelled."""

from __future__ import annotations

from fa_advisor.budgets.model import TENSOR_COLUMNS
from fa_advisor.budgets.occupancy import occupancy
from fa_advisor.budgets.table import (
    ELEMENT_BYTES,
    Problem,
    own_warnings,
    textbook_smem_bytes,
)
from fa_advisor.records import Compiled, DeviceSpec, TileBudget, TileConfig


def foreign_budget(
    function: str, tile: TileConfig, problem: Problem, device: DeviceSpec, compiled: Compiled
) -> TileBudget:
    """A row of the table; without a predicted time, since nothing is known of what it does."""
    resident = occupancy(
        device,
        num_warps=tile.num_warps,
        smem_bytes=compiled.smem_bytes,
        registers_per_thread=compiled.registers or None,
    )
    fits = (
        compiled.error is None
        and compiled.smem_bytes <= device.smem_per_block_optin_bytes
        and compiled.tensor_columns <= TENSOR_COLUMNS
    )
    return TileBudget(
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        direction="fwd",
        kernel=function,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        smem_bytes=compiled.smem_bytes,
        smem_textbook_bytes=textbook_smem_bytes(
            tile, problem.head_dim, problem.value_head_dim, ELEMENT_BYTES[problem.dtype]
        ),
        registers_per_thread=compiled.registers if compiled.error is None else None,
        spill_bytes=compiled.stack_bytes if compiled.error is None else None,
        ctas_per_sm=resident.ctas_per_sm if fits else 0,
        occupancy=resident.occupancy if fits else 0.0,
        limiter=resident.limiter,
        fits=fits,
        basis="compiled" if compiled.error is None else "modelled",
        warnings=own_warnings(
            compiled.smem_bytes, compiled.tensor_columns, compiled.stack_bytes, False, device
        ),
        error=compiled.error,
    )
