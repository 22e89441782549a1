"""One observed call, made comparable: the original and the patched function on the same tensors.

B batch, H heads, L lengths, D head dim, E embedding.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fa_advisor.patching.attend import attend, computing_dtype
from fa_advisor.patching.criterion import Attention, Comparison, compare
from fa_advisor.patching.interface import InterfaceCall
from fa_advisor.patching.mha import multihead
from fa_advisor.patching.trials import (
    Failure,
    Family,
    Function,
    dropout_differs,
    first_failure,
    visible_rows,
)

# Scores of one comparison in float64: 512 MiB for each N x N tensor.
MAX_SCORES = 1 << 26
DROPOUT = 0.25


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """`compare`: on the call's own tensors, `None` where they are too large to do it in float64.
    `trials`: further ones, each with a key that calls of the same family share."""

    compare: Callable[[], Comparison | None]
    trials: Sequence[tuple[Hashable, Callable[[], Failure | None]]]


def of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Attempt:
    """A call of scaled_dot_product_attention."""

    def original(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool) -> Tensor:
        return scaled_dot_product_attention(
            q, k, v, m, 0.0, causal, scale=scale, enable_gqa=enable_gqa or k.shape[1] == 1
        )

    def patched(
        q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool, dropout_p: float = 0.0
    ) -> Tensor:
        return attend(q, k, v, m, dropout_p=dropout_p, is_causal=causal, scale=scale)

    family = _family(original, patched, query, key, value, is_causal)
    name = ("sdpa", scale, *_key(family))

    def own() -> Comparison | None:
        dtype = computing_dtype(query)
        q, k, v, m = _first_batch(query.to(dtype), key.to(dtype), value.to(dtype), mask)
        if _scores(q, k) > MAX_SCORES:
            return None
        return _compare(
            lambda a, b, c, d: scaled_dot_product_attention(
                a, b, c, d, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            ),
            lambda a, b, c, d: attend(a, b, c, d, is_causal=is_causal, scale=scale),
            (q, k, v), m,
        )  # fmt: skip

    return Attempt(compare=own, trials=_trials(name, family, patched))


def of_interface(call: InterfaceCall) -> Attempt:
    """A call of transformers' attention interface."""
    module, sinks = call.module, call.kwargs.get("s_aux")

    def made(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, **more: Any) -> InterfaceCall:
        kwargs = {**call.kwargs, "dropout": 0.0, **more}
        return InterfaceCall(call.original, module, q, k, v, m, kwargs)

    def original(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool) -> Tensor:
        out: Tensor = made(q, k, v, m, is_causal=causal, position_bias=None).run_original()[0]
        return out

    def patched(
        q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool, dropout_p: float = 0.0
    ) -> Tensor:
        more = made(q, k, v, m, is_causal=causal, position_bias=None, dropout=dropout_p)
        return more.run_patched()[0]

    family = _family(
        original, patched, call.query, call.key, call.value, call.is_causal, rows_first=True
    )
    options = tuple(call.kwargs.get(name) for name in ("scaling", "softcap"))
    name = (call.original, id(type(module)), options, sinks is not None, *_key(family))

    def own() -> Comparison | None:
        dtype = computing_dtype(call.query)
        q, k, v, m = _first_batch(
            call.query.to(dtype), call.key.to(dtype), call.value.to(dtype), call.mask
        )
        if _scores(q, k) > MAX_SCORES:
            return None
        # What else takes part in the logits, and has gradients.
        more = {
            name: each
            for name in ("position_bias", "s_aux")
            if isinstance(each := call.kwargs.get(name), Tensor)
        }

        def of(run: Callable[[InterfaceCall], Any]) -> Callable[..., Tensor]:
            def attention(
                a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, *rest: Tensor
            ) -> Tensor:
                given = dict(zip(more, rest, strict=True))
                with _in_place_of(module, sinks, given.get("s_aux")):
                    out: Tensor = run(made(a, b, c, d, **given))[0]
                return out

            return attention

        return _compare(
            of(InterfaceCall.run_original), of(InterfaceCall.run_patched), (q, k, v), m,
            more=more, rows_first=True,
        )  # fmt: skip

    return Attempt(compare=own, trials=_trials(name, family, patched))


