"""`fa_advisor.budget`: arguments checked, tiles compiled or modelled, a table for each GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fa_advisor.budgets.foreign import foreign_budget
from fa_advisor.budgets.given import NOTE, Given, given_on, row_of
from fa_advisor.budgets.grid import BLOCKS, STAGES, WARPS, Candidate, Direction, candidates
from fa_advisor.budgets.table import (
    ELEMENT_BYTES,
    MAX_HEAD_DIM,
    Problem,
    budget_of,
    budget_table,
    endless,
)
from fa_advisor.errors import UsageError
from fa_advisor.probes.compiler import TIMEOUT_S, Request, available, compile_all
from fa_advisor.probes.device import advise_for
from fa_advisor.records import BudgetTable, Compiled, DeviceSpec, TileBudget, TileConfig

if TYPE_CHECKING:
    import pandas as pd

Which = Literal["fwd", "bwd", "both"]
Tiles = Sequence[tuple[int, int]]
Progress = Callable[[int, int], None]

_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
}  # fmt: skip
OLDEST = (8, 0)
# A tile that the model puts this far over the limit isn't worth the compiler's time.
_HOPELESS = 1.5


class Budget(BudgetTable):
    """A table that prints itself, with rich and in notebooks too."""

    __slots__ = ()

    def __str__(self) -> str:
        from fa_advisor.views.text_budget import to_text

        return to_text((self,))

    def __rich__(self) -> Any:
        from fa_advisor.views.text_budget import BudgetView

        return BudgetView((self,))

    def _repr_html_(self) -> str:
        from fa_advisor.views.text_budget import to_html

        return to_html((self,))

    def frame(self) -> pd.DataFrame:
        """A row a tile, in the order of use within its kernel."""
        from fa_advisor.views.tables import budget_frame

        return budget_frame([self])


def budget(
    head_dim: int = 0,
    *,
    value_head_dim: int | None = None,
    dtype: str = "bf16",
    gpu: str | None = None,
    is_causal: bool = False,
    direction: Which = "both",
    tiles: Tiles | None = None,
    num_warps: Sequence[int] | None = None,
    num_stages: Sequence[int] | None = None,
    kernel: str | os.PathLike[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    modelled: bool = False,
    progress: Progress | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Budget:
    """What candidate tiles cost on a GPU, the one to use first; the GPU needn't be there.

    Args:
        head_dim: of query and key, 1 to 256.
        value_head_dim: of value and output; head_dim's by default.
        dtype: "bf16", "fp16" or "fp32", or torch's name for it.
        gpu: a name as `fa-advisor gpus` lists them; the GPU found by default, else an A100 80 GB.
        is_causal: for the kernels of causal calls, which mask the tiles on the diagonal.
        direction: "fwd", "bwd" (two kernels: dK and dV, and dQ) or "both".
        tiles: pairs (block_m, block_n) of queries and keys, each a power of two from 16 to 256;
            with num_warps and num_stages every combination. A grid of about fifty by default.
        kernel: "file.py:function", a @triton.jit function of one's own instead of the bundled.
        arguments: of that kernel, by name: a type such as "*fp16" or "i32" (":16" behind it:
            divisible by 16), or a constant; "{m}", "{n}", "{d}" and "{dv}" stand for the tile's
            block_m and block_n, and for the head dims.
        modelled: compile nothing: the model alone, in microseconds.
        progress: told (done, all) as tiles are compiled.
        timeout_s: for one tile; one that takes longer has a row that says so.

    Raises:
        UsageError: names the argument, what was expected and what came.

    """
    if gpu is not None and not isinstance(gpu, str):
        raise UsageError(f"gpu: expected a name or None, got {type(gpu).__name__}")
    device, note = advise_for(gpu)
    (table,) = tables(
        [device], head_dim, value_head_dim=value_head_dim, dtype=dtype, is_causal=is_causal,
        direction=direction, tiles=tiles, num_warps=num_warps, num_stages=num_stages,
        kernel=kernel, arguments=arguments, modelled=modelled, progress=progress,
        timeout_s=timeout_s, notes=[note] if note else [],
    )  # fmt: skip
    return Budget(**{field.name: getattr(table, field.name) for field in fields(table)})


def tables(
    devices: Sequence[DeviceSpec],
    head_dim: int,
    *,
    value_head_dim: int | None,
    dtype: str,
    is_causal: bool,
    direction: Which,
    tiles: Tiles | None,
    num_warps: Sequence[int] | None,
    num_stages: Sequence[int] | None,
    kernel: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any] | None,
    modelled: bool,
    progress: Progress | None,
    timeout_s: float,
    notes: Sequence[str] = (),
) -> list[BudgetTable]:
    """A table for each device, all of them compiled side by side. Arguments: as `budget`'s."""
    tiles, num_warps, num_stages = _grid(tiles, num_warps, num_stages)
    limit: Any = timeout_s
    if not isinstance(limit, (int, float)) or not 0 < limit < 1e6:
        raise UsageError(f"timeout: expected seconds above 0, got {timeout_s!r}")
    if arguments and kernel is None:
        raise UsageError("arguments: expected none without a kernel of your own")
    if not isinstance(is_causal, bool):
        raise UsageError(f"is_causal: expected a bool, got {type(is_causal).__name__}")
    if direction not in ("fwd", "bwd", "both"):
        raise UsageError(f"direction: expected fwd, bwd or both, got {direction!r}")
    problem = _problem(head_dim, value_head_dim, dtype, is_causal, bool(kernel))
    directions: tuple[Direction, ...] = ("fwd", "bwd") if direction == "both" else (direction,)
    missing = available()
    if kernel is not None:
        if modelled or missing:
            raise UsageError(
                f"--kernel: there is no model of {kernel}"
                + (f", and {missing}" if missing else ", it has to be compiled"),
                hint="leave out --modelled" if not missing else "pip install triton",
            )
        path, function = _kernel(kernel)
        return foreign_tables(
            devices, problem, path, function, dict(arguments or {}),
            tiles or [(64, 64)], num_warps or [4, 8], num_stages or [2, 3], progress, timeout_s,
            notes,
        )  # fmt: skip
    for device in devices:
        if device.capability < OLDEST:
            raise UsageError(
                f"{device.name} has compute capability {device.compute_capability}:"
                " the bundled kernels need 8.0 or later",
                hint="torch's memory-efficient attention runs there; a kernel of your own can be"
                " budgeted with --kernel",
            )
    grid = candidates(directions, tiles=tiles, warps=num_warps, stages=num_stages)
    wanted = [(device, candidate) for device in devices for candidate in grid]
    # Of tiles that were asked for, these have none.
    asked = bool(tiles or num_warps or num_stages)
    fixed = [
        (place, one)
        for place, device in enumerate(devices)
        if not asked
        for one in given_on(problem, device, directions)
    ]
    compiled: dict[int, Compiled] = {}
    of_fixed: Sequence[Compiled | None] = [None] * len(fixed)
    if missing and not modelled:
        notes = [*notes, missing]
    elif not modelled:
        hopeful = [
            i for i, (device, candidate) in enumerate(wanted)
            if budget_of(candidate, problem, device).smem_bytes
            <= _HOPELESS * device.smem_per_block_optin_bytes
            and not endless(candidate, problem)
        ]  # fmt: skip
        requests = [_request(*wanted[i], problem) for i in hopeful]
        requests += [_request(devices[place], one, problem) for place, one in fixed]
        outcomes = _compile(requests, progress, timeout_s)
        compiled = dict(zip(hopeful, outcomes, strict=False))
        of_fixed = outcomes[len(hopeful) :]
    rows = [
        budget_of(candidate, problem, device, compiled.get(i))
        for i, (device, candidate) in enumerate(wanted)
    ]
    size = len(grid)
    found = []
    for i, device in enumerate(devices):
        own = rows[i * size : (i + 1) * size]
        more = [
            row_of(one, problem, device, outcome)
            for (place, one), outcome in zip(fixed, of_fixed, strict=True)
            if place == i
        ]
        said = [*notes, NOTE] if more else notes
        found.append(budget_table([*own, *more], problem, device, said))
    return found


