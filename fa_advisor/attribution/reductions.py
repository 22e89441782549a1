"""The memory that torch's kernel of sums and means takes for as long as it runs, on CUDA.

Where few results are made of many numbers, several blocks of the grid share a result and leave
their parts in global memory. How many blocks and how much memory follows from the operand and the
GPU alone (ATen/native/cuda/Reduce.cuh): for the gradient of a bias it is often more than the
operand itself.
"""

from __future__ import annotations

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

Dims = tuple[int, ...]


class Operand(NamedTuple):
    """What is reduced: strides and offset in elements; `reduced` dimensions, of none all."""

    shape: Dims
    strides: Dims
    offset: int
    reduced: Dims
    dtype: str
    itemsize: int


class _Dim(NamedTuple):
    size: int
    stride: int


def scratch_bytes(
    operand: Operand, result: str, itemsize: int, processors: int, threads: int
) -> list[int]:
    """The bytes of each request, in order; none for most.

    result: the result's dtype, of so many bytes. processors: the GPU's streaming multiprocessors,
    of so many `threads` each.
    """
    if 0 in operand.shape:
        return []
    # The kernel widens these on the way.
    wider = operand.dtype in ("bfloat16", "float16") and result == "float32"
    takes = []
    if result != operand.dtype and not wider:
        takes.append(itemsize * prod(operand.shape))  # a copy in the result's dtype
        operand = operand._replace(dtype=result, itemsize=itemsize)
    accumulator = max(4, operand.itemsize)
    inner, outer = _dims(operand)
    if not _in_32_bits(inner + outer, operand.itemsize):
        if itemsize < accumulator:
            takes.append(accumulator * prod(d.size for d in outer))
        while not _in_32_bits(inner + outer, operand.itemsize):
            _halve(inner, outer)  # One half after the other.
    return takes + _parts(operand.offset, inner, outer, accumulator, processors, threads)


def _parts(
    offset: int, inner: list[_Dim], outer: list[_Dim], accumulator: int, processors: int,
    threads: int,
) -> list[int]:  # fmt: skip
    """The parts of results that blocks share, and the counters that say which block is the last."""
    results, numbers = prod(d.size for d in outer), prod(d.size for d in inner)
    along = not outer or (bool(inner) and inner[0].stride < outer[0].stride)
    width, height = (numbers, results) if along else (results, numbers)
    vector = 1
    if along and len(inner) == 1 and inner[0].stride == 1 and width >= 4 * _WARP:
        width //= _VECTOR
    elif not along and outer[0].stride == 1:
        vector = _vector(offset, inner, outer)
        width //= vector
    block_x, block_y = _block(width, height, _THREADS // vector)
    lanes, neighbours = (block_x, 1) if along else (1, block_x)
    if -(-numbers // lanes) < min(16 * block_y, _MANY_A_THREAD):
        return []  # Each warp has results of its own.
    each = -(-numbers // (lanes * block_y))
    blocks = -(-(results // vector) // neighbours)
    wanted = processors * (threads // (block_x * block_y))
    if each < _MANY_A_THREAD or blocks > wanted:
        return []
    shared = max(min(-(-wanted // blocks), -(-each // _LEAST_A_THREAD)), -(-each // _MANY_A_THREAD))
    if shared == 1:
        return []
    return [accumulator * results * shared * (1 if along else block_x * vector), 4 * blocks]


def _dims(operand: Operand) -> tuple[list[_Dim], list[_Dim]]:
    """The reduced dimensions and the others, the fastest first, neighbours in memory as one."""
    shape, strides, reduced = operand.shape, operand.strides, operand.reduced
    every = range(len(shape))
    gone = {axis % len(shape) for axis in reduced} if reduced else set(every)
    kept = [axis for axis in every if shape[axis] > 1]
    inner = sorted((_Dim(shape[a], strides[a]) for a in kept if a in gone), key=lambda d: d.stride)
    outer = [_Dim(shape[a], strides[a]) for a in reversed(kept) if a not in gone]
    return _joined(inner), _joined(outer)


def _joined(dims: list[_Dim]) -> list[_Dim]:
    found: list[_Dim] = []
    for dim in dims:
        if found and found[-1].size * found[-1].stride == dim.stride:
            found[-1] = _Dim(found[-1].size * dim.size, found[-1].stride)
        else:
            found.append(dim)
    return found


def _in_32_bits(dims: list[_Dim], itemsize: int) -> bool:
    return itemsize * sum((d.size - 1) * d.stride for d in dims) < 2**31 - 1


def _halve(inner: list[_Dim], outer: list[_Dim]) -> None:
    """Cut the dimension that reaches farthest in two."""
    farthest = max(inner + outer, key=lambda d: (d.size - 1) * d.stride)
    dims = inner if farthest in inner else outer
    dims[dims.index(farthest)] = farthest._replace(size=farthest.size // 2)


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
