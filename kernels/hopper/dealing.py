"""A forward's pieces of work, and who does them: which block of the grid, in which order."""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.hopper.order import order_kernel
from fa_advisor.kernels.hopper.tiles import ROWS_OF_A_CONSUMER, Tiles
from fa_advisor.kernels.kinds import Kind, Options
from fa_advisor.kernels.launcher import Launch
from fa_advisor.kernels.tiles import Tile

# Of heads that run side by side, the keys and values fill half of an H100's L2 at most; more heads
# than these were no faster where all rows are alike.
_BYTES_SIDE_BY_SIDE = 24 * 2**20
_MOST_SIDE_BY_SIDE = 8
# A schedule is made on the host: up to so many pieces, in milliseconds.
_MOST_SCHEDULED = 2**16
# And in several ways, of which the shortest is taken, up to so many.
_MOST_DEALT_AGAIN = 2**12
# What a piece of work takes beside its tiles of keys, in such tiles.
_COST_OF_A_TURN = 0.7
# Of a tile's time, the share that goes with the number of consumers whose rows see it.
_SHARED = 0.75
# Packed sequences are put in order by one program: up to so many blocks of rows, of so many
# different lengths, a chunk of them at a time.
_MOST_ORDERED, _LEVELS, _CHUNK = 2**16, 128, 1024


class Pieces(NamedTuple):
    """A forward's pieces of work, and which of `grid` blocks does them; see `schedule_of`.

    blocks: pieces of a head. schedule: None where they aren't dealt out beforehand.
    """

    blocks: int
    total: int
    side_by_side: int
    grid: int
    schedule: Tensor | None


def deal(kind: Kind, o: Options, cut: Tiles, q: Tensor) -> Pieces:
    """The pieces of a call and who does them."""
    blocks = int(triton.cdiv(o.max_seqlen_q, ROWS_OF_A_CONSUMER * cut.consumers))
    batch_heads = kind.batch * kind.heads
    total = blocks * batch_heads
    side_by_side = _side_by_side(kind, o.max_seqlen_k, q.element_size())
    grid = min(total, processors(q.device))
    schedule = None
    costs = None if kind.varlen else [_cost(kind, o, block, cut) for block in range(blocks)]
    if costs is None or len(set(costs)) > 1:
        if costs is None or total > _MOST_SCHEDULED or torch.cuda.is_current_stream_capturing():
            if kind.has_left or kind.has_right or kind.varlen:
                grid = total  # Then the GPU hands the pieces out, as processors are free for them.
        else:
            words = schedule_of(costs, batch_heads, side_by_side, grid, kind.group)
            schedule = torch.tensor(words, dtype=torch.int32, device=q.device)
    return Pieces(blocks, total, side_by_side, grid, schedule)


