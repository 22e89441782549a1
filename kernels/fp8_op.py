"""The custom op for float8_e4m3fn: the kernel that takes it, or bfloat16 and all the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa_advisor.kernels import launch
from fa_advisor.kernels.fp8 import Descales, widened
from fa_advisor.kernels.kinds import Inputs, Options, like
from fa_advisor.kernels.op import OPTIONS, inputs_of, observed, options_of

if TYPE_CHECKING:
    from fa_advisor.kernels.arguments import Call

_NAME = "flash_attention_fp8"
_SCHEMA = (
    f"{_NAME}(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks,"
    " Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seeds,"
    f" Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, {OPTIONS}) -> (Tensor, Tensor)"
)
_N_INPUTS = len(Inputs._fields)
_N_TENSORS = _N_INPUTS + len(Descales._fields)


def attention(
    descales: Descales,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """out, in bfloat16, and lse; shapes as in `op.attention`. No gradients."""
    inputs = inputs_of(
        query, key, value, bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, call
    )
    options = options_of(call)
    if torch.compiler.is_compiling() or observed(query):
        result: tuple[Tensor, Tensor] = _op.flash_attention_fp8(*inputs, *descales, *options)
        return result
    return _run(inputs, descales, options)


def _run(x: Inputs, descales: Descales, o: Options) -> tuple[Tensor, Tensor]:
    found = launch.forward_fp8(x, o, descales)
    if found is not None:
        return found
    of_q, of_k, of_v = descales
    wide = x._replace(
        query=widened(x.query, of_q, x.cu_seqlens_q, torch.bfloat16),
        key=widened(x.key, of_k, x.cu_seqlens_k, torch.bfloat16),
        value=widened(x.value, of_v, x.cu_seqlens_k, torch.bfloat16),
    )
    out, lse, _ = launch.forward(wide, o)(wide)
    return out, lse


def _taken(args: tuple[Any, ...]) -> tuple[Inputs, Descales, Options]:
    return (
        Inputs(*args[:_N_INPUTS]), Descales(*args[_N_INPUTS:_N_TENSORS]),
        Options(*args[_N_TENSORS:]),
    )  # fmt: skip


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _run(*_taken(args))


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, _, _ = _taken(args)
    q = x.query
    rows = (q.shape[1], q.shape[0]) if x.cu_seqlens_q is not None else q.shape[:3]
    out = like(q, x.value.shape[-1], torch.bfloat16)
    return out, q.new_empty(rows, dtype=torch.float32)


def _register() -> Any:
    """The op, registered once per process, whatever name this module is imported under."""
    namespace = torch.ops.fa_advisor
    if hasattr(namespace, _NAME):
        return namespace
    library = torch.library.Library("fa_advisor", "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_NAME, _forward, "CUDA")
    torch.library.register_fake(f"fa_advisor::{_NAME}", _forward_fake, lib=library)
    _libraries.append(library)
    return namespace


# A library's registrations go when it does.
_libraries: list[Any] = []
_op = _register()
