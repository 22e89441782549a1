"""Calls like an earlier one: launched again without being looked at again.

Checking a call and planning its launch read shapes, strides, dtypes and options alone. A call that
agrees with an earlier one in all of them needs neither: at short lengths that is most of what the
host would do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_advisor.kernels import launch
from fa_advisor.kernels.arguments import Call
from fa_advisor.kernels.kinds import Inputs, Options, allow_tf32
from fa_advisor.kernels.op import direct, fresh_seeds, observed, options_of

Tensors = tuple["Tensor | None", ...]

_KINDS_KEPT = 4096
_PLAIN = (Tensor, torch.nn.Parameter)
# What an option may be to be part of a key; a window's two sides are ints by then.
_SCALARS = (int, float, bool, str, type(None), tuple)
_N_OPTIONS = 9


class _Kind(NamedTuple):
    plan: launch.Forward
    options: Options


_kinds: dict[Any, _Kind] = {}


def signature(tensors: Tensors, options: tuple[Any, ...]) -> Any:
    """All that decides how a call on a GPU is checked and launched; None where that isn't all.

    tensors: query, key, value, mask, sinks, slopes and the two cu_seqlens, as the caller gave them.
    """
    query: Any = tensors[0]
    if type(query) not in _PLAIN or observed(query) or not query.is_cuda:
        return None
    parts: tuple[Any, ...] = options
    every = 0
    for t in tensors:
        if t is None:
            parts += (None,)
        elif type(t) in _PLAIN and not t.is_neg() and t.layout is torch.strided:
            parts += (t.shape, t.stride(), t.dtype, t.device)
            every |= t.data_ptr()
        else:
            return None
    if every & 15:
        parts += launch.misaligned(*tensors)
    if query.dtype is torch.float32:
        parts += (allow_tf32(),)
    if torch.is_autocast_enabled("cuda"):
        parts += (torch.get_autocast_dtype("cuda"),)
    slopes = tensors[5]
    return None if slopes is not None and slopes.requires_grad else parts


def again(known: Any, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
    """out and lse where such a call was made before, else None."""
    try:
        kind = _kinds.get(known)
    except TypeError:  # An option that can't be hashed: `check` will say what it makes of it.
        return None
    if kind is None:
        return None
    if torch.autograd.forward_ad._current_level >= 0:
        return None
    seeds = fresh_seeds(kind.options.dropout_p, tensors[0])  # type: ignore[arg-type]
    return direct(kind.plan, kind.options, Inputs(*tensors, seeds))  # type: ignore[call-arg, arg-type]


def remember(known: Any, given: Tensors, checked: Tensors, call: Call) -> None:
    """Keep how a call was launched, if its tensors reach the kernel as they were given.

    checked: query, key, value and mask as the kernel got them.
    """
    slopes = given[5]
    if (
        any(a is not b for a, b in zip(checked, given, strict=False))
        or not all(t is None or t.is_contiguous() for t in given[len(checked) :])
        or (slopes is not None and slopes.dtype is not torch.float32)
        or not all(type(option) in _SCALARS for option in known[:_N_OPTIONS])
    ):
        return
    if len(_kinds) >= _KINDS_KEPT:
        _kinds.clear()
    options = options_of(call)
    # Any seeds will do: to draw some would move the generator.
    seeds = None
    if options.dropout_p > 0.0:
        seeds = torch.empty(1, dtype=torch.int64, device="cuda")
    inputs = Inputs(*given, seeds)  # type: ignore[call-arg, arg-type]
    _kinds[known] = _Kind(launch.forward(inputs, options), options)
