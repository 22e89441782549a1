"""Everything that is hooked while a model is observed, put up and taken down as one."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex
from torch.nn.modules import module as nn_module
from torch.nn.modules import transformer
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fa_advisor.probes import dispatch
from fa_advisor.probes.by_id import ById
from fa_advisor.probes.compiled import uncompiled
from fa_advisor.probes.events import Code, Event, Phase
from fa_advisor.probes.fake import FakeDevice, cuda_calls_as_cpu
from fa_advisor.probes.lines import user_line
from fa_advisor.probes.masks import is_triangular
from fa_advisor.probes.modules import buffers_of, modules_of, parameters_of
from fa_advisor.probes.opstream import OpStream, shape_of
from fa_advisor.probes.scopes import Scopes, qualified
from fa_advisor.probes.structure import tensors_in
from fa_advisor.records import DeviceSpec


class Watch:
    """A context manager: inside it every operator, module, gradient and optimizer step is seen.

    `sink` gets the events. `gpu` decides which SDPA backend fake tensors take and is what
    `why_not` speaks of. `fake`: run on fake tensors. `device_type`, `stamp`: see `OpStream`.
    """

    def __init__(
        self,
        sink: Callable[[list[Event]], None],
        gpu: DeviceSpec,
        *,
        device_type: str | None = None,
        fake: FakeDevice | None = None,
        stamp: Callable[[str], None] | None = None,
    ) -> None:
        self.scopes = Scopes()
        self.fake = fake
        self.gpu = gpu
        self._device_type = device_type
        self.stream = OpStream(
            sink,
            self.scopes,
            device_type=device_type,
            execute=fake.execute if fake else None,
            stamp=stamp,
        )
        self.stream.overrides[torch.ops.aten.scaled_dot_product_attention.default] = dispatch.sdpa
        self._hooked = ExitStack()
        self._watching = ExitStack()
        self._seen_parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks: list[Any] = []
        self._step_handles: list[Any] = []
        self.cycle = Cycle()
        self._optimizers: ById[bool] = ById()
        self.as_block = True  # begins and ends where a block of code does
        self.paused = True
        self.met_compiled = False  # what would have been compiled ran as it is
        self.trained = False  # a gradient has come, or an optimizer stepped
        self.gradients = 0  # how often one has come
        self.calls: dict[int, Call] = {}  # the first of each outermost model, by the model's id
        self.on_enter: Callable[[nn.Module, Any], object] | None = None
        self.on_leave: Callable[[nn.Module], object] | None = None
        self.on_step: Callable[[], object] = lambda: self.end_step("train")
        # Takes the steps' ends, if it is there, at the very moment: else the sink does, in turn.
        self.on_end: Callable[[str, object], object] | None = None

    def __enter__(self) -> Watch:
        stack = self._hooked
        try:
            self.scopes.on_enter = self._forward_begins
            self.scopes.on_leave = self._forward_ends
            self.scopes.install()
            stack.callback(self.scopes.remove)
            self._step_handles = [
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ends),
            ]
            for handle in self._step_handles:
                stack.callback(handle.remove)
            self.resume()
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.pause()
        self._hooked.close()

    def pause(self) -> None:
        """See modules and optimizer steps begin and end, and nothing else."""
        self.paused = True
        self._watching.close()

    def resume(self) -> None:
        """See everything again, and what the known models hold now."""
        stack = self._watching
        try:
            stack.callback(self._remove_hooks)
            if not self.stream.ignore_compile_internals():
                stack.enter_context(uncompiled(self._met_compiled))
            stack.enter_context(dispatch.observed_by(self))
            stack.enter_context(_observed_resizes(self.stream))
            if self.fake is not None:
                stack.enter_context(cuda_calls_as_cpu())
            if self._device_type != "cuda":
                stack.enter_context(_taken_apart())
            stack.callback(lambda: self.stream.end(as_block=self.as_block))
            self.stream.begin()
            self.look_again()
        except BaseException:
            stack.close()
            raise
        self.paused = False

    # -- models, inputs, optimizers ------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Label a model's parameters, buffers and existing gradients, and follow its gradients."""
        prefix = self.scopes.add_root(model)
        for name, module in modules_of(model):
            fqn = qualified(prefix, name)
            for parameter in parameters_of(module, recurse=False):
                if parameter not in self._seen_parameters:
                    self._add_parameter(parameter, fqn)
            for buffer in buffers_of(module, recurse=False):
                self._add_buffer(buffer, fqn)
            for value in vars(module).values():
                if isinstance(value, Tensor):  # a cache that was never registered
                    self._add_buffer(value, fqn)

    def look_again(self) -> None:
        """Label what the known models hold now: storages change without any hook that tells."""
        for model in self.scopes.roots():
            self.add_model(model)
        for parameter, fqn in list(self._seen_parameters.items()):
            self.stream.label(parameter, "parameter", fqn)
            if parameter.grad is not None:
                self.stream.label(parameter.grad, "gradient", fqn)
        for optimizer in self.optimizers():
            self.label_optimizer(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped and live."""
        return self._optimizers.keys()

    def abandon(self) -> None:
        """See nothing more, and touch no lock on the way: for the child of a fork."""
        self.paused = True
        self.scopes.remove()
        for handle in self._step_handles:
            handle.remove()
        self.stream.end(as_block=False)
        dispatch.forget(self)

    def add_inputs(self, values: Any) -> None:
        """Label the tensors of a model's inputs; what a graph made is no input."""
        for tensor in tensors_in(values):
            if tensor.grad_fn is None:
                self.stream.label(tensor, "input", "")

    def end_step(self, kind: str = "", about: object = None) -> None:
        """Say that a step of the user's ended: `kind` and `about` are the step log's."""
        if self.on_end is None:
            self.stream.emit((Code.STEP, kind, about))
        else:
            self.stream.flush()
            self.on_end(kind, about)
        self.stream.step_ends()

    def _add_parameter(self, parameter: nn.Parameter, fqn: str) -> None:
        self._seen_parameters[parameter] = fqn
        self.stream.label(parameter, "parameter", fqn)
        if parameter.grad is not None:
            self.stream.label(parameter.grad, "gradient", fqn)
        if parameter.requires_grad and parameter.is_leaf:

            def gradient_is_there(leaf: Tensor) -> None:
                self.trained = True
                self.gradients += 1
                if leaf.grad is not None and not self.paused:
                    self.stream.label(leaf.grad, "gradient", fqn)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))

    def _add_buffer(self, buffer: Tensor, fqn: str) -> None:
        if not self.stream.labelled(buffer, "buffer"):
            self.stream.label(buffer, "buffer", fqn, triangular=is_triangular(buffer))

    def _met_compiled(self) -> None:
        self.met_compiled = True

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._seen_parameters.clear()

    # -- what happens --------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any) -> None:
        if self.on_enter is not None:
            self.on_enter(model, args)
        if self.paused:
            return
        self.stream.revive()
        if self.stream.phase is Phase.OPTIMIZER:  # the closure of an LBFGS
            self.stream.phase = Phase.FORWARD
        parameters = list(parameters_of(model))
        if any(parameter not in self._seen_parameters for parameter in parameters):
            self.add_model(self.scopes.root_of(model))
        kwargs = keywords()
        if parameters:
            call = self.calls.get(id(model))
            if call is None or call.model is not model:
                call = self.calls[id(model)] = Call(model, args, kwargs)
            call.begins_at = self.stream.op_count
        self.add_inputs(args)
        self.add_inputs(kwargs)

    def _forward_ends(self, model: nn.Module) -> None:
        if not self.paused:
            call = self.calls.get(id(model))
            if call is not None:
                call.operators += self.stream.op_count - call.begins_at
            if not torch.is_grad_enabled():
                self.stream.emit((Code.FORWARD_END,))
        if self.on_leave is not None:
            self.on_leave(model)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if self.scopes.elsewhere():
            return
        self.trained = True
        self._optimizers[optimizer] = True
        if not self.paused:
            for parameter in _parameters_of(optimizer):  # some may be no module's
                if parameter not in self._seen_parameters:
                    self._add_parameter(parameter, "")
        self.cycle.begins(optimizer)
        self.stream.phase = Phase.OPTIMIZER

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self.scopes.elsewhere():
            return
        if not self.paused:
            self.label_optimizer(optimizer)
        self.stream.phase = Phase.FORWARD
        if self.cycle.ends_with(optimizer):
            self.on_step()

    def label_optimizer(self, optimizer: Optimizer) -> None:
        """Label an optimizer's state. Step counts live on the host unless a kernel reads them."""
        on_device = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
        for state in optimizer.state.values():
            if not isinstance(state, dict):
                continue
            for name, value in state.items():
                if isinstance(value, Tensor):
                    host = name == "step" and value.ndim == 0 and not on_device
                    label = "host" if host and value.device.type == "cpu" else "optimizer_state"
                    self.stream.label(value, label, "")

    def sdpa(self, facts: Any) -> None:
        """scaled_dot_product_attention was entered (facts) or left (None)."""
        source = user_line(sys._getframe(1)) if facts is not None else None
        self.stream.emit((Code.SDPA, facts, self.scopes.current, source))


