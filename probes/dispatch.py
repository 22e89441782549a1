"""Composite operators that the stream must see whole, or that a GPU would take apart differently.

While anything is watched, `scaled_dot_product_attention` announces itself before it decomposes (so
that its math path can be told from hand-written attention), and on fake tensors it takes the
backend that the target GPU would take. Dropout, half-precision softmax and RMSNorm decompose on
fake tensors as they do on CUDA. The overrides go when the last watch ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fa_advisor.probes.events import SdpaFacts
from fa_advisor.probes.opstream import dtype_name, torch_version
from fa_advisor.probes.sdpa import AttentionCall, Choice, choose
from fa_advisor.records import DeviceSpec

if TYPE_CHECKING:
    from fa_advisor.probes.watch import Watch

aten = torch.ops.aten
_watches: list[Watch] = []
_library: torch.library.Library | None = None
_installed: set[str] = set()
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")


@contextmanager
def observed_by(watch: Watch) -> Iterator[None]:
    """Install the overrides with the first watch, remove them with the last."""
    global _library
    _watches.append(watch)
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _impl("scaled_dot_product_attention", sdpa)
    if watch.fake is not None and "dropout" not in _installed:
        for name, function in _ON_FAKES.items():
            _impl(name, function)
    try:
        yield
    finally:
        forget(watch)
        if not _watches and _library is not None:
            _library._destroy()
            _library = None
            _installed.clear()


def _impl(name: str, function: Callable[..., Any]) -> None:
    assert _library is not None
    for key in _KEYS:
        _library.impl(name, function, key)
    _installed.add(name)


def forget(watch: Watch) -> None:
    """Tell a watch nothing more, and leave the overrides where they are."""
    if watch in _watches:
        _watches.remove(watch)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Announce the call, then run it: as torch would here, or as the target GPU would."""
    fake = any(isinstance(t, FakeTensor) for t in (query, key, value))
    call = _describe(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = "math"
    for watch in _watches:
        choice = _choice(call, watch.gpu, _disabled())
        if fake and watch.fake is not None:
            backend = choice.backend
        watch.sdpa(
            SdpaFacts(
                backend,
                choice.why_not,
                call.batch,
                call.num_heads,
                call.num_kv_heads,
                is_causal,
                attn_mask is not None,
                dropout_p,
            )
        )
    try:
        if not fake:
            masked = attn_mask is not None or is_causal
            if masked and _runs_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            ):
                return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return aten.scaled_dot_product_attention.default._op_dk(
                _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        run = _BACKENDS[backend]
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    finally:
        for watch in _watches:
            watch.sdpa(None)


@lru_cache(maxsize=256)
def _choice(call: AttentionCall, gpu: DeviceSpec, disabled: frozenset[str]) -> Choice:
    return choose(call, gpu, torch_version(), _cudnn_version(), disabled=disabled)


def _runs_math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> bool:  # fmt: skip
    """Would torch take the math path for this call on the device it is on?"""
    if query.ndim < 3 or query.shape[-3] % key.shape[-3]:
        return False  # torch's own error, or its own way, is what the user should see
    choice = torch._fused_sdp_choice(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return bool(choice == 0)


def _describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionCall:
    def extent(tensor: Tensor, dim: int) -> int:
        return int(tensor.shape[dim]) if tensor.ndim >= -dim else 1

    return AttentionCall(
        dtype=dtype_name(query.dtype),
        head_dim_q=extent(query, -1),
        head_dim_v=extent(value, -1),
        num_heads=extent(query, -3),
        num_kv_heads=extent(key, -3),
        batch=math.prod(query.shape[:-3]),
        seqlen_q=extent(query, -2),
        seqlen_k=extent(key, -2),
        is_causal=is_causal,
        mask=None if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        mask_ndim=0 if mask is None else mask.ndim,
        mask_requires_grad=mask is not None and mask.requires_grad,
        mask_last_stride_one=mask is None or mask.ndim == 0 or mask.stride(-1) == 1,
        dropout_p=dropout_p,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        enable_gqa=enable_gqa,
        ndim=query.ndim,
        last_stride_one=all(t.stride(-1) == 1 for t in (query, key, value)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _disabled() -> frozenset[str]:
    """The backends that the user has switched off."""
    cuda = torch.backends.cuda
    return frozenset(
        name
        for name, enabled in (
            ("flash", cuda.flash_sdp_enabled()),
            ("efficient", cuda.mem_efficient_sdp_enabled()),
            ("cudnn", cuda.cudnn_sdp_enabled()),
        )
        if not enabled
    )


def _cudnn_version() -> tuple[int, int] | None:
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return None if version is None else (version // 10000, version // 100 % 100)


# -- what each backend does around its kernel (aten/.../transformers/attention.cpp) ---------------


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask becomes an additive one of the query's dtype, in memory."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    lowest = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, lowest)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    head_dim = query.shape[-1]
    padding = -head_dim % 8
    if padding:  # the kernel's head dims are multiples of 8
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
    out: Tensor = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale or head_dim**-0.5
    )[0]
    return out[..., :head_dim] if padding else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    bias = _additive(mask, query.dtype)
    if bias is not None:
        strides = bias.stride()
        if strides[-1] != 1 or any(stride % 8 for stride in strides[:-1]):
            length = bias.shape[-1]  # rows are padded so that each starts aligned
            bias = F.pad(bias, (0, 8 - length % 8))[..., :length]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    out: Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    bias = _additive(mask, query.dtype)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out: Tensor = aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, bias, needs_grad, dropout_p, is_causal, False, scale=scale
    )[0]
    return out


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """`_scaled_dot_product_attention_math`, but with the mask added in place.

    torch adds it in place too, except where it sees a tensor subclass or a dispatch mode: then it
    would show an N x N tensor that an unobserved run doesn't make.
    """
    dtype = query.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    if half and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(scale if scale is not None else query.shape[-1] ** -0.5)
    query = query * root
    if is_causal:
        mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
    mask = _additive(mask, query.dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    probabilities: Tensor = aten._safe_softmax.default(scores, -1)
    if scores.device.type == "cpu":
        with torch.no_grad():  # the masked rows that it looks for inside, in memory all the same
            scores.isneginf().all(-1, True)
    del scores  # torch gives its name to the probabilities
    if dropout_p > 0.0:
        probabilities = F.dropout(probabilities, dropout_p, True)
    returned = probabilities.to(dtype)  # torch makes the weights it returns, wanted or not
    out: Tensor = (probabilities @ value).to(dtype)
    del returned
    return out


_BACKENDS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


# -- composites that CUDA takes apart in another way than the CPU ----------------------------------


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if isinstance(x, FakeTensor) and train and 0 < p < 1 and x.numel():
        return aten.native_dropout.default(x, p, train)[0]  # a mask of one byte an element
    return aten.dropout.default._op_dk(_COMPOSITE, x, p, train)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if isinstance(x, FakeTensor) and x.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax.default(x, dim, True)  # the cast is fused into the kernel
    return aten.softmax.int._op_dk(_COMPOSITE, x, dim, dtype)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if isinstance(x, FakeTensor) and x.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax.default(x, dim, True)
    return aten.log_softmax.int._op_dk(_COMPOSITE, x, dim, dtype)


class _FusedRmsNorm(torch.autograd.Function):
    """What `_fused_rms_norm` keeps on CUDA: its input and a reciprocal norm a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if isinstance(x, FakeTensor) and (weight is None or weight.dtype is x.dtype):
        return _FusedRmsNorm.apply(x, tuple(shape), weight)  # type: ignore[no-untyped-call]
    return aten.rms_norm.default._op_dk(_COMPOSITE, x, shape, weight, eps)


_ON_FAKES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax,
    "log_softmax.int": _log_softmax,
    "rms_norm": _rms_norm,
}
