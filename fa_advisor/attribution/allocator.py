"""A model of CUDA's caching allocator: which block a request gets, and what is reserved.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp (default settings, one stream). Sizes in
bytes. The address space is the model's own.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # requests up to this come from the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # requests below MIN_LARGE share segments of this size
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


def rounded(nbytes: int) -> int:
    """What a request of `nbytes` is rounded up to: a multiple of 512, at least 512."""
    return max(MIN_BLOCK, (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK)


class _Block:
    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: list[tuple[int, int]]) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """`allocate` and `release` blocks; `allocated` and `reserved` are what torch would report."""

    def __init__(self, total_bytes: int | None = None) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_reserved = 0
        self._total = total_bytes
        self._small: list[tuple[int, int]] = []  # (size, address) of free blocks, sorted
        self._large: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}  # address -> block
        self._end = 0

    def allocate(self, nbytes: int) -> int:
        """Returns the block's address; its size is `size_of(address)`."""
        size = rounded(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        at = bisect_left(pool, (size, 0))
        block = self._blocks[pool.pop(at)[1]] if at < len(pool) else self._new_segment(size, pool)
        block.free = False
        rest = block.size - size
        if rest >= MIN_BLOCK if pool is self._small else rest > SMALL_SIZE:
            self._split(block, size)
        self.allocated += block.size
        return block.address

    def size_of(self, address: int) -> int:
        """The size of a block in use: the request, rounded, and what wasn't worth splitting off."""
        return self._blocks[address].size

    def release(self, address: int) -> None:
        """Give a block back; it merges with free neighbours of its segment."""
        block = self._blocks[address]
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                block = self._merge(neighbour, block)
        block.free = True
        insort(block.pool, (block.size, block.address))

    def _new_segment(self, size: int, pool: list[tuple[int, int]]) -> _Block:
        if pool is self._small:
            length = SMALL_SEGMENT
        elif size < MIN_LARGE:
            length = LARGE_SEGMENT
        else:
            length = (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
        if self._total is not None and self.reserved + length > self._total:
            self._release_cached()
        block = _Block(self._end, length, pool)
        self._blocks[block.address] = block
        self._end += length
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _release_cached(self) -> None:
        """What the allocator does before it gives up: return segments that are wholly free."""
        for pool in (self._small, self._large):
            for _, address in list(pool):
                block = self._blocks[address]
                if block.previous is None and block.next is None:
                    self._forget(block)
                    del self._blocks[address]
                    self.reserved -= block.size

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool)
        rest.free = True
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self._blocks[rest.address] = rest
        insort(block.pool, (rest.size, rest.address))

    def _forget(self, block: _Block) -> None:
        at = bisect_left(block.pool, (block.size, block.address))
        del block.pool[at]

    def _merge(self, one: _Block, other: _Block) -> _Block:
        low, high = (one, other) if one.address < other.address else (other, one)
        low.size += high.size
        low.next = high.next
        if high.next is not None:
            high.next.previous = low
        del self._blocks[high.address]
        return low