def foreign_tables(
    devices: Sequence[DeviceSpec], problem: Problem, path: Path, function: str,
    arguments: Mapping[str, Any], tiles: Tiles, num_warps: Sequence[int],
    num_stages: Sequence[int], progress: Progress | None, timeout_s: float, notes: Sequence[str],
) -> list[BudgetTable]:  # fmt: skip
    """The tables of somebody's own kernel."""
    grid = [
        TileConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
        for m, n in tiles
        for warps in num_warps
        for stages in num_stages
    ]
    requests = [
        _foreign_request(device, tile, problem, path, function, arguments)
        for device in devices
        for tile in grid
    ]
    outcomes = _compile(requests, progress, timeout_s)
    reasons = {outcome.error for outcome in outcomes}
    reason = str(reasons.pop())
    # The kernel itself is at fault, not what a tile makes of it, nor the compiler.
    if not reasons and ": " in reason and not reason.startswith("the compiler's process"):
        raise UsageError(f"{path.name}:{function} doesn't compile: {reason}")
    found = []
    for i, device in enumerate(devices):
        own = outcomes[i * len(grid) : (i + 1) * len(grid)]
        rows = [
            foreign_budget(function, tile, problem, device, outcome)
            for tile, outcome in zip(grid, own, strict=True)
        ]
        found.append(budget_table(rows, problem, device, notes, padded=False))
    return found


