"""Every shipped tile, compiled for the GPUs it is meant for: it fits, and it doesn't spill.

No GPU is needed. `make compile-tiles` compiles the whole table; with TRITON=3.9.0, under that one.
The compiler can abort the interpreter, so it runs in child processes, one for each core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fa_advisor.kernels.tiles import (
    HEAD_DIMS,
    KERNELS,
    MOST_STACK_BYTES,
    Tile,
    group_of,
    lighter,
    tile,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
whole_table = pytest.mark.skipif(
    "FA_ADVISOR_COMPILE_ALL" not in os.environ, reason="ten minutes a Triton: make compile-tiles"
)

COMPILER = Path(__file__).with_name("compile_tiles.py")
# Shared memory that one block may have, by target (KiB).
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# No tile holds dK and dV of 256 features in fp32 in registers. From 16x16 to 32x32, with 4, 8 and
# 16 warps, this is the least; the others take 1,100 to 3,000 bytes.
UNAVOIDABLE = {("keys", "fp32", 256): 520}
# The commonest head dims.
COMMONEST = {80: (64, 128), 86: (128,), 90: (64, 128), 120: (128,)}
PLAIN = ("plain", "causal")
# Calls that need more than the plain ones, for which the table has no tiles of their own. The
# kernel for a bias's gradient has no use for most.
OTHERS = ("ragged", "pointers", "packed", "window", "dropout", "mask", "bias")
NOT_OF_BIAS = ("ragged", "pointers", "packed", "tf32", "mask", "bias")
NOT_CAUSAL = ("plain", "ragged", "dropout", "mask", "bias")
# As often as a launch tries.
ATTEMPTS = 4

# What compile_tiles.py reads: target, kernel, tile, head dims, dtype, kind of call.
Config = tuple[int, str, Tile, int, int, str, str]
DTYPES = {2: "bf16", 4: "fp32"}
Row = dict[str, Any]


def _configs(cc: int, dims: tuple[int, ...], size: int, calls: tuple[str, ...]) -> list[Config]:
    group = group_of((cc // 10, cc % 10))
    return [
        (
            cc,
            kernel,
            tile(group, kernel, dim, size, call not in NOT_CAUSAL),
            dim,
            dim,
            DTYPES[size],
            call,
        )
        for kernel in KERNELS
        for dim in dims
        for call in calls
        if not (kernel == "bias" and call in NOT_OF_BIAS)
    ]


def _child(configs: list[Config]) -> list[Row]:
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
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    died_at = configs[len(rows) : len(rows) + 1]
    assert done.returncode == 0, f"{died_at}: {done.stderr[-3000:]}"
    return rows


def _compiled(configs: list[Config]) -> list[Row]:
    cores = len(os.sched_getaffinity(0))
    shares = [share for share in (configs[i::cores] for i in range(cores)) if share]
    with ThreadPoolExecutor(cores) as pool:
        rows = [row for rows in pool.map(_child, shares) for row in rows]
    assert len(rows) == len(configs)
    for row in rows:
        assert "error" not in row, row
        assert row["smem_bytes"] <= LIMITS[row["capability"]] * 1024, row
    return rows


def _settled(configs: list[Config]) -> list[Row]:
    """A row for each call, as a launch has it: a tile that spills gives way to a lighter one."""
    settled: dict[tuple[Any, ...], Row] = {}
    for _ in range(ATTEMPTS):
        again: list[Config] = []
        for row in _compiled(configs):
            target = (row["capability"], row["kernel"])
            call = (*target, row["dim"], row["dim_v"], row["dtype"], row["call"])
            best = settled.setdefault(call, row)
            if row["stack_bytes"] < best["stack_bytes"]:
                settled[call] = row
            following = lighter(Tile(*row["tile"]), row["kernel"])
            if row["stack_bytes"] > MOST_STACK_BYTES and following is not None:
                again.append((*target, following, *call[2:]))
        configs = again
    return list(settled.values())


def _table(configs: list[Config]) -> list[Row]:
    """The table's own rows; under a Triton that it wasn't chosen for, as a launch has them."""
    return _settled(configs) if "FA_ADVISOR_TRITON_PATH" in os.environ else _compiled(configs)


def _check(rows: list[Row]) -> None:
    for row in rows:
        most = UNAVOIDABLE.get((row["kernel"], row["dtype"], row["dim"]), MOST_STACK_BYTES)
        assert row["stack_bytes"] <= most, row


def _print(rows: list[Row]) -> None:
    """What `make compile-tiles` shows of a target."""
    spilled = [row for row in rows if row["stack_bytes"]]
    print(
        f"triton {rows[0]['triton']}, sm_{rows[0]['capability']}: {len(rows)} compiled,"
        f" shared memory up to {max(row['smem_bytes'] for row in rows)} bytes,"
        f" {len(spilled)} with a stack frame"
    )
    for row in spilled:
        print("  ", *(row[name] for name in ("kernel", "dim", "dtype", "call", "tile")),
              f"{row['registers']} registers, {row['stack_bytes']} bytes of stack")  # fmt: skip


def test_a_lighter_tile_keeps_what_made_it_fast() -> None:
    assert lighter(Tile(64, 64, 4, 2), "queries") == Tile(
        64, 32, 4, 2
    )  # Hopper multiplies 64 rows.
    assert lighter(Tile(64, 64, 8, 2), "keys") == Tile(64, 32, 8, 2)
    assert lighter(Tile(64, 64, 4, 2), "keys") == Tile(32, 64, 4, 2)
    assert lighter(Tile(64, 64, 4, 2, 168), "queries") == Tile(64, 64, 4, 2)


def test_the_commonest_tiles_fit_and_do_not_spill() -> None:
    configs = [c for cc, dims in COMMONEST.items() for c in _configs(cc, dims, 2, PLAIN)]
    _check(_table(configs))


@pytest.mark.slow
@whole_table
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cc", LIMITS)
def test_every_tile_fits_and_does_not_spill(cc: int, size: int) -> None:
    calls = (*PLAIN, "tf32") if size == 4 else PLAIN
    configs = _configs(cc, HEAD_DIMS, size, calls)
    rows = _table(configs)
    _print(rows)
    _check(rows)


@pytest.mark.slow
@whole_table
@pytest.mark.parametrize("cc", [80, 90, 120])
def test_other_calls_come_to_a_tile_that_does_not_spill(cc: int) -> None:
    rows = _settled(_configs(cc, COMMONEST[cc], 2, OTHERS))
    _print(rows)
    _check(rows)
