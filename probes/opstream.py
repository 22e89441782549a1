"""The op stream: one dispatch-level engine for fake, CPU and CUDA tensors.

Sees every operator of forward, backward and optimizer step below autograd, numbers the storages
that it makes, and notices when each dies (a weak reference to the storage, so views, saved tensors
and C++ owners count as they do for the allocator). It keeps no tensor alive and makes none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as dynamo
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from fa_advisor.probes.collector import Allowance
from fa_advisor.probes.events import GATHERS, Code, Event, Kind, Op, Phase, Scope
from fa_advisor.probes.in_place import NAMES as MAY_BE_IN_PLACE
from fa_advisor.probes.in_place import owned_by_the_engine, unwatched
from fa_advisor.probes.lines import in_checkpoint, user_line
from fa_advisor.probes.operators import classify
from fa_advisor.probes.scopes import Scopes

# Events are handed on in batches: the hot path only appends. Small ones, so that an event is gone
# before Python's garbage collector would count it among what lasts.
BATCH = 128
# That Python's garbage collector counts and that an operator leaves in the events and the ledger.
OBJECTS = 6

_CompositeImplicit = torch._C.DispatchKey.CompositeImplicitAutograd
_PYTHON_KEYS = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)
# Composite for other devices; the CPU's and CUDA's own kernels run them whole.
_WHOLE = frozenset(("aten::silu_backward", "aten::mish_backward", "aten::native_channel_shuffle"))
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_DTYPES: dict[torch.dtype, str] = {}


class _Sort(Enum):
    """What an argument is, by its type: asked so often that the answer is kept."""

    TENSOR = 0
    SEQUENCE = 1
    OTHER = 2


_SORTS: dict[type, _Sort] = {}


def _learn_type(cls: type) -> _Sort:
    if issubclass(cls, Tensor):
        sort = _Sort.TENSOR
    else:
        sort = _Sort.SEQUENCE if cls in (list, tuple) else _Sort.OTHER
    _SORTS[cls] = sort
    return sort


class _Known(NamedTuple):
    """What is decided once per operator. `call`: `func` without its wrapping in Python."""

    op: Op
    recorded: bool
    composite: bool
    call: Any
    may_be_in_place: bool
    has_scalars: bool
    func: Any


class _Ref(weakref.ref[Any]):
    """A weak reference to a storage that knows the storage's number."""

    __slots__ = ("key", "label", "nbytes", "sid")

    key: int
    label: str
    nbytes: int
    sid: int


class Failed(NamedTuple):
    """An operator that found no memory; `sids` number the storages that it was about to make."""

    op: Op
    scope: Scope
    phase: Phase
    source: tuple[str, int] | None
    sids: tuple[int, ...]


