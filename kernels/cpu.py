"""The attention in torch's own operations: what `flash_attention` runs off CUDA.

Meant for correctness: it does what the kernels do, option for option, and computes in float32
(float64 for float64) whatever the dtype. Queries are taken in blocks, each recomputed in backward,
so that memory stays proportional to the length. One block is plain autograd throughout: double
backward, torch.func, vmap and meta tensors work there as in any torch code.

Shapes: B batch, H query heads, G key and value heads, M queries of a block, N keys, D head dim,
E value head dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_advisor.kernels.arguments import Call

# Scores of one block of queries, over batch and heads: 64 MiB of float32.
BLOCK_SCORES = 1 << 24

_NOWHERE = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What makes a logit of a score: where rows and keys stand, and what is added.

    position_M counts among the keys of the row's own sequence (the alignment is in it already);
    sequence_* tells packed sequences apart; alibi broadcasts to [B, H, M, 1].
    """

    position_M: Tensor
    position_N: Tensor
    sequence_M: Tensor | None
    sequence_N: Tensor | None
    bias: Tensor | None
    alibi: Tensor | None
    sinks: Tensor | None

    def rows(self, start: int, stop: int) -> _Terms:
        """The same for rows start to stop."""
        sequence, bias, alibi = self.sequence_M, self.bias, self.alibi
        return replace(
            self,
            position_M=self.position_M[start:stop],
            sequence_M=None if sequence is None else sequence[start:stop],
            bias=bias if bias is None or bias.shape[2] == 1 else bias[:, :, start:stop],
            alibi=alibi if alibi is None or alibi.shape[2] == 1 else alibi[:, :, start:stop],
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
    """out and lse of a validated call; shapes as in `arguments.check`.

    lse is [B, H, Lq] ([H, total] for packed sequences), in the dtype computed in.
    """
    # There is no autocast to turn off for meta tensors.
    with nullcontext() if query.is_meta else torch.autocast(query.device.type, enabled=False):
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        if call.varlen:
            assert cu_seqlens_q is not None and cu_seqlens_k is not None
            query_BHMD, key_BGND, value_BGNE = (
                x.transpose(0, 1).unsqueeze(0).to(dtype) for x in (query, key, value)
            )
            terms = _packed(query, key, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, call)
        else:
            query_BHMD, key_BGND, value_BGNE = (x.to(dtype) for x in (query, key, value))
            terms = _dense(query, key, bias, sinks, alibi_slopes, call)
        out, lse = _by_blocks(query_BHMD * call.scale, key_BGND, value_BGNE, terms, call)
    out = out.to(query.dtype)
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0)) if call.varlen else (out, lse)


def _dense(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    call: Call,
) -> _Terms:
    len_q, len_k = query.shape[2], key.shape[2]
    offset = len_k - len_q if call.bottom_right else 0
    slopes = alibi_slopes
    return _Terms(
        position_M=torch.arange(len_q, device=query.device) + offset,
        position_N=torch.arange(len_k, device=query.device),
        sequence_M=None,
        sequence_N=None,
        bias=bias,
        alibi=None if slopes is None else slopes.reshape(-1, call.num_heads, 1, 1),
        sinks=sinks,
    )


def _packed(
    query: Tensor,
    key: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    call: Call,
) -> _Terms:
    """Packed sequences are one long one, in which a row sees keys of its own sequence alone."""
    token_M = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    token_N = torch.arange(key.shape[0], device=query.device, dtype=torch.int32)
    sequence_M = torch.bucketize(token_M, cu_seqlens_q[1:].contiguous(), right=True)
    sequence_N = torch.bucketize(token_N, cu_seqlens_k[1:].contiguous(), right=True)
    position_M = token_M - cu_seqlens_q[sequence_M]
    if call.bottom_right:
        position_M = position_M + (cu_seqlens_k.diff() - cu_seqlens_q.diff())[sequence_M]
    alibi = None
    if alibi_slopes is not None and alibi_slopes.ndim == 2:
        alibi = alibi_slopes[sequence_M].T[None, :, :, None]
    elif alibi_slopes is not None:
        alibi = alibi_slopes.reshape(1, -1, 1, 1)
    return _Terms(
        position_M=position_M,
        position_N=token_N - cu_seqlens_k[sequence_N],
        sequence_M=sequence_M,
        sequence_N=sequence_N,
        bias=None,
        alibi=alibi,
        sinks=sinks,
    )