def kept_budgets(
    problem: Problem, device: DeviceSpec, most: int, *, long: bool
) -> tuple[TileBudget, ...]:
    """For a report: of each kernel the first `most`, compiled where that was done before.

    long: whether there are sequences that Hopper's own kernels take.
    """
    grid = candidates(("fwd", "bwd"))
    fixed = given_on(problem, device, ("fwd", "bwd")) if long else ()
    kinds: list[Candidate | Given] = [*fixed, *grid]
    requests = [_request(device, one, problem) for one in kinds]
    known: Sequence[Compiled | None] = [None] * len(requests)
    if available() is None:
        known = compile_all(requests, only_kept=True)
    rows = [
        row_of(one, problem, device, outcome) for one, outcome in zip(fixed, known, strict=False)
    ]
    rows += [
        budget_of(candidate, problem, device, outcome)
        for candidate, outcome in zip(grid, known[len(fixed) :], strict=True)
    ]
    table = budget_table(rows, problem, device)
    kernels = dict.fromkeys(row.kernel for row in table.budgets)
    return tuple(
        row
        for kernel in kernels
        for row in [row for row in table.budgets if row.kernel == kernel][:most]
    )


def _compile(
    requests: Sequence[Request], progress: Progress | None, timeout_s: float
) -> list[Compiled]:
    def tell(done: int) -> None:
        if progress is not None:
            progress(done, len(requests))

    return [o for o in compile_all(requests, timeout_s=timeout_s, progress=tell) if o is not None]


def _number(device: DeviceSpec) -> int:
    major, minor = device.capability
    return 10 * major + minor


def _request(device: DeviceSpec, one: Candidate | Given, problem: Problem) -> Request:
    tile = one.tile
    return Request(
        capability=_number(device),
        kernel=one.kernel,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        dim=problem.head_dim,
        dim_v=problem.value_head_dim,
        dtype=problem.dtype,
        call="causal" if problem.is_causal else "plain",
    )


_TYPE = re.compile(
    r"(\*(k|const )?)?(i1|[iu](8|16|32|64)|fp(8\w*|16|32|64)|bf16)(:16)?|tensordesc<.*>"
)


