"""Choices among values that don't exist: the indices of topk, argmax, sort and their like.

On fake tensors nothing says which entry is the largest, but how many indices come out, and from
what range, is known. They are drawn at random instead, as real integers, so that what a model does
with them (one_hot, bincount, nonzero, a loop over experts) works and has honest sizes: a router
then spreads its tokens evenly over its experts, which is what balancing losses train it to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# More indices than this stay fake: nobody loops over so many.
MAX_ELEMENTS = 1 << 20

_aten = torch.ops.aten
_ONE = (_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim)
_SEVERAL = (_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.multinomial.default)
CHOOSERS = frozenset((*_ONE, *_SEVERAL))


class Draws:
    """Draws indices and remembers which storages hold them.

    `read`: the operators whose drawn indices the model computed with.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._generator = torch.Generator().manual_seed(0)  # the user's own is left alone
        self._storages: dict[int, tuple[weakref.ref[Any], str]] = {}

    def draw(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The output of a fake run of one of `CHOOSERS`, with real indices in it."""
        several = isinstance(out, (tuple, list))
        indices = out[1] if several else out
        if not 0 < indices.numel() <= MAX_ELEMENTS:
            return out
        drawn = self._indices(func, args, kwargs, indices.shape)
        storage = drawn.untyped_storage()
        key = storage._cdata
        forget = self._storages.pop
        known = weakref.ref(storage, lambda _: forget(key, None))
        self._storages[key] = (known, func._schema.name.removeprefix("aten::"))
        return type(out)((out[0], drawn)) if several else drawn

    def note_reads(self, inputs: Iterable[Tensor]) -> None:
        """Real tensors are about to be computed with."""
        if self._storages:
            for tensor in inputs:
                known = self._storages.get(tensor.untyped_storage()._cdata)
                if known is not None:
                    self.read.add(known[1])

    def _indices(self, func: Any, args: Any, kwargs: Any, shape: torch.Size) -> Tensor:
        """Each from 0 to the extent of what is chosen from; those of one row are distinct."""
        source = args[0]
        dim = _dim(func, args, kwargs)
        extent = source.numel() if dim is None else source.shape[dim] if source.ndim else 1
        if func in _ONE or not shape:
            return torch.randint(extent, shape, generator=self._generator)
        assert dim is not None
        dim %= len(shape)
        starts = [*shape[:dim], 1, *shape[dim + 1 :]]
        steps = torch.arange(shape[dim]).view([-1] + [1] * (len(shape) - dim - 1))
        return (torch.randint(extent, starts, generator=self._generator) + steps) % extent


def _dim(func: Any, args: Any, kwargs: Any) -> int | None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            if index < len(args):
                return args[index]  # type: ignore[no-any-return]
            return kwargs.get("dim", argument.default_value)  # type: ignore[no-any-return]
    return -1  # multinomial chooses within rows
