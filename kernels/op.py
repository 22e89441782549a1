"""The custom ops: what torch.compile, export, autograd and profilers see of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa_advisor.kernels import launch
from fa_advisor.kernels.kinds import Inputs, Options, like

if TYPE_CHECKING:
    from fa_advisor.kernels.arguments import Call

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seeds"
)
OPTIONS = (
    "float scale, bool is_causal, bool bottom_right, SymInt? window_left, SymInt? window_right,"
    " float softcap, float dropout_p, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_FORWARD = f"flash_attention_forward({_INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse,"
    f" Tensor statistics, bool need_bias, bool need_sinks, {_INPUTS}, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_N_INPUTS = len(Inputs._fields)
_FORWARD_MODE = (
    "flash_attention: forward-mode differentiation (jvp) isn't supported; use"
    " torch.nn.functional.scaled_dot_product_attention under"
    " torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


def attention(
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
    """Attention and its log-sum-exp, differentiable in query, key, value, bias and sinks.

    query [B, H, Lq, D], key [B, G, Lk, D], value [B, G, Lk, Dv]; with cu_seqlens (int32 [B + 1])
    [total, heads, dim]. bias: bool (True: visible) or additive, [B or 1, H or 1, Lq or 1, Lk or 1].
    Returns out [B, H, Lq, Dv] ([total, H, Dv]) and lse, fp32 [B, H, Lq] ([H, total]).
    """
    inputs = inputs_of(
        query, key, value, bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, call
    )
    options = options_of(call)
    if torch.compiler.is_compiling():
        out, lse, _ = _op.flash_attention_forward(*inputs, *options)
    elif observed(query):
        if _transformed_by(torch._C._functorch.TransformType.Jvp):
            raise RuntimeError(_FORWARD_MODE)
        if _transformed_by(torch._C._functorch.TransformType.Grad):
            out, lse, _ = _Attention.apply(*inputs, *options)  # type: ignore[no-untyped-call]
        else:
            out, lse, _ = _op.flash_attention_forward(*inputs, *options)
    else:
        if torch.autograd.forward_ad._current_level >= 0:
            _refuse_forward_mode(inputs)
        # The dispatcher's way to the same functions costs more than a short sequence's kernels.
        out, lse = direct(launch.forward(inputs, options), options, inputs)
    return out, lse


def inputs_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    call: Call,
) -> Inputs:
    """A validated call's tensors as the kernels read them: small ones at consecutive addresses."""
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.resolve_neg().to(torch.float32).contiguous()
    if sinks is not None:
        sinks = sinks.resolve_neg().contiguous()
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    seeds = fresh_seeds(call.dropout_p, query)
    return Inputs(query, key, value, bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seeds)


def _refuse_forward_mode(inputs: Inputs) -> None:
    for t in inputs:
        if t is not None and torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(_FORWARD_MODE)


def direct(plan: launch.Forward, options: Options, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call whose plan is known, past the dispatcher."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        result: tuple[Tensor, Tensor] = _Direct.apply(plan, options, *inputs)  # type: ignore[no-untyped-call]
        return result
    out, lse, _ = plan(inputs)
    return out, lse


def fresh_seeds(dropout_p: float, query: Tensor) -> Tensor | None:
    """The key of a call's random numbers, drawn on the device: under a CUDA graph, each replay."""
    if dropout_p <= 0.0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=query.device)


def observed(query: Tensor) -> bool:
    """Whether someone wants to see the op: a mode, a subclass of Tensor, a functorch transform."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or type(query) not in (Tensor, torch.nn.Parameter)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _transformed_by(kind: Any) -> bool:
    level: Any = torch._C._functorch.peek_interpreter_stack()  # None outside of transforms.
    return bool(level and level.key() == kind)


def options_of(call: Call) -> Options:
    """A validated call's options as the ops carry them."""
    return Options(
        call.scale, call.is_causal, call.bottom_right, call.window_left, call.window_right,
        call.softcap, call.dropout_p, call.max_seqlen_q, call.max_seqlen_k,
    )  # fmt: skip


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args[:_N_INPUTS])
    out, lse, statistics = launch.forward(x, Options(*args[_N_INPUTS:]))(x)
    if statistics is None:
        statistics = x.query.new_empty((0,), dtype=torch.float32)
    return out, lse, statistics


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args[:_N_INPUTS])
    out = like(x.query, x.value.shape[-1])
    varlen = x.cu_seqlens_q is not None
    rows = (x.query.shape[1], x.query.shape[0]) if varlen else x.query.shape[:3]
    lse = x.query.new_empty(rows, dtype=torch.float32)
    additive = x.bias is not None and x.bias.dtype is not torch.bool
    statistics = x.query.new_empty((2, *rows) if additive else (0,), dtype=torch.float32)
    return out, lse, statistics


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    need_bias: bool,
    need_sinks: bool,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = Inputs(*args[:_N_INPUTS])
    dq, dk, dv, dbias, delta = launch.backward(
        x, Options(*args[_N_INPUTS:]), grad_out, grad_lse, out, lse, statistics, need_bias
    )
    dsinks = _sinks_gradient(x, lse, delta) if need_sinks else dq.new_empty((0,))
    return dq, dk, dv, dq.new_empty((0,)) if dbias is None else dbias, dsinks


