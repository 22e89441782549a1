"""Which tiles are worth a look, for each of the bundled kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fa_advisor.records import TileConfig

Direction = Literal["fwd", "bwd"]
# A backward is two: dK and dV by blocks of keys, dQ by blocks of queries.
Kernel = Literal["forward", "keys", "queries"]
KERNELS: dict[Direction, tuple[Kernel, ...]] = {"fwd": ("forward",), "bwd": ("keys", "queries")}
DIRECTION: dict[Kernel, Direction] = {"forward": "fwd", "keys": "bwd", "queries": "bwd"}

BLOCKS = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = tuple(range(1, 8))

# block_m (queries), block_n (keys), warps, and the stages to try.
_GRID: dict[Kernel, tuple[tuple[int, int, int, tuple[int, ...]], ...]] = {
    "forward": (
        (128, 128, 8, (2, 3)),
        (128, 64, 8, (2, 3)),
        (128, 64, 4, (2, 3)),
        (128, 32, 4, (2, 3)),
        (64, 128, 4, (2,)),
        (64, 64, 8, (1,)),
        (64, 64, 4, (1, 2, 3)),
        (64, 32, 4, (2, 3)),
        (32, 64, 4, (2,)),
        (32, 32, 4, (1, 2)),
        (32, 16, 8, (1,)),
    ),
    "keys": (
        (64, 128, 8, (1, 2)),
        (32, 128, 8, (2,)),
        (32, 128, 4, (2,)),
        (64, 64, 8, (2,)),
        (64, 64, 4, (1, 2)),
        (32, 64, 8, (2,)),
        (32, 64, 4, (1, 2)),
        (64, 32, 8, (2,)),
        (32, 32, 4, (1, 2)),
        (16, 32, 8, (1,)),
        (16, 16, 8, (1,)),
    ),
    "queries": (
        (128, 64, 8, (2, 3)),
        (128, 64, 4, (2, 3)),
        (64, 128, 4, (2,)),
        (128, 32, 4, (2,)),
        (64, 64, 4, (1, 2, 3)),
        (64, 32, 4, (2,)),
        (64, 32, 8, (1,)),
        (32, 32, 4, (1,)),
        (16, 32, 8, (1,)),
    ),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with a tile."""

    kernel: Kernel
    tile: TileConfig

    @property
    def direction(self) -> Direction:
        """The pass that it is part of."""
        return DIRECTION[self.kernel]


def candidates(
    directions: Iterable[Direction],
    *,
    tiles: Sequence[tuple[int, int]] | None = None,
    warps: Sequence[int] | None = None,
    stages: Sequence[int] | None = None,
) -> list[Candidate]:
    """The grid; or every combination of what is given, the grid's own values for what isn't."""
    found: dict[Candidate, None] = {}
    for direction in directions:
        for kernel in KERNELS[direction]:
            rows = _GRID[kernel]
            shapes = tiles or list(dict.fromkeys((m, n) for m, n, _, _ in rows))
            for m, n in shapes:
                own = [row for row in rows if row[:2] == (m, n)]
                for num_warps in warps or sorted({row[2] for row in own} or {4, 8}):
                    tried = [s for row in own if row[2] == num_warps for s in row[3]]
                    for num_stages in stages or tried or (1, 2):
                        tile = TileConfig(
                            block_m=m, block_n=n, num_warps=num_warps, num_stages=num_stages
                        )
                        found[Candidate(kernel, tile)] = None
    return list(found)
