"""What `flash_attention` accepts: every argument checked and brought to one form, before any work.

The checks read shapes, dtypes and devices alone - never a value that lies on a GPU - and are plain
Python: a call's host cost counts at short lengths.

Shapes: B batch, H query heads, G key and value heads, Lq and Lk lengths, D and Dv head dims.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fa_advisor.kernels.fp8 import E4M3, negated
from fa_advisor.kernels.masks import normal_mask
from fa_advisor.kernels.packed import check_packed

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)

# Of float64: a scale or a cap beyond it is none.
# Below it a scale is 0 in the kernels' float32, and they know what 0 means.
_SMALLEST_SCALE = 2.0**-126
_LARGEST = 1.7976931348623157e308
# A side of a window wider than this says nothing; 32 bits hold sums of it.
_WIDEST = 2**30
_ALIGNMENTS = ("top-left", "bottom-right")
_HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
_ON_GPU = (*_HALF_AND_SINGLE, E4M3)
_WITH_DOUBLE = (*_HALF_AND_SINGLE, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A validated call's options, in one form.

    Query i stands at `i + offset` among the keys, with offset 0 (top-left) or Lk - Lq
    (bottom_right); causality, window and ALiBi all count from there. "No key to the right" is
    said by `is_causal` alone: `window_right` is then None. None is an unlimited side.
    `max_seqlen_*` are the lengths themselves where the call isn't `varlen`.
    """

    scale: float
    is_causal: bool
    bottom_right: bool
    window_left: int | None
    window_right: int | None
    softcap: float
    dropout_p: float
    varlen: bool
    max_seqlen_q: int
    max_seqlen_k: int
    num_heads: int
    num_kv_heads: int


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window: int | tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal_alignment: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Call]:
    """The call's query, key, value and mask in the kernel's layout, and its options.

    query [B, H, Lq, D], key [B, G, Lk, D], value [B, G, Lk, Dv] with the last dim contiguous
    ([total, heads, dim] with cu_seqlens), and a mask of four dims, each full or 1.
    Raises ValueError or TypeError that names the argument, what was expected and what came.
    """
    flags: tuple[tuple[str, object], ...] = (("is_causal", is_causal), ("enable_gqa", enable_gqa))
    for name, flag in flags:
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    _check_kind((
        ("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask),
        ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
    ))  # fmt: skip
    if _autocasting(query) and query.dtype is not E4M3:
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    if attn_mask is not None:
        attn_mask = attn_mask.resolve_neg()
    _check_tensors(query, key, value)
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    if varlen:
        max_q, max_k = check_packed(
            query, key, value, attn_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
    else:
        if max_seqlen_q is not None or max_seqlen_k is not None:
            raise ValueError(
                "max_seqlen_q, max_seqlen_k: expected None without cu_seqlens_q and cu_seqlens_k,"
                f" got {max_seqlen_q} and {max_seqlen_k}"
            )
        # The mask is held against the shapes as the caller gave them.
        if attn_mask is not None:
            attn_mask = normal_mask(attn_mask, query, key, is_causal)
        query, key, value = _four_dims(query, key, value)
        num_heads, max_q = query.shape[1:3]
        num_kv_heads, max_k = key.shape[1:3]

    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if not (0 < head_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
        name = "value" if 0 < head_dim <= MAX_HEAD_DIM else "query"
        raise ValueError(
            f"{name}: expected a head dim from 1 to {MAX_HEAD_DIM},"
            f" got {value_dim if name == 'value' else head_dim}"
        )
    if num_heads != num_kv_heads:
        _check_groups(num_heads, num_kv_heads, enable_gqa)
    if num_heads == 0:
        raise ValueError("query: expected at least one head, got 0")

    if scale is None:
        scale = head_dim**-0.5
    elif not _is_number(scale):
        raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
    elif not -_LARGEST <= scale <= _LARGEST:
        raise ValueError(f"scale: expected a finite number, got {scale}")
    elif scale < 0:  # The kernel takes a row's maximum before it scales.
        query, scale = negated(query), -scale
    if scale < _SMALLEST_SCALE:
        scale = 0.0

    left, right = (None, None) if window is None else _window(window)
    if is_causal or right == 0:
        is_causal, right = True, None
    if softcap != 0.0 or dropout_p != 0.0:
        _check_softcap_and_dropout(softcap, dropout_p)
    if _none_of(causal_alignment, _ALIGNMENTS):
        raise ValueError(
            f"causal_alignment: expected 'top-left' or 'bottom-right', got {causal_alignment!r}"
        )
    if sinks is not None:
        _check_per_head("sinks", sinks, query, [(num_heads,)])
    if alibi_slopes is not None:
        batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        _check_per_head("alibi_slopes", alibi_slopes, query, [(num_heads,), (batch, num_heads)])
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes: expected a tensor that doesn't require grad (its gradient isn't"
                " computed), got one that does; pass a learned bias as attn_mask"
            )

    options = (
        float(scale),
        bool(is_causal),
        causal_alignment == "bottom-right",
        left,
        right,
        float(softcap),
        float(dropout_p),
        varlen,
        max_q,
        max_k,
        num_heads,
        num_kv_heads,
    )
    hashable = type(max_q) is type(max_k) is int  # Symbolic lengths aren't.
    keep = hashable and not torch.compiler.is_compiling()
    call = _seen_call(*options) if keep else _call(*options)
    return _last_contiguous(query), _last_contiguous(key), _last_contiguous(value), attn_mask, call


def _call(
    scale: float,
    is_causal: bool,
    bottom_right: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    varlen: bool,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_kv_heads: int,
) -> Call:
    return Call(
        scale=scale,
        is_causal=is_causal,
        bottom_right=bottom_right,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        varlen=varlen,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )


# To build a frozen dataclass of twelve fields takes longer than all the checks of a common call.
_seen_call = lru_cache(maxsize=1024)(_call)


def unsupported_gpu(index: int) -> str | None:
    """Why the kernels can't run on CUDA device `index`, with what to use instead; None if they can.

    Reads the device: call it once and keep the answer.
    """
    if not torch.cuda.is_available():  # A fake CUDA tensor: there is no device to refuse.
        return None
    name = torch.cuda.get_device_name(index)
    instead = "use torch.nn.functional.scaled_dot_product_attention there"
    if torch.version.hip is not None:
        return f"query: expected a tensor on an NVIDIA GPU, got one on {name} (ROCm); {instead}"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return (
            f"query: expected a tensor on a GPU of compute capability {need} or higher,"
            f" got one on {name} ({have}); {instead}"
        )
    return None


def _autocasting(query: object) -> bool:
    if not isinstance(query, Tensor) or query.is_meta:
        return False
    return torch.is_autocast_enabled("cuda" if query.is_cuda else query.device.type)


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What autocast makes of scaled_dot_product_attention's arguments; a float32 mask stays."""
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(x: Tensor) -> Tensor:
        eligible = x.is_floating_point() and x.dtype not in (torch.float64, E4M3)
        return x.to(dtype) if eligible else x

    if mask is not None and mask.dtype is not torch.float32:
        mask = cast(mask)
    return cast(query), cast(key), cast(value), mask


def _check_kind(arguments: Iterable[tuple[str, object]]) -> None:
    """Tensors that lie in memory by strides, where there are any."""
    for name, x in arguments:
        if x is None and name not in ("query", "key", "value"):
            continue
        if not isinstance(x, Tensor):
            what = "a Tensor" if name in ("query", "key", "value") else "a Tensor or None"
            raise TypeError(f"{name}: expected {what}, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(
                f"{name}: expected a strided tensor, got a nested one;"
                " pass its values() as [total, H, D] with its offsets().int() as cu_seqlens"
            )
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got one in layout {x.layout}")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Device and dtype of the three."""
    dtype, device = query.dtype, query.device
    if dtype not in _ON_GPU and (query.is_cuda or dtype is not torch.float64):
        raise TypeError(
            "query: expected float16, bfloat16, float32 or float8_e4m3fn (float64 on the CPU"
            f" alone), got {dtype} on {device}"
        )
    if key.dtype is not dtype or value.dtype is not dtype:
        name, x = ("key", key) if key.dtype is not dtype else ("value", value)
        raise TypeError(f"{name}: expected query's dtype {dtype}, got {x.dtype}")
    if key.device != device or value.device != device:
        name, x = ("key", key) if key.device != device else ("value", value)
        raise ValueError(f"{name}: expected query's device {device}, got {x.device}")


def _four_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as [B, heads, length, dim], with equal batches; further leading dims flattened."""
    if query.ndim == key.ndim == value.ndim == 4:
        (batch, _, _, dim), (kb, kh, kl, kd), (vb, vh, vl, _) = query.shape, key.shape, value.shape
        if batch == kb == vb and kh == vh and kl == vl and dim == kd:
            return query, key, value
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3 or x.ndim != query.ndim:
            expected = "[..., H, L, D], at least 3 dims" if name == "query" else "query's rank"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key: expected query's head dim {query.shape[-1]}, got {key.shape[-1]}"
            f" (shape {tuple(key.shape)})"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value: expected key's heads and length {tuple(key.shape[-3:-1])},"
            f" got {tuple(value.shape[-3:-1])} (shape {tuple(value.shape)})"
        )
    try:
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise ValueError(
            "query, key, value: expected leading dims that broadcast, got"
            f" {tuple(query.shape[:-3])}, {tuple(key.shape[:-3])} and {tuple(value.shape[:-3])}"
        ) from None
    batch = lead.numel()
    query, key, value = (
        x.expand(*lead, *x.shape[-3:]).reshape(batch, *x.shape[-3:]) for x in (query, key, value)
    )
    return query, key, value


def _check_groups(num_heads: int, num_kv_heads: int, enable_gqa: bool) -> None:
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(
            f"key: expected a number of heads that divides query's {num_heads}, got {num_kv_heads}"
        )
    # One head broadcasts without being asked, as in scaled_dot_product_attention.
    if not enable_gqa and num_kv_heads != 1:
        raise ValueError(
            f"key: expected query's {num_heads} heads, got {num_kv_heads};"
            " pass enable_gqa=True to share each of them among query heads"
        )


def _window(window: int | tuple[int, int]) -> tuple[int | None, int | None]:
    """The window's two sides; None where it has no limit."""
    sides: tuple[int, ...] = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(_is_int(side) for side in sides):
        raise TypeError(f"window: expected an int or two, (left, right), or None, got {window!r}")
    left, right = sides
    if left < -1 or right < -1:
        raise ValueError(
            f"window: expected 0 or more keys on a side, or -1 for no limit, got {window!r}"
        )
    return tuple(None if side == -1 else min(int(side), _WIDEST) for side in sides)  # type: ignore[return-value]


def _check_softcap_and_dropout(softcap: float, dropout_p: float) -> None:
    for name, number in (("softcap", softcap), ("dropout_p", dropout_p)):
        if not _is_number(number):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    if not 0.0 <= softcap <= _LARGEST:
        raise ValueError(f"softcap: expected 0 (none) or a positive number, got {softcap}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {dropout_p}")


def _check_per_head(name: str, x: Tensor, query: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if x.dtype not in _WITH_DOUBLE:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.device != query.device:
        raise ValueError(f"{name}: expected query's device {query.device}, got {x.device}")
    if tuple(x.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _none_of(x: object, known: tuple[str, ...]) -> bool:
    return not isinstance(x, str) or x not in known


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat, numbers.Real))


def _is_int(x: object) -> bool:
    return isinstance(x, (int, torch.SymInt, numbers.Integral)) and not isinstance(x, bool)
