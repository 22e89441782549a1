"""The model of CUDA's caching allocator against a naive one, and against the rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fa_advisor.attribution.allocator import CachingAllocator, rounded

KIB, MIB = 2**10, 2**20

# Sizes about every threshold: 512 B, 1 MiB, 10 MiB, 20 MiB, and anything between.
SIZES = st.one_of(
    st.integers(1, 2 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 40 * MIB),
    st.builds(
        lambda base, off: max(1, base + off),
        st.sampled_from([512, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 19 * MIB, 20 * MIB]),
        st.integers(-513, 513),
    ),
)


class Naive:
    """Segments as plain lists of [offset, size, in use]; every search looks at all of them."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, bool, list[list[int]]]] = []  # start, small, blocks
        self.end = 0

    def allocate(self, nbytes: int) -> tuple[int, int]:
        size = rounded(nbytes)
        small = size <= MIB
        fitting = [
            (block[1], start + block[0], blocks, block)
            for start, is_small, blocks in self.segments
            if is_small is small
            for block in blocks
            if not block[2] and block[1] >= size
        ]
        if fitting:
            _, address, blocks, block = min(fitting, key=lambda f: f[:2])
        else:
            if small:
                length = 2 * MIB
            elif size < 10 * MIB:
                length = 20 * MIB
            else:
                length = -(-size // (2 * MIB)) * 2 * MIB
            address, block = self.end, [0, length, 0]
            blocks = [block]
            self.segments.append((address, small, blocks))
            self.end += length
        left = block[1] - size
        if left >= 512 if small else left > MIB:
            blocks.insert(blocks.index(block) + 1, [block[0] + size, left, 0])
            block[1] = size
        block[2] = 1
        return address, block[1]

    def release(self, address: int) -> None:
        for start, _, blocks in self.segments:
            for block in blocks:
                if start + block[0] == address and block[2]:
                    block[2] = 0
            merged = [blocks[0]]
            for block in blocks[1:]:
                if not block[2] and not merged[-1][2]:
                    merged[-1][1] += block[1]
                else:
                    merged.append(block)
            blocks[:] = merged

    @property
    def reserved(self) -> int:
        return sum(block[1] for _, _, blocks in self.segments for block in blocks)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ours = CachingAllocator()
        self.naive = Naive()
        self.live: dict[int, tuple[int, int]] = {}  # address -> size, requested
        self.highest = 0

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        address = self.ours.allocate(nbytes)
        size = self.ours.size_of(address)
        assert (address, size) == self.naive.allocate(nbytes)
        assert size >= nbytes and size % 512 == 0
        assert address not in self.live
        self.live[address] = (size, nbytes)
        self.highest = max(self.highest, self.ours.reserved)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[address]
        self.ours.release(address)
        self.naive.release(address)

    @invariant()
    def blocks_dont_overlap(self) -> None:
        end = 0
        for address in sorted(self.live):
            assert address >= end
            end = address + self.live[address][0]

    @invariant()
    def the_sums_are_right(self) -> None:
        assert self.ours.allocated == sum(size for size, _ in self.live.values())
        assert self.ours.reserved == self.naive.reserved
        assert self.ours.allocated <= self.ours.reserved <= self.ours.peak_reserved
        assert self.ours.peak_reserved == self.highest

    def teardown(self) -> None:
        """All given back, the segments are whole again: nothing new is reserved for any of them."""
        for address in list(self.live):
            self.ours.release(address)
            self.naive.release(address)
        assert self.ours.allocated == 0
        reserved = self.ours.reserved
        for _, _, blocks in self.naive.segments:
            assert len(blocks) == 1
        # Largest first: each takes a whole segment of its own pool.
        for size in sorted(
            (b[0][1] for _, small, b in self.naive.segments if not small), reverse=True
        ):
            assert self.ours.size_of(self.ours.allocate(size)) == size
        for _, small, _ in self.naive.segments:
            if small:
                self.ours.allocate(MIB)
                self.ours.allocate(MIB)
        assert self.ours.reserved == reserved


TestAgainstTheNaive = Machine.TestCase
TestAgainstTheNaive.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize(
    ("request_bytes", "reserved", "size"),
    [
        (1, 2 * MIB, 512),
        (512, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # 2 MiB - 512 are left: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is left: not worth splitting
        (11 * MIB - 512, 12 * MIB, 11 * MIB - 512),
        (21 * MIB, 22 * MIB, 22 * MIB),
        (22 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_a_first_request(request_bytes: int, reserved: int, size: int) -> None:
    allocator = CachingAllocator()
    address = allocator.allocate(request_bytes)
    assert allocator.size_of(address) == allocator.allocated == size
    assert allocator.reserved == reserved


def test_the_pools_are_apart() -> None:
    allocator = CachingAllocator()
    allocator.allocate(5 * MIB)  # leaves 15 MiB of its segment
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 22 * MIB
    assert allocator.allocated == 20 * MIB + 512


def test_the_best_fit_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    one, two, three, four = (allocator.allocate(n * MIB) for n in (6, 4, 7, 3))
    assert allocator.reserved == 20 * MIB
    allocator.release(one)
    allocator.release(three)
    assert allocator.allocate(6 * MIB - 512) == one  # 6 MiB before 7 MiB
    allocator.release(one)
    allocator.release(two)  # one, two and three are one block of 17 MiB
    assert allocator.allocate(17 * MIB) == one
    allocator.release(one)
    allocator.release(four)
    assert allocator.allocate(20 * MIB) == one
    assert allocator.reserved == 20 * MIB


def test_whole_segments_are_returned_before_the_gpu_is_full() -> None:
    allocator = CachingAllocator(64 * MIB)
    held = allocator.allocate(512)
    for _ in range(3):
        allocator.release(allocator.allocate(30 * MIB))
    assert allocator.reserved == 32 * MIB
    allocator.allocate(40 * MIB)  # 32 + 40 would be over: the free 30 MiB go back first
    assert allocator.reserved == 42 * MIB
    assert allocator.peak_reserved == 42 * MIB
    allocator.release(held)
