"""CUDA's autocast on fake tensors, which are the CPU's as far as torch knows.

`torch.autocast("cuda")` becomes the CPU's, whose matrix products take the lower precision as
CUDA's do. Softmax, norms and sums don't on the CPU, but run in float32 on CUDA: those are added
here, for fake tensors alone. And cross_entropy runs in float32 on the CPU, where CUDA has no rule
for it: its log_softmax keeps the logits' dtype, and nll_loss alone is in float32.
Source: aten/src/ATen/autocast_mode.h, AT_FORALL_FP32*.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LOW = (torch.float16, torch.bfloat16)
_KEY = "AutocastCPU"
_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_aten = torch.ops.aten

# Inputs are cast to float32.
_IN_FLOAT32 = (
    "exp", "log", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt",
    "softplus", "logsumexp", "layer_norm", "group_norm",
)  # fmt: skip
# The output is asked for in float32, which some kernels do without a copy of the input.
_TO_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum")
# Taken apart, and the parts are cast.
_BY_PARTS = ("cross_entropy_loss",)

_active = 0
_library: torch.library.Library | None = None
_original: Any = None


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Nests; what it changed is as it was after the outermost."""
    global _active, _library, _original
    cls = torch.amp.autocast_mode.autocast
    if not _active:
        _original = cls.__init__
        cls.__init__ = _as_cpu(_original)  # type: ignore[method-assign]
        _library = torch.library.Library("aten", "IMPL")
        rules = (
            (_IN_FLOAT32, _in_float32),
            (_TO_FLOAT32, _to_float32),
            (_BY_PARTS, _by_parts),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the CPU's own rule is overridden
            for names, rule in rules:
                for name in names:
                    _library.impl(name, rule(_operator(name)), _KEY)
    _active += 1
    try:
        yield
    finally:
        _active -= 1
        if not _active and _library is not None:
            cls.__init__ = _original  # type: ignore[method-assign]
            _library._destroy()
            _library = None


def _as_cpu(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _in_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, FakeTensor) for a in args):
            args = tuple(_float(a) for a in args)
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            return op(*args, **kwargs)

    return run


def _to_float32(op: Any) -> Callable[..., Any]:
    has_positional = any(a.name == "dtype" and not a.kwarg_only for a in op._schema.arguments)
    at = [a.name for a in op._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype", args[at] if has_positional and len(args) > at else None)
        if given is None and isinstance(args[0], FakeTensor) and args[0].dtype in _LOW:
            args = args[:at] if has_positional else args
            kwargs = {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            return op(*args, **kwargs)

    return run


def _by_parts(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, FakeTensor) for a in args):
            return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            return op(*map(_float, args), **{name: _float(a) for name, a in kwargs.items()})

    return run


def _float(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOW:
        return value.float()
    return value
