"""Whether anyone uses a tensor that a module returned: attention weights above all."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class WatchedTensor(Tensor):
    """A tensor that notes on its tell-tale when anything is done with it."""

    telltale: Telltale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(tensor: WatchedTensor) -> Tensor:
            # Read past __torch_function__, which would note the reading.
            with torch._C.DisableTorchFunctionSubclass():
                tensor.__dict__["telltale"].used = True
                return tensor.as_subclass(Tensor)

        args, kwargs = tree_map_only(WatchedTensor, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class Telltale:
    """What happened to one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.used = False
        self._watched: ref[Tensor] | None = None
        self._tensor = tensor.detach()

    def watched(self) -> Tensor:
        """The tensor to hand out in place of the original."""
        made = self._tensor.as_subclass(WatchedTensor)
        made.__dict__["telltale"] = self
        self._watched = ref(made)
        return made

    @property
    def alive(self) -> bool:
        """Whether it is still held by someone."""
        return self._watched is not None and self._watched() is not None


def in_output(telltale: Telltale, output: Any) -> bool:
    """Whether the model hands the tensor on to its caller."""
    return any(
        isinstance(leaf, WatchedTensor) and leaf.__dict__["telltale"] is telltale
        for leaf in tree_leaves(output)
    )