def _by_blocks(
    query_BHMD: Tensor, key_BGND: Tensor, value_BGNE: Tensor, terms: _Terms, call: Call
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query_BHMD.shape
    # A compiled graph has no loop, and torch.func no checkpoint: one block there.
    whole = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    scores_per_row = batch * heads * key_BGND.shape[2]
    if whole or rows * scores_per_row <= BLOCK_SCORES:
        return _block(query_BHMD, key_BGND, value_BGNE, terms, call)
    step = max(1, BLOCK_SCORES // scores_per_row)
    blocks = []
    for start in range(0, rows, step):
        part = query_BHMD[:, :, start : start + step]
        part_terms = terms.rows(start, start + step)
        if torch.is_grad_enabled():
            block = checkpoint(
                _block, part, key_BGND, value_BGNE, part_terms, call, use_reentrant=False
            )
        else:
            block = _block(part, key_BGND, value_BGNE, part_terms, call)
        blocks.append(block)
    outs, lses = zip(*blocks, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _block(
    query_BHMD: Tensor, key_BGND: Tensor, value_BGNE: Tensor, terms: _Terms, call: Call
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E] and lse [B, H, M] of one block of scaled queries."""
    logits_BHMN = _logits(_per_group(query_BHMD, key_BGND.mT), terms, call)
    sink_H11 = None if terms.sinks is None else terms.sinks.to(logits_BHMN.dtype)[:, None, None]
    if logits_BHMN.shape[-1] == 0:
        highest = logits_BHMN.new_full((*logits_BHMN.shape[:-1], 1), _NOWHERE)
    else:
        highest = logits_BHMN.detach().amax(-1, keepdim=True)
    if sink_H11 is not None:
        highest = torch.maximum(highest, sink_H11.detach())
    # A row that sees nothing: exp(-inf - 0) is 0, where -inf - -inf would be NaN.
    highest = torch.where(highest == _NOWHERE, 0.0, highest)

    weights_BHMN = torch.exp(logits_BHMN - highest)
    total = weights_BHMN.sum(-1, keepdim=True)
    if sink_H11 is not None:
        total = total + torch.exp(sink_H11 - highest)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, _NOWHERE, highest + torch.log(total)).squeeze(-1)
    weights_BHMN = weights_BHMN / total
    if call.dropout_p:
        weights_BHMN = F.dropout(weights_BHMN, call.dropout_p)
    return _per_group(weights_BHMN, value_BGNE), lse


def _logits(scores_BHMN: Tensor, terms: _Terms, call: Call) -> Tensor:
    if call.softcap:
        scores_BHMN = call.softcap * torch.tanh(scores_BHMN / call.softcap)
    position_M1 = terms.position_M[:, None]
    distance_MN = terms.position_N - position_M1
    if terms.alibi is not None:
        scores_BHMN = scores_BHMN - terms.alibi.to(scores_BHMN.dtype) * distance_MN.abs()
    if terms.bias is not None and terms.bias.dtype != torch.bool:
        scores_BHMN = scores_BHMN + terms.bias

    hidden = []
    if terms.bias is not None and terms.bias.dtype == torch.bool:
        hidden.append(~terms.bias)
    if terms.sequence_M is not None and terms.sequence_N is not None:
        hidden.append(terms.sequence_M[:, None] != terms.sequence_N)
    right = 0 if call.is_causal else call.window_right
    if right is not None:
        hidden.append(distance_MN > right)
    if call.window_left is not None:
        hidden.append(distance_MN < -call.window_left)
    for mask in hidden:
        scores_BHMN = scores_BHMN.masked_fill(mask, _NOWHERE)
    return scores_BHMN


def _per_group(left_BHMX: Tensor, right_BGXY: Tensor) -> Tensor:
    """left @ right, each of right's heads shared by H / G of left's, with no copy of it."""
    batch, heads, rows, _ = left_BHMX.shape
    groups = right_BGXY.shape[1]
    if heads == groups:
        return left_BHMX @ right_BGXY
    folded = left_BHMX.reshape(batch, groups, heads // groups * rows, left_BHMX.shape[3])
    return (folded @ right_BGXY).reshape(batch, heads, rows, right_BGXY.shape[3])
