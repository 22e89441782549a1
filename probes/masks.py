"""Whether a buffer is a causal mask, read from its values where they can be had for free."""

from __future__ import annotations

import torch
from torch import Tensor

# Larger masks on a GPU aren't copied to the host to be looked at.
MAX_COPY_BYTES = 64 << 20
_MARK = "_fa_advisor_triangular"


def is_triangular(buffer: Tensor) -> bool:
    """Is a buffer [..., N, N] a causal mask? Fake tensors have no values to tell.

    One row and one column decide: above the diagonal all the same, below it all the same, and
    the two differ.
    """
    if getattr(buffer, _MARK, False):
        return True
    if buffer.ndim < 2 or buffer.shape[-1] != buffer.shape[-2] or buffer.shape[-1] < 2:
        return False
    if type(buffer) is not Tensor or not buffer.numel():
        return False
    with torch.no_grad():
        last = buffer[(0,) * (buffer.ndim - 2)]
        if last.device.type == "cuda":
            if not last.is_contiguous() or last.nbytes > MAX_COPY_BYTES:
                return False
            last = last.cpu()  # a plain copy: nothing is made on the GPU
        elif last.device.type != "cpu":
            return False
        above, below = last[0, 1:], last[1:, 0]
        alike = (above == above[0]).all() and (below == below[0]).all()
        return bool(alike and above[0] != below[0])


def mark_triangular(buffer: Tensor) -> None:
    """Remember on a fake buffer what its real values told."""
    setattr(buffer, _MARK, True)
