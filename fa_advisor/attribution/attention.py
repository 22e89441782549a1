"""Finds attention in the op stream by structure.

A product of two activations (S = QK^T) is followed through scale, bias, mask, cast and softcap to
a softmax, and from there through dropout and casts to the product with V; only then is it
attention. In backward the product that meets softmax's backward with this P is dP, what comes
out is dS. Names of modules play no part. A classifier, a router or a pooling softmax starts from
a product with a parameter, so it never becomes a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa_advisor.attribution.extents import (
    at,
    claim_mask,
    common_scope,
    elements,
    mark_kv,
    mixes_heads,
    read_extents,
    shared_heads,
    spans,
    unfold_queries,
)
from fa_advisor.attribution.storage import MAX_ANCESTRY, Call, Origin, Shape, Storage
from fa_advisor.probes.events import Kind, Op, Phase, Scope, SdpaFacts

Operand = tuple[Storage, Shape]
Handler = Callable[["AttentionMatcher", "_Context"], None]

_PARAMETER = int(Origin.PARAMETER)
_POSITION = int(Origin.POSITION)
_TRIANGULAR = int(Origin.TRIANGULAR)
_RANDOM = int(Origin.RANDOM)
# What SDPA does too between QK^T and the softmax.
_EXPRESSIBLE = frozenset(
    (
        *("mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_", "exp", "exp_", "exp2"),
        *("masked_fill", "masked_fill_", "where", "isneginf", "nan_to_num", "_log_softmax"),
        *("_to_copy", "clone", "copy_", "contiguous", "native_dropout"),
    )
)


class _Context:
    """One operator's run."""

    __slots__ = ("extra", "inputs", "op", "outputs", "phase", "scope", "source")

    def __init__(
        self,
        op: Op,
        scope: Scope,
        phase: Phase,
        source: tuple[str, int] | None,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        extra: Any,
    ) -> None:
        self.op = op
        self.scope = scope
        self.phase = phase
        self.source = source
        self.inputs = inputs
        self.outputs = outputs
        self.extra = extra