def _side_by_side(kind: Kind, keys: int, element_bytes: int) -> int:
    """How many query heads run side by side: their keys and values shall stay in L2."""
    bytes_a_head = max(1, keys * (kind.dim + kind.dim_v) * element_bytes)
    heads = max(1, _BYTES_SIDE_BY_SIDE // bytes_a_head) * kind.group
    if not (kind.has_left or kind.has_right):
        heads = min(heads, max(_MOST_SIDE_BY_SIDE, kind.group))
    return min(heads, kind.batch * kind.heads)


def _cost(kind: Kind, o: Options, block: int, cut: Tiles) -> float:
    """The time that a block's rows take, in tiles of keys of all its consumers."""
    shift = o.max_seqlen_k - o.max_seqlen_q if o.bottom_right else 0
    tiles = []
    for consumer in range(block * cut.consumers, (block + 1) * cut.consumers):
        first = consumer * ROWS_OF_A_CONSUMER
        begin, end = 0, o.max_seqlen_k if first < o.max_seqlen_q else 0
        if kind.has_right:
            end = max(min(end, first + ROWS_OF_A_CONSUMER + shift + kind.right), 0)
        if kind.has_left:
            begin = max(first + shift - kind.left, 0) // cut.block_n * cut.block_n
        tiles.append(max(0, -(-(end - begin) // cut.block_n)))
    mean = sum(tiles) / len(tiles)
    return _COST_OF_A_TURN + _SHARED * mean + (1 - _SHARED) * max(tiles)


def _alike(kind: Kind, side_by_side: int) -> int:
    """A few heads more, so that the last ones aren't left to themselves."""
    groups = max(1, kind.heads // side_by_side)
    return int(triton.cdiv(kind.heads // kind.group, groups)) * kind.group


def order_of(kind: Kind, o: Options, cut: Tiles, pieces: Pieces, k: Tensor) -> Order | None:
    """How packed sequences are put in order; None where there are too many blocks of rows."""
    entries = kind.batch * pieces.blocks
    if entries > _MOST_ORDERED:
        return None
    tiles = triton.cdiv(o.max_seqlen_k, cut.block_n)
    static = (
        entries, pieces.blocks, kind.heads,
        _alike(kind, _side_by_side(kind, k.shape[0], k.element_size())),
        max(0, (tiles // (_LEVELS - 1)).bit_length()), kind.left, kind.right,
        kind.has_left, kind.has_right, o.bottom_right, ROWS_OF_A_CONSUMER * cut.consumers,
        cut.block_n, _LEVELS, _CHUNK,
    )  # fmt: skip
    launch = Launch(
        "hopper_order", order_kernel, lambda _: (1, static), Tile(_CHUNK, 1, 8, 1),
        adjustable=False,
    )  # fmt: skip
    grid = min(pieces.total, processors(k.device))
    return Order(launch, 2 + entries * kind.heads + _LEVELS, grid)


def schedule_of(
    costs: list[float], batch_heads: int, side_by_side: int, grid: int, together: int = 1
) -> list[int]:
    """Which pieces of work each of `grid` persistent blocks does: as a queue would deal them out.

    costs: of each of a head's pieces. Heads run in groups of about `side_by_side`, the costliest
    pieces of a group first; `together` of them are never parted. Returns grid + 1 offsets, into
    what follows: batch_head * len(costs) + piece, and one word more, so that the next may be read
    before its turn.
    """
    longest_first = sorted(range(len(costs)), key=lambda piece: -costs[piece])
    best = min(
        (
            _dealt(
                costs, longest_first, _stretches(batch_heads // together, groups, together), grid
            )
            for groups in _numbers_of_groups(len(costs), batch_heads, side_by_side)
        ),
        key=lambda dealt: dealt[0],
    )[1]
    offsets = list(itertools.accumulate(map(len, best), initial=grid + 1))
    return [*offsets, *itertools.chain.from_iterable(best), 0]


def _numbers_of_groups(pieces: int, batch_heads: int, side_by_side: int) -> range:
    """How many groups of heads are tried: how the last pieces fall decides up to a seventh."""
    least = -(-batch_heads // side_by_side)
    tried = 1 if pieces * batch_heads > _MOST_DEALT_AGAIN else 4
    return range(least, min(least + tried, batch_heads + 1))


def _stretches(count: int, groups: int, of: int) -> list[range]:
    """`count` * `of` heads in so many groups, as alike in size as may be."""
    ends = [count * group // groups * of for group in range(groups + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def _dealt(
    costs: list[float], longest_first: list[int], groups: list[range], grid: int
) -> tuple[float, list[list[int]]]:
    """When the last block is done, and each one's pieces: the next goes to who is free first."""
    free = [(0.0, block) for block in range(grid)]
    own: list[list[int]] = [[] for _ in range(grid)]
    for heads in groups:
        for piece in longest_first:
            for head in heads:
                at, block = free[0]
                own[block].append(head * len(costs) + piece)
                heapq.heapreplace(free, (at + costs[piece], block))
    return max(free)[0], own


# Schedules that CUDA graphs read again whenever they are replayed.
_captured: list[Tensor] = []


class Scheduled(NamedTuple):
    """A launch with what its kernel takes after the pointers of a call."""

    launch: Launch
    schedule: Tensor | None

    def __call__(self, device: int, *pointers: Any) -> None:
        if self.schedule is not None and self.schedule.is_cuda:
            self._keep(self.schedule, device)
        self.launch(device, *pointers, self.schedule)

    @staticmethod
    def _keep(schedule: Tensor, device: int) -> None:
        """Plans are forgotten when there are many: not before what reads them is over."""
        if torch.cuda.is_current_stream_capturing():
            _captured.append(schedule)
        elif torch._C._cuda_getCurrentRawStream(device):  # Not the default stream.
            schedule.record_stream(torch.cuda.current_stream(device))


class Order(NamedTuple):
    """The launch that puts packed sequences' pieces in order, in so many words; and how many blocks
    take them."""

    launch: Launch
    words: int
    grid: int

    def empty(self, device: torch.device) -> Tensor:
        """Room for an order."""
        return torch.empty(self.words, dtype=torch.int32, device=device)


class Ordered(NamedTuple):
    """A forward's launch on packed sequences, called as `Scheduled` is: the order first."""

    launch: Launch
    order: Order

    def __call__(self, device: int, *pointers: Any) -> None:
        cu_q, cu_k = pointers[11:13]
        order = self.order.empty(cu_q.device)
        self.order.launch(device, order, cu_q, cu_k)
        self.launch(device, *pointers, order)


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors: a persistent grid has a block for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