def _parameters_of(optimizer: Optimizer) -> list[Any]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if isinstance(p, Tensor)]


class Cycle:
    """Which optimizer's step ends a step of the training, where several step in turn.

    The last one before the first steps again; until that is known, each. `surplus`: so many ends
    were told too many by then.
    """

    def __init__(self) -> None:
        self.surplus = 0
        self._stepped: ById[bool] = ById()  # in the cycle that runs
        self._latest: weakref.ref[Any] = weakref.ref(self)
        self._last: weakref.ref[Any] | None = None

    def begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if optimizer in self._stepped:
            if self._last is None:
                self.surplus = len(self._stepped) - 1
            last = self._last() if self._last is not None else None
            if last is None or last not in self._stepped:
                self._last = self._latest
            self._stepped.clear()
        self._stepped[optimizer] = True
        self._latest = weakref.ref(optimizer)

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer that has stepped is the last one of the cycle."""
        last = self._last() if self._last is not None else None
        return last is None or last is optimizer


class Call:
    """A model's first call, and how many operators ran in all of them.

    `args` and `kwargs` have shapes and dtypes but no memory.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.operators = 0
        self.begins_at = 0
        self.makes_graph = torch.is_grad_enabled()
        self._model = weakref.ref(model)
        self.args: tuple[Any, ...] = outline(args)
        self.kwargs: dict[str, Any] = outline(kwargs)

    @property
    def model(self) -> nn.Module | None:
        """What was called, while it lives."""
        return self._model()


