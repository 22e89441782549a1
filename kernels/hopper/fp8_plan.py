"""Which calls the Hopper kernel on float8_e4m3fn takes, and how it is launched.

The others are done in bfloat16: by the Hopper kernel or the portable one, as `plan` has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_advisor.kernels.fp8 import E4M3, Descales
from fa_advisor.kernels.hopper import dealing, plan
from fa_advisor.kernels.hopper.tiles import ROWS_OF_A_CONSUMER, fp8_tiles_of
from fa_advisor.kernels.kinds import (
    NONE,
    Inputs,
    Kind,
    Options,
    by_descriptor,
    like,
    strides2,
    strides3,
)
from fa_advisor.kernels.launcher import Launch
from fa_advisor.kernels.tiles import Tile

_MOST_DIM = 128


def refusal(kind: Kind, o: Options, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why a call is done in bfloat16; None where it is done in eight bits.

    Each row is a kind of call and the reason. Few queries or few keys are no reason: more bytes
    would move to make bfloat16 of them.
    """
    reasons: tuple[tuple[bool, str], ...] = (
        (kind.bias != NONE, "masks and biases aren't written for it"),
        (kind.dropout, "dropout isn't written for it"),
        (kind.alibi, "ALiBi isn't written for it"),
        (not o.scale > 0.0, "what is hidden is -inf before the scale, and 0 times that is NaN"),
        (max(kind.dim, kind.dim_v) > _MOST_DIM, "O, and what is added to it, fill the registers"),
        (kind.dim_v % 8 != 0, "rows of O aren't multiples of 16 bytes"),
        (min(o.max_seqlen_q, o.max_seqlen_k) == 0, "there is nothing to see"),
        (not by_descriptor(kind, q, k), "tensor maps can't name such strides"),
        (v.stride(-1) != 1, "V's features are apart"),
        (max(q.numel(), k.numel(), v.numel()) >= 2**40, "tensor maps can't name tensors as large"),
    )
    return next((why for applies, why in reasons if applies), None)


class Forward(NamedTuple):
    """A call's two launches, and the shapes of what they fill: V's transpose, out and lse.

    out, lse: sizes and strides.
    """

    transpose: Launch
    attend: dealing.Scheduled
    transposed: tuple[int, ...]
    out: tuple[Any, Any]
    lse: tuple[Any, Any]

    def buffers(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """V's transpose, out and lse."""
        return (
            torch.empty(self.transposed, dtype=E4M3, device=device),
            torch.empty_strided(*self.out, dtype=torch.bfloat16, device=device),
            torch.empty_strided(*self.lse, dtype=torch.float32, device=device),
        )

    def __call__(self, x: Inputs, descales: Descales) -> tuple[Tensor, Tensor]:
        """out and lse."""
        transposed, out, lse = self.buffers(x.query.device)
        index = x.query.get_device()
        self.transpose(index, *_turned(x, transposed))
        self.attend(index, *_attended(x, descales, transposed, out, lse))
        return out, lse


def _turned(x: Inputs, transposed: Tensor) -> tuple[Tensor | None, ...]:
    """The pointers of the first launch, for which V is bytes."""
    return x.value.view(torch.uint8), transposed.view(torch.uint8), x.cu_seqlens_k


def _attended(
    x: Inputs, descales: Descales, transposed: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor | None, ...]:
    """Those of the second, but for the schedule."""
    return (
        x.query, x.key, transposed, out, lse, *descales, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k
    )  # fmt: skip


def forward(kind: Kind, o: Options, x: Inputs, descales: Descales) -> Forward | None:
    """The plan, or None where the call is to be done in bfloat16."""
    q, k, v = x[:3]
    if not plan.available(q.device) or refusal(kind, o, q, k, v) is not None:
        return None
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa_advisor.kernels.hopper.fp8 import fp8_forward_kernel
    from fa_advisor.kernels.hopper.transpose import transpose_kernel

    varlen = kind.varlen
    cut = fp8_tiles_of(kind.dim, kind.dim_v)
    bm, bn, width = ROWS_OF_A_CONSUMER, cut.block_n, cut.block_dv
    kv_heads = k.shape[1]
    key_blocks = int(triton.cdiv(o.max_seqlen_k, bn))
    # Packed sequences start at whole tiles in V's transpose: each has room for its last one.
    slots = (k.shape[0] // bn + kind.batch) * bn if varlen else key_blocks * bn
    transposed = torch.empty(
        (1 if varlen else kind.batch, kv_heads, width, slots), dtype=E4M3, device="meta"
    )
    out = like(q, kind.dim_v, torch.bfloat16)
    rows = (q.shape[1], q.shape[0]) if varlen else tuple(q.shape[:3])
    lse = q.new_empty(rows, dtype=torch.float32)
    pieces = dealing.deal(kind, o, cut, q)
    turning = (
        *strides3(v, varlen), *transposed.stride()[:3], o.max_seqlen_k, kv_heads, key_blocks,
        kind.dim_v, varlen, width, bn,
    )  # fmt: skip
    described = {
        0: plan.describe(q, varlen, bm, cut.part),
        1: plan.describe(k, varlen, bn, cut.part),
        2: plan.describe(transposed, False, width, bn),
        3: plan.describe(out, varlen, bm, width),
    }
    of_heads = [n for d in descales for n in ((0, 0) if d is None else d.stride())]
    attending = (
        *strides2(lse, varlen), *of_heads,
        o.max_seqlen_q, o.max_seqlen_k, kind.batch * kind.heads, kind.heads, kind.group,
        pieces.blocks, pieces.side_by_side, pieces.total, o.scale, o.softcap, kind.left, kind.right,
        varlen, kind.softcap, x.sinks is not None, kind.has_left, kind.has_right, o.bottom_right,
        not varlen and o.max_seqlen_k % bn == 0, bm, bn, width, cut.stages, cut.consumers,
    )  # fmt: skip
    turns = key_blocks * kind.batch * kv_heads
    found = Forward(
        transpose=Launch(
            "hopper_transpose", transpose_kernel, lambda _: (turns, turning),
            Tile(width, bn, 4, 1), adjustable=False,
        ),
        attend=dealing.Scheduled(
            Launch(
                "hopper_fp8_forward", fp8_forward_kernel, lambda _: (pieces.grid, attending),
                Tile(bm, bn, 4, cut.stages), lambda _: described, adjustable=False,
                describe=TensorDescriptor,
            ),
            pieces.schedule,
        ),
        transposed=tuple(transposed.shape),
        out=(tuple(out.shape), out.stride()),
        lse=(rows, lse.stride()),
    )  # fmt: skip
    buffers = found.buffers(q.device)
    ready = plan.compiles(found.transpose, q.device, _turned(x, buffers[0]))
    attended = (*_attended(x, descales, *buffers), pieces.schedule)
    return found if ready and plan.compiles(found.attend.launch, q.device, attended) else None
