"""Running a model that isn't there: fake tensors for what is big, real ones for what is small.

Big tensors (parameters, activations) are fake: shapes without memory. Small tensors that depend on
no fake one (token ids, position ids, masks of moderate size, an optimizer's step counts) are real,
so that `.item()`, `.tolist()` and value-dependent control flow on them work. Everything is on the
CPU as far as torch knows; `cuda` in a user's code is read as this device.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode

from fa_advisor.errors import TargetError
from fa_advisor.probes.autocast import cuda_autocast
from fa_advisor.probes.drawn import CHOOSERS, Draws
from fa_advisor.probes.fake_rules import RULES
from fa_advisor.probes.lines import user_line
from fa_advisor.probes.masks import is_triangular, mark_triangular

# The most elements that a tensor may have and still be computed for real: ids and masks (16 MiB of
# bools), floating-point tables and masks while running, and while building, where most are weights.
REAL_INTEGERS = 1 << 24
REAL_FLOATS = 1 << 22
REAL_WEIGHTS = 1 << 20
_device_of = torch.ops.prim.device.default
_FLEX = (flex_attention, flex_attention_backward)
# Below this many, an op on real tensors isn't sized first: no op makes much of so little.
TINY_ELEMENTS = 64


# What doesn't fit is told to the user by the error that follows; torch logs a traceback besides.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


class FakeDevice:
    """Executes operators for an `OpStream`; `mode` is the FakeTensorMode behind it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.building = False
        self._flex_seen = False
        self.left_compiled = False  # a copy of a model that is compiled isn't
        self._written: dict[Any, tuple[int, ...]] = {}
        self._draws = Draws()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of values that fake tensors don't have, in sentences for the report."""
        made = []
        if self._draws.read:
            made.append(
                f"Without a GPU there are no values for {' and '.join(sorted(self._draws.read))}"
                " to choose by: the choices that the model computes with, such as a router's of"
                " experts, were drawn evenly at random. --device cpu or cuda uses the model's own."
            )
        if self._flex_seen:
            made.append(
                "flex_attention is modelled as torch.compile runs it; called without"
                " torch.compile, it computes all of S and P."
            )
        return tuple(made)

    def execute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _device_of:
            return args[0].fake_device if FakeTensor in types else func(*args)
        if func in _FLEX:
            self._flex_seen = True
            return _flex(func, args)
        if FakeTensor not in types:
            return self._from_real(func, types, args, kwargs)
        written = self._written.get(func)
        if written is None:
            written = self._written[func] = _written_arguments(func)
        if written:
            target = args[written[0]] if written[0] < len(args) else None
            if isinstance(target, Tensor) and not isinstance(target, FakeTensor):
                return target  # a real tensor can't take in values that don't exist
        out = kwargs.get("out")
        if isinstance(out, Tensor) and not isinstance(out, FakeTensor):
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            with self.mode:
                shape = func.overloadpacket(*args, **rest).shape
            return out if out.shape == shape else out.resize_(shape)
        rule = RULES.get(func)
        if rule is not None:
            return self._by_rule(rule, func, types, args, kwargs)
        return self._fake(func, types, args, kwargs)

    def _by_rule(self, rule: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        call = rule(func, args, kwargs)
        if isinstance(call, Tensor):
            return call
        func, args, kwargs = call
        out = self._fake(func, types, args, kwargs)
        return self._draws.draw(func, args, kwargs, out) if func in CHOOSERS else out

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            out = self.mode.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise no_value(func) from error
        except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
            raise TargetError(
                f"{func} can't run on fake tensors (it has no shape rule)",
                hint="profile with --device cpu or on a GPU with --device cuda",
            ) from error
        if isinstance(out, tuple):
            out = tuple(out)  # some shape rules return named tuples, which no operator does
        if self.building:
            # Module.to() swaps parameters, which a live weak reference forbids.
            memo = self.mode.fake_tensor_converter.meta_converter.tensor_memo
            if memo:
                memo.clear()
        return out

    def _from_real(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """No fake argument: compute for real if what goes in and comes out is small."""
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        if any(t.device.type == "meta" for t in inputs):
            return func(*args, **kwargs)
        if inputs and (_is_view(func) or _changes(func)):
            return func(*args, **kwargs)
        self._draws.note_reads(inputs)
        elements = sum(t.numel() for t in inputs)
        if inputs and elements <= TINY_ELEMENTS and not _grows(func):
            return func(*args, **kwargs)
        if not all(self._small(t) for t in inputs):
            return self._fake(func, types, args, kwargs)
        try:
            sized = self.mode.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)  # its values are here
        if not all(self._small(t) for t in _tensors((sized,))):
            if self.building:
                self.mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
            return sized
        return func(*args, **kwargs)

    def _small(self, tensor: Tensor) -> bool:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.numel() <= REAL_INTEGERS
        return tensor.numel() <= (REAL_WEIGHTS if self.building else REAL_FLOATS)

    # -- turning a model into one of this device ----------------------------------------------

    def fake(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A fake tensor of the same size, strides and dtype (or `dtype`, for floating ones)."""
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        ours = isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode
        if ours and tensor.device.type != "meta":
            with torch.no_grad():
                return tensor.detach().to(target)
        with self.mode, torch.no_grad():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=target, device="cpu")
        if is_triangular(tensor):
            mark_triangular(made)
        return made

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Replace every parameter and buffer in place (tied ones once) by a fake one.

        Small buffers that aren't floating point stay real: models read their values.
        """
        memo: dict[int, Tensor] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._parameter(parameter, dtype, memo)
            for name, buffer in module._buffers.items():
                if buffer is None or _stays_real(buffer):
                    continue
                if id(buffer) not in memo:
                    memo[id(buffer)] = self.fake(buffer, dtype)
                module._buffers[name] = memo[id(buffer)]
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.device.type == "meta":
                    setattr(module, name, self.fake(value, dtype))

    def copy_of(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """A fake copy of a real model; the original is left alone."""
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = self._parameter(parameter, dtype, {})
        for buffer in model.buffers():
            if not _stays_real(buffer):
                memo[id(buffer)] = self.fake(buffer, dtype)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.device.type == "meta":
                    memo[id(value)] = self.fake(value, dtype)
            if module._compiled_call_impl is not None:
                self.left_compiled = True
        return copy.deepcopy(model, memo)

    def _parameter(
        self, parameter: Tensor, dtype: torch.dtype | None, memo: dict[int, Tensor]
    ) -> nn.Parameter:
        made = memo.get(id(parameter))
        if made is None:
            data = self.fake(parameter.detach(), dtype)
            with self.mode:
                made = nn.Parameter(data, requires_grad=parameter.requires_grad)
            own = vars(made).keys() | {"fake_device", "fake_mode", "constant"}
            for name, value in vars(parameter).items():
                if name not in own:
                    setattr(made, name, value)  # tags that models hang on their parameters
            memo[id(parameter)] = made
        return made  # type: ignore[return-value]


def no_value(func: Any) -> TargetError:
    """The error of code that asks for a value that a fake tensor doesn't have."""
    line = user_line(sys._getframe(1))
    where = f" at {line[0]}:{line[1]}" if line else ""
    return TargetError(
        f"the model's control flow needs a tensor's value ({func}{where}), and without a GPU it"
        " runs on fake tensors, which have none",
        hint="profile with --device cpu (real values, slower) or on a GPU with --device cuda",
    )


_READERS = (Tensor.numpy, Tensor.__array__, Tensor.tolist)


def _flex(func: Any, args: Any) -> Any:
    """What flex_attention's compiled kernels make on a GPU: no S, no P."""
    query, key, value = args[:3]
    if func is flex_attention_backward:
        return (
            torch.empty_like(query), torch.empty_like(key), torch.empty_like(value),
            tuple(None for _ in args[-2] or ()),
        )  # fmt: skip
    rows = query.shape[:-1]
    out = query.new_empty((*rows, value.shape[-1]))
    return (
        out,
        query.new_empty(rows, dtype=torch.float32),
        query.new_empty(rows, dtype=torch.float32),
    )


class CudaAsCpu(TorchFunctionMode):
    """Reads `cuda` as this device, so that code written for a GPU runs where there is none.

    Also answers, or refuses, what asks a fake tensor for its value behind the dispatcher's back.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if func is Tensor.cuda:
            return args[0]
        if func in _READERS and isinstance(args[0], FakeTensor):
            raise no_value(f"Tensor.{func.__name__}")
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor) and args[0].ndim == 0:
            return format(math.nan, args[1])  # only shown: the value that isn't there
        if func is Tensor.to and any(_is_cuda(a) for a in args[1:]):
            args = tuple("cpu" if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


@contextmanager
def cuda_calls_as_cpu() -> Iterator[None]:
    """`Module.cuda()` and `torch.autocast("cuda")` too, which ask for a CUDA context first."""
    original = nn.Module.cuda
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    try:
        with CudaAsCpu(), cuda_autocast():
            yield
    finally:
        nn.Module.cuda = original  # type: ignore[method-assign]


def _is_cuda(value: Any) -> bool:
    if type(value) is str:
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _stays_real(buffer: Tensor) -> bool:
    return (
        type(buffer) is Tensor
        and buffer.device.type == "cpu"
        and not buffer.is_floating_point()
        and buffer.numel() <= REAL_INTEGERS
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _written_arguments(func: Any) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or len(schema.returns) > 1:
        return ()
    return tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _changes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


_GROWING = ("repeat", "one_hot", "new_", "arange", "full", "zeros", "ones", "empty", "rand")


def _grows(func: Any) -> bool:
    return any(word in str(func) for word in _GROWING)