def keywords() -> dict[str, Any]:
    """The keyword arguments of the module call whose global pre-hook asks: a hook on all modules
    isn't given them, but torch's frame that runs it has them."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(16):
        if frame is None or frame.f_code.co_filename == nn_module.__file__:
            break
        frame = frame.f_back
    found = frame.f_locals.get("kwargs") if frame is not None else None
    return found if isinstance(found, dict) else {}


def outline(value: Any) -> Any:
    """The same structure with tensors that have a shape and a dtype but no memory."""
    if isinstance(value, Tensor):
        with _disable_current_modes():
            return torch.empty(shape_of(value), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: outline(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(outline(item) for item in value)
    return None


class _taken_apart:
    """From the first watch to the last: those of `record` needn't nest."""

    _open = 0
    _undo = ExitStack()

    def __enter__(self) -> None:
        cls = type(self)
        if not cls._open:
            cls._undo.enter_context(_composites_taken_apart())
        cls._open += 1

    def __exit__(self, *exc: object) -> None:
        cls = type(self)
        cls._open -= 1
        if not cls._open:
            cls._undo.close()


@contextmanager
def _composites_taken_apart() -> Iterator[None]:
    """nn.MultiheadAttention's inference fast path is one operator that nothing can see into, and
    that has no shape rule for fake tensors. Off, except on a GPU, where it is what users run."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    detect = transformer._detect_is_causal_mask

    def detect_without_values(
        mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        # nn.TransformerEncoder compares a mask with a causal one; a fake mask has no values.
        return bool(is_causal) if isinstance(mask, FakeTensor) else detect(mask, is_causal, size)

    validate, uncompiled = flex._validate_device, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    # flex_attention compiles itself, and no mode may watch that; on the CPU it refuses to train.
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    flex._validate_device = lambda query, key, value: (
        None if isinstance(query, FakeTensor) else validate(query, key, value)
    )
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = detect_without_values
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        flex._validate_device = validate
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = uncompiled
        torch.backends.mha.set_fastpath_enabled(enabled)


class _observed_resizes:
    """`UntypedStorage.resize_` doesn't pass the dispatcher: tell the stream of each."""

    _streams: list[OpStream] = []  # noqa: RUF012
    _original: Any = None

    def __init__(self, stream: OpStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        cls = type(self)
        cls._streams.append(self._stream)
        if len(cls._streams) == 1:
            cls._original = torch.UntypedStorage.resize_

            def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                out = cls._original(storage, size)
                for stream in cls._streams:
                    stream.resized(storage)
                return out

            torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]

    def __exit__(self, *exc: object) -> None:
        cls = type(self)
        cls._streams.remove(self._stream)
        if not cls._streams:
            # The method is inherited: deleting ours uncovers it.
            del torch.UntypedStorage.resize_
