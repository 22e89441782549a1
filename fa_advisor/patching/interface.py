"""Transformers' attention interface: a key of ours for each implementation that it stands in for.

A key says which implementation the model had, so that a module that isn't patched, or a call that
the kernel doesn't take, runs the original function. Both keys have `sdpa`'s masks: None where
`is_causal` says it all, else boolean. A model that had `eager` computes with them what it computed
with its own, which were the same ones as floats.

Registering a key changes no model: one uses it when its own configuration names it.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fa_advisor.patching import fallback
from fa_advisor.patching.attend import attend, refusal
from fa_advisor.patching.swap import Patched, original_class

# No key may contain "sdpa" or "flash": transformers reads meaning into those words.
KEYS = {"sdpa": "fa_advisor", "eager": "fa_advisor_eager"}
ORIGINALS = {key: original for original, key in KEYS.items()}


class Observer(Protocol):
    """What sees each call of the interface while sites are looked for."""

    def interface(self, call: InterfaceCall) -> Any: ...


OBSERVER: ContextVar[Observer | None] = ContextVar("fa_advisor_observer", default=None)


class InterfaceSite(Patched):
    """An attention module whose calls of the interface go to the kernel."""


class InterfaceCall:
    """One call of the interface: attention of `module` over [B, H, L, D] tensors."""

    def __init__(
        self,
        original: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.original = original
        self.module = module
        self.query, self.key, self.value = query, key, value
        self.mask = attention_mask
        self.kwargs = kwargs

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the causal one that `None` stands for, as `sdpa` reads it."""
        asked = self.kwargs.get("is_causal")
        if asked is None:
            asked = getattr(self.module, "is_causal", True)
        return self.query.shape[2] > 1 and self.mask is None and bool(asked)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.kwargs.get("position_bias")
        return bias

    @property
    def dropout_p(self) -> float:
        return float(self.kwargs.get("dropout") or 0.0)

    def refusal(self) -> str | None:
        """Why the kernel doesn't take this call; `None` where it does."""
        if self.original == "eager" and weights_wanted(self.module):
            return "WEIGHTS_CONSUMED"
        code = refusal(
            self.query, self.key, self.value, self.mask,
            dropout_p=self.dropout_p, enable_gqa=True,
        )  # fmt: skip
        if code is None and self.bias is not None:
            code = refusal(self.query, self.key, self.value, self.bias, enable_gqa=True)
        return code

    def run_patched(self) -> tuple[Tensor, None]:
        """[B, L, H, D] through the kernel."""
        key, value, mask = self.key, self.value, self.mask
        is_causal, bias = self.is_causal, self.bias
        length = self.query.shape[2]
        if is_causal and key.shape[2] > length:
            # A static cache at its first step: what lies behind the queries isn't written yet.
            key, value = key[:, :, :length], value[:, :, :length]
            bias = None if bias is None else bias[..., :length]
        if bias is not None:
            mask = _with_bias(bias, mask, is_causal, length)
            is_causal = False
        out = attend(
            self.query, key, value, mask, dropout_p=self.dropout_p, is_causal=is_causal,
            scale=self.kwargs.get("scaling"), softcap=float(self.kwargs.get("softcap") or 0.0),
            sinks=self.kwargs.get("s_aux"),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def run_original(self) -> Any:
        """What the module's own implementation returns: the output and, from `eager`, weights."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        mask = self.mask
        if self.original == "eager":
            function = eager_function(self.module)
            mask = self._additive_mask()
        else:
            function = ALL_ATTENTION_FUNCTIONS[self.original]
        return function(self.module, self.query, self.key, self.value, mask, **self.kwargs)

    def _additive_mask(self) -> Tensor | None:
        """The float mask that `eager_mask` makes where `sdpa_mask` made this one."""
        mask, query = self.mask, self.query
        if self.is_causal:
            lengths = query.shape[2], self.key.shape[2]
            mask = torch.ones(lengths, dtype=torch.bool, device=query.device).tril()[None, None]
        if mask is None or mask.dtype != torch.bool:
            return mask
        zeros = torch.zeros((), dtype=query.dtype, device=query.device)
        # A float64 reference goes through a float32 softmax, where float64's minimum is -inf.
        narrow = torch.float32 if query.dtype == torch.float64 else query.dtype
        return torch.where(mask, zeros, torch.finfo(narrow).min)


def _with_bias(bias: Tensor, mask: Tensor | None, is_causal: bool, length: int) -> Tensor:
    if is_causal:
        mask = torch.ones(length, bias.shape[-1], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def eager_function(module: nn.Module) -> Any:
    """The `eager_attention_forward` of the file that the module's class is written in.

    Raises: LookupError where that file has none.
    """
    for kind in original_class(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise LookupError(f"{type(module).__name__}'s module has no eager_attention_forward")


def weights_wanted(module: nn.Module) -> bool:
    """Whether the running forward was asked to return the attention weights."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # another release: the configuration is what there is to ask
        return False
    collector: Any = _active_collector
    return any("attentions" in name for name in collector.get() or ())


def _interface(original: str) -> Any:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        call = InterfaceCall(original, module, query, key, value, attention_mask, kwargs)
        if not torch.compiler.is_compiling() and (observer := OBSERVER.get()) is not None:
            return observer.interface(call)
        if not isinstance(module, InterfaceSite):
            return call.run_original()
        code = call.refusal()
        if code is None:
            return call.run_patched()
        fallback.count(module, code)
        return call.run_original()

    attention.__qualname__ = attention.__name__ = f"{KEYS[original]}_attention_forward"
    return attention


def register() -> None:
    """Make the keys known to transformers, which has to be installed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for original, key in KEYS.items():
        AttentionInterface.register(key, _FUNCTIONS[original])
        AttentionMaskInterface.register(key, sdpa_mask)


_FUNCTIONS = {original: _interface(original) for original in KEYS}