class MultiheadCall:
    """One call of an nn.MultiheadAttention, with its arguments by name."""

    def __init__(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> None:
        self.module = module
        self.query, self.key, self.value = query, key, value
        self.key_padding_mask, self.attn_mask = key_padding_mask, attn_mask
        self.need_weights, self.is_causal = need_weights, is_causal


def of_multihead(call: MultiheadCall) -> Attempt:
    """A call of an nn.MultiheadAttention: the whole module, projections and all."""
    module = call.module
    double = _in_double(module)

    def own() -> Comparison | None:
        return _compare_multihead(
            module, double, call.query, call.key, call.value, call.key_padding_mask,
            call.attn_mask, call.is_causal and not call.need_weights,
        )  # fmt: skip

    def padded() -> Failure | None:
        for length in (65, 128):
            shape = (2, length) if module.batch_first else (length, 2)
            generator = torch.Generator().manual_seed(length)
            like = call.query
            query, key, value = (
                torch.randn(*shape, dim, generator=generator).to(like.device, like.dtype)
                for dim in (module.embed_dim, module.kdim, module.vdim)
            )
            keys = torch.arange(length, device=like.device)
            padding = keys >= torch.tensor([[length], [length // 2]], device=like.device)
            ahead = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
            for name, mask, hint in (("", None, False), (" and causal", ahead, True)):
                result = _compare_multihead(module, double, query, key, value, padding, mask, hint)
                if not result.within:
                    place = f"{result.where}, padding{name}, length {length}"
                    return Failure(error=result.error, place=place)
        return None

    heads, dim = module.num_heads, module.head_dim
    probe = call.query.new_empty(1, heads, 1, dim)
    inner = of_sdpa(probe, probe, probe, None, call.is_causal, None, False)
    key = ("mha", id(module), call.query.dtype)
    return Attempt(compare=own, trials=[*inner.trials, (key, padded)])


def _in_double(module: Any) -> Any:
    """The module with float64 tensors and no hooks; what isn't a tensor is shared with it."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers"):
        tensors = vars(module)[name].items()
        vars(made)[name] = {
            key: each.detach().double() if each is not None and each.is_floating_point() else each
            for key, each in tensors
        }
    vars(made)["_modules"] = {key: _in_double(each) for key, each in module._modules.items()}
    vars(made)["_forward_hooks"], vars(made)["_forward_pre_hooks"] = OrderedDict(), OrderedDict()
    return made


def _compare_multihead(
    module: nn.MultiheadAttention,
    double: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    hint: bool,
) -> Comparison:
    def fitting(each: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return each if each is None or each.dtype == torch.bool else each.to(dtype)

    def original(of: nn.MultiheadAttention) -> Attention:
        def run(tensors: list[Tensor]) -> Tensor:
            q, k, v = tensors
            # Not through __call__: hooks are for the model's own calls.
            out: Tensor = nn.MultiheadAttention.forward(
                of, q, k, v, key_padding_mask=fitting(padding, q.dtype),
                attn_mask=fitting(mask, q.dtype), need_weights=False, is_causal=hint,
            )[0]  # fmt: skip
            return out

        return run

    def patched(of: nn.MultiheadAttention) -> Attention:
        return lambda given: multihead(of, given[0], given[1], given[2], padding, mask, hint)

    return compare(
        original(module), patched(module), (query, key, value), ("query", "key", "value"),
        reference=original(double), patched_wide=patched(double),
    )  # fmt: skip


def _compare(
    original: Callable[..., Tensor],
    patched: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    *,
    more: dict[str, Tensor] | None = None,
    rows_first: bool = False,
) -> Comparison:
    """Compare two functions of (query, key, value, mask, *more)."""
    visible = None if mask is None else visible_rows(mask, rows_first=rows_first)
    more = more or {}
    added = mask is not None and mask.is_floating_point()
    inputs = [*tensors, *more.values(), *([mask] if added and mask is not None else [])]
    names = ["query", "key", "value", *more, *(["mask"] if added else [])]
    rest = slice(3, 3 + len(more))

    def of(function: Callable[..., Tensor]) -> Attention:
        return lambda given: function(*given[:3], given[-1] if added else mask, *given[rest])

    return compare(of(original), of(patched), inputs, names, visible=visible)


def _trials(
    key: Hashable, family: Family, patched: Callable[..., Tensor]
) -> list[tuple[Hashable, Callable[[], Failure | None]]]:
    def dropping() -> Failure | None:
        return dropout_differs(
            family, DROPOUT, lambda q, k, v, m, causal: patched(q, k, v, m, causal, DROPOUT)
        )

    return [(key, lambda: first_failure(family)), ((key, "dropout"), dropping)]


def _family(
    original: Function,
    patched: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    *,
    rows_first: bool = False,
) -> Family:
    return Family(
        original=original,
        patched=patched,
        heads=query.shape[-3],
        kv_heads=key.shape[-3],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=computing_dtype(query),
        device=query.device,
        is_causal=is_causal,
        rows_first=rows_first,
    )


def _key(family: Family) -> tuple[Hashable, ...]:
    return (
        family.heads, family.kv_heads, family.head_dim, family.value_dim, family.dtype,
        family.device, family.is_causal,
    )  # fmt: skip


def _scores(query: Tensor, key: Tensor) -> int:
    return query.shape[:-1].numel() * key.shape[-2]


def _first_batch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The first of the batch alone where all of it is too much for float64."""
    if query.dim() != 4 or _scores(query, key) <= MAX_SCORES:
        return query, key, value, mask
    if mask is not None and mask.dim() == 4:
        mask = mask[:1]
    return query[:1], key[:1], value[:1], mask


@contextmanager
def _in_place_of(
    module: nn.Module, parameter: Tensor | None, leaf: Tensor | None
) -> Iterator[None]:
    """`leaf` where the module has `parameter`: `eager` reads its sinks off the module."""
    names = [name for name, each in module._parameters.items() if each is parameter]
    if parameter is None or leaf is None or not names:
        yield
        return
    kept = module._parameters[names[0]]
    module._parameters[names[0]] = leaf  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters[names[0]] = kept
