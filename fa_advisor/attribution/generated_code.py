"""What Inductor's generated code says of a block that it allocated: by which kernel it is filled,
and whether it is attention's.

The wrapper that Inductor writes is read as text, at the line that an allocation's stack names: a
buffer is made by `empty_strided_*`, passed to kernels by name, and renamed where its memory is used
again. A kernel's name lists the operators that were fused. Attention shows by its structure: a
batched product whose result a softmax reads is S.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fa_advisor.attribution.frames import Frames, generated_frame
from fa_advisor.records import Category

_ALLOCATION = re.compile(
    r"\s*(\w+) = empty_strided_\w+\((?:\((?P<shape>[^()]*)\)), \([^()]*\), torch\.(?P<dtype>\w+)"
)
_RENAMED = re.compile(r"\s*(\w+) = (?:reinterpret_tensor\()?(\w+)\b")
_CALL = re.compile(r"\s*(?:[\w, ()]+ = )?((?:\w+\.)*\w+)\((.*)")
_FUSED = re.compile(r"(?:triton_\w+?|cpp)_fused_(\w+?)(?:_\d+)?$")
_NO_KERNELS = frozenset(
    ("assert_size_stride", "assert_alignment", "reinterpret_tensor", "get_raw_stream", "del")
)
_PRODUCTS = ("bmm", "baddbmm")
_LONGEST = 40  # of an operator's name: fused ones may list ten


class Buffer(NamedTuple):
    """A buffer of generated code. op: what fills it; shape: `None` where it isn't in numbers."""

    op: str
    shape: tuple[int, ...] | None
    dtype: str
    role: Category | None


@dataclass
class _Memory:
    """One allocation, and the kernels that it is passed to under any name, in order."""

    shape: tuple[int, ...] | None
    dtype: str
    kernels: list[str] = field(default_factory=list)

    @property
    def numel(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)


class GeneratedCode:
    """Generated files, each read once."""

    def __init__(self) -> None:
        self._files: dict[str, Mapping[int, Buffer]] = {}

    def buffer(self, frames: Frames) -> Buffer | None:
        """What was allocated there; `None` where that can't be told."""
        frame = generated_frame(frames)
        if frame is None:
            return None
        file = frame["filename"]
        if file not in self._files:
            try:
                lines = Path(file).read_text("utf-8", "replace").splitlines()
            except OSError:
                lines = []
            self._files[file] = {
                line: buffer
                for first, last in _functions(lines)
                for line, buffer in _buffers(lines, first, last)
            }
        return self._files[file].get(frame["line"])


def _functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """From which line to which the functions go that call kernels."""
    starts = [at for at, line in enumerate(lines) if line.lstrip().startswith("def ")]
    for first, last in itertools.pairwise([*starts, len(lines)]):
        if re.match(r"\s*def call\(", lines[first]):
            yield first, last


def _buffers(lines: list[str], first: int, last: int) -> Iterator[tuple[int, Buffer]]:
    """The line number of each allocation, and what it is."""
    memories: dict[int, _Memory] = {}
    names: dict[str, _Memory] = {}
    for at in range(first + 1, last):
        line = lines[at]
        if made := _ALLOCATION.match(line):
            extents = [extent.strip() for extent in made["shape"].split(",") if extent.strip()]
            numbers = all(extent.isdecimal() for extent in extents)
            shape = tuple(map(int, extents)) if numbers else None
            names[made[1]] = memories[at + 1] = _Memory(shape, made["dtype"])
        elif (renamed := _RENAMED.match(line)) and renamed[2] in names:
            names[renamed[1]] = names[renamed[2]]
        elif (call := _CALL.match(line)) and call[1].rsplit(".", 1)[-1] not in _NO_KERNELS:
            passed = {id(names[n]): names[n] for n in re.findall(r"\w+", call[2]) if n in names}
            for memory in passed.values():
                memory.kernels.append(_operators(call[1]))
    squares = {m.numel for m in memories.values() if _is_product(m) and any(_softmax(m))} - {None}
    backward = any("softmax_backward" in k for m in memories.values() for k in m.kernels)
    for line_number, memory in memories.items():
        role = _role(memory, backward) if memory.numel in squares else None
        op = memory.kernels[0] if memory.kernels else ""
        if len(op) > _LONGEST:
            op = op[:_LONGEST].rpartition("_")[0] + "_etc"
        yield line_number, Buffer(op, memory.shape, memory.dtype, role)


def _operators(function: str) -> str:
    """The operators of a kernel: `bmm` of extern_kernels.bmm, `_softmax_add` of a fused one."""
    name = function.removesuffix(".run").rsplit(".", 1)[-1]
    fused = _FUSED.match(name)
    if fused is not None:
        return fused[1]
    parts = function.split(".")
    return parts[parts.index("aten") + 1] if "aten" in parts[:-1] else name


def _softmax(memory: _Memory) -> list[bool]:
    """Of each kernel that has it, whether a softmax is part of it; the loss's isn't meant."""
    return ["softmax" in kernel.replace("_log_softmax", "") for kernel in memory.kernels]


def _is_product(memory: _Memory) -> bool:
    return bool(memory.kernels) and memory.kernels[0] in _PRODUCTS


def _role(memory: _Memory, backward: bool) -> Category | None:
    """Of memory of the size of a score matrix."""
    if memory.dtype in ("bool", "uint8", "int8"):
        return "attention_dropout"
    if backward:
        return "attention_grad"
    softmax = _softmax(memory)
    read = [at for at, kernel in enumerate(memory.kernels) if at and kernel in _PRODUCTS]
    if not any(softmax):
        # What dropout leaves of P meets V; a product that no softmax reads is nobody's score.
        return "attention_prob" if read and not _is_product(memory) else None
    # In its place P takes the memory of S where that is used again.
    score = _is_product(memory) and not any(at > softmax.index(True) for at in read)
    return "attention_score" if score else "attention_prob"
