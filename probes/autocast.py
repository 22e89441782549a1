"""CUDA's autocast on fake tensors, which are the CPU's as far as torch knows.

`torch.autocast("cuda")` becomes the CPU's, whose matrix products take the lower precision as
CUDA's do. Where the two have other rules, CUDA's are put in the place of the CPU's, for fake
tensors alone: softmax, norms and sums run in float32 on CUDA; cross_entropy, on which it has no
rule, keeps the logits' dtype in its log_softmax, and nll_loss alone is in float32.
Source: aten/src/ATen/autocast_mode.h, AT_FORALL_*; a rule that this torch's CUDA doesn't have yet
is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

_LOW = (torch.float16, torch.bfloat16)
_FLOATS = (*_LOW, torch.float32)
_KEY = "AutocastCPU"
_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_aten = torch.ops.aten

# Inputs are cast to the lower precision.
_IN_LOWER = ("einsum", "chain_matmul", "linalg_multi_dot", "mv", "addmv", "addr")
# Inputs are cast to float32.
_IN_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "tan",
    "softplus", "logsumexp", "cosine_similarity", "dist", "pdist", "renorm",
    "layer_norm", "group_norm", "rms_norm",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# The output is asked for in float32, which some kernels do without a copy of the input.
_TO_FLOAT32 = (
    "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "prod", "prod.dim_int",
    "cumprod", "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
)  # fmt: skip
# All inputs are cast to float32 where one of them is.
_PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add",
    "tensordot", "vdot",
)  # fmt: skip
# The CPU has a rule and CUDA none: run as they are; of what is composite, the parts are cast.
_AS_THEY_ARE = (
    "cross_entropy_loss", "cat", "stack", "trace", "avg_pool3d", "adaptive_avg_pool3d",
    "adaptive_max_pool3d", "max_pool3d", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_active = 0
_library: torch.library.Library | None = None
_replaced: list[tuple[Any, str, Any]] = []  # whose, by which name, what it was


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Nests; what it changed is as it was after the outermost."""
    global _active, _library
    if not _active:
        _ask_the_cpus()
        _library = torch.library.Library("aten", "IMPL")
        rules = (
            (_IN_LOWER, _in_lower),
            (_IN_FLOAT32, _in_float32),
            (_TO_FLOAT32, _to_float32),
            (_PROMOTED, _promoted),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the CPU's own rule is overridden
            for names, rule in rules:
                for name in names:
                    if _has_rule(name, "AutocastCUDA"):
                        _library.impl(name, rule(_operator(name)), _KEY)
            for name in _AS_THEY_ARE:
                if not _has_rule(name, "AutocastCUDA"):
                    _library.impl(name, _as_it_is(_operator(name)), _KEY)
    _active += 1
    try:
        yield
    finally:
        _active -= 1
        if not _active and _library is not None:
            while _replaced:
                setattr(*_replaced.pop())
            _library._destroy()
            _library = None


def _ask_the_cpus() -> None:
    """Who asks for CUDA's autocast (custom_fwd does, for one) is told of the CPU's."""
    mode: Any = torch.amp.autocast_mode
    enabled, dtype_of, cast = torch.is_autocast_enabled, torch.get_autocast_dtype, mode._cast

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str = "cuda") -> torch.dtype:
        return dtype_of("cpu" if device_type == "cuda" and enabled("cpu") else device_type)

    def to_dtype(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    for owner, name, new in (
        (mode.autocast, "__init__", _as_cpu(mode.autocast.__init__)),
        (mode, "_cast", to_dtype),
        (torch, "is_autocast_enabled", is_enabled),
        (torch, "get_autocast_dtype", get_dtype),
        (torch, "get_autocast_gpu_dtype", get_dtype),
    ):
        _replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


def _as_cpu(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _has_rule(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _in_lower(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, FakeTensor) for t in tree_leaves(args)):
            low = torch.get_autocast_dtype("cpu")
            args = tree_map_only(Tensor, lambda t: t.to(low) if t.dtype in _FLOATS else t, args)
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            return op(*args, **kwargs)

    return run


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


def _promoted(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Tensor) and a.dtype is torch.float32 for a in args):
            args = tuple(_float(a) for a in args)
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            return op(*args, **kwargs)

    return run


def _as_it_is(op: Any) -> Callable[..., Any]:
    composite = op.has_kernel_for_dispatch_key(_COMPOSITE)

    def run(*args: Any, **kwargs: Any) -> Any:
        fake = any(isinstance(a, FakeTensor) for a in args)
        if fake and composite:
            return op._op_dk(_COMPOSITE, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_keys):
            if fake:
                return op(*args, **kwargs)
            return op(*map(_float, args), **{name: _float(a) for name, a in kwargs.items()})

    return run


def _float(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOW:
        return value.float()
    return value
