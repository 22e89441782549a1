"""Calls that a site hasn't made and may: other lengths, padding, decoding, large logits.

A family of calls differs in lengths and masks alone: the same function, heads, head dims, dtype
and options. One of each family is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_advisor.patching.criterion import compare

# (query, key, value, mask, is_causal) -> the output, [..., L, D] or [..., L, H, D]
Function = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool], Tensor]

BATCH = 2
LENGTHS = (128, 129, 192)  # modulo 128: 0, 1, 64; modulo 32: 1
LARGE = 6.0  # logits of this standard deviation saturate a softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The two functions to compare and the tensors that they take.

    `rows_first`: the output is [B, L, H, D], not [B, H, L, D].
    """

    original: Function
    patched: Function
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    is_causal: bool
    rows_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The trial in which the two differed, and by how much."""

    error: float
    place: str


def first_failure(family: Family) -> Failure | None:
    """The first trial that fails; `None` where all are passed."""
    for name, seqlen_q, seqlen_k, mask, is_causal, scale in _trials(family):
        query, key, value = _tensors(family, seqlen_q, seqlen_k, scale)
        visible = None if mask is None else visible_rows(mask, rows_first=family.rows_first)
        result = compare(
            _call(family.original, mask, is_causal), _call(family.patched, mask, is_causal),
            (query, key, value), ("query", "key", "value"), visible=visible,
        )  # fmt: skip
        if not result.within:
            return Failure(error=result.error, place=f"{result.where}, {name}")
    return _unstable(family) or (_sees_ahead(family) if family.is_causal else None)


def visible_rows(mask: Tensor, *, rows_first: bool = False) -> Tensor:
    """[.., L, 1] (or [B, L, H, 1]): which rows see a key. The others mean nothing: SDPA gives 0,
    `eager` the mean of all values, and torch's CPU kernel a wrong gradient."""
    if mask.dtype == torch.bool:
        visible = mask.any(-1, keepdim=True)
    else:
        visible = (mask > torch.finfo(mask.dtype).min / 2).any(-1, keepdim=True)
    return visible.transpose(1, 2) if rows_first else visible


def _call(function: Function, mask: Tensor | None, is_causal: bool) -> Callable[..., Tensor]:
    def call(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        fitting = mask
        if mask is not None and mask.is_floating_point():
            fitting = mask.to(query.dtype)
        return function(query, key, value, fitting, is_causal)

    return call


def _trials(family: Family) -> Iterator[tuple[str, int, int, Tensor | None, bool, float]]:
    """Name, query length, key length, mask, is_causal, size of the logits."""
    device = family.device
    for length, size in zip(LENGTHS, (1.0, LARGE, 1.0), strict=True):
        yield f"length {length}", length, length, None, family.is_causal, size
    keys = torch.arange(128, device=device)
    right = keys < torch.tensor([[128], [77]], device=device)
    left = keys >= torch.tensor([[0], [51]], device=device)
    for name, padding in (("right padding", right), ("left padding, added", left)):
        mask = padding[:, None, None, :]
        if family.is_causal:
            mask = mask & torch.ones(128, 128, dtype=torch.bool, device=device).tril()
        if padding is left:
            zeros = torch.zeros(mask.shape, device=device, dtype=family.dtype)
            mask = zeros.masked_fill(~mask, torch.finfo(family.dtype).min)
        yield name, 128, 128, mask, False, 1.0
    for seqlen_q in (1, 5):
        decode = torch.ones(seqlen_q, 129, dtype=torch.bool, device=device).tril(129 - seqlen_q)
        yield f"decoding {seqlen_q} of 129", seqlen_q, 129, decode[None, None], False, 1.0


def _tensors(
    family: Family, seqlen_q: int, seqlen_k: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1009 + seqlen_k)

    def draw(heads: int, length: int, dim: int) -> Tensor:
        drawn = torch.randn(BATCH, heads, length, dim, generator=generator)
        return drawn.to(family.device, family.dtype)

    query = draw(family.heads, seqlen_q, family.head_dim) * scale
    key = draw(family.kv_heads, seqlen_k, family.head_dim)
    return query, key, draw(family.kv_heads, seqlen_k, family.value_dim)


def _unstable(family: Family) -> Failure | None:
    """The same call twice gives the same bits."""
    tensors = _tensors(family, 128, 128, 1.0)
    with torch.no_grad():
        first, second = (family.patched(*tensors, None, family.is_causal) for _ in range(2))
    if torch.equal(first, second):
        return None
    return Failure(error=float((first - second).abs().max()), place="the same call twice")


def _sees_ahead(family: Family) -> Failure | None:
    """What comes later changes nothing that was before."""
    query, key, value = _tensors(family, 128, 128, 1.0)
    rows = 1 if family.rows_first else 2
    with torch.no_grad():
        before = family.patched(query, key, value, None, True).narrow(rows, 0, 100)
        key[..., 100:, :] += 3.0
        value[..., 100:, :] += 3.0
        after = family.patched(query, key, value, None, True).narrow(rows, 0, 100)
    if torch.allclose(before, after, rtol=1e-3, atol=1e-3):
        return None
    return Failure(error=float((before - after).abs().max()), place="causality")


def dropout_differs(family: Family, dropout_p: float, patched: Function) -> Failure | None:
    """Whether `patched`, which drops, drops another share than `dropout_p` or scales otherwise.

    With a query of zeros the weights are equal, and with one-hot values the output shows them.
    """
    length = family.value_dim
    query, key, _ = _tensors(family, 256, length, 0.0)
    eye = torch.eye(length, device=family.device, dtype=family.dtype)
    value = eye.expand(BATCH, family.kv_heads, length, length)
    with torch.no_grad():
        kept = family.original(query, key, value, None, False).float()
        dropped = patched(query, key, value, None, False).float()
    share = float((dropped == 0).float().mean())
    spread = (dropout_p * (1 - dropout_p) / dropped.numel()) ** 0.5
    scaled = dropped[dropped != 0] * (1 - dropout_p) / kept[dropped != 0]
    off = float((scaled - 1).abs().max()) if scaled.numel() else 0.0
    if abs(share - dropout_p) <= 6 * spread + 1e-4 and off < 0.02:
        return None
    return Failure(error=max(abs(share - dropout_p), off), place="dropout")
