"""What torch does in place when nobody watches, and would do in new memory under a dispatch mode.

Autograd's engine adds two gradients into the first where it alone holds that, and a few backward
formulas fill a tensor that they have just made; both ask whether a mode is on, and make one tensor
more if it is (at::isTensorSubclassLike). That would change the peak that is measured, so the mode
does it in place for them, by their own rules.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_aten = torch.ops.aten

Counts = tuple[int, int, int]


def owns_the_first(args: tuple[Any, ...]) -> bool:
    """Whether the first of two tensors is dense, holds the result of the two, and has one owner
    left: then autograd's engine adds into it (torch/csrc/autograd/input_buffer.cpp).

    `args` are the dispatch mode's own, untouched: one more reference to a tensor would count.
    """
    if len(args) != 2 or not (type(args[0]) is Tensor and type(args[1]) is Tensor):
        return False
    a, b = args
    fits = a.dtype == b.dtype and a.device == b.device and _reaches(b.shape, a.shape)
    strided = a.layout is torch.strided and b.layout is torch.strided
    del a, b
    return fits and strided and _counts(args) == owned_by_the_engine() and _dense(args[0])


def _reaches(shape: torch.Size, other: torch.Size) -> bool:
    return shape == other or (
        len(shape) <= len(other)
        and all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))
    )


def _counts(args: tuple[Any, ...]) -> Counts:
    """References to the first one's Python object, to the tensor, and to its storage."""
    return (
        sys.getrefcount(args[0]),
        args[0]._use_count(),
        torch._C._storage_Use_Count(args[0].untyped_storage()._cdata),
    )


def _dense(tensor: Tensor) -> bool:
    """Plain values without gaps or overlaps, in whatever order of the dimensions."""
    if tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


_SELECTS = frozenset(
    f"{name}Backward{number}"
    for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort")
    for number in (0, 1)
)
# Operators of backward formulas (torch/csrc/autograd/FunctionsManual.cpp): of which nodes, and what
# an unwatched run does to the zeros that the node has made.
_FILLS: dict[Any, tuple[frozenset[str], Any]] = {
    _aten.index_put.default: (
        frozenset(("IndexBackward0",)),
        lambda zeros, indices, grad, accumulate: _aten._index_put_impl_.default(
            zeros, indices, grad, accumulate, True
        ),
    ),
    _aten.scatter.src: (_SELECTS, _aten.scatter_.src),
    _aten.scatter_add.default: (
        frozenset(("GatherBackward0", "CummaxBackward0", "CumminBackward0")),
        _aten.scatter_add_.default,
    ),
    _aten.index_add.default: (frozenset(("IndexSelectBackward0",)), _aten.index_add_.default),
    _aten.put.default: (frozenset(("TakeBackward0",)), _aten.put_.default),
}
# A formula whose steps go into what the step before has made (with a `pos_weight` not all do).
_CHAIN = "BinaryCrossEntropyWithLogitsBackward0"
_LINKS = {_aten.sub.Tensor: _aten.sub_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor}

NAMES = frozenset(
    func._schema.name.removeprefix("aten::") for func in (*_FILLS, *_LINKS, _aten.add.Tensor)
)


def unwatched(func: Any, node: Any, args: tuple[Any, ...]) -> Any:
    """What runs instead of `func` within autograd's `node`, without grad mode, when nobody watches;
    mostly `func`. Only operators of a name in `NAMES` can be others."""
    if func is _aten.add.Tensor:
        return _aten.add_.Tensor if owns_the_first(args) else func
    if func in _LINKS:
        return _LINKS[func] if node.name() == _CHAIN and owns_the_first(args) else func
    nodes, instead = _FILLS.get(func, (frozenset(), func))
    return instead if node.name() in nodes else func


class _Calibration(TorchDispatchMode):
    """Sees the engine add two tensors that it alone owns."""

    seen: Counts | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen = self._as_the_stream_asks(args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _as_the_stream_asks(args: tuple[Any, ...]) -> Counts:
        return _counts(args)


@cache
def owned_by_the_engine() -> Counts | None:
    """The counts of a tensor that the engine alone owns, seen from inside a dispatch mode.

    Asked for the first time, it runs a backward: not from inside a mode.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        middle = leaf * 2
        (total,) = (middle.sin() + middle.cos()).unbind()
        calibration = _Calibration()  # type: ignore[no-untyped-call]
        with calibration:
            total.backward()
    seen: Counts | None = calibration.seen
    return seen