class OpStream(TorchDispatchMode):
    """`sink` gets lists of events; `execute` runs an operator (fake tensors bring their own).

    `device_type`: only storages on this device are numbered ("cuda" on a GPU; None: all).
    `stamp` is called with "NUMBER name" before an operator runs and with "" after it; with it,
    events say where storages lie, and compiled graphs run compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo traces nothing in here; but torch's own way of saying so puts two Python functions
        before every operator."""
        return False

    def __init__(
        self,
        sink: Callable[[list[Event]], None],
        scopes: Scopes,
        *,
        device_type: str | None = None,
        execute: Callable[..., Any] | None = None,
        stamp: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink = sink
        self._scopes = scopes
        self._device_type = device_type
        self._execute = execute
        self._stamp = stamp
        if stamp is not None:
            owned_by_the_engine()  # now, while autograd can still be run
        self.failed: Failed | None = None  # the last operator that found no memory
        self.number = 0  # of the last operator that began, where allocations are stamped
        # By id: an OpOverload's own hash is computed in Python. The entry keeps the id alive.
        self._ops: dict[int, _Known] = {}
        self._is_here = None if device_type is None else attrgetter(f"is_{device_type}")
        self._refs: dict[int, _Ref] = {}
        self._next_sid = 0
        self._events: list[Event] = []
        self._plain: dict[type, bool] = {}
        self.phase = Phase.FORWARD
        self.muted = False
        self.late = False  # its block ended under another mode: it leaves when that has left
        self.op_count = 0
        self._step_began = 0  # at this op_count
        self._allowance = Allowance()
        self.overrides: dict[Any, Callable[..., Any]] = {}

    # -- the hot path -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tracing = dynamo.set_eval_frame(None)
        if tracing is not None:
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                dynamo.set_eval_frame(tracing)
        if self.muted:
            return func(*args, **(kwargs or {}))
        known = self._ops.get(id(func)) or self._learn(func)
        op, recorded, composite, call, _, _, _ = known
        if types and not self._all_plain(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by on their own
        if composite and not _nested_among(args):  # those have kernels of their own
            return self._decompose(func, args, kwargs)
        execute = self._execute
        if self._stamp is not None and recorded:
            out = self._run_stamped(self._stamp, known, args, kwargs)
        elif execute is not None:
            out = execute(func, types, args, kwargs or {})
        elif kwargs:
            out = call(*args, **kwargs)
        else:
            out = call(*args)
        if not recorded:  # views have no storage of their own
            if (
                self._stamp is not None
                and self.phase is Phase.FORWARD
                and torch.is_grad_enabled()
                and _current_node() is None
            ):
                self._scopes.mark_line(user_line(sys._getframe(1)))
        elif self.phase is not Phase.OPTIMIZER:
            self._record(op, args, kwargs, out, known.has_scalars)
        elif not op.writes:
            self._record_update(op, out)
        return out

    def _run_stamped(
        self, stamp: Callable[[str], None], known: _Known, args: Any, kwargs: Any
    ) -> Any:
        """Run an operator on the GPU; what it allocates carries its number."""
        op, _, _, call, may_be_in_place, _, func = known
        self.number += 1
        stamp(f"{self.number} {op.name}")
        try:
            if may_be_in_place and not kwargs and not torch.is_grad_enabled():
                node = _current_node()
                if node is not None:
                    call = unwatched(func, node, args)
            return call(*args, **kwargs) if kwargs else call(*args)
        except torch.OutOfMemoryError:
            self._record_failure(op, func, args, kwargs or {})
            raise
        finally:
            stamp("")

    def _record_failure(self, op: Op, func: Any, args: Any, kwargs: Any) -> None:
        """An operator found no memory: tell what it was about to make."""
        inputs: list[tuple[int, Any]] = []
        self._inputs_in(args, inputs)
        self._inputs_in(kwargs.values(), inputs)
        outputs: list[tuple[int, Any, str, int]] = []
        for made in _as_on_meta(func, args, kwargs):
            nbytes = made.untyped_storage().nbytes()
            outputs.append((self._next_sid, made.shape, dtype_name(made.dtype), nbytes))
            self._next_sid += 1
        node = _current_node()
        backward = node is not None and self._scopes.depth == 0
        if backward:
            phase, (scope, source) = Phase.BACKWARD, self._scopes.place_of_node(node)
        else:
            phase, scope, source = self.phase, self._scopes.current, user_line(sys._getframe(2))
        extra = _extra(op, args) if op.kind in _WITH_SCALARS else None
        self.failed = Failed(op, scope, phase, source, tuple(sid for sid, *_ in outputs))
        self._events.append((0, op, scope, phase, source, inputs, outputs, extra, self.number))
        self._events += [(1, sid) for sid, *_ in outputs]  # they never came to be

    def _record(self, op: Op, args: Any, kwargs: Any, out: Any, has_scalars: bool) -> None:
        inputs: list[tuple[int, Any]] = []
        self._inputs_in(args, inputs)
        if kwargs:
            self._inputs_in(kwargs.values(), inputs)
        outputs: list[tuple[int, Any, str, int]] = []
        made = False
        sort = _SORTS.get(type(out)) or _learn_type(type(out))
        if sort is _Sort.TENSOR:
            made = self._output(out, outputs)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, Tensor):
                    made = self._output(item, outputs) or made
        node, scopes, stamped = _current_node(), self._scopes, self._stamp is not None
        source = None
        if node is None:
            scope = scopes.current
            phase: Phase = self.phase
            if made:
                source = user_line(sys._getframe(2))
                if stamped and torch.is_grad_enabled():
                    scopes.mark_line(source)
        elif scopes.depth > 0 or (torch.is_grad_enabled() and in_checkpoint(sys._getframe(2))):
            # A function's recomputation enters no module.
            scope = scopes.current if scopes.depth > 0 else scopes.of_node(node)
            phase = Phase.RECOMPUTE
            if made:
                source = user_line(sys._getframe(2))
        else:
            scope, source = scopes.place_of_node(node)
            phase = Phase.BACKWARD
        extra = _extra(op, args) if has_scalars else None
        events = self._events
        if stamped:
            events.append((0, op, scope, phase, source, inputs, outputs, extra, self.number))
        else:
            events.append((0, op, scope, phase, source, inputs, outputs, extra))
        self.op_count += 1
        if len(events) >= BATCH:
            self.flush()

    def _record_update(self, op: Op, out: Any) -> None:
        """In an optimizer's step only what is made matters, and in-place ops make nothing."""
        self.op_count += 1
        outputs: list[tuple[int, Any, str, int]] = []
        made = False
        if isinstance(out, Tensor):
            made = self._output(out, outputs)
        elif type(out) in (list, tuple):
            for item in out:
                if isinstance(item, Tensor):
                    made = self._output(item, outputs) or made
        if made:
            scope = self._scopes.current
            source = user_line(sys._getframe(2)) if self._stamp is not None else None
            event = (0, op, scope, Phase.OPTIMIZER, source, (), outputs, None)
            self._events.append(event if self._stamp is None else (*event, self.number))

    def sid(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; -1 for one that isn't followed.

        A storage never seen before existed before the stream began.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or no storage of its own
            return -1
        ref = self._refs.get(storage._cdata)
        if ref is not None:
            return ref.sid
        if self._is_here is not None and not self._is_here(tensor):
            return -1
        if self.phase is Phase.OPTIMIZER and tensor.ndim == 0:
            return -1  # a scalar operand, which lives on the host
        nbytes = storage.nbytes()
        ref = self._number(storage, nbytes)
        shape, dtype = shape_of(tensor), dtype_name(tensor.dtype)
        # A bucket from before the stream: it is first met where it is filled.
        bucket = _in_a_gradients_hook() and GATHERS in self._scopes.types.values()
        if bucket:
            shape = torch.Size((nbytes // tensor.itemsize,))
        self._events.append((Code.EXTERNAL, ref.sid, shape, dtype, nbytes))
        if bucket:
            self._events.append((Code.LABEL, ref.sid, "communication", ""))
        return ref.sid

    def _inputs_in(self, values: Any, inputs: list[tuple[int, Any]]) -> None:
        refs = self._refs
        for value in values:
            sort = _SORTS.get(type(value))
            if sort is None:
                sort = _learn_type(type(value))
            if sort is _Sort.TENSOR:
                try:  # the common case of `sid`, without the call
                    ref = refs.get(value.untyped_storage()._cdata)
                    if ref is not None:
                        inputs.append((ref.sid, value.shape))
                        continue
                except (NotImplementedError, RuntimeError):
                    if not value.is_nested:
                        continue
                sid = self.sid(value)
                if sid >= 0:
                    inputs.append((sid, shape_of(value)))
            elif sort is _Sort.SEQUENCE:
                self._inputs_in(value, inputs)

    def _output(self, tensor: Tensor, outputs: list[tuple[int, Any, str, int]]) -> bool:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return False
        nbytes = storage.nbytes()
        ref = self._refs.get(storage._cdata)
        shape = shape_of(tensor)
        if ref is None:
            if self._is_here is not None and not self._is_here(tensor):
                return False
            sid = self._number(storage, nbytes).sid
            dtype = tensor.dtype
            outputs.append((sid, shape, _DTYPES.get(dtype) or dtype_name(dtype), nbytes))
            return True
        if nbytes != ref.nbytes:
            self._resized(storage, ref)
        outputs.append((ref.sid, shape, "", -1))
        return False

    def _number(self, storage: Any, nbytes: int) -> _Ref:
        ref = _Ref(storage, self.died)
        ref.sid = sid = self._next_sid
        ref.key = key = storage._cdata
        ref.nbytes = nbytes
        ref.label = ""
        self._next_sid = sid + 1
        self._refs[key] = ref
        if self._stamp is not None:
            self._locate(storage, sid)
        return ref

    def _locate(self, storage: Any, sid: int) -> None:
        self._events.append((8, sid, storage.data_ptr(), self.number))  # Code.BLOCK

    def died(self, ref: Any) -> None:
        """The storage that a `_Ref` is of is gone."""
        known: Any = self._refs.get(ref.key)
        if known is ref:
            del self._refs[ref.key]
        self._events.append((1, ref.sid))

    # -- once per operator or type ------------------------------------------------------------

    def _learn(self, func: Any) -> _Known:
        op = classify(func)
        recorded = op.kind is not Kind.VIEW
        # In inference mode composite ops arrive undecomposed; take them apart as autograd would.
        composite = (
            recorded
            and isinstance(func, torch._ops.OpOverload)
            and torch._C._dispatch_has_kernel(func.name())
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _CompositeImplicit)
            and func.name() not in _WHOLE
        )
        known = self._ops[id(func)] = _Known(
            op,
            recorded,
            composite,
            func._op if type(func) is torch._ops.OpOverload else func,
            op.name in MAY_BE_IN_PLACE,
            op.kind in _WITH_SCALARS,
            func,
        )
        return known

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        override = self.overrides.get(func)
        with self:
            if override is not None:
                return override(*args, **(kwargs or {}))
            return func._op_dk(_CompositeImplicit, *args, **(kwargs or {}))

    def _all_plain(self, types: Any) -> bool:
        for cls in types:
            plain = self._plain.get(cls)
            if plain is None:
                wrapper = hasattr(cls, "__tensor_flatten__")
                plain = self._plain[cls] = not wrapper
            if not plain:
                return False
        return True

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """On a GPU a compiled model runs compiled, as it does for the user: the allocator's trace
        sees what is inside. Elsewhere torch runs it uncompiled, so that the mode sees."""
        return self._stamp is not None

    # -- coming and going, not always as a block does ------------------------------------------

    def begin(self) -> None:
        """See the operators of this thread from now on."""
        self.muted = self.late = False
        self._allow()
        _leave_late()
        if self in _get_current_dispatch_mode_stack():
            self.revive()
        else:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, as_block: bool) -> None:
        """Leave the thread's stack of modes; where that can't be now, stay on it and see nothing.

        A block (`as_block`) that ended under another mode leaves late: when another stream begins
        or ends and that mode has left. What isn't a block can't leave under another mode, in
        another thread, in the middle of a backward, and within `torch.inference_mode()`, which puts
        the dispatch keys back as it found them.
        """
        self.flush()
        self._allowance.close()
        stack = _get_current_dispatch_mode_stack()
        nested = torch.is_inference_mode_enabled() or torch._C._current_graph_task_id() != -1
        if stack and stack[-1] is self and (as_block or not nested):
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _leave_late()
        else:
            self.late = as_block and self in stack
        self.muted = True

    def revive(self) -> None:
        """See on where the end of a `torch.inference_mode()` that it began in has blinded it."""
        for key in _PYTHON_KEYS:
            if not torch._C._dispatch_tls_is_dispatch_key_included(key):
                torch._C._dispatch_tls_set_dispatch_key_included(key, True)

    # -- what others tell the stream ----------------------------------------------------------

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def label(self, tensor: Tensor, label: str, fqn: str, *, triangular: bool = False) -> None:
        """Say what a tensor's storage is; wrapper subclasses are labelled by their parts."""
        if type(tensor) in _PLAIN and self.labelled(tensor, label):
            return
        for part in parts(tensor):
            sid = self.sid(part)
            if sid < 0:
                continue
            ref = self._refs[part.untyped_storage()._cdata]
            if ref.label != label:
                ref.label = label
                self._events.append((Code.LABEL, sid, label, fqn, triangular))

    def labelled(self, tensor: Tensor, label: str) -> bool:
        """Whether `label` is what a plain tensor's storage is known as already."""
        try:
            ref = self._refs.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return False
        return ref is not None and ref.label == label

    def resized(self, storage: Any) -> None:
        """A storage was resized behind the dispatcher's back."""
        ref = self._refs.get(storage._cdata)
        if ref is not None and storage.nbytes() != ref.nbytes:
            self._resized(storage, ref)

    def _resized(self, storage: Any, ref: _Ref) -> None:
        ref.nbytes = storage.nbytes()
        self._events.append((Code.RESIZE, ref.sid, ref.nbytes))
        if self._stamp is not None:
            self._locate(storage, ref.sid)

    def flush(self) -> None:
        """Hand on what has been seen so far."""
        events, self._events = self._events, []
        if events:
            self._sink(events)
            self._allow()

    def step_ends(self) -> None:
        """What was kept of the step is let go."""
        self._step_began = self.op_count
        self._allow()

    def _allow(self) -> None:
        if not self.muted:
            self._allowance.allow(OBJECTS * (self.op_count - self._step_began + BATCH))


def _hide_from_dynamo(*functions: Callable[..., Any]) -> None:
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
    for function in functions:
        dynamo.set_code_exec_strategy(function.__code__, skip)


_hide_from_dynamo(OpStream.__torch_dispatch__, OpStream.died)


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a (possibly nested) wrapper subclass holds; itself if it is plain."""
    if not hasattr(tensor, "__tensor_flatten__"):
        if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
            return [tensor._values()] if tensor.layout is torch.sparse_coo else [tensor.values()]
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


def torch_version() -> tuple[int, int]:
    """(2, 13), of the torch that runs."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _in_a_gradients_hook() -> bool:
    """In a backward, but in none of its operators: a hook, or what was put off to the end."""
    node = _current_node()
    if node is None:
        return torch._C._current_graph_task_id() != -1
    return bool(node.name().endswith("AccumulateGrad"))


def _nested_among(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.is_nested for value in args)


def shape_of(tensor: Tensor) -> Any:
    """A tensor's shape; how many numbers it has where it has none: nested ones."""
    try:
        return tensor.shape
    except RuntimeError:
        return torch.Size((tensor.numel(),))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as reports write it."""
    name = _DTYPES.get(dtype)
    if name is None:
        name = _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return name


def _as_on_meta(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What an operator would make, as tensors without memory; none where that can't be told."""

    def shadow(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        made = func(*tree_map(shadow, args), **tree_map(shadow, kwargs))
    except Exception:
        return []
    found = made if isinstance(made, (list, tuple)) else (made,)
    return [t for t in found if isinstance(t, Tensor) and t.device.type == "meta"]


_WITH_SCALARS = frozenset(
    (Kind.SOFTMAX, Kind.DROPOUT, Kind.RANDOM, Kind.FUSED_ATTENTION, Kind.REDUCTION)
)


def _extra(op: Op, args: Any) -> Any:
    """The few scalars that the attribution needs."""
    kind = op.kind
    if kind == Kind.SOFTMAX:
        for value in args[1:]:
            if type(value) is int:
                return value
        return -1
    if kind == Kind.DROPOUT:
        return float(args[1])
    if kind == Kind.REDUCTION:
        return _reduced(args[0], args[1] if len(args) > 1 else None)
    if kind == Kind.FUSED_ATTENTION and op.backend == "native":
        return int(args[2 if op.name.startswith("_transformer") else 4])  # heads
    if kind == Kind.RANDOM and op.name == "bernoulli_" and len(args) > 1:
        return float(args[1]) if isinstance(args[1], (int, float)) else None
    return None


def _reduced(tensor: Tensor, dims: Any) -> Any:
    """How a sum's operand lies in memory and what of it is summed."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if type(dims) is int:
        dims = (dims,)
    elif not isinstance(dims, (list, tuple)):
        dims = ()
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return shape, strides, offset, tuple(dims), dtype_name(tensor.dtype)


def _leave_late() -> None:
    """Take off the thread's stack the streams whose blocks ended under a mode that has left."""
    while (stack := _get_current_dispatch_mode_stack()) and (
        isinstance(stack[-1], OpStream) and stack[-1].late
    ):
        stack[-1].late = False
        stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
