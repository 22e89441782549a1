"""What shapes tell of an attention call: batch, heads and lengths, masks, copies of K and V."""

from __future__ import annotations

from fa_advisor.attribution.storage import Call, Origin, Shape, Storage
from fa_advisor.probes.events import Scope


def elements(shape: Shape) -> int:
    """The number of elements."""
    product = 1
    for extent in shape:
        product *= extent
    return product


def at(shape: Shape, index: int) -> int:
    """The extent at a negative index; 1 where the shape is too short to have it."""
    return shape[index] if len(shape) >= -index else 1


def spans(call: Call, shape: Shape, other: Shape, other_numel: int) -> bool:
    """Does an operand beside S or P have both of its N x N dimensions, without broadcasting?"""
    if other_numel < call.m * call.n:
        return False
    for k in range(-1, -len(shape), -1):
        for q in range(k - 1, -len(shape) - 1, -1):
            if (shape[q], shape[k]) in ((call.m, call.n), (call.n, call.m)):
                return (at(other, q), at(other, k)) == (shape[q], shape[k])
    return False


def claim_mask(call: Call, mask: Storage) -> None:
    """Label a mask, and the N x N storages that it was built from."""
    call.causal = call.causal or bool(mask.origin & int(Origin.TRIANGULAR))
    pending = [mask]
    while pending:
        storage = pending.pop()
        if storage.label is not None or storage.call is not None:
            continue
        if storage is not mask and not (
            storage.numel >= call.m * call.n and has_both(storage.shape, call.m, call.n)
        ):
            continue
        storage.call, storage.role = call, "attention_mask"
        if storage.saved_by is None:
            storage.saved_by = call
        pending.extend(storage.parents)
        storage.parents = ()


def mixes_heads(call: Call, shape: Shape) -> bool:
    """Talking heads: scores or weights as rows [batch x m x n, heads], times a parameter."""
    return len(shape) == 2 and shape[0] % (call.m * call.n) == 0 and call.m * call.n > shape[1]


def has_both(shape: Shape, m: int, n: int) -> bool:
    """Are `m` and `n` two different dimensions' extents?"""
    extents = list(shape)
    if m in extents:
        extents.remove(m)
        return n in extents
    return False


def unfold_queries(call: Call, scores: Storage, shape: Shape) -> None:
    """Heads that share K are folded into the queries of the product (einsum does so): take them
    out again where S is seen as [..., heads, m, n]."""
    if len(shape) < 3 or shape[-1] != call.n or call.m in (shape[-2], 1) or call.softmaxed:
        return
    heads, rest = divmod(call.m, max(1, shape[-2]))
    if rest or shape[-3] != heads or elements(shape) != scores.numel:
        return
    call.m = shape[-2]
    call.kv_heads = -heads


def read_extents(call: Call, shape: Shape, dim: int) -> None:
    """Batch, heads and lengths from the tensor that softmax saw."""
    if len(shape) < 2:
        return
    keys = shape[dim]
    known = call.scope.heads
    rest = [*shape]
    del rest[dim]
    if len(shape) >= 4 and call.m not in rest and known in rest[1:]:
        # Products of chunks, put together to a band of keys a query before softmax (Longformer).
        call.batch, call.heads = shape[0], known
        call.m, call.n = elements(tuple(rest)) // max(1, shape[0] * known), keys
        return
    if (call.m, call.n) != (call.m, keys) and call.m == keys:
        call.m, call.n = call.n, call.m
    if len(shape) >= 4:
        batch, heads = shape[0], elements(shape) // max(1, shape[0] * call.m * keys)
        if len(shape) > 4 and known > 1 and heads % known == 0:  # windows beside the heads
            batch, heads = batch * heads // known, known
        call.batch, call.heads = batch, max(1, heads)
    elif len(shape) == 3:
        call.batch = shape[0]


def shared_heads(operand: Storage, shape: Shape) -> int:
    """0, or minus the factor by which K or V was repeated over the query heads (repeat_kv)."""
    if 0 < operand.numel < elements(shape):  # a single head, expanded without a copy
        return -(elements(shape) // operand.numel)
    for storage in copies(operand):
        for parent in storage.parents:
            if storage.op in _REPEATS and 0 < parent.numel < storage.numel:
                return -(storage.numel // parent.numel)
    return 0


_REPEATS = frozenset(("clone", "_to_copy", "repeat", "index_select"))
# "mul": K is scaled on its way into the product (SDPA's math path scales both operands).
_COPIES = frozenset(("clone", "_to_copy", "cat", "repeat", "index_select", "index_copy", "mul"))


def copies(storage: Storage) -> list[Storage]:
    """A storage and what it is a plain copy of, nearest first (K^T, repeated K, K in the cache)."""
    chain = [storage]
    while chain[-1].op in _COPIES and chain[-1].parents and len(chain) < 6:
        chain.append(chain[-1].parents[0])
    return chain


def mark_kv(operand: Storage) -> None:
    """Remember that these bytes are a key's or a value's."""
    for storage in copies(operand):
        storage.kv = True


def common_scope(one: Scope, other: Scope) -> Scope:
    """The innermost module that contains both scopes."""
    if one.fqn == other.fqn or one.fqn == "":
        return one
    if other.fqn == "" or one.fqn.startswith(other.fqn + "."):
        return other
    if other.fqn.startswith(one.fqn + "."):
        return one
    a, b = one.fqn.split("."), other.fqn.split(".")
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return Scope(".".join(a[:shared]), "", 0)
