"""The table of tiles: what each takes, which comes first and why, and what to beware of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa_advisor.budgets.grid import Candidate, Kernel
from fa_advisor.budgets.model import TENSOR_COLUMNS, estimate, predicted_ms
from fa_advisor.budgets.occupancy import occupancy
from fa_advisor.records import BudgetTable, Compiled, DeviceSpec, TileBudget, TileConfig

MAX_HEAD_DIM = 256
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# A stack frame up to this is a few values kept in L1.
NEGLIGIBLE_SPILL_BYTES = 96
# A stack frame over which a launch of a bundled kernel leaves a tile for a lighter one, as
# fa_advisor.kernels.launcher has it.
LAUNCHED_STACK_BYTES: dict[str, int] = {"forward": 128, "keys": 256, "queries": 128}
# Products of a thread in one of exact fp32's: above it a compile takes half a minute and more.
_MOST_UNROLLED = 1024
BATCH, HEADS, LENGTH = 4, 16, 4096
WORKLOAD = f"{BATCH} x {HEADS} heads x {LENGTH:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the tiles are for. dtype: bf16, fp16 or fp32 (IEEE products)."""

    head_dim: int
    value_head_dim: int
    dtype: str
    is_causal: bool


def textbook_smem_bytes(
    tile: TileConfig, head_dim: int, value_head_dim: int, element_bytes: int
) -> int:
    """The textbook's estimate: one block each of Q, K, V, S and O, in the input dtype."""
    q = tile.block_m * head_dim
    k = tile.block_n * head_dim
    v = tile.block_n * value_head_dim
    s = tile.block_m * tile.block_n
    o = tile.block_m * value_head_dim
    return (q + k + v + s + o) * element_bytes


def budget_of(
    candidate: Candidate, problem: Problem, device: DeviceSpec, compiled: Compiled | None = None
) -> TileBudget:
    """A tile's row: the compiler's figures where there are some, else the model's."""
    tile, size = candidate.tile, ELEMENT_BYTES[problem.dtype]
    shape: dict[str, Any] = {
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "element_bytes": size,
        "precision": "ieee",
        "capability": device.capability,
        "causal": problem.is_causal,
    }
    modelled = estimate(candidate.kernel, **shape)
    exact = compiled is not None and compiled.error is None
    # A block's threads share the SM's registers, whatever each could have.
    most = device.registers_per_sm // (32 * tile.num_warps) // 8 * 8
    would_spill = modelled.spills or modelled.registers > most
    smem, registers, spilled = modelled.smem_bytes, min(modelled.registers, most), None
    stack = max(modelled.stack_bytes, 4 * (modelled.registers - registers))
    columns = modelled.tensor_columns
    if compiled is not None and exact:
        smem, registers, spilled = compiled.smem_bytes, compiled.registers, compiled.stack_bytes
        stack, columns = compiled.stack_bytes, compiled.tensor_columns
    resident = occupancy(
        device, num_warps=tile.num_warps, smem_bytes=smem, registers_per_thread=registers
    )
    fits = (
        smem <= device.smem_per_block_optin_bytes
        and columns <= TENSOR_COLUMNS
        and resident.ctas_per_sm > 0
    )
    time_ms = None
    if fits and resident.ctas_per_sm:
        time_ms = predicted_ms(
            candidate.kernel, **shape, registers=registers, stack_bytes=stack, smem_bytes=smem,
            ctas_per_sm=resident.ctas_per_sm, device=device, batch=BATCH, heads=HEADS,
            seqlen=LENGTH,
        )  # fmt: skip
    return TileBudget(
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        direction=candidate.direction,
        kernel=candidate.kernel,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        smem_bytes=smem,
        smem_textbook_bytes=textbook_smem_bytes(
            tile, problem.head_dim, problem.value_head_dim, size
        ),
        smem_modelled_bytes=modelled.smem_bytes,
        registers_per_thread=registers,
        spill_bytes=spilled,
        ctas_per_sm=resident.ctas_per_sm if fits else 0,
        occupancy=resident.occupancy if fits else 0.0,
        limiter=resident.limiter,
        fits=fits,
        basis="compiled" if exact else "modelled",
        in_smem=dict(modelled.holders),
        in_registers=dict(modelled.in_registers),
        time_ms=time_ms,
        error=compiled.error if compiled is not None else None,
        warnings=(
            *own_warnings(smem, columns, spilled, would_spill, device),
            *_refusal(candidate.kernel, spilled),
        ),
    )


