"""The memory that torch's kernel of sums and means takes for as long as it runs, on CUDA.

Where few results are made of many numbers, several blocks of the grid share a result and leave
their parts in global memory. How many blocks and how much memory follows from the operand and the
GPU alone (ATen/native/cuda/Reduce.cuh, ATen/TensorIterator.cpp): for the gradient of a bias it is
often more than the operand itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

# Operators that such a kernel runs, with sums in the accumulator's type.
REDUCTIONS = frozenset(("sum", "mean"))
_WARP = 32
_THREADS = 512
_VECTOR = 4
# Numbers for a thread: with at least so many its block shares the GPU's work on a result, ...
_MANY_A_THREAD = 256
# ... for as long as each has so many.
_LEAST_A_THREAD = 16
_MOST_IN_32_BITS = 2**31 - 1
# Summed in twice as many bits, which the result has no room for.
_HALVES = frozenset(("float16", "bfloat16", "complex32"))

Dims = tuple[int, ...]


class Operand(NamedTuple):
    """What is reduced: strides and offset in elements; `reduced` dimensions, of none all."""

    shape: Dims
    strides: Dims
    offset: int
    reduced: Dims
    dtype: str


class Machine(NamedTuple):
    """A GPU's streaming multiprocessors, and the threads of each."""

    processors: int
    threads: int


class _Dim(NamedTuple):
    """A dimension, its strides in the operand and in the result (0 where it is reduced)."""

    size: int
    stride: int
    result: int


