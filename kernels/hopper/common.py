"""What the Hopper kernels share."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_advisor.kernels.score import LOG2E

# Rows of a descriptor of packed sequences, far past any: see `plan.describe`.
FAR = gl.constexpr(2**30)


@gluon.constexpr_function
def accumulator(n: int, depth: int = 16) -> Any:
    """The layout of a warpgroup's product, [64, n]; depth: of an instruction, 32 bytes of A."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, depth]
    )


@gluon.jit
def origin(batch, first, length, VARLEN: gl.constexpr):
    """The two leading coordinates of a sequence in its descriptor, and where its rows begin."""
    if VARLEN:
        return FAR, first + length, FAR - length
    else:
        return 0, batch, 0


@gluon.jit
def lengths(batch, cu_q, cu_k, len_q, len_k, VARLEN: gl.constexpr):
    """The sequence's first query and key in their storage, and how many it has of each."""
    first_q = 0
    first_k = 0
    if VARLEN:
        first_q = gl.load(cu_q + batch)
        first_k = gl.load(cu_k + batch)
        len_q = gl.load(cu_q + batch + 1) - first_q
        len_k = gl.load(cu_k + batch + 1) - first_k
    return first_q, first_k, len_q, len_k


@gluon.jit
def cheap_tanh(x):
    """Tanh to about 1e-7: not of its value, but of 1, which is what a capped logit needs."""
    return 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0)