def refused(row: TileBudget) -> bool:
    """Whether a launch leaves a tile of a bundled kernel for a lighter one: by what was compiled,
    not by the model."""
    bundled = row.smem_modelled_bytes is not None
    return bundled and (row.spill_bytes or 0) > LAUNCHED_STACK_BYTES.get(row.kernel, math.inf)


def _refusal(kernel: Kernel, spilled: int | None) -> tuple[str, ...]:
    most = LAUNCHED_STACK_BYTES[kernel]
    if (spilled or 0) <= most:
        return ()
    return (f"not to be used: over {most} bytes of stack a launch takes a lighter tile instead",)


def own_warnings(
    smem: int, columns: int, spilled: int | None, would_spill: bool, device: DeviceSpec
) -> tuple[str, ...]:
    """What is to be said of a tile by itself."""
    found = []
    over = smem - device.smem_per_block_optin_bytes
    if over > 0:
        found.append(f"needs {over:,} bytes of shared memory more than a block can have")
    if columns > TENSOR_COLUMNS:
        found.append(f"needs {columns} columns of tensor memory, of {TENSOR_COLUMNS} there are")
    if spilled is not None and spilled > NEGLIGIBLE_SPILL_BYTES:
        found.append(f"spills: {spilled:,} bytes a thread live in memory instead of registers")
    elif spilled is None and would_spill:
        found.append("will spill registers, as modelled")
    return tuple(found)


def budget_table(
    rows: Iterable[TileBudget],
    problem: Problem,
    device: DeviceSpec,
    notes: Sequence[str] = (),
    *,
    padded: bool = True,
) -> BudgetTable:
    """The rows in the order of use, with what only shows between them.

    Order within a kernel: tiles that fit, with a result, that a launch accepts; where some were
    compiled, those; then by predicted time; then by shared memory. `padded`: whether the kernels
    pad head dims, as those bundled do.
    """
    by_kernel: dict[str, list[TileBudget]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, []).append(row)
    for kernel, own in by_kernel.items():
        # What wasn't compiled where others were, as it would take minutes, mustn't come first.
        known = any(row.basis == "compiled" for row in own)
        own.sort(key=lambda row: (*_rank(row)[:3], known and row.basis == "modelled", _rank(row)))
        by_kernel[kernel] = [
            replace(row, warnings=(*row.warnings, *_between(row, own, by_kernel))) for row in own
        ]
    return BudgetTable(
        device=device,
        head_dim=problem.head_dim,
        value_head_dim=problem.value_head_dim,
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        budgets=tuple(row for own in by_kernel.values() for row in own),
        explanations={kernel: _explained(own, device) for kernel, own in by_kernel.items()},
        workload=WORKLOAD,
        notes=(*(_padding(problem) if padded else ()), *notes),
    )


def best_tile(budgets: Iterable[TileBudget]) -> TileConfig | None:
    """The tile to use: of one kernel's budgets in the table's order, the first that fits and that
    a launch accepts."""
    for row in budgets:
        if row.fits and row.error is None and not refused(row):
            return TileConfig(
                block_m=row.block_m,
                block_n=row.block_n,
                num_warps=row.num_warps,
                num_stages=row.num_stages,
            )
    return None


def endless(candidate: Candidate, problem: Problem) -> bool:
    """Whether the compiler would take minutes: exact fp32 products are unrolled, one by one."""
    tile = candidate.tile
    width = _padded(max(problem.head_dim, problem.value_head_dim))
    products = tile.block_m * tile.block_n * width / (32 * tile.num_warps)
    return problem.dtype == "fp32" and products > _MOST_UNROLLED


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _rank(row: TileBudget) -> tuple[bool, bool, bool, float, bool, float, int]:
    """Lowest first. Where nothing says how long a kernel takes, the work in flight on an SM for
    each load of keys decides, after spills."""
    time = float("inf") if row.time_ms is None else row.time_ms
    work = row.occupancy * row.block_m * row.block_n
    return (
        not row.fits,
        row.error is not None,
        refused(row),
        time,
        _spills_much(row),
        -work,
        row.smem_bytes,
    )


def _spills_much(row: TileBudget) -> bool:
    return (row.spill_bytes or 0) > NEGLIGIBLE_SPILL_BYTES


