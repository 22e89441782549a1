"""What the op stream emits: plain tuples, because one is made for every operator that runs.

An event is `(code, ...)`; the alias below each code names the fields. Storages are numbered in
the order in which they were seen (`sid`), so that a number is never used twice.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple


class Kind(IntEnum):
    """What an operator is to the attribution; decided once per operator."""

    VIEW = 0  # output shares the input's storage
    FACTORY = 1
    RANDOM = 2
    ARANGE = 3
    POINTWISE = 4
    COMPARE = 5
    EXP = 6
    COPY = 7
    RESHAPING = 8  # cat, pad, roll, tril: keeps the elements, may change the extent
    TRIANGULAR = 9
    MATMUL = 10
    SOFTMAX = 11
    SOFTMAX_BACKWARD = 12
    DROPOUT = 13
    REDUCTION = 14
    INDEX = 15
    FUSED_ATTENTION = 16
    FUSED_ATTENTION_BACKWARD = 17
    COMMUNICATION = 18
    OTHER = 19


class Op(NamedTuple):
    """An operator as the attribution sees it."""

    name: str
    kind: Kind
    writes: bool  # changes one of its arguments
    backend: str  # FUSED_ATTENTION: flash, efficient, cudnn, ...


class Scope(NamedTuple):
    """A module whose forward is running. `heads` is its own `num_heads`, 0 where it has none."""

    fqn: str
    type: str
    heads: int


NOWHERE = Scope("", "", 0)
# The module that gathers gradients in buckets, for the other processes; its C++ makes them.
GATHERS = "DistributedDataParallel"


class SdpaFacts(NamedTuple):
    """How scaled_dot_product_attention was called, and what runs it."""

    backend: str
    why_not: dict[str, tuple[str, ...]]
    batch: int
    num_heads: int
    num_kv_heads: int
    is_causal: bool
    has_mask: bool
    dropout_p: float


class Phase(IntEnum):
    """Where in the step an operator runs. RECOMPUTE: a forward run again inside backward."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    RECOMPUTE = 3


class Code(IntEnum):
    """The first field of an event."""

    OP = 0
    FREE = 1
    EXTERNAL = 2
    RESIZE = 3
    LABEL = 4
    SDPA = 5
    STEP = 6
    FORWARD_END = 7
    BLOCK = 8


# (OP, op, scope, phase, source, inputs, outputs, extra[, number])
#   source   (file, line) | None, only where a storage was made
#   inputs   ((sid, shape), ...) in the order of the arguments
#   outputs  ((sid, shape, dtype, nbytes), ...); nbytes is -1 where the storage was known before
#   number   which operator of the stream, from 1; only where the allocator's trace is recorded
#   extra    dropout's p, softmax's dim, fused attention's facts that only the arguments tell;
#            of a sum's operand shape, strides, offset, reduced dimensions and dtype
# (FREE, sid)
# (EXTERNAL, sid, shape, dtype, nbytes)    a storage that existed before the stream began
# (RESIZE, sid, nbytes)
# (LABEL, sid, label, fqn)                 parameter, buffer, gradient, optimizer_state, input, host
# (SDPA, facts | None, scope, source)      scaled_dot_product_attention was entered | left
# (STEP, kind, about)                      the user's step ended: train, infer
# (BLOCK, sid, address, number)            where the storage lies, when that operator ran; comes
#                                          before the event that makes the storage known
# (FORWARD_END,)                           the outermost module returned without a graph
Event = tuple[Any, ...]
