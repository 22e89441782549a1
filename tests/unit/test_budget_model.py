"""The model of the kernels' budgets against what Triton 3.7.1 took: kept, so that none is needed.

benchmarks/budget_model.py compiles some hundreds; tests/kernels/test_budget_model.py a handful.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fa_advisor.budgets.model import (
    MOST_STACK_BYTES,
    TENSOR_COLUMNS,
    Estimate,
    Kernel,
    _Shape,
    estimate,
    predicted_ms,
)
from fa_advisor.budgets.table import LAUNCHED_STACK_BYTES
from fa_advisor.kernels import tiles
from fa_advisor.probes.gpus import CAPABILITIES, lookup

# Capability, kernel, block_m, block_n, warps, stages, head dim, dtype, call; registers, bytes of
# stack, bytes of shared memory. One for each kernel, capability and way to multiply.
Row = tuple[int, Kernel, int, int, int, int, int, str, str, int, int, int]
COMPILED: list[Row] = [
    (80, "forward", 128, 32, 4, 4, 256, "bf16", "plain", 32, 4408, 172032),
    (80, "forward", 32, 16, 4, 3, 128, "fp32", "causal", 148, 0, 51328),
    (86, "forward", 32, 32, 8, 2, 256, "fp32", "tf32", 186, 0, 102912),
    (86, "forward", 16, 16, 4, 1, 32, "fp32", "causal", 72, 0, 5120),
    (90, "forward", 64, 16, 8, 1, 128, "bf16", "plain", 70, 0, 20488),
    (90, "forward", 16, 64, 4, 2, 64, "bf16", "causal", 68, 0, 20512),
    (90, "forward", 128, 128, 8, 2, 128, "fp32", "plain", 32, 18760, 262144),
    (100, "forward", 128, 16, 8, 1, 32, "bf16", "causal", 40, 0, 13312),
    (100, "forward", 32, 16, 8, 2, 256, "bf16", "plain", 94, 0, 33816),
    (100, "forward", 16, 128, 8, 2, 64, "fp32", "causal", 145, 0, 77952),
    (120, "forward", 32, 128, 8, 3, 32, "fp32", "tf32", 154, 0, 69664),
    (120, "forward", 32, 64, 8, 2, 64, "fp32", "plain", 88, 0, 49152),
    (80, "keys", 64, 16, 8, 3, 128, "fp32", "tf32", 255, 8, 115712),
    (80, "keys", 32, 32, 8, 2, 64, "fp32", "causal", 188, 0, 37120),
    (86, "keys", 32, 128, 4, 2, 128, "bf16", "causal", 40, 6296, 82176),
    (86, "keys", 32, 16, 8, 2, 192, "fp32", "causal", 255, 88, 100608),
    (90, "keys", 16, 64, 4, 2, 96, "bf16", "plain", 203, 0, 49312),
    (90, "keys", 64, 32, 8, 2, 128, "bf16", "causal", 177, 0, 53792),
    (90, "keys", 16, 32, 4, 2, 128, "fp32", "plain", 204, 0, 51328),
    (100, "keys", 16, 16, 8, 2, 64, "bf16", "plain", 58, 0, 8856),
    (100, "keys", 64, 64, 4, 3, 96, "bf16", "causal", 255, 432, 165888),
    (100, "keys", 128, 32, 8, 1, 64, "fp32", "causal", 255, 1616, 98304),
    (120, "keys", 32, 128, 8, 2, 128, "bf16", "causal", 255, 280, 82200),
    (120, "keys", 16, 32, 4, 1, 96, "fp32", "causal", 255, 704, 51200),
    (80, "queries", 32, 128, 4, 3, 256, "fp32", "tf32", 255, 2296, 491520),
    (80, "queries", 64, 32, 8, 2, 128, "fp32", "plain", 128, 0, 106496),
    (86, "queries", 32, 128, 8, 2, 64, "fp32", "causal", 255, 160, 98304),
    (89, "queries", 64, 32, 4, 3, 128, "bf16", "plain", 168, 0, 69632),
    (90, "queries", 64, 64, 4, 3, 64, "bf16", "causal", 143, 0, 66560),
    (90, "queries", 32, 64, 8, 1, 192, "bf16", "causal", 166, 0, 65552),
    (90, "queries", 32, 16, 8, 2, 128, "fp32", "causal", 78, 0, 51200),
    (100, "queries", 32, 32, 8, 2, 128, "bf16", "causal", 124, 0, 34840),
    (100, "queries", 64, 16, 4, 1, 64, "bf16", "causal", 50, 0, 20488),
    (100, "queries", 64, 32, 8, 3, 128, "fp32", "plain", 146, 0, 139264),
    (120, "queries", 32, 64, 8, 4, 32, "fp32", "tf32", 255, 56, 57408),
    (120, "queries", 64, 32, 8, 2, 128, "fp32", "causal", 255, 800, 106496),
]  # fmt: skip
# Milliseconds measured on an H200, bf16, 4096 tokens, 64 heads of 128 features: block_m, block_n,
# warps, stages; what the compiler took (registers, stack, shared memory) and blocks on an SM.
MEASURED: dict[
    tuple[Kernel, bool], list[tuple[float, tuple[int, int, int, int], int, int, int, int]]
] = {
    ("forward", False): [
        (1.026, (128, 64, 4, 2), 255, 8, 98336, 2),
        (1.110, (64, 64, 4, 3), 147, 0, 114744, 2),
        (1.188, (128, 64, 8, 3), 146, 0, 131128, 1),
        (1.195, (128, 128, 8, 3), 195, 0, 229432, 1),
    ],
    ("keys", True): [
        (1.247, (64, 64, 4, 1), 255, 40, 65544, 2),
        (1.380, (32, 64, 4, 2), 255, 0, 65824, 2),
    ],
    ("queries", False): [
        (1.358, (64, 64, 4, 2), 154, 0, 98320, 2),
        (1.448, (64, 64, 4, 3), 154, 0, 131096, 1),
        (1.468, (128, 32, 8, 2), 122, 0, 98320, 2),
        (1.544, (64, 32, 4, 2), 124, 0, 65552, 3),
    ],
}


def modelled(row: Row, **changed: Any) -> Estimate:
    capability, kernel, m, n, warps, stages, dim, dtype, call = row[:9]
    arguments: dict[str, Any] = {
        "block_m": m,
        "block_n": n,
        "num_warps": warps,
        "num_stages": stages,
        "head_dim": dim,
        "value_head_dim": dim,
        "element_bytes": 4 if dtype == "fp32" else 2,
        "precision": "tf32" if call == "tf32" else "ieee",
        "capability": divmod(capability, 10),
        "causal": call != "plain",
    }
    return estimate(kernel, **{**arguments, **changed})


def limit(row: Row) -> int:
    major, minor = divmod(row[0], 10)
    return CAPABILITIES[f"{major}.{minor}"].smem_per_block_optin_bytes


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: "-".join(map(str, row[:9])))
def test_as_compiled(row: Row) -> None:
    ours = modelled(row)
    registers, stack, smem = row[9:]
    assert ours.smem_bytes == pytest.approx(smem, rel=0.05)
    assert not (ours.smem_bytes <= limit(row) < smem), "promised to fit, and doesn't"
    if stack > MOST_STACK_BYTES:
        assert ours.spills
    else:
        assert abs(ours.registers - registers) < 100


def test_what_counts_as_spilling_is_what_the_tiles_are_chosen_by() -> None:
    assert MOST_STACK_BYTES == tiles.MOST_STACK_BYTES


def test_shared_memory_is_exact_nearly_always() -> None:
    exact = sum(modelled(row).smem_bytes == row[11] for row in COMPILED)
    assert exact >= 0.9 * len(COMPILED)


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: "-".join(map(str, row[:9])))
def test_whoever_holds_it_sums_to_it(row: Row) -> None:
    ours = modelled(row)
    assert sum(ours.holders.values()) == ours.smem_bytes
    assert min(ours.holders.values()) > 0
    assert ours.registers <= 255


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: "-".join(map(str, row[:9])))
def test_a_stage_more_never_takes_less(row: Row) -> None:
    taken = [modelled(row, num_stages=stages).smem_bytes for stages in (2, 3, 4, 5)]
    assert taken == sorted(taken)


def test_the_parts_by_hand() -> None:
    """Hopper: queries stay, two buffers each of K and V, two arrays of two 8-byte barriers."""
    row = (90, "forward", 128, 64, 4, 2, 128, "bf16", "plain", 255, 8, 98336)
    assert modelled(row).holders == {  # type: ignore[arg-type]
        "Q": 128 * 128 * 2,
        "K x 2": 2 * 64 * 128 * 2,
        "V x 2": 2 * 64 * 128 * 2,
        "barriers": 2 * 2 * 8,
    }
    assert modelled(row).in_registers == {  # type: ignore[arg-type]
        "O": 128 * 128 * 4,
        "S": 128 * 64 * 4,
        "P": 128 * 64 * 2,
        "m, l": 128 * 2 * 4,
    }


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ((100, "keys", 16, 128, 8, 2, 256, "bf16", "plain"), 560),
        ((100, "keys", 32, 128, 8, 1, 256, "bf16", "plain"), 592),
        ((100, "keys", 128, 128, 8, 2, 128, "bf16", "plain"), 640),
        ((100, "queries", 128, 128, 8, 2, 256, "bf16", "plain"), 576),
        ((100, "queries", 128, 128, 8, 2, 256, "fp32", "tf32"), 640),
    ],
)
def test_what_does_not_fit_in_tensor_memory(row: Any, columns: int) -> None:
    """As Triton counts them; below 512 it rounds up to a power of two."""
    assert modelled(row).tensor_columns == columns > TENSOR_COLUMNS


def test_what_fits_in_tensor_memory() -> None:
    for kernel, m, n, dim in (
        ("keys", 64, 64, 256), ("keys", 64, 128, 128), ("forward", 128, 64, 256),
        ("forward", 256, 64, 128), ("queries", 128, 64, 256), ("queries", 128, 128, 128),
    ):  # fmt: skip
        row: Any = (100, kernel, m, n, 8, 2, dim, "bf16", "plain")
        assert 256 < modelled(row).tensor_columns <= TENSOR_COLUMNS
    assert modelled(COMPILED[0]).tensor_columns == 0


def test_the_fastest_measured_tile_is_predicted_first() -> None:
    for (kernel, causal), rows in MEASURED.items():
        times = {}
        for measured, (m, n, warps, stages), registers, stack, smem, ctas in rows:
            times[measured] = predicted_ms(
                kernel, block_m=m, block_n=n, num_warps=warps, num_stages=stages, head_dim=128,
                value_head_dim=128, element_bytes=2, precision="ieee", capability=(9, 0),
                causal=causal, registers=registers, stack_bytes=stack, smem_bytes=smem,
                ctas_per_sm=ctas, device=lookup("h200"), batch=4, heads=16, seqlen=4096,
            )  # fmt: skip
            assert abs(math.log(times[measured] / measured)) < 0.2
        assert min(times, key=lambda measured: times[measured]) == min(times)


def test_the_first_tile_of_every_measured_shape_is_close_to_the_fastest() -> None:
    """benchmarks/tiles.py timed every tile of the grid. The worst of dK and dV are causal calls of
    1,024 tokens with head dims 192 and 256: over the 10 % that are wanted."""
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "tiles.json"
    rows = [
        row for row in json.loads(results.read_text())["rows"]
        if row["launches"] and row["spill"] <= LAUNCHED_STACK_BYTES[row["kernel"]]
    ]  # fmt: skip
    behind: dict[str, list[float]] = {}
    shape = ("head_dim", "length", "causal", "kernel")
    for _, run in itertools.groupby(rows, key=lambda row: [row[name] for name in shape]):
        own = list(run)
        ratio = min(own, key=_predicted)["ms"] / min(row["ms"] for row in own)
        behind.setdefault(own[0]["kernel"], []).append(ratio)
    for kernel, worst in {"forward": 1.10, "keys": 1.14, "queries": 1.10}.items():
        ratios = behind[kernel]
        assert len(ratios) >= 38
        assert math.prod(ratios) ** (1 / len(ratios)) < 1.03
        assert max(ratios) < worst


def _predicted(row: dict[str, Any]) -> float:
    m, n, warps, stages, _ = row["tile"]
    return predicted_ms(
        row["kernel"], block_m=m, block_n=n, num_warps=warps, num_stages=stages,
        head_dim=row["head_dim"], value_head_dim=row["head_dim"], element_bytes=2,
        precision="ieee", capability=(9, 0), causal=row["causal"], registers=row["registers"],
        stack_bytes=row["spill"], smem_bytes=row["smem"], ctas_per_sm=row["ctas"],
        device=lookup("h200"), batch=4, heads=16, seqlen=4096,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "m", "n", "warps", "times"),
    [
        ("forward", 128, 64, 8, 1),
        ("forward", 64, 64, 8, 2),  # Two warp groups of 64 rows each: both make all of them.
        ("forward", 32, 64, 4, 1),  # mma.sync, along the columns.
        ("forward", 32, 32, 4, 2),  # Along the rows, 16 each.
        ("keys", 32, 64, 8, 2),
        ("keys", 16, 16, 8, 8),
    ],
)
def test_warps_that_make_what_another_makes(
    kernel: Kernel, m: int, n: int, warps: int, times: int
) -> None:
    shape = _Shape(kernel, m, n, warps, 2, 128, 128, 2, ieee=True, major=9, causal=False)
    assert shape.makings() == times


def test_few_columns_are_bound_by_reading() -> None:
    """wgmma: 64 rows read for 32 columns takes longer than to multiply them; for 128 it doesn't.
    Peaks of a clock: 4,096 floating point operations, 128 bytes."""
    for columns in (32, 128):
        shape = _Shape("forward", 64, columns, 4, 2, 128, 128, 2, ieee=False, major=9, causal=False)
        multiplying = 2 * 64 * columns * 256 / 4096
        seconds = shape.busy_s(4096, 128)
        assert seconds >= multiplying
        assert (seconds > multiplying) == (columns == 32)


def test_every_shipped_tile_fits() -> None:
    """They do: tests/kernels/test_compile.py compiles them."""
    for (group, kernel, size), row in tiles._TABLE.items():
        for dim, tile in zip(tiles.HEAD_DIMS, row, strict=True):
            if kernel == "bias":
                continue
            for capability in tiles.GROUPS[group]:
                name = "{}.{}".format(*capability)
                if name not in CAPABILITIES:
                    continue
                ours = estimate(
                    kernel, block_m=tile.block_m, block_n=tile.block_n,
                    num_warps=tile.num_warps, num_stages=tile.num_stages, head_dim=dim,
                    value_head_dim=dim, element_bytes=size, precision="ieee",
                    capability=capability, causal=True,
                )  # type: ignore[arg-type]  # fmt: skip
                limit = CAPABILITIES[name].smem_per_block_optin_bytes
                assert ours.smem_bytes <= limit, (group, kernel, size, dim)
                assert ours.tensor_columns <= TENSOR_COLUMNS, (group, kernel, size, dim)
