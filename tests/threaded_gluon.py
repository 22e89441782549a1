"""Run Gluon kernels for Hopper on a CPU: a thread for each warp group, torch for what they compute.

Gluon has no interpreter. This one executes a kernel's own source with the language's names bound to
what stands below, and is stricter than a GPU: a copy arrives when it likes, a product must find its
operands unchanged from its issue to its wait, what is stored to shared memory must be fenced before
a copy or a product reads it, and a wait that nobody ends is an error, not a hang. What depends
on layouts, registers or the order within a warp group it can't show.
"""

from __future__ import annotations

import ast
import builtins
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_advisor.kernels import launch as launches
from fa_advisor.kernels.hopper import plan
from fa_advisor.kernels.launcher import Launch

_PREFIX = "fa_advisor.kernels.hopper."
KERNELS = Path(__file__).parents[1] / "kernels"
PATIENCE_S = 20.0
OFTEN = 0.1  # How often a copy or a product takes long.
_local = threading.local()
_read: set[str] = set()  # Modules made from their source.


Broken = threading.BrokenBarrierError


class Deadlock(AssertionError):
    pass


class Scalar(int):
    """An integer that can be cast as a tensor can."""

    def to(self, *_: Any, **__: Any) -> Scalar:
        return self


def _binary(name: str) -> Callable[[int, Any], Any]:
    plain = getattr(int, name)

    def operate(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return Scalar(plain(int(self), int(other)))

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Scalar, f"__{_name}__", _binary(f"__{_name}__"))
    setattr(Scalar, f"__r{_name}__", _binary(f"__r{_name}__"))


class Block(Tensor):
    """A tensor in registers."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)  # type: ignore[no-any-return]


def block(t: Tensor) -> Block:
    return t.as_subclass(Block)


class Pointer:
    """An address: a flat storage and one offset or many."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + other)

    @classmethod
    def to_(cls, t: Tensor) -> Pointer:
        flat = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
        return cls(flat, t.storage_offset())


