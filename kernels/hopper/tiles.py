"""How the Hopper kernels cut a call: what is known without torch or Triton."""

from __future__ import annotations

from typing import NamedTuple

CAPABILITY = (9, 0)
ROWS_OF_A_CONSUMER = 64
# Keys of a block of the backward kernel.
BLOCK_N = 128
# Queries of a block of the kernel of dQ where a head dim is over 128.
WIDE_QUERIES = 128


class Tiles(NamedTuple):
    """How the forward kernel cuts a call. Features of Q and K are `parts` * `part`.

    shared_out: the output leaves through the buffer of Q, for want of room for one of its own.
    """

    part: int
    parts: int
    block_dv: int
    block_n: int
    stages: int
    consumers: int
    shared_out: bool


def tiles_of(dim: int, dim_v: int) -> Tiles:
    """The tiles for a query's and a value's head dim, up to 256 each."""
    part, parts = next(p for limit, p in _PARTS if dim <= limit)
    block_dv = next(size for size in (64, 128, 256) if dim_v <= size)
    widest = max(part * parts, block_dv)
    if widest <= 64:
        return Tiles(part, parts, block_dv, 128, 3, 3, shared_out=False)
    if widest <= 128:
        return Tiles(part, parts, block_dv, 128, 2, 2, shared_out=False)
    return Tiles(part, parts, block_dv, 64, 2, 2, shared_out=part == block_dv == 256)


def fp8_tiles_of(dim: int, dim_v: int) -> Tiles:
    """The same for float8_e4m3fn, whose head dims are up to 128."""
    part, block_dv = (64 if size <= 64 else 128 for size in (dim, dim_v))
    return Tiles(part, 1, block_dv, 128, 2, 2, shared_out=False)


# Head dims up to the first are cut in parts of the second: a box of a tensor map is a power of two.
_PARTS = ((64, (64, 1)), (96, (32, 3)), (128, (128, 1)), (192, (64, 3)), (256, (256, 1)))


def widths(dim: int, dim_v: int) -> tuple[int, int, int]:
    """For the backward: both head dims as they are padded, and the query rows of a tile."""
    widest = max(dim, dim_v)
    if widest <= 64:
        return 64, 64, 128
    if widest <= 128:
        return 128, 128 if dim_v > 64 else 64, 64
    return 256, 256 if dim_v > 128 else 128, 64


def value_stages(wide_v: int) -> int:
    """How many tiles of V the kernel of dQ has room for where a head dim is over 128."""
    return 1 if wide_v == 256 else 2
