"""Everything that is hooked while a model is observed, put up and taken down as one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex
from torch.nn.modules import transformer
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from fa_advisor.probes import dispatch
from fa_advisor.probes.events import Code, Event, Phase
from fa_advisor.probes.fake import FakeDevice, cuda_calls_as_cpu
from fa_advisor.probes.lines import user_line
from fa_advisor.probes.masks import is_triangular
from fa_advisor.probes.opstream import OpStream
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
        self._stack = ExitStack()
        self._seen_parameters: set[int] = set()
        self._hooks: list[Any] = []
        self.on_step: Callable[[], None] | None = None  # an optimizer's step has ended
        self.first_call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __enter__(self) -> Watch:
        stack = self._stack
        try:
            self.scopes.on_enter = self._forward_begins
            self.scopes.on_leave = self._forward_ends
            self.scopes.install()
            stack.callback(self.scopes.remove)
            for handle in (
                register_optimizer_step_pre_hook(self._step_begins),
                register_optimizer_step_post_hook(self._step_ends),
            ):
                stack.callback(handle.remove)
            stack.callback(self._remove_hooks)
            stack.enter_context(dispatch.observed_by(self))
            stack.enter_context(_observed_resizes(self.stream))
            if self.fake is not None:
                stack.enter_context(cuda_calls_as_cpu())
            if self._device_type != "cuda":
                stack.enter_context(_taken_apart())
            stack.enter_context(self.stream)
            stack.callback(self.stream.flush)
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # -- models, inputs, optimizers ------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Label a model's parameters, buffers and existing gradients, and follow its gradients."""
        prefix = self.scopes.add_root(model)
        self._hooks.append(model.register_forward_pre_hook(_Called(self), with_kwargs=True))
        for name, module in model.named_modules():
            fqn = qualified(prefix, name)
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in self._seen_parameters:
                    self._add_parameter(parameter, fqn)
            for buffer in module.buffers(recurse=False):
                self.stream.label(buffer, "buffer", fqn, triangular=is_triangular(buffer))
            for value in vars(module).values():
                if isinstance(value, Tensor):  # a cache that was never registered
                    self.stream.label(value, "buffer", fqn, triangular=is_triangular(value))

    def add_inputs(self, values: Any) -> None:
        """Label the tensors of a model's inputs."""
        for tensor in tensors_in(values):
            self.stream.label(tensor, "input", "")

    def end_step(self) -> None:
        """Say that a step of the user's ended where no optimizer says so."""
        self.stream.emit((Code.STEP,))

    def _add_parameter(self, parameter: nn.Parameter, fqn: str) -> None:
        self._seen_parameters.add(id(parameter))
        self.stream.label(parameter, "parameter", fqn)
        if parameter.grad is not None:
            self.stream.label(parameter.grad, "gradient", fqn)
        if parameter.requires_grad and parameter.is_leaf:

            def gradient_is_there(leaf: Tensor) -> None:
                if leaf.grad is not None:
                    self.stream.label(leaf.grad, "gradient", fqn)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    # -- what happens --------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any) -> None:
        for parameter in model.parameters():
            if id(parameter) not in self._seen_parameters:
                self.add_model(model)
                break
        self.add_inputs(args)

    def called(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A model's forward begins; unlike the hook on all modules, this one sees keywords."""
        if self.scopes.depth <= 1 and self.first_call == ((), {}):
            self.first_call = (_outline(args), _outline(kwargs))
        self.add_inputs(kwargs)

    def _forward_ends(self, model: nn.Module) -> None:
        if not torch.is_grad_enabled():
            self.stream.emit((Code.FORWARD_END,))

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self.stream.phase = Phase.OPTIMIZER

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self.label_optimizer(optimizer)
        self.stream.phase = Phase.FORWARD
        self.stream.emit((Code.STEP,))
        if self.on_step is not None:
            self.stream.flush()
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


class _Called:
    """The hook on a model. A copy of the model, deep or pickled, gets one that does nothing."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._watch is not None and not torch.compiler.is_compiling():
            self._watch.called(model, args, kwargs)

    def __reduce__(self) -> Any:
        return _Called, ()


def _outline(value: Any) -> Any:
    """The same structure with tensors that have a shape and a dtype but no memory."""
    if isinstance(value, Tensor):
        with _disable_current_modes():
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_outline(item) for item in value)
    return None


@contextmanager
def _taken_apart() -> Iterator[None]:
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