class Unfenced:
    """What threads have stored in an allocation and not fenced since."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []
        self.lock = threading.Lock()

    def stored(self, view: Tensor) -> None:
        with self.lock:
            self.spans.append((threading.get_ident(), *_span(view)))

    def fence(self) -> None:
        with self.lock:
            self.spans = [span for span in self.spans if span[0] != threading.get_ident()]

    def within(self, view: Tensor) -> bool:
        first, last = _span(view)
        with self.lock:
            return any(first <= end and begin <= last for _, begin, end in self.spans)


def _span(view: Tensor) -> tuple[int, int]:
    """The first byte of its storage, and that of its last element."""
    first = view.storage_offset()
    steps = zip(view.shape, view.stride(), strict=True)
    last = first + sum((n - 1) * step for n, step in steps)
    return first * view.element_size(), last * view.element_size()


class Shared:
    """A view of shared memory."""

    def __init__(self, view: Tensor, whole: Unfenced) -> None:
        self.view, self.whole = view, whole

    shape = property(lambda self: list(self.view.shape))
    dtype = property(lambda self: self.view.dtype)
    layout = None

    def _like(self, view: Tensor) -> Shared:
        return Shared(view, self.whole)

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.view.shape[0], f"buffer {i} of {self.view.shape[0]}"
        return self._like(self.view[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._like(self.view.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._like(self.view.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._like(self.view.permute(*order))

    def load(self, _: Any = None) -> Block:
        return block(self.view.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.view.dtype, (value.dtype, self.view.dtype)
        self.view.copy_(value)
        self.whole.stored(self.view)


class Scattered(Shared):
    """Shared memory in an order of its own. physical[i]: where the i-th element lies."""

    def __init__(self, view: Tensor, whole: Unfenced, physical: Tensor) -> None:
        super().__init__(view, whole)
        self.physical = physical

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.view.shape[0]
        return Scattered(self.view[int(i)], self.whole, self.physical)

    def store(self, value: Tensor) -> None:
        self.view.view(-1)[self.physical] = value.reshape(-1).as_subclass(Tensor)
        self.whole.stored(self.view)


def scattered_by(offset_bases: Sequence[Sequence[int]]) -> Tensor:
    """Where each element of a square lies: what each bit of an offset adds to row and column."""
    size = 1 << len(offset_bases)
    offsets = torch.arange(size)
    row, column = torch.zeros_like(offsets), torch.zeros_like(offsets)
    for bit, (down, right) in enumerate(offset_bases):
        chosen = offsets >> bit & 1
        row, column = row ^ chosen * down, column ^ chosen * right
    physical = torch.empty_like(offsets)
    physical[row * int(size**0.5) + column] = offsets
    return physical


def viewed(tile: Shared, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    """The same memory, from its first byte on, as another type in another shape and order."""
    size = torch.empty((), dtype=dtype).element_size()
    for n in shape:
        size *= n
    nbytes = tile.view.reshape(-1).view(torch.uint8)
    assert nbytes.data_ptr() == tile.view.data_ptr(), "not in one piece"
    view = nbytes[:size].view(dtype).view(*shape)
    return Shared(view, tile.whole) if layout is None else Scattered(view, tile.whole, layout)


class Barrier:
    """An mbarrier: phases that end when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = 0
        self.nbytes = self.completed = 0

    def _settle(self) -> None:
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == 0 and self.nbytes == 0:
            self.completed += 1
            self.missing = self.count
            self.changed.notify_all()

    def arrive(self, arrivals: int, nbytes: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.nbytes += nbytes
            self._settle()

    def come(self, nbytes: int) -> None:
        with self.changed:
            self.nbytes -= nbytes
            self._settle()

    def wait(self, phase: int) -> None:
        assert phase in (0, 1)
        with self.changed:
            if not self.changed.wait_for(lambda: self.completed & 1 != phase, PATIENCE_S):
                raise Deadlock(f"phase {phase} of a barrier never ends ({self.completed} did)")


class Barriers:
    """An allocation of them."""

    def __init__(self, n: int) -> None:
        self.all = [Barrier() for _ in range(n)]

    def index(self, i: int) -> Barrier:
        assert 0 <= i < len(self.all)
        return self.all[int(i)]


def one(barrier: Any) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.all[0]  # type: ignore[no-any-return]


class Descriptor:
    """A tensor map: tiles of a tensor by coordinates, zeros beyond its bounds."""

    def __init__(self, t: Tensor, shape: Any, strides: Any, tile: Sequence[int]) -> None:
        self.flat = Pointer.to_(t).flat
        self.first, self.shape, self.strides = t.storage_offset(), shape, strides
        self.dtype, self.layout = t.dtype, None
        nbytes = t.element_size()
        for n in tile:
            nbytes *= n
        self.block_type = SimpleNamespace(shape=list(tile), nbytes=nbytes)

    def _places(self, coords: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Offsets of a tile's elements, modulo 2^64 as the hardware has them, and which exist."""
        offsets = torch.zeros((), dtype=torch.int64)
        inside = torch.ones((), dtype=torch.bool)
        rank = len(self.shape)
        for dim, (at, n) in enumerate(zip(coords, self.block_type.shape, strict=True)):
            index = torch.arange(n) + int(at)
            own = [1] * rank
            own[dim] = n
            offsets = offsets + (index * int(self.strides[dim])).view(own)  # int64 wraps around.
            inside = inside & ((index >= 0) & (index < int(self.shape[dim]))).view(own)
        return offsets + self.first, inside

    def read(self, coords: Sequence[int]) -> Tensor:
        offsets, inside = self._places(coords)
        found = self.flat[offsets.masked_fill(~inside, 0)]
        if found.element_size() == 1:  # torch masks no eight-bit floats.
            return found.view(torch.uint8).masked_fill(~inside, 0).view(self.dtype)
        return found.masked_fill(~inside, 0)

    def write(self, coords: Sequence[int], tile: Tensor, add: bool = False) -> None:
        offsets, inside = self._places(coords)
        tile = tile.reshape(self.block_type.shape)
        if add:
            self.flat.index_add_(0, offsets[inside], tile[inside])
        else:
            self.flat[offsets[inside]] = tile[inside]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Product:
    """A product under way; `left` and `right` are read again when it is waited for."""

    def __init__(self, left: Any, right: Shared, total: Any) -> None:
        self.left, self.right, self.total = left, right, total
        for operand in (left, right):
            if isinstance(operand, Shared):
                assert not operand.whole.within(operand.view), "no fence before a product"
        self.early = self._made()
        self.value: Block | None = None

    def _made(self) -> Tensor:
        left, right = (x.view if isinstance(x, Shared) else x for x in (self.left, self.right))
        return torch.as_tensor(left.float() @ right.float())

    def finish(self) -> None:
        late = self._made()
        assert _same_bits(late, self.early), "an operand changed before its product was waited for"
        before = self.total.value if isinstance(self.total, Product) else self.total
        assert before is not None
        self.value = block(late if before is _NOTHING else before + late)


_NOTHING = object()


def warpgroup_mma(
    left: Any, right: Shared, total: Any, use_acc: bool = True, is_async: bool = False
) -> Product:
    assert is_async
    product = Product(left, right, total if use_acc else _NOTHING)
    _local.products.append(product)
    return product


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    _dawdle()
    while len(_local.products) > outstanding:
        _local.products.pop(0).finish()
    values = [x.value if isinstance(x, Product) else x for x in deps]
    assert all(value is not None for value in values), "read before it was waited for"
    return values[0] if len(values) == 1 else tuple(values)


def _wait_barrier(barrier: Any, phase: int, pred: Any = True) -> None:
    if pred:
        one(barrier).wait(int(phase))


def load_tile(desc: Descriptor, coords: Sequence[int], barrier: Any, into: Shared) -> None:
    """Some time later the tile is there, whoever still reads what lay there."""

    def copy() -> None:
        _dawdle()
        into.view.view(desc.block_type.shape).copy_(desc.read(coords))
        one(barrier).come(desc.block_type.nbytes)

    _local.run(copy)


def _dawdle() -> None:
    """Now and then anything takes long."""
    if random.random() < OFTEN:
        time.sleep(3e-3)


def store_tile(desc: Descriptor, coords: Sequence[int], tile: Shared) -> None:
    assert not tile.whole.within(tile.view), "no fence before a copy out"
    _local.stores.append((desc, coords, tile, tile.view.clone(), False))


def add_tile(desc: Descriptor, coords: Sequence[int], tile: Shared) -> None:
    assert not tile.whole.within(tile.view), "no fence before a sum"
    _local.stores.append((desc, coords, tile, tile.view.clone(), True))


def store_wait(pending: int) -> None:
    _dawdle()
    while len(_local.stores) > pending:
        desc, coords, tile, early, add = _local.stores.pop(0)
        assert _same_bits(tile.view, early), "shared memory changed before its copy was waited for"
        desc.write(coords, early, add)


def fence() -> None:
    for whole in _local.allocations:
        whole.fence()


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is _BARRIERS:
        return Barriers(shape[0])
    whole = Unfenced()
    _local.allocations.append(whole)
    # Whatever lay there before: read too early, it shows.
    lies = torch.zeros(tuple(shape), dtype=dtype)
    lies.fill_(float("nan") if dtype.is_floating_point else 2**30)
    return Shared(lies, whole) if layout is None else Scattered(lies, whole, layout)


_BARRIERS = object()


def _load(at: Pointer, mask: Any = None, other: Any = 0) -> Any:
    offset = at.offset
    if not isinstance(offset, Tensor):
        if mask is False:
            return Scalar(other)
        value = at.flat[int(offset)]
        return Scalar(int(value)) if not value.is_floating_point() else block(value)
    if mask is None:
        return block(at.flat[offset])
    return block(at.flat[offset.masked_fill(~mask, 0)].masked_fill(~mask, other))


def _store(at: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    keep = torch.ones_like(at.offset, dtype=torch.bool) if mask is None else mask
    at.flat[at.offset[keep]] = value.to(at.flat.dtype)[keep]


_atomic = threading.Lock()


def _atomic_add(at: Pointer, more: int, sem: str | None = None) -> Scalar:
    with _atomic:
        before = int(at.flat[at.offset])
        at.flat[at.offset] = before + more
    return Scalar(before)


def _pairwise(
    of_numbers: Callable[..., Any], of_tensors: Callable[..., Tensor]
) -> Callable[..., Any]:
    def function(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            a, b = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (a, b))
            return block(of_tensors(a, b))
        found = of_numbers(a, b)
        return Scalar(found) if isinstance(found, int) else found

    return function


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor):
        return block(torch.where(condition, a, b))
    return a if condition else b


def _asm(code: str, _: str, args: Sequence[Any], **__: Any) -> Any:
    """The few instructions that the kernels write themselves."""
    if "bar.sync 9," in code:
        _local.together.wait(PATIENCE_S)
        return None
    if "bar.sync $1" in code:
        if not _local.turns[args[0]].acquire(timeout=PATIENCE_S):
            raise Deadlock(f"nobody arrived at the named barrier {args[0]}")
        return None
    if "bar.arrive $1" in code:
        # Twice, and the barrier would be complete without whoever waits at it.
        _local.turns[args[0]].release()
        return None
    if "barrier.cta.red" in code:  # A warp group is one thread here: nobody to wait for.
        x, most, _barrier = args
        _local.exceeds = bool((x > most).any())
        return None
    if code.startswith("mov.u32 $0, fa_exceeds;"):
        return Scalar(_local.exceeds)
    if ".reg .u32 fa_exceeds;" in code:
        return None
    if "e4m3x2" in code:
        numbers = torch.stack([x.as_subclass(Tensor) for x in args], -1)
        return block(numbers.to(torch.float8_e4m3fn).view(torch.int32).squeeze(-1))
    if code == "mov.b32 $0, $1;":  # The word of four numbers, given once for each of them.
        return block(args[0].as_subclass(Tensor)[..., ::4].contiguous().view(torch.int8))
    if "x2.f32" in code:
        dtype = torch.bfloat16 if "bf16x2" in code else torch.float16
        halves = torch.stack([x.as_subclass(Tensor) for x in args], -1).to(dtype)
        return block(halves.view(torch.int32).squeeze(-1))
    if code.startswith("mov.b32 {$0, $1}"):
        halves = args[0].as_subclass(Tensor).contiguous().view(torch.int16)
        return tuple(block(half) for half in halves.unflatten(-1, (-1, 2)).unbind(-1))
    s, offset, limit = args
    passes = offset > limit if "setp.gt" in code else offset < limit
    assert "setp.gt" in code or "setp.lt" in code, code
    return block(torch.where(passes, float("-inf"), s))


def _warp_specialize(parts: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    """Each part in a thread; the first error of any is raised."""
    errors: list[BaseException] = []
    copies: list[threading.Thread] = []
    together = threading.Barrier(2)
    turns = [threading.BoundedSemaphore() for _ in range(16)]  # A warp group arrives, one waits.
    for turn in turns:
        turn.acquire()
    program, allocations = _local.program, _local.allocations

    def run_copy(copy: Callable[[], None]) -> None:
        thread = threading.Thread(target=copy, daemon=True)
        copies.append(thread)
        thread.start()

    def run(function: Any, args: tuple[Any, ...]) -> None:
        _local.program, _local.allocations, _local.run = program, allocations, run_copy
        _local.products, _local.stores = [], []
        _local.together, _local.turns = together, turns
        try:
            with torch.no_grad():
                function(*args)
            assert not _local.products, "a product was never waited for"
            assert not _local.stores, "a copy out was never waited for"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * PATIENCE_S)
    for copy in copies:
        copy.join(PATIENCE_S)
    # A deadlock follows from another error more often than it is one.
    errors.sort(key=lambda error: isinstance(error, (Deadlock, Broken)))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _reduced(operation: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Tensor, axis: int) -> Any:
        found = operation(x, axis)
        if found.dim() or found.is_floating_point():
            return block(found)
        return Scalar(int(found))

    return reduce


class _SharedLayout:
    """Swizzles don't show."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return None

    get_default_for = staticmethod(lambda *_: None)


_LANGUAGE: dict[str, Any] = {
    "constexpr": _same,
    "static_range": range,
    "program_id": lambda _: Scalar(_local.program[0]),
    "num_programs": lambda _: Scalar(_local.program[1]),
    "allocate_shared_memory": allocate,
    "warp_specialize": _warp_specialize,
    "zeros": lambda shape, dtype, layout=None: block(torch.zeros(shape, dtype=dtype)),
    "full": lambda shape, x, dtype, layout=None: block(torch.full(shape, x, dtype=dtype)),
    "arange": lambda a, b, layout=None: block(torch.arange(a, b, dtype=torch.int32)),
    "load": _load,
    "store": _store,
    "where": _where,
    "maximum": _pairwise(max, torch.maximum),
    "minimum": _pairwise(min, torch.minimum),
    "max": _reduced(torch.amax),
    "sum": _reduced(torch.sum),
    "exp2": torch.exp2,
    "log2": torch.log2,
    "split": lambda x: tuple(block(half.contiguous()) for half in x.unbind(-1)),
    "join": lambda a, b: block(torch.stack([a, b], -1)),
    "convert_layout": _same,
    "inline_asm_elementwise": _asm,
    "atomic_add": _atomic_add,
    "SwizzledSharedLayout": _SharedLayout,
    "BlockedLayout": lambda *_, **__: None,
    "SliceLayout": lambda *_, **__: None,
    "DotOperandLayout": lambda *_, **__: None,
    "NVMMADistributedLayout": lambda *_, **__: None,
    "NVMMASharedLayout": _SharedLayout,
    "SharedLinearLayout": scattered_by,
    **{name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "uint8")},
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64")},
}
_MBARRIER = SimpleNamespace(
    init=lambda barrier, count: one(barrier).__dict__.update(count=count, missing=count),
    expect=lambda barrier, nbytes, pred=True: one(barrier).arrive(1, nbytes) if pred else None,
    arrive=lambda barrier, count=1, pred=True: one(barrier).arrive(count) if pred else None,
    wait=_wait_barrier,
    MBarrierLayout=lambda: _BARRIERS,
)


def _jit(function: Any = None, **_: Any) -> Any:
    return _same if function is None else function


_language = SimpleNamespace(**_LANGUAGE)
_gluon = SimpleNamespace(jit=_jit, constexpr_function=_same, language=_language)
_STANDS_FOR: dict[str, Any] = {
    "triton.experimental": SimpleNamespace(gluon=_gluon),
    "triton.experimental.gluon": _gluon,
    "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(
        fence_async_shared=fence,
        mbarrier=_MBARRIER,
        tma=SimpleNamespace(store_wait=store_wait),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    ),
    "fa_advisor.kernels.hopper.compat": SimpleNamespace(
        load_tile=load_tile,
        store_tile=store_tile,
        add_tile=add_tile,
        viewed=viewed,
        thread_barrier=lambda: None,
    ),
    # The kernels before and after are Triton's own language: they aren't run here.
    "triton": SimpleNamespace(jit=_jit),
    "triton.language": SimpleNamespace(constexpr=None),
    "fa_advisor.kernels.score": SimpleNamespace(
        LOG2E=1.4426950408889634, LN2=0.6931471805599453, UNSPECIALIZED=[]
    ),
}


def spoil(
    monkeypatch: pytest.MonkeyPatch, name: str, healthy: str, ill: str, *more: tuple[str, str]
) -> None:
    """For one test: a module's source with a fault in it."""
    source = (KERNELS / "hopper" / f"{name}.py").read_text()
    for was, becomes in ((healthy, ill), *more):
        assert was in source
        source = source.replace(was, becomes)
    others = {key: found for key, found in _STANDS_FOR.items() if key not in _read}
    monkeypatch.setattr(sys.modules[__name__], "_STANDS_FOR", others)
    module(name, source)


def module(name: str, source: str | None = None) -> SimpleNamespace:
    """One of the modules in kernels/hopper, in this language."""
    known = _STANDS_FOR.get(_PREFIX + name)
    if known is not None:
        return known  # type: ignore[no-any-return]
    path = KERNELS / "hopper" / f"{name}.py"
    names: dict[str, Any] = {"__name__": name, "__builtins__": {**vars(builtins), **_BUILTINS}}
    exec(compile(ast.parse(source or path.read_text()), str(path), "exec"), names)
    made = SimpleNamespace(**names)
    _STANDS_FOR[_PREFIX + name] = made
    _read.add(_PREFIX + name)
    return made


def _import(name: str, *more: Any, **named: Any) -> Any:
    if name.startswith(_PREFIX):
        return module(name.removeprefix(_PREFIX))
    found = _STANDS_FOR.get(name)
    if name == "triton.language" and not (more and more[2]):
        found = SimpleNamespace(language=found)  # "import a.b as c" takes b from a.
    return found if found is not None else builtins.__import__(name, *more, **named)


_BUILTINS = {"__import__": _import}


def launch(
    kernel: Any, grid: int, pointers: Sequence[Any], static: Sequence[Any],
    descriptors: dict[int, tuple[Any, ...]],
) -> None:  # fmt: skip
    """A kernel of `module` over a grid, one block after the other.

    descriptors: by position among the pointers, shape, strides, tile and layout.
    """
    given: list[Any] = []
    for position, t in enumerate(pointers):
        if position in descriptors:
            given.append(Descriptor(t, *descriptors[position][:3]))
        else:
            given.append(Pointer.to_(t) if isinstance(t, Tensor) else t)
    numbers = [Scalar(x) if type(x) is int else x for x in static]
    with torch.no_grad():
        for program in range(grid):
            _local.program, _local.allocations = (program, grid), []
            kernel(*given, *numbers)


def plan_as_on_hopper(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], *modules: Any
) -> None:
    """For one test: every call is planned as for a Hopper GPU, and `run` in its launches' place.

    modules: those that look at tensors by `by_descriptor`, beside the two that always do.
    """
    for module in (plan, launches, *modules):
        monkeypatch.setattr(module, "by_descriptor", lambda *_: True)
    monkeypatch.setattr(plan, "SHORT", 0)
    monkeypatch.setattr(plan, "available", lambda _: True)
    monkeypatch.setattr(plan, "compiles", lambda *_: True)
    monkeypatch.setattr(launches, "_check_device", lambda _: None)
    monkeypatch.setattr(launches, "_on", lambda _: nullcontext())
    monkeypatch.setattr(launches, "_plans", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(Launch, "__call__", run)
