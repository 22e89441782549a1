"""Hand-written attention, seen by what its tensors are made from.

A product of two activations is a score; a score through a softmax is a probability; a probability
times an activation is attention. A score that meets an activation without a softmax is attention
of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn

Stage = Literal["score", "probability"]
Found = Literal["HAND_WRITTEN", "NON_SOFTMAX"]

_PRODUCTS = {
    torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.bmm,
    Tensor.__matmul__, Tensor.__rmatmul__, Tensor.baddbmm, Tensor.baddbmm_, torch.functional.einsum,
}  # fmt: skip
_ROTATIONS = {torch.cos, torch.sin, Tensor.cos, Tensor.sin}
_SOFTMAXES = {torch.softmax, nn.functional.softmax, Tensor.softmax}


class Lineage:
    """Follows tensors through the calls of one run. Keeps none of them alive."""

    def __init__(self) -> None:
        self._stages: dict[int, tuple[ref[Tensor], Stage]] = {}

    def after(self, func: Any, args: Any, out: Any) -> Found | None:
        """What the call that gave `out` completes, if it completes an attention."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return None
        given = [each for each in _tensors(args) if each.is_floating_point()]
        stages = [self._stage(each) for each in given]
        if func in _SOFTMAXES:
            if "score" in stages:
                self._note(out, "probability")
        elif func in _PRODUCTS:
            return self._product(given, stages, out)
        elif func not in _ROTATIONS:  # positions x frequencies is a product too
            for each, stage in zip(given, stages, strict=True):
                # What keeps the last dim's size still has a row a query: scale, mask, cast,
                # dropout, a slice that takes the sinks off again.
                if stage is not None and out.dim() >= 2 and abs(out.shape[-1] - each.shape[-1]) < 2:
                    self._note(out, stage)
                    break
        return None

    def _product(
        self, given: list[Tensor], stages: list[Stage | None], out: Tensor
    ) -> Found | None:
        operands = [each for each in given if each.dim() >= 3][-2:]
        outer = len(operands) == 2 and operands[0].shape[-1] == 1
        if len(operands) < 2 or outer or any(isinstance(each, nn.Parameter) for each in given):
            return None
        if "probability" in stages:
            return "HAND_WRITTEN"
        if "score" in stages:
            # (QK^T)V as it is. Scores may meet parameters and themselves, so only a product
            # whose other operand is no score counts.
            return "NON_SOFTMAX" if stages.count("score") == 1 else None
        self._note(out, "score")
        return None

    def _note(self, tensor: Tensor, stage: Stage) -> None:
        self._stages[id(tensor)] = (ref(tensor), stage)

    def _stage(self, tensor: Tensor) -> Stage | None:
        entry = self._stages.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
