"""The caching allocator's address space, moved along by the events of its own trace.

The trace says which address each request got, so nothing is guessed of where; the allocator's
rules (c10/cuda/CUDACachingAllocator.cpp) tell how large a block it made of the free one there:
what is left over is split off, or stays with the block as slack. Sizes in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fa_advisor.attribution.allocator import MIN_BLOCK, SMALL_SIZE, rounded
from fa_advisor.attribution.by_address import ByAddress

Pool = tuple[int, int]
SHARED_POOL: Pool = (0, 0)


class State(Enum):
    """What a block is to the allocator."""

    FREE = 0
    LIVE = 1
    PENDING = 2  # freed, but another stream may still be using it


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What one request got: an identity that addresses, used again and again, can't be.

    `born` is the index of its event, -1 for what was there before the trace.
    """

    born: int
    address: int
    requested: int
    size: int
    pool: Pool


class Block:
    """A piece of a segment; `given` while it is live or pending."""

    __slots__ = ("address", "given", "next", "pool", "previous", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.state = State.FREE
        self.given: Given | None = None
        self.previous: Block | None = None
        self.next: Block | None = None


@dataclass(frozen=True)
class Rules:
    """The settings that decide a block's size."""

    expandable: bool = False
    max_split_size: int | None = None
    power2_divisions: Mapping[int, int] = field(default_factory=dict)  # by a power of two, in bytes

    def rounded(self, nbytes: int) -> int:
        """What a request is rounded up to."""
        if self.power2_divisions and nbytes > MIN_BLOCK:
            power = 1 << (nbytes.bit_length() - 1)
            bounds = sorted(self.power2_divisions)
            nearest = bounds[max(0, bisect_right(bounds, power) - 1)]
            divisions = self.power2_divisions[nearest]
            if divisions > 1 and nbytes > MIN_BLOCK * divisions and nbytes != power:
                step = power // divisions
                return -(-nbytes // step) * step
        return rounded(nbytes)

    def splits(self, rest: int, size: int) -> bool:
        """Is a remainder of `rest` bytes split off a block of which `size` are wanted?"""
        if self.expandable or size <= SMALL_SIZE:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and (self.max_split_size is None or size < self.max_split_size)


class Arena:
    """Blocks by address. `strays` counts what contradicts the trace: 0 where it is whole."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.blocks: ByAddress[Block] = ByAddress()
        self._last: dict[int, Block] = {}  # by its end, the last block of a segment
        self.allocated = 0
        self.pending = 0
        self.reserved = 0
        self.strays = 0

    # -- segments ---------------------------------------------------------------------------

    def load(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Take over the segments and blocks of a snapshot."""
        for segment in segments:
            pool = pool_of(segment)
            self.reserved += segment["total_size"]
            address, previous = segment["address"], None
            for known in segment["blocks"]:
                block = Block(known.get("address", address), known["size"], pool)
                address = block.address + block.size
                if known["state"] == "active_allocated":
                    self._take(block, known.get("requested_size", block.size), -1)
                elif known["state"] == "active_pending_free":
                    self._take(block, known.get("requested_size", block.size), -1)
                    self._set_aside(block)
                self._link(previous, block)
                self.blocks[block.address] = block
                previous = block
            self._link(previous, None)

    def add(self, address: int, size: int, pool: Pool, *, grows: bool = False) -> None:
        """A segment from the driver; `grows`: mapped to an expandable one, beside what is there."""
        block = Block(address, size, pool)
        self.reserved += size
        self._link(block, None)
        if grows:
            for other in self._beside(address, size):
                low, high = (other, block) if other.address < address else (block, other)
                self._link(low, high)
        self.blocks[address] = block
        self._merge(block)

    def remove(self, address: int, size: int) -> None:
        """A segment, or a part of an expandable one, goes back to the driver."""
        self.reserved -= size
        block = self._holding(address)
        if block is None or block.address + block.size < address + size:
            self.strays += 1
            return
        if block.state is not State.FREE:
            self.strays += 1
        before, after = block.previous, block.next
        del self.blocks[block.address]
        self._link(before, None)
        self._link(None, after)
        if address > block.address:
            rest = Block(block.address, address - block.address, block.pool)
            self._link(before, rest)
            self._link(rest, None)
            self.blocks[rest.address] = rest
        end = block.address + block.size
        if end > address + size:
            rest = Block(address + size, end - address - size, block.pool)
            self._link(rest, after)
            self.blocks[rest.address] = rest

    # -- blocks -----------------------------------------------------------------------------

    def allocate(self, address: int, requested: int, at: int) -> Given:
        """What a request got; `at` is the index of the event."""
        size = self.rules.rounded(requested)
        block = self.blocks.get(address)
        if block is None or block.state is not State.FREE or block.size < size:
            self.strays += 1
            if block is not None and block.state is State.LIVE:
                self.allocated -= block.size
            block = self.blocks[address] = Block(address, size, SHARED_POOL)
            self._link(block, None)
        elif self.rules.splits(block.size - size, size):
            rest = Block(address + size, block.size - size, block.pool)
            self._link(rest, block.next)
            self._link(block, rest)
            block.size = size
            self.blocks[rest.address] = rest
        return self._take(block, requested, at)

    def request_free(self, address: int) -> Given | None:
        """The program gave a block back: it no longer counts as allocated."""
        block = self.blocks.get(address)
        if block is None or block.state is not State.LIVE:
            self.strays += 1
            return None
        self._set_aside(block)
        return block.given

    def complete_free(self, address: int) -> None:
        """No stream uses the block any more: it can be given out again."""
        block = self.blocks.get(address)
        if block is None or block.state is not State.PENDING:
            self.strays += 1
            return
        self.pending -= block.size
        block.state, block.given = State.FREE, None
        self._merge(block)

    def live(self) -> list[Given]:
        """What counts as allocated."""
        return [b.given for b in self.blocks.values() if b.given and b.state is State.LIVE]

    # -- inside -----------------------------------------------------------------------------

    def _take(self, block: Block, requested: int, at: int) -> Given:
        block.state = State.LIVE
        block.given = given = Given(at, block.address, requested, block.size, block.pool)
        self.allocated += block.size
        return given

    def _set_aside(self, block: Block) -> None:
        block.state = State.PENDING
        self.allocated -= block.size
        self.pending += block.size

    def _link(self, low: Block | None, high: Block | None) -> None:
        """Make two pieces neighbours; `None` is a segment's end."""
        if high is not None:
            high.previous = low
        if low is not None:
            low.next = high
            if high is None:
                self._last[low.address + low.size] = low

    def _merge(self, block: Block) -> None:
        """Free neighbours of a segment are one block."""
        if block.previous is not None and block.previous.state is State.FREE:
            block = self._absorb(block.previous, block)
        if block.next is not None and block.next.state is State.FREE:
            self._absorb(block, block.next)

    def _absorb(self, low: Block, high: Block) -> Block:
        low.size += high.size
        del self.blocks[high.address]
        self._link(low, high.next)
        return low

    def _beside(self, address: int, size: int) -> list[Block]:
        """The blocks that end or begin where a piece is mapped."""
        before, after = self._last.get(address), self.blocks.get(address + size)
        if before is not None and (
            self.blocks.get(before.address) is not before or before.address + before.size != address
        ):
            before = None  # it has gone since
        return [block for block in (before, after) if block is not None]

    def _holding(self, address: int) -> Block | None:
        start = address if address in self.blocks else self.blocks.floor(address)
        block = self.blocks[start] if start is not None else None
        return block if block is not None and address < block.address + block.size else None


def pool_of(segment: Mapping[str, Any]) -> Pool:
    """A segment's memory pool: (0, 0), or that of a CUDA graph or of a MemPool."""
    first, second = segment.get("segment_pool_id", SHARED_POOL)
    return int(first), int(second)
