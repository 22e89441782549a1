"""One kernel for one kind of call: compiled at the first, with a tile that fits; then launched.

Triton's own way to a launch costs more than the kernels at short lengths, so what doesn't change
from call to call is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_advisor.kernels import tuning
from fa_advisor.kernels.tiles import Tile, lighter, smaller

INTERPRET = bool(triton.knobs.runtime.interpret)
# A thread's stack frame up to which a tile is as fast as a lighter one, as measured on an H200 with
# masks and dropout: 64 x 64 x 2 accumulators leave the keys' kernel no other. Far beyond it ptxas
# has made wrong code.
_MOST_STACK_BYTES = {"keys": 256}
_MOST_STACK_BYTES_ELSEWHERE = 128
# A tile that spills more is left for a lighter one this often; then the least spilling is taken.
_MOST_ATTEMPTS = 4

# The grid's size and the arguments after the pointers, for a tile.
Geometry = Callable[[Tile], "tuple[int, tuple[Any, ...]]"]
# By position among the pointers: shape, strides and block of a tensor descriptor, and for Gluon its
# layout in shared memory.
Descriptors = Callable[[Tile], "dict[int, tuple[Any, ...]]"]


class _Ready(NamedTuple):
    """A kernel compiled for a tile, and what each launch of it is given besides the pointers."""

    compiled: Any
    grid: int
    static: tuple[Any, ...]
    templates: dict[int, Any]

    @property
    def stack_bytes(self) -> int:
        """A thread's stack frame: what didn't find room in registers."""
        return int(self.compiled.n_spills) * 4


class Launch:
    """Called with the pointers, it launches.

    tuning_key: for FA_ADVISOR_AUTOTUNE; None where there is nothing to tune.
    adjustable: whether another tile may take the chosen one's place where that doesn't fit.
    describe: the kind of tensor descriptor that the kernel takes, Triton's own or Gluon's.
    """

    def __init__(
        self,
        name: str,
        kernel: Any,
        geometry: Geometry,
        chosen: Tile,
        descriptors: Descriptors | None = None,
        tuning_key: Callable[[], tuning.TuningKey] | None = None,
        *,
        adjustable: bool = True,
        describe: Callable[..., Any] = TensorDescriptor,
    ) -> None:
        self._name = name
        self._kernel = kernel
        self._geometry = geometry
        self._tile = chosen
        self._descriptors = descriptors
        self._tuning_key = tuning_key
        self._adjustable = adjustable
        self._describe = describe
        self._ready: _Ready | None = None
        self._lock = threading.Lock()

    def __call__(self, device: int, *pointers: Any) -> None:
        if INTERPRET:
            grid, static = self._geometry(self._tile)
            self._kernel[(grid,)](*pointers, *static)
            return
        ready = self._ready
        if ready is None:
            ready = self._first(device, pointers)
        _launch(ready, device, pointers)

    def ready(self, device: int, pointers: tuple[Any, ...]) -> None:
        """Compile for such pointers, unless that was done; nothing is launched."""
        if not INTERPRET and self._ready is None:
            self._first(device, pointers)

    def _first(self, device: int, pointers: tuple[Any, ...]) -> _Ready:
        """Choose the tile and compile."""
        with self._lock:
            if self._ready is None:
                if self._tuning_key is not None and tuning.enabled():
                    prepared: dict[Tile, _Ready] = {}

                    def run(t: Tile) -> None:
                        if t not in prepared:
                            prepared[t] = self._prepare(t, pointers)
                        _launch(prepared[t], device, pointers)

                    self._tile = tuning.tuned(self._name, self._tuning_key(), self._tile, run)
                prepare = self._fitting if self._adjustable else partial(self._prepare, self._tile)
                self._ready = prepare(pointers)
            return self._ready

    def _fitting(self, pointers: tuple[Any, ...]) -> _Ready:
        """The tile compiled, or the next that has room for this call in memory and registers.

        The table's tiles do for plain calls. Operands that tensor descriptors can't name, masks
        and dropout take more. A limit on registers must not be what makes a tile spill.
        """
        best: _Ready | None = None
        current = self._tile
        attempts = 0
        most = _MOST_STACK_BYTES.get(self._name, _MOST_STACK_BYTES_ELSEWHERE)
        while True:
            following: Tile | None
            try:
                ready = self._prepare(current, pointers)
            except OutOfResources:
                following = smaller(current)
                if following is None and best is None:
                    raise
            else:
                attempts += 1
                if best is None or ready.stack_bytes < best.stack_bytes:
                    best = ready
                if ready.stack_bytes <= (0 if current.max_registers is not None else most):
                    return ready
                following = lighter(current, self._name) if attempts < _MOST_ATTEMPTS else None
            if following is None:
                assert best is not None
                return best
            current = following

    def _prepare(self, t: Tile, pointers: tuple[Any, ...]) -> _Ready:
        """Compile for a tile, and load; nothing is launched."""
        grid, static = self._geometry(t)
        templates = {}
        if self._descriptors is not None:
            templates = {
                position: self._describe(pointers[position], *description)
                for position, description in self._descriptors(t).items()
            }
        compiled = self._kernel.warmup(
            *(templates.get(i, p) for i, p in enumerate(pointers)),
            *static,
            grid=(grid,),
            num_warps=t.num_warps,
            num_stages=t.num_stages,
            maxnreg=t.max_registers,
        )
        load = compiled.run  # That is when the GPU's limits are held against it.
        if isinstance(load, partial):
            load()  # It failed before, for another kind of call: Triton keeps the error.
        for template in templates.values():
            template.base = None  # What is kept must keep no memory.
        return _Ready(compiled, grid, static, templates)


def _launch(ready: _Ready, device: int, pointers: tuple[Any, ...]) -> None:
    # An address is taken as it is; a tensor would be looked up with the driver each time.
    addresses: list[Any] = [p if p is None else p.data_ptr() for p in pointers]
    for position, template in ready.templates.items():
        descriptor = object.__new__(type(template))
        descriptor.__dict__.update(template.__dict__)
        descriptor.base = pointers[position]
        addresses[position] = descriptor
    compiled = ready.compiled
    stream = torch._C._cuda_getCurrentRawStream(device)
    if _hooked():
        compiled[(ready.grid, 1, 1)](*addresses, *ready.static, stream=stream)
        return
    compiled.run(
        ready.grid, 1, 1, stream, compiled.function, compiled.packed_metadata,
        None, None, None, *addresses, *ready.static,
    )  # fmt: skip


def _hooked() -> bool:
    """Whether somebody listens to Triton's launches, as a profiler of its kernels does."""
    knobs = triton.knobs.runtime
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
