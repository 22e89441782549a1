"""Which tile each kernel uses: a shipped table, held against every target's limits by the tests.

Keyed by the GPU's group, the padded head dim and the bytes of an element; never by the sequence
length. tests/kernels/test_compile.py compiles each entry for its targets: it fits in shared memory
and doesn't spill.
"""

from __future__ import annotations

from typing import NamedTuple

# Up to this many tokens, encoding tensor maps costs the host more than they save the GPU.
SHORT = 512


class Tile(NamedTuple):
    """A kernel's blocking: queries and keys in a tile, and how the compiler schedules it.

    max_registers: the compiler's limit per thread, where a second block on the SM is worth more
    than registers; None leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Compute capabilities that share limits; shared memory a block: 163, 99, 227, 227 KiB.
GROUPS = {
    "sm80": ((8, 0), (8, 7)),
    "sm86": ((8, 6), (8, 9), (12, 0), (12, 1)),
    "sm90": ((9, 0),),
    "sm100": ((10, 0), (10, 3), (11, 0)),
}
KERNELS = ("forward", "keys", "queries", "bias")
HEAD_DIMS = (16, 32, 64, 128, 256)
# A frame this small is a few values kept in L1, which is what the fastest tiles do.
MOST_STACK_BYTES = 96
# What runs on no GPU: Triton's interpreter. Small, so that short sequences cross tiles.
INTERPRETED = Tile(32, 16, 4, 1)

# For each group, kernel and element size: one tile per head dim, in HEAD_DIMS' order.
_TABLE: dict[tuple[str, str, int], tuple[Tile, ...]] = {
    ("sm80", "forward", 2): (
        Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 2),
        Tile(64, 64, 8, 1)),
    ("sm80", "keys", 2): (
        Tile(64, 64, 4, 1), Tile(32, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 8, 2),
        Tile(16, 32, 8, 1)),
    ("sm80", "queries", 2): (
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2),
        Tile(64, 32, 8, 1)),
    ("sm80", "bias", 2): (
        Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 8, 1),
        Tile(32, 32, 8, 1)),
    ("sm80", "forward", 4): (
        Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1),
        Tile(32, 16, 8, 1)),
    ("sm80", "keys", 4): (
        Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 8, 1),
        Tile(16, 16, 8, 1)),
    ("sm80", "queries", 4): (
        Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1),
        Tile(16, 32, 8, 1)),
    ("sm80", "bias", 4): (
        Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 8, 1),
        Tile(16, 16, 8, 1)),
    ("sm90", "forward", 2): (
        Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 4, 2, 168), Tile(128, 64, 4, 2),
        Tile(128, 64, 8, 2)),
    ("sm90", "keys", 2): (
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 128, 4, 2), Tile(64, 64, 4, 2),
        Tile(64, 64, 8, 2)),
    ("sm90", "queries", 2): (
        Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3),
        Tile(64, 64, 4, 2)),
    ("sm100", "forward", 2): (
        Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(128, 128, 8, 2),
        Tile(128, 32, 8, 2)),
    ("sm100", "keys", 2): (
        Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(32, 64, 8, 2),
        Tile(32, 32, 8, 1)),
    ("sm100", "queries", 2): (
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2),
        Tile(64, 32, 8, 2)),
    ("sm100", "bias", 2): (
        Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 8, 1),
        Tile(64, 64, 8, 1)),
}  # fmt: skip
# Where causal calls, with their second loop, do better with another tile.
_CAUSAL: dict[tuple[str, str, int, int], Tile] = {
    ("sm90", "forward", 2, 128): Tile(64, 64, 4, 3),
    ("sm90", "keys", 2, 128): Tile(64, 64, 4, 1),
    ("sm90", "keys", 2, 256): Tile(32, 32, 4, 2),
    ("sm90", "queries", 2, 64): Tile(64, 64, 4, 3),
    ("sm90", "queries", 2, 256): Tile(64, 32, 4, 2),
}
# Groups without an entry of their own take another's.
_SAME_AS = {"sm86": "sm80", "sm90": "sm80", "sm100": "sm90"}


def group_of(capability: tuple[int, int]) -> str:
    """The table's group for a compute capability; one it doesn't know takes its generation's."""
    for group, members in GROUPS.items():
        if capability in members:
            return group
    return {8: "sm86", 9: "sm90", 10: "sm100", 11: "sm100"}.get(capability[0], "sm86")


def tile(group: str, kernel: str, head_dim: int, element_bytes: int, causal: bool = False) -> Tile:
    """The shipped tile. `head_dim`: the larger of the two, padded to a power of two (from 16)."""
    if causal and (group, kernel, element_bytes, head_dim) in _CAUSAL:
        return _CAUSAL[group, kernel, element_bytes, head_dim]
    while (group, kernel, element_bytes) not in _TABLE:
        group = _SAME_AS[group]
    return _TABLE[group, kernel, element_bytes][HEAD_DIMS.index(head_dim)]


def smaller(tile: Tile) -> Tile | None:
    """The next tile to try where one asks for more than the GPU has; None after the smallest.

    A mask or bias is loaded tile by tile through the same pipeline, so a call with one may need
    more shared memory than the table's entries, which are for calls without.
    """
    if tile.num_stages > 1:
        return tile._replace(num_stages=tile.num_stages - 1)
    if tile.block_n > 16 and tile.block_n >= tile.block_m:
        return tile._replace(block_n=tile.block_n // 2)
    if tile.block_m > 16:
        return tile._replace(block_m=tile.block_m // 2)
    return None


def lighter(tile: Tile, kernel: str) -> Tile | None:
    """The next tile to try where one spills registers; None after the lightest."""
    if tile.max_registers is not None:
        return tile._replace(max_registers=None)
    # Half the queries would cost dQ Hopper's products, which are of 64 rows, and wouldn't keep dK
    # and dV of a wide head, on eight warps, from spilling with a mask.
    halve_keys = kernel == "queries" or (kernel == "keys" and tile.num_warps == 8)
    if halve_keys and tile.block_m == 64 and tile.block_n > 32:
        return tile._replace(block_n=tile.block_n // 2)
    if tile.block_m > 16:
        return tile._replace(block_m=tile.block_m // 2)
    if tile.block_n > 16:
        return tile._replace(block_n=tile.block_n // 2)
    return None
