"""FA_ADVISOR_AUTOTUNE=1: the fastest tile, measured once for each kind of kernel and kept on disk.

Without the variable the shipped table decides, and nothing here reads, writes or measures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton

from fa_advisor.kernels.kept import directory, write
from fa_advisor.kernels.tiles import GROUPS, Tile, tile

log = logging.getLogger(__name__)

# A call that is over sooner says more of the host than of the tile: it decides nothing.
SHORTEST_MS = 0.1
# What another tile must save for the shipped one to go: less is noise.
WORTHWHILE = 0.02
_WARM_UP, _LAUNCHES = 2, 7


class TuningKey(NamedTuple):
    """What a tile depends on: the GPU, the compiler and which code is compiled.

    Never how long, how many or how wide apart the sequences are. `dim`, `dim_v`: padded, as the
    tile table's. `descriptors`: operands come by tensor descriptor. `source`: of the kernel and
    all that it calls.
    """

    gpu: str
    capability: tuple[int, int]
    triton: str
    source: str
    dim: int
    dim_v: int
    element_bytes: int
    precision: str
    causal: bool
    window: bool
    bias: int
    softcap: bool
    dropout: bool
    packed: bool
    descriptors: bool


def identity(function: Any, device: torch.device) -> tuple[str, tuple[int, int], str, str]:
    """The first four fields of a key: the GPU's, Triton's and the kernel's own."""
    return (
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        triton.__version__,
        function.cache_key,
    )


def enabled() -> bool:
    """Whether tiles are to be measured."""
    return os.environ.get("FA_ADVISOR_AUTOTUNE") == "1"


def milliseconds(launch: Callable[[], None]) -> float:
    """The median time of a launch on the current stream, by CUDA events.

    Launches queue up behind the warm-up, so that the host's own time stays out of it.
    """
    for _ in range(_WARM_UP):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_LAUNCHES + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return float(median(a.elapsed_time(b) for a, b in pairwise(events)))


def candidates(kernel: str, key: TuningKey, shipped: Tile) -> list[Tile]:
    """The shipped tile, those that the table has for other GPUs, and its neighbours."""
    head_dim = max(key.dim, key.dim_v)
    elsewhere = (tile(group, kernel, head_dim, key.element_bytes) for group in GROUPS)
    found = dict.fromkeys((shipped, *elsewhere, *_neighbours(shipped)))
    return [t for t in found if t == shipped or _sensible(t)]


def _neighbours(t: Tile) -> Iterator[Tile]:
    m, n, warps, stages, limit = t
    if limit is not None:
        yield t._replace(max_registers=None)
    yield t._replace(num_stages=stages - 1)
    yield t._replace(num_stages=stages + 1)
    yield t._replace(num_warps=8 if warps == 4 else 4)
    for block_m, block_n in ((m, n // 2), (m // 2, n), (m, n * 2), (m * 2, n)):
        yield Tile(block_m, block_n, warps, stages)
    for block_m, block_n in ((m, n * 2), (m * 2, n)):
        yield Tile(block_m, block_n, 8, stages)


def _sensible(t: Tile) -> bool:
    """Whether the compiler could hold it, roughly; a file's tile may be anything."""
    return (
        t.block_m in (16, 32, 64, 128, 256)
        and t.block_n in (16, 32, 64, 128, 256)
        and t.block_m * t.block_n <= 2**14
        and t.num_warps in (4, 8)
        and t.num_stages in (1, 2, 3, 4)
        and (t.max_registers is None or 32 <= t.max_registers <= 255)
    )


_tuned: dict[tuple[str, TuningKey], Tile] = {}
# Two measurements at a time would measure each other.
_lock = threading.Lock()


def tuned(
    kernel: str,
    key: TuningKey,
    shipped: Tile,
    run: Callable[[Tile], None],
    timer: Callable[[Callable[[], None]], float] = milliseconds,
) -> Tile:
    """The tile to use: measured before, or measured now; the shipped one where that can't be.

    `run(tile)` launches once, on the current stream and compiled if need be, writing nothing but
    outputs; it raises where the tile doesn't fit.
    """
    if not enabled():
        return shipped
    with _lock:
        known = _tuned.get((kernel, key)) or _read(kernel, key)
        if known is None:
            # To measure is to wait for the GPU, which breaks a capture.
            if torch.cuda.is_current_stream_capturing():
                return shipped
            fastest = _fastest(kernel, key, shipped, run, timer)
            if fastest is None:
                return shipped
            # Several processes may start a job together: all take what the first one found.
            known = _read(kernel, key)
            if known is None:
                known = fastest
                _write(kernel, key, fastest)
        _tuned[kernel, key] = known
        return known


def _fastest(
    kernel: str,
    key: TuningKey,
    shipped: Tile,
    run: Callable[[Tile], None],
    timer: Callable[[Callable[[], None]], float],
) -> Tile | None:
    """The fastest candidate; None where none ran, or the call is too short to tell."""
    times: dict[Tile, float] = {}
    for t in candidates(kernel, key, shipped):
        try:
            times[t] = timer(lambda t=t: run(t))  # type: ignore[misc]
        except Exception as error:
            # Too large for this GPU or this compiler. If the call itself is at fault, the launch
            # that follows says so.
            log.debug("%s: %s: %s", kernel, t, error)
            continue
        if len(times) == 1 and times[t] < SHORTEST_MS:
            return None
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    if shipped in times and times[best] > times[shipped] * (1 - WORTHWHILE):
        best = shipped
    log.info(
        "tuned %s for head dim %d on %s: %s, %.3f ms; shipped: %s, %s; %d tiles measured",
        kernel, max(key.dim, key.dim_v), key.gpu, tuple(best), times[best], tuple(shipped),
        f"{times[shipped]:.3f} ms" if shipped in times else "doesn't fit", len(times),
    )  # fmt: skip
    return best


def _path(kernel: str, key: TuningKey) -> Path:
    """A file for each kind of kernel: processes that tune different ones never meet."""
    name = hashlib.sha256(repr((kernel, key)).encode()).hexdigest()[:16]
    return directory() / "tiles" / f"{kernel}-{name}.json"


def _described(kernel: str, key: TuningKey) -> dict[str, Any]:
    return {"kernel": kernel, **key._asdict(), "capability": list(key.capability)}


def _read(kernel: str, key: TuningKey) -> Tile | None:
    """The tile that was kept; None where there is none, or none that can be believed."""
    try:
        path = _path(kernel, key)
        kept = json.loads(path.read_text())
        found = Tile(*kept.pop("tile"))
        if kept != _described(kernel, key) or not _sensible(found):
            raise ValueError(f"{path} holds something else")
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        _say_once(f"a kept tile of {kernel} can't be used: {type(error).__name__}: {error}")
        return None
    return found


def _write(kernel: str, key: TuningKey, best: Tile) -> None:
    text = json.dumps({**_described(kernel, key), "tile": list(best)}, indent=1)
    try:
        path = _path(kernel, key)
        write(path, text + "\n")
    except (OSError, RuntimeError) as error:
        # RuntimeError: there's no home directory.
        _say_once(f"tuned tiles can't be kept: {type(error).__name__}: {error}")


@cache
def _say_once(text: str) -> None:
    log.warning(text)