def _between(
    row: TileBudget, own: Sequence[TileBudget], every: Mapping[str, Sequence[TileBudget]]
) -> list[str]:
    """What shows beside other rows: stages that buy nothing, a backward that doesn't fit."""
    found = []
    for other in own:
        same = (other.block_m, other.block_n, other.num_warps) == (
            row.block_m, row.block_n, row.num_warps
        )  # fmt: skip
        if same and other.num_stages < row.num_stages and row.fits and _no_better(row, other):
            more = row.num_stages - other.num_stages
            found.append(
                f"the {_ordinal(row.num_stages)} stage buys nothing"
                if more == 1
                else f"buys nothing over {other.num_stages} stage{'s' * (other.num_stages > 1)}"
            )
            break
    if row.kernel == "forward" and row.fits:
        for other in every.get("keys", ()):
            if (other.block_m, other.block_n) == (row.block_m, row.block_n) and other.fits:
                break
        else:
            if any(
                (other.block_m, other.block_n) == (row.block_m, row.block_n)
                for other in every.get("keys", ())
            ):
                found.append("fits forward, but no backward with such a tile does")
    return found


def _no_better(row: TileBudget, other: TileBudget) -> bool:
    """Whether `row`, with its further stages, is no faster; or, untimed, keeps no more on an SM."""
    if row.error or other.error or not other.fits:
        return False
    if row.time_ms is not None and other.time_ms is not None:
        return row.time_ms >= other.time_ms
    return row.ctas_per_sm < other.ctas_per_sm


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}th")


def _padding(problem: Problem) -> list[str]:
    found = []
    for name, dim in (("head dim", problem.head_dim), ("value head dim", problem.value_head_dim)):
        padded = _padded(dim)
        if padded != dim and not (name == "value head dim" and dim == problem.head_dim):
            found.append(
                f"{name} {dim} is padded to {padded}: {1 - dim / padded:.1%} of its products are"
                " with zeros"
            )
    return found


def _explained(own: Sequence[TileBudget], device: DeviceSpec) -> str:
    """Two sentences on the tile that comes first."""
    winner = own[0]
    if not winner.fits:
        figures = [row for row in own if row.error is None]
        if not figures:
            return "The compiler gave figures for none of these tiles."
        least = min(figures, key=lambda row: row.smem_bytes)
        return (
            f"No tile of these fits on {device.name}: the smallest takes {least.smem_bytes:,} bytes"
            f" of shared memory, and a block can have {device.smem_per_block_optin_bytes:,}."
            " Try smaller tiles or fewer stages."
        )
    if winner.error is not None:
        return "The compiler gave figures for no tile that fits. The model's stand in their place."
    blocks = "one block" if winner.ctas_per_sm == 1 else f"{winner.ctas_per_sm} blocks"
    limit = {
        "smem": "shared memory lets in no more",
        "registers": "registers let in no more",
        "warps": "the SM has no more warps",
        "ctas": "the SM takes no more blocks",
    }[winner.limiter]
    spills = f", {_spilling(winner)}."
    first = f"{_named(winner)} keeps {blocks} on each SM ({limit}){spills}"
    if refused(winner):
        return f"{first} A launch accepts none of these tiles: it takes a lighter one instead."
    behind = next((row for row in own[1:] if row.fits and row.error is None), None)
    if behind is None:
        return f"{first} It is the only one that fits." if len(own) > 1 else first
    if refused(behind):
        return f"{first} It is the only one that a launch accepts."
    if winner.time_ms is None or behind.time_ms is None:
        beside = f"{behind.ctas_per_sm} block{'s' * (behind.ctas_per_sm != 1)} on each SM"
        return (
            f"{first} Next comes {_named(behind)}: {beside},"
            f" {behind.smem_bytes / 1024:.1f} KiB of shared memory, {_spilling(behind)}."
        )
    return f"{first} Next comes {_named(behind)}, {_by_how_much(behind.time_ms / winner.time_ms)}."


def _named(row: TileBudget) -> str:
    stages = f"{row.num_stages} stage{'s' * (row.num_stages > 1)}"
    warps = f"{row.num_warps} warp{'s' * (row.num_warps > 1)}"
    return f"{row.block_m} x {row.block_n} with {warps} and {stages}"


def _by_how_much(ratio: float) -> str:
    if ratio < 1.005:
        return "as fast as predicted times can tell"
    return f"predicted to take {ratio - 1:.0%} longer"


def _spilling(row: TileBudget) -> str:
    if row.spill_bytes:
        return f"though {row.spill_bytes:,} bytes a thread spill"
    if row.spill_bytes is None and any("spill" in warning for warning in row.warnings):
        return "though it will spill, as modelled"
    return "without spilling"