def _foreign_request(
    device: DeviceSpec, tile: TileConfig, problem: Problem, path: Path, function: str,
    arguments: Mapping[str, Any],
) -> Request:  # fmt: skip
    stands_for = {
        "m": tile.block_m, "n": tile.block_n, "d": problem.head_dim, "dv": problem.value_head_dim,
    }  # fmt: skip
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name, given in arguments.items():
        value = given
        if isinstance(given, str):
            value = re.sub(r"\{(\w*)\}", partial(_stood_for, name, stands_for), given)
        if isinstance(value, str) and _TYPE.fullmatch(value):
            signature[name] = value
        elif isinstance(value, str) and (value[:1] == "*" or value.endswith(":16") or not value):
            raise UsageError(
                f"argument {name}: {value!r} is no type",
                hint="types are such as *fp16, *bf16:16, i32, i64:16, fp32",
            )
        else:
            constants[name] = _constant(value)
    return Request(
        capability=_number(device),
        kernel=function,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        path=str(path),
        signature=signature,
        constants=constants,
    )


def _stood_for(name: str, stands_for: Mapping[str, int], found: re.Match[str]) -> str:
    word = found[1]
    if word not in stands_for:
        raise UsageError(
            f"argument {name}: {{{word}}} stands for nothing", hint="{m}, {n}, {d} and {dv} do"
        )
    return str(stands_for[word])


def _constant(value: Any) -> Any:
    """A constant as it was meant: "True", "64" and "0.5" on a command line aren't texts."""
    if not isinstance(value, str):
        return value
    if value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _kernel(kernel: str | os.PathLike[str]) -> tuple[Path, str]:
    if not isinstance(kernel, (str, os.PathLike)):
        raise UsageError(f"kernel: expected FILE:FUNCTION, got {type(kernel).__name__}")
    text = os.fspath(kernel)
    file, _, function = text.rpartition(":")
    if not file or not function.isidentifier():
        raise UsageError(
            f"kernel: expected FILE:FUNCTION, got {text!r}", hint="for example kernels.py:attention"
        )
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"kernel: there is no file {file}")
    return path.resolve(), function


def _problem(
    head_dim: int, value_head_dim: int | None, dtype: str, is_causal: bool, foreign: bool
) -> Problem:
    least = 0 if foreign else 1
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    for name, dim in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        if not _is_whole(dim) or not least <= dim <= MAX_HEAD_DIM:
            raise UsageError(
                f"{name}: expected 1 to {MAX_HEAD_DIM}, got {dim!r}",
                hint="the head dim is hidden size / number of heads",
            )
    short = _DTYPES.get(str(dtype).removeprefix("torch."))
    if short is None or short not in ELEMENT_BYTES:
        raise UsageError(f"dtype: expected bf16, fp16 or fp32, got {dtype!r}")
    return Problem(
        head_dim=head_dim, value_head_dim=value_head_dim, dtype=short, is_causal=is_causal
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _grid(
    tiles: Iterable[tuple[int, int]] | None,
    num_warps: Iterable[int] | None,
    num_stages: Iterable[int] | None,
) -> tuple[Tiles | None, Sequence[int] | None, Sequence[int] | None]:
    """What was given of the grid, as lists of ints that can be."""
    found: list[list[Any] | None] = []
    given: tuple[tuple[str, Any, Sequence[int]], ...] = (
        ("tiles", tiles, BLOCKS),
        ("num_warps", num_warps, WARPS),
        ("num_stages", num_stages, STAGES),
    )
    for name, values, known in given:
        if values is None:
            found.append(None)
            continue
        what = "pairs (block_m, block_n)" if name == "tiles" else "a list of ints"
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise UsageError(f"{name}: expected {what}, got {values!r}")
        listed = list(values)
        for value in listed:
            each = value if name == "tiles" else (value,)
            whole = isinstance(each, (tuple, list)) and all(map(_is_whole, each))
            if not whole or len(each) != (2 if name == "tiles" else 1):
                raise UsageError(f"{name}: expected {what}, got {value!r} among them")
            if any(part not in known for part in each):
                shown = "x".join(map(str, each))
                if name == "tiles":
                    raise UsageError(
                        f"tiles: expected powers of two from {BLOCKS[0]} to {BLOCKS[-1]},"
                        f" got {shown}"
                    )
                raise UsageError(
                    f"{name}: expected one of {', '.join(map(str, known))}, got {shown}"
                )
        if not listed:
            raise UsageError(f"{name}: expected {what}, got none")
        found.append(listed)
    return found[0], found[1], found[2]
