"""From tensors to kernel launches.

Everything that a launch needs besides its pointers is worked out once per kind of call - shapes,
strides, options - and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.arguments import unsupported_gpu
from fa_advisor.kernels.backward import bias_kernel, delta_kernel, keys_kernel, queries_kernel
from fa_advisor.kernels.forward import forward_kernel
from fa_advisor.kernels.fp8 import Descales
from fa_advisor.kernels.hopper import fp8_plan as hopper_fp8
from fa_advisor.kernels.hopper import plan as hopper
from fa_advisor.kernels.hopper.dealing import Ordered, Scheduled
from fa_advisor.kernels.kinds import (
    ADDITIVE,
    BOOLEAN,
    Inputs,
    Kind,
    Options,
    addressable,
    allow_tf32,
    by_descriptor,
    descriptor_layout,
    kind_of,
    like,
    padded,
    strides2,
    strides3,
)
from fa_advisor.kernels.launcher import INTERPRET, Descriptors, Geometry, Launch
from fa_advisor.kernels.spans import spans_kernel
from fa_advisor.kernels.tiles import INTERPRETED, SHORT, Tile, group_of, tile
from fa_advisor.kernels.tuning import TuningKey, identity

_PLANS_KEPT = 4096


def _tile(kernel: str, kind: Kind, query: Tensor) -> Tile:
    if INTERPRET:
        return INTERPRETED
    dim = max(padded(kind.dim), padded(kind.dim_v))
    group = group_of(torch.cuda.get_device_capability(query.device))
    causal = kind.has_right and not (kind.bias or kind.dropout)
    return tile(group, kernel, dim, query.element_size(), causal)


def _launch(
    name: str, kernel: Any, geometry: Geometry, kind: Kind, query: Tensor,
    descriptors: Descriptors | None = None,
) -> Launch:  # fmt: skip
    device, element_bytes = query.device, query.element_size()

    def key() -> TuningKey:
        return TuningKey(
            *identity(kernel, device), padded(kind.dim), padded(kind.dim_v), element_bytes,
            kind.precision, kind.has_right, kind.has_left, kind.bias, kind.softcap, kind.dropout,
            kind.varlen, descriptors is not None,
        )  # fmt: skip

    return Launch(name, kernel, geometry, _tile(name, kind, query), descriptors, key)


def _even(o: Options, t: Tile, varlen: bool) -> bool:
    """Whether the keys fill their tiles, so that none of them needs a mask for the end."""
    return not varlen and o.max_seqlen_k % t.block_n == 0


def _bias_flags(kind: Kind) -> tuple[bool, bool]:
    return kind.bias_strides[2] != 0, kind.bias_strides[3] != 0


_plans: dict[Any, Any] = {}


def _key(
    what: str, o: Options, x: Inputs, *more: Tensor | None, flags: tuple[bool, ...] = ()
) -> Any:
    """All that decides how a call is launched: options, shapes, strides, dtypes, alignment."""
    q, k, v = x[:3]
    tf32 = q.dtype is torch.float32 and allow_tf32()
    key: tuple[Any, ...] = (
        what, o, q.dtype, q.device, tf32, flags,
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
    )  # fmt: skip
    for t in (*x[3:], *more):
        key += (None,) if t is None else (t.dtype, t.shape, t.stride())
    return (*key, misaligned(*x, *more))


def misaligned(*tensors: Tensor | None) -> tuple[int, ...]:
    """Which don't start at a multiple of 16 bytes: kernels are compiled for what they see."""
    every = 0
    for t in tensors:
        if t is not None:
            every |= t.data_ptr()
    if not every & 15:
        return ()
    return tuple(i for i, t in enumerate(tensors) if t is not None and t.data_ptr() & 15)


def _keep(key: Any, plan: Any, known: dict[Any, Any] = _plans) -> Any:
    if len(known) >= _PLANS_KEPT:
        known.clear()
    known[key] = plan
    return plan


class _Spans(NamedTuple):
    """How `spans_kernel` is called for a boolean mask, and how what it leaves lies in memory."""

    launch: Launch
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    def __call__(self, device: int, mask: Tensor) -> Tensor:
        """int32 [B or 1, H or 1, rows (or columns) or 1, 4], for the mask's bytes."""
        spans = torch.empty((*self.shape, 4), dtype=torch.int32, device=mask.device)
        if spans.numel():
            self.launch(device, mask, spans)
        return spans


_NO_SPANS = (0, 0, 0)


