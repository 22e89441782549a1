"""Where two gradients meet: what autograd's engine does when nobody watches.

It adds into the one that nobody else holds. Under a dispatch mode it makes a third tensor, which
would change the peak that is measured, so the mode adds in place for it, by the engine's own rule
(torch/csrc/autograd/input_buffer.cpp): a plain dense tensor whose last owner is the engine.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Counts = tuple[int, int, int]


def operand_to_add_into(args: tuple[Any, ...]) -> int | None:
    """0 or 1: which operand of the engine's sum it would have reused; `None` for neither.

    `args` are the dispatch mode's own, untouched: one more reference to a tensor would count.
    """
    if len(args) != 2 or not (type(args[0]) is Tensor and type(args[1]) is Tensor):
        return None
    a, b = args
    if a.shape != b.shape or a.dtype != b.dtype or a.layout is not torch.strided:
        return None
    if b.layout is not torch.strided or a.device != b.device:
        return None
    del a, b
    owned = owned_by_the_engine()
    for index in (0, 1):
        if _counts(args, index) == owned and _dense(args[index]):
            return index
    return None


def _counts(args: tuple[Any, ...], index: int) -> Counts:
    """References to the Python object, to the tensor, and to its storage."""
    return (
        sys.getrefcount(args[index]),
        args[index]._use_count(),
        torch._C._storage_Use_Count(args[index].untyped_storage()._cdata),
    )


def _dense(tensor: Tensor) -> bool:
    """Plain values without gaps or overlaps, in whatever order of the dimensions."""
    if tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


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
        return _counts(args, 0)


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
