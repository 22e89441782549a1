"""Modules whose own forward calls scaled_dot_product_attention.

While such a module's forward runs, in that thread and nowhere else, a TorchFunctionMode turns the
calls into the kernel's. It is entered inside the forward, so the recompute of a checkpoint around
the module has it too, and torch.compile traces through it. The recompute of a checkpoint *inside*
the forward runs when the forward is over: what is checkpointed there stays as it was, both times.
"""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fa_advisor.patching import fallback
from fa_advisor.patching.attend import attend, refusal
from fa_advisor.patching.swap import Patched


class RedirectedSdpa(Patched):
    """A module whose calls of scaled_dot_product_attention go to the kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Redirection(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Redirection(TorchFunctionMode):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.surroundings = _surroundings()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            if not torch.compiler.is_compiling() and _surroundings() != self.surroundings:
                fallback.count(self.module, "CHECKPOINT_INSIDE")
                return func(*args, **kwargs)
            return sdpa(self.module, *args, **kwargs)
        if torch.compiler.is_compiling() and args and func.__name__ in _PYTHON_METHODS:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)


def _surroundings() -> tuple[bool, Any]:
    """What a checkpoint changes for what it runs: gradients, or what becomes of saved tensors."""
    if torch.compiler.is_compiling():
        return True, None
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


# Methods that torch writes in Python (unflatten, split, norm). torch.compile knows them as
# methods of a tensor; as plain functions it would break the graph at their super().
_PYTHON_METHODS = frozenset(
    name for name, method in vars(Tensor).items() if isfunction(method) and name[0] != "_"
)


def sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention through the kernel, or as it was where the kernel can't."""
    code = refusal(
        query, key, value, attn_mask,
        dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa,
    )  # fmt: skip
    if code is None:
        return attend(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    fallback.count(module, code)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