class AttentionMatcher:
    """Fed with every operator in order; leaves its findings on the storages and in `calls`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []  # confirmed since the ledger last emptied it
        self._sdpa: tuple[SdpaFacts, Scope, tuple[str, int] | None] | None = None

    def enter_sdpa(
        self, facts: SdpaFacts | None, scope: Scope, source: tuple[str, int] | None
    ) -> None:
        """scaled_dot_product_attention was entered (facts) or left (None)."""
        self._sdpa = None if facts is None else (facts, scope, source)

    def see(
        self,
        op: Op,
        scope: Scope,
        phase: Phase,
        source: tuple[str, int] | None,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        extra: Any,
    ) -> None:
        handler = _HANDLERS.get(op.kind)
        if phase is Phase.BACKWARD and handler is AttentionMatcher._flow:
            for storage, _ in inputs:
                if storage.call is not None:
                    break
            else:
                return  # masks are made in forward, or in its recomputation
        if handler is not None and (inputs or op.kind <= Kind.ARANGE):
            handler(self, _Context(op, scope, phase, source, inputs, outputs, extra))

    # -- where values come from -------------------------------------------------------------

    def _made(self, c: _Context) -> None:
        for storage, _ in c.outputs:
            if c.op.kind is Kind.ARANGE:
                storage.origin |= _POSITION
            elif c.op.kind is Kind.RANDOM:
                storage.origin |= _RANDOM
                storage.random_p = c.extra or 0.0

    def _flow(self, c: _Context) -> None:
        """Pointwise and its like: carry attention's role along, else the origin of the values."""
        main: Operand | None = None
        for operand in c.inputs:
            role = operand[0].role
            if role is None or role == "attention_mask" or operand[0].call is None:
                continue
            if main is None or _RANK[role] > _RANK[main[0].role]:
                main = operand
        if main is None:
            self._flow_origin(c)
        else:
            self._flow_role(c, main)

    def _flow_role(self, c: _Context, main: Operand) -> None:
        storage, shape = main
        call = storage.call
        assert call is not None
        call = call.find()
        role = storage.role
        unfold_queries(call, storage, shape)
        # A product that meets P or a dropout mask inside backward is dP.
        becomes_grad = role != "attention_grad" and c.phase is Phase.BACKWARD
        if role == "attention_score" and not becomes_grad and c.op.name not in _EXPRESSIBLE:
            call.expressible = False
        for other, other_shape in c.inputs:
            if other is storage:
                continue
            if other.role is not None and other.call is not None:
                if other.role != "attention_mask":
                    call = self._meet(call, other.call.find(), becomes_grad)
                elif role == "attention_score" and c.phase is not Phase.BACKWARD:
                    call.has_mask = True  # another site's mask, used again
                    call.causal = call.causal or bool(other.origin & _TRIANGULAR)
            elif role != "attention_grad":
                self._bystander(call, role, shape, other, other_shape, c.phase)
        if becomes_grad and call.confirmed:
            role = "attention_grad"
        if c.op.kind is Kind.EXP and role == "attention_score":
            call.softmaxed = True
            read_extents(call, shape, -1)
            role = "attention_prob"
        for out, out_shape in c.outputs:
            if out.label is None and elements(out_shape) * 2 >= elements(shape):
                out.call, out.role = call, role
                self._keep(call, out)

    def _meet(self, call: Call, other: Call, in_backward: bool) -> Call:
        """Two calls' storages in one op: one call, if neither is a finished one of its own."""
        if other is call:
            return call
        if other.confirmed and call.confirmed:
            return call
        keep, drop = (other, call) if other.confirmed else (call, other)
        if drop.confirmed or (keep.confirmed and not in_backward):
            return call
        drop.merged_into = keep
        keep.masks.extend(drop.masks)
        keep.softmaxed = keep.softmaxed or drop.softmaxed
        keep.saved_bytes += drop.saved_bytes
        drop.masks = []
        return keep

    def _bystander(
        self,
        call: Call,
        role: str | None,
        shape: Shape,
        other: Storage,
        other_shape: Shape,
        phase: Phase,
    ) -> None:
        """A storage beside S or P in a pointwise op: a mask or bias, if it is N x N."""
        if phase is Phase.BACKWARD or other.numel == 1:
            return
        over_keys = bool(other_shape) and shape[-1] == other_shape[-1] > 1
        if role == "attention_score" and over_keys and shape[-1] in (call.m, call.n):
            call.has_mask = True
            call.causal = call.causal or bool(other.origin & _TRIANGULAR)
        if not spans(call, shape, other_shape, other.numel) or other.label is not None:
            return
        if role == "attention_prob" and other.origin & _RANDOM:
            other.call, other.role = call, "attention_dropout"
            self._keep(call, other)
            if other.random_p:
                call.dropout_p = round(1.0 - other.random_p, 9)  # 0.1, not 1 - 0.9
        elif call.confirmed:
            claim_mask(call, other)
        else:
            call.masks.append(other)

    def _flow_origin(self, c: _Context) -> None:
        if c.phase is Phase.BACKWARD:
            return  # masks are made in forward, or in its recomputation
        kind = c.op.kind
        all_of, any_of = _PARAMETER | _POSITION, 0
        parents: list[Storage] = []
        generation = 0
        for storage, _ in c.inputs:
            all_of &= storage.origin
            any_of |= storage.origin
            if storage.label is None and storage.call is None:
                parents.append(storage)
                generation = max(generation, storage.generation)
        origin = all_of | (any_of & (_TRIANGULAR | _RANDOM))
        if kind is Kind.INDEX:  # a table's values say nothing of the positions that chose them
            origin &= ~_TRIANGULAR
        compared = kind is Kind.COMPARE and len(c.inputs) == 2 and all_of & _POSITION
        if kind is Kind.TRIANGULAR or compared:
            origin |= _TRIANGULAR
        random_p = max((s.random_p for s, _ in c.inputs), default=0.0)
        for out, _ in c.outputs:
            if out.label is not None:
                continue
            out.origin |= origin
            out.random_p = random_p
            if not any(out is p for p in parents):
                if generation < MAX_ANCESTRY:
                    out.parents, out.generation = tuple(parents), generation + 1
                else:
                    out.parents, out.generation = (), 0

    # -- the products -----------------------------------------------------------------------

    def _product(self, c: _Context) -> None:
        factors = c.inputs
        if len(factors) > 2:  # out= is an argument, but no factor
            factors = [f for f in factors if not any(f[0] is out for out, _ in c.outputs)]
        if len(factors) < 2:
            return
        a, b = factors[-2], factors[-1]
        for (operand, shape), (other, other_shape) in ((a, b), (b, a)):
            if operand.call is None or operand.role in (None, "attention_mask"):
                continue
            call = operand.call.find()
            if other.origin & _PARAMETER and mixes_heads(call, shape):
                call.expressible = False
                for out, _ in c.outputs:
                    out.call, out.role = call, operand.role
                    self._keep(call, out)
                return
            if operand.role == "attention_prob" and call.softmaxed:
                if not call.confirmed and (c.phase is not Phase.BACKWARD or self._ran(call)):
                    self._confirm(c, call, operand, shape, other, other_shape)
                return
            if operand.role in ("attention_grad", "attention_dropout"):
                return
            if call.confirmed:
                return
        if a[0].origin & _PARAMETER or b[0].origin & _PARAMETER or not c.outputs:
            return
        out, shape = c.outputs[0]
        if len(shape) < 2 or len(a[1]) < 2 or out.label is not None:
            return
        sdpa, scope, source = self._sdpa or (None, c.scope, c.source)
        source = source or c.source or out.source  # the last: where out='s buffer was made
        call = Call(shape[-2], shape[-1], a[1][-1], out.dtype, scope, c.phase, source, sdpa)
        call.batch = shape[0] if len(shape) == 3 else 1
        call.kv_heads = shared_heads(*b)
        for operand in (a[0], b[0]):
            self._keep(call, operand)
        mark_kv(b[0])
        out.call, out.role = call, "attention_score"
        self._keep(call, out)
        if len(factors) == 3:  # baddbmm and its like add a bias to the product
            bias, bias_shape = factors[0]
            if bias.op.startswith("empty"):
                bias.call, bias.role = call, "attention_score"
            else:
                self._bystander(call, "attention_score", shape, bias, bias_shape, c.phase)

    def _ran(self, call: Call) -> bool:
        """Is a recomputed call one that forward has shown to be attention?

        Checkpointing stops a second run at the last tensor that backward needs, which may be
        before the product with V.
        """
        return call.phase is Phase.RECOMPUTE and any(
            (known.source, known.m, known.n) == (call.source, call.m, call.n)
            for known in self.calls
        )

    def _confirm(
        self,
        c: _Context,
        call: Call,
        prob: Storage,
        prob_shape: Shape,
        value: Storage,
        value_shape: Shape,
    ) -> None:
        if value.origin & _PARAMETER:
            return
        call.confirmed = True
        call.scope = common_scope(call.scope, c.scope)
        call.dtype = prob.dtype
        mark_kv(value)
        self._keep(call, value)
        if call.kv_heads == 0:
            call.kv_heads = shared_heads(value, value_shape)
        if call.scope.heads > 1 and call.heads == 1 and call.batch % call.scope.heads == 0:
            call.batch, call.heads = call.batch // call.scope.heads, call.scope.heads
        masks, call.masks = call.masks, []
        for mask in masks:
            claim_mask(call, mask)
        self.calls.append(call)

    def _softmax(self, c: _Context) -> None:
        storage, shape = c.inputs[0]
        if storage.call is None or storage.role not in ("attention_score", "attention_prob"):
            return
        call = storage.call.find()
        if c.phase is not Phase.BACKWARD:
            unfold_queries(call, storage, shape)
            call.softmaxed = True
            dim = c.extra if isinstance(c.extra, int) else -1
            read_extents(call, shape, dim)
            for other, other_shape in c.inputs[1:]:
                self._bystander(call, "attention_score", shape, other, other_shape, c.phase)
        for out, _ in c.outputs:
            out.call, out.role = call, "attention_prob"
            self._keep(call, out)

    def _softmax_backward(self, c: _Context) -> None:
        if len(c.inputs) < 2:
            return
        (grad, _), (prob, _) = c.inputs[0], c.inputs[1]
        if prob.call is None or prob.role not in ("attention_prob", "attention_score"):
            return
        call = prob.call.find()
        if grad.call is not None and grad.role != "attention_grad":
            self._meet(grad.call.find(), call, True)
        if grad.label is None and grad is not prob:
            grad.call, grad.role = call, "attention_grad"
        for out, _ in c.outputs:
            if out is not prob and out.label is None:
                out.call, out.role = call, "attention_grad"

    def _dropout(self, c: _Context) -> None:
        storage = c.inputs[0][0]
        if storage.call is None or storage.role not in ("attention_score", "attention_prob"):
            return self._flow_origin(c)
        call = storage.call.find()
        if isinstance(c.extra, float):
            call.dropout_p = c.extra
        for index, (out, _) in enumerate(c.outputs):
            out.call = call
            out.role = "attention_dropout" if index == 1 else storage.role
            self._keep(call, out)

    def _reduce(self, c: _Context) -> None:
        """A mean of P over the heads, a bias's gradient summed over the batch: still N x N."""
        storage, _ = c.inputs[0]
        if storage.call is None or storage.role is None:
            return self._flow_origin(c)
        call = storage.call.find()
        for out, shape in c.outputs:
            tail = tuple(shape[-2:])
            n_by_n = tail in ((call.m, call.n), (call.n, call.m)) and min(tail) > 1
            if n_by_n and out.label is None:
                out.call, out.role = call, storage.role

    def _gather(self, c: _Context) -> None:
        storage = c.inputs[0][0]
        if storage.call is not None and storage.role == "attention_score":
            self._flow_role(c, c.inputs[0])
        else:
            self._flow_origin(c)

    # -- fused kernels ----------------------------------------------------------------------

    def _fused(self, c: _Context) -> None:
        query, shape = c.inputs[0]
        key_shape = c.inputs[1][1] if len(c.inputs) > 1 else shape
        sdpa, scope, source = self._sdpa or (None, c.scope, c.source)
        heads_first = "scaled_dot_product" in c.op.name or c.op.backend == "flex"
        length, head = (-2, -3) if heads_first else (-3, -2)
        call = Call(
            at(shape, length), at(key_shape, length), shape[-1], query.dtype, scope, c.phase,
            source or c.source, sdpa,
        )  # fmt: skip
        call.batch = shape[0] if len(shape) == 4 else 1
        call.heads = at(shape, head)
        # Keys may have been repeated over the query heads on their way here.
        call.kv_heads = shared_heads(*c.inputs[1]) if len(c.inputs) > 1 else 0
        call.kv_heads = call.kv_heads or at(key_shape, head)
        call.fused = c.op.backend
        if call.fused == "native":  # [batch, length, heads x head_dim], heads as an argument
            call.m, call.n = at(shape, -2), at(key_shape, -2)
            call.heads = call.kv_heads = c.extra
            call.head_dim = shape[-1] // c.extra
            call.batch = shape[0] if len(shape) == 3 else 1
        call.confirmed = True
        for operand, _ in (*c.inputs, *c.outputs):
            self._keep(call, operand)
        for operand, _ in c.inputs[1:3]:
            mark_kv(operand)
        # A mask that is built or converted for the kernel is N x N memory all the same.
        for mask, mask_shape in c.inputs[3:4]:
            if mask_shape[-2:] == (call.m, call.n) and call.m > 1 and mask.numel >= call.m * call.n:
                call.causal = call.causal or bool(mask.origin & _TRIANGULAR)
                claim_mask(call, mask)
        self.calls.append(call)

    def _keep(self, call: Call, storage: Storage) -> None:
        """Remember whose backward will want this storage (the first call that touched it)."""
        if storage.saved_by is None and storage.label is None:
            storage.saved_by = call
            if storage.read_in_backward:
                call.saved_bytes += storage.nbytes


_RANK: dict[Any, int] = {
    "attention_dropout": 0,
    "attention_score": 1,
    "attention_prob": 2,
    "attention_grad": 3,
}

_HANDLERS: dict[Kind, Handler] = {
    Kind.RANDOM: AttentionMatcher._made,
    Kind.ARANGE: AttentionMatcher._made,
    Kind.POINTWISE: AttentionMatcher._flow,
    Kind.COMPARE: AttentionMatcher._flow,
    Kind.EXP: AttentionMatcher._flow,
    Kind.COPY: AttentionMatcher._flow,
    Kind.RESHAPING: AttentionMatcher._flow,
    Kind.TRIANGULAR: AttentionMatcher._flow,
    Kind.MATMUL: AttentionMatcher._product,
    Kind.SOFTMAX: AttentionMatcher._softmax,
    Kind.SOFTMAX_BACKWARD: AttentionMatcher._softmax_backward,
    Kind.DROPOUT: AttentionMatcher._dropout,
    Kind.REDUCTION: AttentionMatcher._reduce,
    Kind.INDEX: AttentionMatcher._gather,
    Kind.FUSED_ATTENTION: AttentionMatcher._fused,
}