def _plan_spans(kind: Kind, axis: int, length: int) -> _Spans | None:
    """For the mask's rows (axis 2) or columns (axis 3), each of `length` entries."""
    if kind.bias != BOOLEAN:
        return None
    along = kind.bias_strides
    batches, heads, owned = (
        n if along[i] else 1 for i, n in enumerate(kind.bias_shape) if i in (0, 1, axis)
    )
    strides = (heads * owned * 4, owned * 4, 4)
    looped = along[5 - axis]
    # Whichever of the two lies densely is loaded in long stretches.
    rows, columns = (16, 256) if looped == 1 else (64, 64)

    def geometry(_: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks = triton.cdiv(owned, rows)
        return blocks * batches * heads, (
            along[0], along[1], along[axis], looped, heads, owned, length, blocks,
            looped == 0, rows, columns,
        )  # fmt: skip

    return _Spans(
        launch=Launch("spans", spans_kernel, geometry, Tile(rows, columns, 4, 3)),
        shape=(batches, heads, owned),
        strides=(
            strides[0] if batches > 1 else 0,
            strides[1] if heads > 1 else 0,
            strides[2] if owned > 1 else 0,
        ),
    )


class Forward(NamedTuple):
    """A forward call's plan: its launch, and how its results lie in memory.

    Called with inputs of its kind it gives out, lse (fp32 [B, H, Lq] or [H, total]) and the row
    statistics that backward needs: fp32 [2, *lse's shape] with an additive bias, else None.
    backwards: the plans of such calls' backward, by what the forward doesn't say already.
    """

    launch: Launch | Scheduled | Ordered | None
    spans: _Spans | None
    out: tuple[Any, Any]
    lse: tuple[Any, Any]
    copies: bool
    additive: bool
    backwards: dict[Any, _Backward]

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, lse and the statistics."""
        q, k, v = x.query, x.key, x.value
        if self.copies:
            q, k, v = addressable(q), addressable(k), addressable(v)
        device = q.device
        out = torch.empty_strided(*self.out, dtype=q.dtype, device=device)
        lse = torch.empty_strided(*self.lse, dtype=torch.float32, device=device)
        highest = total = statistics = None
        if self.additive:
            statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=device)
            highest, total = statistics[0], statistics[1]
        if self.launch is not None:
            bias, spans, index = _bytes(x.bias), None, q.get_device()
            with _on(q):
                if self.spans is not None and bias is not None:
                    spans = self.spans(index, bias)
                self.launch(
                    index, q, k, v, out, lse, highest, total, bias, spans, x.sinks,
                    x.alibi_slopes, x.cu_seqlens_q, x.cu_seqlens_k, x.seeds,
                )  # fmt: skip
        return out, lse, statistics


def forward(x: Inputs, o: Options) -> Forward:
    """The plan for such inputs."""
    key = _key("forward", o, x)
    plan: Forward | None = _plans.get(key)
    return plan if plan is not None else _keep(key, _plan_forward(x, o))


def forward_fp8(x: Inputs, o: Options, descales: Descales) -> tuple[Tensor, Tensor] | None:
    """out and lse of float8_e4m3fn inputs, or None where the call is to be done in bfloat16."""
    key = _key("fp8", o, x, *descales)
    plan: hopper_fp8.Forward | None
    if key in _plans:
        plan = _plans[key]
    else:
        _check_device(x.query)
        plan = _keep(key, hopper_fp8.forward(kind_of(x, o), o, x, descales))
    if plan is None:
        return None
    with _on(x.query):
        return plan(x, descales)


def _check_device(query: Tensor) -> None:
    if INTERPRET:
        if query.dtype not in (torch.float16, torch.float32):
            # Its dot multiplies bfloat16's bit patterns as integers.
            raise ValueError(
                "query: expected float16 or float32 under TRITON_INTERPRET=1,"
                f" got {str(query.dtype).removeprefix('torch.')}"
            )
    elif not query.is_cuda:
        raise ValueError(f"query: expected a CUDA tensor, got one on {query.device}")
    elif refusal := unsupported_gpu(query.get_device()):
        # Compiled code comes here without having passed the checks of an eager call.
        raise ValueError(refusal)


def _bytes(bias: Tensor | None) -> Tensor | None:
    return bias.view(torch.uint8) if bias is not None and bias.dtype is torch.bool else bias


class _NoGuard:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NO_GUARD = _NoGuard()


def _on(t: Tensor) -> Any:
    """Launches go to the current device: make it the tensor's."""
    if INTERPRET or t.device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(t.device)


def _plan_forward(x: Inputs, o: Options) -> Forward:
    _check_device(x.query)
    q, k, v = addressable(x.query), addressable(x.key), addressable(x.value)
    out = like(x.query, v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if x.cu_seqlens_q is not None else tuple(q.shape[:3])
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    kind = kind_of(x, o)
    tma = o.max_seqlen_k > SHORT and by_descriptor(kind, k, v)
    block_d, block_dv = padded(kind.dim), padded(kind.dim_v)
    bias_m, bias_n = _bias_flags(kind)
    n = kind.varlen
    sinks = x.sinks is not None
    # What follows is kept for later calls: layouts alone, no tensor, or its memory would be too.
    strides = (*strides3(q, n), *strides3(k, n), *strides3(v, n), *strides3(out, n))
    row = strides2(lse, n)
    layouts = (descriptor_layout(k, n), descriptor_layout(v, n))
    spans = _plan_spans(kind, 2, o.max_seqlen_k)
    span_strides = _NO_SPANS if spans is None else spans.strides

    def geometry(t: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks = triton.cdiv(o.max_seqlen_q, t.block_m)
        return blocks * kind.batch * kind.heads, (
            *strides, *row, *kind.bias_strides, *span_strides, kind.slope_stride,
            o.max_seqlen_q, o.max_seqlen_k, kind.heads, kind.group, blocks,
            o.scale, o.softcap, kind.left, kind.right, kind.threshold, kind.keep_scale,
            n, kind.fold, kind.softcap, kind.alibi, sinks,
            kind.bias, bias_m, bias_n, kind.has_left, kind.has_right, o.bottom_right,
            kind.dropout, tma, _even(o, t, n), kind.precision,
            kind.dim, kind.dim_v, block_d, block_dv,
            t.block_m, t.block_n,
        )  # fmt: skip

    def descriptors(t: Tile) -> dict[int, tuple[Any, Any, Any]]:
        return {
            1: (*layouts[0], [1, 1, t.block_n, block_d]),
            2: (*layouts[1], [1, 1, t.block_n, block_dv]),
        }

    launch: Launch | Scheduled | Ordered | None = None
    if out.numel():
        launch = hopper.forward(kind, o, q, k, v, out, row, span_strides, x)
        if launch is None:
            described = descriptors if tma else None
            launch = _launch("forward", forward_kernel, geometry, kind, q, described)
    return Forward(
        launch=launch,
        spans=spans,
        out=(tuple(out.shape), out.stride()),
        lse=(lse_shape, lse.stride()),
        copies=q is not x.query or k is not x.key or v is not x.value,
        additive=kind.bias == ADDITIVE,
        backwards={},
    )


class _Backward(NamedTuple):
    """A backward call's plan. gradients: size and stride of dQ, dK and dV.

    hopper: its kernels, in these ones' place; of these, delta and queries still run where those
    don't make dQ.
    """

    hopper: hopper.Backward | hopper.WideBackward | None
    delta: Launch
    keys: Launch
    queries: Launch
    bias: Launch | None
    row_spans: _Spans | None
    column_spans: _Spans | None
    gradients: tuple[tuple[Any, Any], ...]
    copies: bool


def backward(
    x: Inputs, o: Options, grad_out: Tensor, grad_lse: Tensor | None,
    out: Tensor, lse: Tensor, statistics: Tensor | None, need_bias: bool,
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """dQ, dK, dV, the bias's gradient (None unless `need_bias`) and delta.

    forward: the call's plan, if it is at hand: then its kind needn't be worked out again.
    """
    q, k, v, g, bias = x.query, x.key, x.value, grad_out, x.bias
    exact = torch.are_deterministic_algorithms_enabled()
    key: Any
    if forward is None:
        known = _plans
        key = _key("backward", o, x, g, grad_lse, out, flags=(need_bias, exact))
    else:
        known = forward.backwards
        # What was saved may come back with other strides: from a hook that keeps it elsewhere.
        tf32 = q.dtype is torch.float32 and allow_tf32()
        key = (
            need_bias, exact, tf32, q.stride(), k.stride(), v.stride(), g.stride(), out.stride(),
            None if bias is None else bias.stride(),
            None if grad_lse is None else grad_lse.stride(),
            misaligned(*x, g, grad_lse, out),
        )  # fmt: skip
    plan: _Backward | None = known.get(key)
    if plan is None:
        plan = _plan_backward(x, o, g, grad_lse, out, lse, need_bias, exact)
        _keep(key, plan, known)
    if plan.copies:
        q, k, v, g = addressable(q), addressable(k), addressable(v), addressable(g)
    device = q.device
    dtype = q.dtype
    for_query, for_key, for_value = plan.gradients
    if plan.hopper is not None:
        with _on(q):
            dq = None
            if not plan.hopper.makes_dq:
                dq = torch.empty_strided(*for_query, dtype=dtype, device=device)
                delta, base = torch.empty_like(lse), torch.empty_like(lse)
                index, cu = q.get_device(), (x.cu_seqlens_q, x.cu_seqlens_k)
                plan.delta(index, out, g, grad_lse, lse, delta, base, cu[0])
                plan.queries(
                    index, q, k, v, g, dq, base, None, None, delta, None, None, None, *cu, None
                )
            inputs = x._replace(query=q, key=k, value=v)
            dq, dk, dv, delta = plan.hopper(inputs, g, grad_lse, out, lse, dq)
        return dq, dk, dv, None, delta
    dq = torch.empty_strided(*for_query, dtype=dtype, device=device)
    dk = torch.empty_strided(*for_key, dtype=dtype, device=device)
    dv = torch.empty_strided(*for_value, dtype=dtype, device=device)
    delta, base = torch.empty_like(lse), torch.empty_like(lse)
    highest = total = dbias = None
    if statistics is not None and statistics.ndim > 1:  # Else the ops' word for none.
        highest, total = statistics[0], statistics[1]
    if need_bias and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=device)
    raw_bias = _bytes(bias)
    rest = (x.alibi_slopes, x.cu_seqlens_q, x.cu_seqlens_k, x.seeds)
    index = q.get_device()
    with _on(q):
        spans = None
        if q.numel():
            plan.delta(index, out, g, grad_lse, lse, delta, base, x.cu_seqlens_q)
            if plan.row_spans is not None and raw_bias is not None:
                spans = plan.row_spans(index, raw_bias)
            plan.queries(index, q, k, v, g, dq, base, highest, total, delta, raw_bias, spans, *rest)
        if k.numel():
            if plan.column_spans is not None and raw_bias is not None:
                spans = plan.column_spans(index, raw_bias)
            plan.keys(
                index, q, k, v, g, dk, dv, base, highest, total, delta, raw_bias, spans, *rest
            )
        if plan.bias is not None and dbias is not None and dbias.numel():
            plan.bias(
                index, q, k, v, g, dbias, highest, total, delta, bias, x.alibi_slopes, x.seeds
            )
    return dq, dk, dv, dbias, delta


def _plan_backward(
    x: Inputs, o: Options, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
    need_bias: bool, exact: bool,
) -> _Backward:  # fmt: skip
    q, k, v, g = (addressable(t) for t in (x.query, x.key, x.value, grad_out))
    dq, dk, dv = like(x.query), like(x.key), like(x.value)
    dbias = torch.empty(x.bias.shape, device="meta") if need_bias and x.bias is not None else None
    kind = kind_of(x, o)
    block_d, block_dv = padded(kind.dim), padded(kind.dim_v)
    bias_m, bias_n = _bias_flags(kind)
    n = kind.varlen
    keys_tma = o.max_seqlen_q > SHORT and by_descriptor(kind, q, g)
    queries_tma = o.max_seqlen_k > SHORT and by_descriptor(kind, k, v)
    row = strides2(lse, n)
    inputs = (*strides3(q, n), *strides3(k, n), *strides3(v, n), *strides3(g, n))
    numbers = (o.scale, o.softcap, kind.left, kind.right, kind.threshold, kind.keep_scale)
    switches = (
        n, kind.fold, kind.softcap, kind.alibi, kind.bias, bias_m, bias_n,
        kind.has_left, kind.has_right, o.bottom_right, kind.dropout,
    )  # fmt: skip
    widths = (kind.dim, kind.dim_v, block_d, block_dv)
    # As in the forward's plan: no tensor in what is kept.
    need_lse = grad_lse is not None
    lse_strides = (0, 0, 0)
    if grad_lse is not None:
        s = grad_lse.stride()
        lse_strides = (0, s[0], s[1]) if n else (s[0], s[1], s[2])
    delta_strides = (*strides3(out, n), *strides3(g, n), *row, *lse_strides)
    query_strides = strides3(dq, n)
    key_strides = (*strides3(dk, n), *strides3(dv, n))
    bias_strides = dbias.stride() if dbias is not None else ()
    row_spans = _plan_spans(kind, 2, o.max_seqlen_k)
    column_spans = _plan_spans(kind, 3, o.max_seqlen_q)
    row_span_strides = _NO_SPANS if row_spans is None else row_spans.strides
    column_span_strides = _NO_SPANS if column_spans is None else column_spans.strides
    layouts = [descriptor_layout(t, n) for t in (q, g, k, v)]

    def delta_geometry(t: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks = triton.cdiv(o.max_seqlen_q, t.block_m)
        return blocks * kind.batch * kind.heads, (
            *delta_strides, o.max_seqlen_q, kind.heads, blocks, n, need_lse, kind.fold,
            kind.dim_v, block_dv,
            t.block_m,
        )  # fmt: skip

    def keys_geometry(t: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks = triton.cdiv(o.max_seqlen_k, t.block_n)
        return blocks * kind.batch * (kind.heads // kind.group), (
            *inputs, *key_strides, *row,
            *kind.bias_strides, *column_span_strides, kind.slope_stride,
            o.max_seqlen_q, o.max_seqlen_k, kind.heads, kind.group, blocks, *numbers,
            *switches, keys_tma, _even(o, t, n), kind.precision, *widths, t.block_m, t.block_n,
        )  # fmt: skip

    def queries_geometry(t: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks = triton.cdiv(o.max_seqlen_q, t.block_m)
        return blocks * kind.batch * kind.heads, (
            *inputs, *query_strides, *row, *kind.bias_strides, *row_span_strides,
            kind.slope_stride,
            o.max_seqlen_q, o.max_seqlen_k, kind.heads, kind.group, blocks, *numbers,
            *switches, queries_tma, _even(o, t, n), kind.precision, *widths, t.block_m, t.block_n,
        )  # fmt: skip

    def bias_geometry(t: Tile) -> tuple[int, tuple[Any, ...]]:
        blocks_m = triton.cdiv(o.max_seqlen_q, t.block_m)
        blocks_n = triton.cdiv(o.max_seqlen_k, t.block_n)
        owns = tuple(size != 1 for size in kind.bias_shape)
        grid = 1
        for own, size in zip(owns, (kind.batch, kind.heads, blocks_m, blocks_n), strict=True):
            grid *= size if own else 1
        return grid, (
            *inputs, *bias_strides, *row, *kind.bias_strides, kind.slope_stride,
            kind.batch, o.max_seqlen_q, o.max_seqlen_k, kind.heads, kind.group, blocks_m, blocks_n,
            *numbers, kind.softcap, kind.alibi, *owns, kind.has_left, kind.has_right,
            o.bottom_right, kind.dropout, kind.precision, *widths, t.block_m, t.block_n,
        )  # fmt: skip

    def keys_descriptors(t: Tile) -> dict[int, tuple[Any, Any, Any]]:
        return {
            0: (*layouts[0], [1, 1, t.block_m, block_d]),
            3: (*layouts[1], [1, 1, t.block_m, block_dv]),
        }

    def queries_descriptors(t: Tile) -> dict[int, tuple[Any, Any, Any]]:
        return {
            1: (*layouts[2], [1, 1, t.block_n, block_d]),
            2: (*layouts[3], [1, 1, t.block_n, block_dv]),
        }

    copied = x._replace(query=q, key=k, value=v)
    return _Backward(
        hopper=hopper.backward(kind, o, copied, g, grad_lse, out, lse, exact),
        delta=Launch(
            "delta", delta_kernel, delta_geometry, Tile(64 if block_dv < 256 else 32, 16, 4, 1)
        ),
        keys=_launch(
            "keys", keys_kernel, keys_geometry, kind, q, keys_descriptors if keys_tma else None
        ),
        queries=_launch(
            "queries", queries_kernel, queries_geometry, kind, q,
            queries_descriptors if queries_tma else None,
        ),
        bias=_launch("bias", bias_kernel, bias_geometry, kind, q) if need_bias else None,
        row_spans=row_spans,
        column_spans=column_spans,
        gradients=tuple((tuple(t.shape), t.stride()) for t in (dq, dk, dv)),
        copies=any(a is not b for a, b in zip((q, k, v, g), (*x[:3], grad_out), strict=True)),
    )  # fmt: skip