def _sinks_gradient(x: Inputs, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink has no value, so its dP is 0: its gradient is -sum(P_sink * delta) over the rows."""
    assert x.sinks is not None
    heads = (-1, 1) if x.cu_seqlens_q is not None else (1, -1, 1)
    probability = torch.exp(x.sinks.float().view(heads) - lse)
    if x.cu_seqlens_q is not None:
        # Rows past the last sequence belong to none; nothing wrote them.
        inside = torch.arange(lse.shape[-1], device=lse.device) < x.cu_seqlens_q[-1]
        probability = probability.where(inside, 0.0)
        delta = delta.where(inside, 0.0)
    # A sink at -inf in an empty row: exp(-inf - -inf).
    products = (probability.nan_to_num(0.0, posinf=0.0) * delta).neg_()
    return products.sum(-1 if products.ndim == 2 else (0, 2)).to(x.sinks.dtype)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    need_bias: bool,
    need_sinks: bool,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = Inputs(*args[:_N_INPUTS])
    dbias = (
        x.bias.new_empty(x.bias.shape)
        if need_bias and x.bias is not None
        else x.query.new_empty((0,))
    )
    dsinks = (
        x.sinks.new_empty(x.sinks.shape)
        if need_sinks and x.sinks is not None
        else x.query.new_empty((0,))
    )
    return like(x.query), like(x.key), like(x.value), dbias, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    out, lse, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(*inputs[:_N_INPUTS], out, lse, statistics)
    ctx.options = inputs[_N_INPUTS:]


def _differentiate(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    _: Tensor | None,
    backward: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = ()
    if grad_out is not None or grad_lse is not None:
        *inputs, out, lse, statistics = ctx.saved_tensors
        need_bias, need_sinks = _needs(inputs, ctx.needs_input_grad)
        *gradients_of_three, dbias, dsinks = (backward or _op.flash_attention_backward)(
            torch.zeros_like(out) if grad_out is None else grad_out,
            grad_lse, out, lse, statistics, need_bias, need_sinks, *inputs, *ctx.options,
        )  # fmt: skip
        gradients = (
            *gradients_of_three, dbias if need_bias else None, dsinks if need_sinks else None
        )  # fmt: skip
    return gradients + (None,) * (_N_INPUTS + len(Options._fields) - len(gradients))


def _needs(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[bool, bool]:
    """Whether the bias's and the sinks' gradients are wanted."""
    bias, sinks = inputs[3], inputs[4]
    return (
        bias is not None and wanted[3] and bias.is_floating_point(),
        sinks is not None and wanted[4],
    )


class _Direct(torch.autograd.Function):
    """Eager mode, past the dispatcher: in the form without setup_context, a tenth of its cost."""

    @staticmethod
    def forward(
        ctx: Any, plan: launch.Forward, options: Options, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse, statistics = plan(Inputs(*inputs))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse, statistics)
        ctx.plan, ctx.options = plan, options
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * (2 + _N_INPUTS)
        *inputs, out, lse, statistics = ctx.saved_tensors
        need_bias, need_sinks = _needs(inputs, ctx.needs_input_grad[2:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled():
            # With create_graph, by a function that refuses to be differentiated again.
            if statistics is None:
                statistics = out.new_empty((0,), dtype=torch.float32)
            dq, dk, dv, dbias, dsinks = _backward_once(
                grad_out, grad_lse, out, lse, statistics, need_bias, need_sinks, *inputs,
                *ctx.options,
            )  # fmt: skip
            dbias, dsinks = dbias if need_bias else None, dsinks if need_sinks else None
        else:
            x = Inputs(*inputs)
            dq, dk, dv, dbias, delta = launch.backward(
                x, ctx.options, grad_out, grad_lse, out, lse, statistics, need_bias, ctx.plan
            )
            dsinks = _sinks_gradient(x, lse, delta) if need_sinks else None
        return None, None, dq, dk, dv, dbias, dsinks, None, None, None, None


class _Attention(torch.autograd.Function):
    """The ops for functorch's transforms, which torch.library.register_autograd doesn't know."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor]
        with torch._C._AutoDispatchBelowAutograd():
            result = _op.flash_attention_forward(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse, _ = gradients
        return _differentiate(ctx, grad_out, grad_lse, None, _backward_once)

    @staticmethod
    def vmap(*_: Any) -> Any:
        _refuse_vmap()


class _AttentionBackward(torch.autograd.Function):
    """The backward op for functorch's transforms and create_graph; its own backward refuses."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...]
        with torch._C._AutoDispatchBelowAutograd():
            result = _op.flash_attention_backward(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        _refuse_double_backward(ctx)

    @staticmethod
    def vmap(*_: Any) -> Any:
        _refuse_vmap()


def _backward_once(*args: Any) -> tuple[Any, ...]:
    """The backward op where its own derivative may be asked for."""
    result: tuple[Any, ...] = _AttentionBackward.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _refuse_vmap() -> None:
    raise RuntimeError(
        "flash_attention: vmap over a gradient isn't supported; differentiate the batched call"
        " instead (its leading dims are a batch), or use"
        " torch.nn.functional.scaled_dot_product_attention"
    )


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "flash_attention: double backward isn't supported; for second derivatives use"
        " torch.nn.functional.scaled_dot_product_attention under"
        " torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def _register() -> Any:
    """The ops, registered once per process, whatever name this module is imported under."""
    namespace = torch.ops.fa_advisor
    if hasattr(namespace, "flash_attention_forward"):
        return namespace
    library = torch.library.Library("fa_advisor", "FRAGMENT")
    for schema, kernel, fake, save, differentiate in (
        (_FORWARD, _forward, _forward_fake, _save, _differentiate),
        (_BACKWARD, _backward, _backward_fake, None, _refuse_double_backward),
    ):
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CUDA", "CPU"):
            library.impl(name, kernel, device)
        qualified = f"fa_advisor::{name}"
        torch.library.register_fake(qualified, fake, lib=library)
        torch.library.register_autograd(qualified, differentiate, setup_context=save, lib=library)
    _libraries.append(library)
    return namespace


# A library's registrations go when it does.
_libraries: list[Any] = []
_op = _register()