def scratch_bytes(operand: Operand, result: str, machine: Machine) -> list[int]:
    """The bytes of each request that making a `result` (a dtype) takes, in order; none for most."""
    if 0 in operand.shape:
        return []
    takes = []
    # Sixteen bits are widened by the kernel on its way; else there is a copy in the new dtype.
    wider = operand.dtype in ("bfloat16", "float16") and result == "float32"
    if result != operand.dtype and not wider:
        takes.append(_bits(result) // 8 * prod(operand.shape))
        operand = operand._replace(dtype=result, strides=_dense(operand), offset=0)
    dims = _dims(operand)
    itemsize = _bits(operand.dtype) // 8
    reach = (itemsize, _bits(result) // 8)
    if operand.dtype in _HALVES and not wider and not _in_32_bits(dims, reach):
        takes.append(2 * itemsize * prod(d.size for d in dims if d.result))
    accumulator = itemsize * (2 if operand.dtype in _HALVES else 1)
    most = _THREADS // (2 if operand.dtype == "complex128" else 1)
    return takes + list(_parts(operand.offset, dims, reach, accumulator, most, machine))


def _bits(dtype: str) -> int:
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8


@lru_cache(maxsize=1024)
def _parts(
    offset: int, dims: tuple[_Dim, ...], reach: tuple[int, int], accumulator: int, most: int,
    machine: Machine,
) -> tuple[int, ...]:  # fmt: skip
    """The parts of results that blocks share, and the counters that say which block is the last."""
    if not _in_32_bits(dims, reach):  # One half after the other.
        one, other = (
            _parts(offset, half, reach, accumulator, most, machine) for half in _halves(dims, reach)
        )
        return max(one, other)
    inner = [d for d in dims if not d.result]
    outer = [d for d in dims if d.result]
    results, numbers = prod(d.size for d in outer), prod(d.size for d in inner)
    along = not outer or (bool(inner) and inner[0].stride < outer[0].stride)
    width, height = (numbers, results) if along else (results, numbers)
    vector = 1
    if along and len(inner) == 1 and inner[0].stride == 1 and width >= 4 * _WARP:
        width //= _VECTOR
    elif not along and outer[0].stride == 1:
        vector = _vector(offset, inner, outer)
        width //= vector
    block_x, block_y = _block(width, height, most // vector)
    lanes, neighbours = (block_x, 1) if along else (1, block_x)
    if -(-numbers // lanes) < min(16 * block_y, _MANY_A_THREAD):
        return ()  # Each warp has results of its own.
    each = -(-numbers // (lanes * block_y))
    blocks = -(-(results // vector) // neighbours)
    wanted = machine.processors * (machine.threads // (block_x * block_y))
    if each < _MANY_A_THREAD or blocks > wanted:
        return ()
    shared = max(min(-(-wanted // blocks), -(-each // _LEAST_A_THREAD)), -(-each // _MANY_A_THREAD))
    if shared == 1:
        return ()
    return accumulator * results * shared * (1 if along else block_x * vector), 4 * blocks


def _dims(operand: Operand) -> tuple[_Dim, ...]:
    """The reduced dimensions and then the others, the fastest first, neighbours as one."""
    shape, every = operand.shape, range(len(operand.shape))
    gone = {axis % len(shape) for axis in operand.reduced if shape} if operand.reduced else {*every}
    results, size = {}, 1
    for axis in reversed(every):
        if axis not in gone:
            results[axis] = size
            size *= shape[axis]
    dims = [_Dim(shape[a], operand.strides[a], results.get(a, 0)) for a in every]
    found: list[_Dim] = []
    for dim in (dims[axis] for axis in _sorted(len(dims), partial(_later, dims))):
        last = found[-1] if found else dim
        if dim.size == 1:
            continue
        if found and (last.size * last.stride, last.size * last.result) == dim[1:]:
            found[-1] = last._replace(size=last.size * dim.size)
        else:
            found.append(dim)
    return tuple(found)


def _later(dims: list[_Dim], one: int, other: int) -> int:
    """1 where dimension `one` comes after the `other`, -1 before, 0 where nothing tells."""
    a, b = dims[one], dims[other]
    if (a.result == 0) != (b.result == 0):
        return 1 if b.result == 0 else -1
    for first, second in ((a.result, b.result), (a.stride, b.stride)):
        if first and second:
            if first != second:
                return 1 if first > second else -1
            if a.size > b.size:
                return 1
    return 0


def _sorted(count: int, later: Callable[[int, int], int]) -> list[int]:
    """The axes, the last one first, sorted by insertion: what isn't told keeps its place."""
    order = list(reversed(range(count)))
    for start in range(1, count):
        at = start
        for before in range(start - 1, -1, -1):
            told = later(order[before], order[at])
            if told > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif told < 0:
                break
    return order


def _dense(operand: Operand) -> Dims:
    """The strides of a copy: in the operand's order, without holes."""
    dims = [_Dim(n, s, 0) for n, s in zip(operand.shape, operand.strides, strict=True)]
    strides, size = [1] * len(dims), 1
    for axis in _sorted(len(dims), partial(_later, dims)):
        strides[axis] = size
        size *= dims[axis].size
    return tuple(strides)


def _in_32_bits(dims: tuple[_Dim, ...], reach: tuple[int, int]) -> bool:
    """Whether 32 bits count the elements and the bytes of both operand and result."""
    offsets = (
        1 + sum((d.size - 1) * stride * itemsize for d, stride in each)
        for itemsize, each in zip(
            reach, ([(d, d.stride) for d in dims], [(d, d.result) for d in dims]), strict=True
        )
    )
    return max(prod(d.size for d in dims), *offsets) <= _MOST_IN_32_BITS


def _halves(dims: tuple[_Dim, ...], reach: tuple[int, int]) -> list[tuple[_Dim, ...]]:
    """The dimension that reaches farthest cut in two."""

    def extent(at: int) -> int:
        size, *strides = dims[at]
        return max(
            (size - 1) * each * itemsize for each, itemsize in zip(strides, reach, strict=True)
        )

    at = max(range(len(dims) - 1, -1, -1), key=extent)
    size = dims[at].size
    return [
        (*dims[:at], dims[at]._replace(size=part), *dims[at + 1 :])
        for part in (size // 2, size - size // 2)
    ]


def _vector(offset: int, inner: list[_Dim], outer: list[_Dim]) -> int:
    """How many neighbouring results a thread makes: all that it reads must be aligned to that."""
    numbers = [offset, outer[0].size, *(d.stride for d in (*inner, *outer[1:]))]
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """A block's threads, both ways: powers of two."""
    x, y = (_power(size) if size < most else most for size in (width, height))
    height = min(y, most // min(x, _WARP))
    return min(x, most // height), height


def _power(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1
