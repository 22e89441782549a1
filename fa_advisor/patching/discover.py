"""Finding a model's attention sites by running it, and trying each call as it comes.

The model runs as it is: the original computes every result that is handed on, and what the kernel
would have given is compared beside it. One call's tensors are held at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fa_advisor.kernels.arguments import unsupported_gpu
from fa_advisor.patching import attempts
from fa_advisor.patching.attend import refusal
from fa_advisor.patching.interface import OBSERVER, InterfaceCall, InterfaceSite, eager_function
from fa_advisor.patching.lineage import Lineage
from fa_advisor.patching.mha import (
    FusedMultihead,
    FusedMultiheadWithoutWeights,
    configuration_refusal,
    multihead_refusal,
)
from fa_advisor.patching.sdpa import RedirectedSdpa
from fa_advisor.patching.sites import Site, Sites
from fa_advisor.patching.swap import Patched
from fa_advisor.patching.trials import Failure
from fa_advisor.patching.watched import Telltale, in_output
from fa_advisor.records import Form


class Discovery(TorchFunctionMode):
    """Collects sites into `sites` while it is active and `attached` to the model.

    `verify`: whether each call is compared with the kernel's.
    """

    def __init__(self, root: nn.Module, *, verify: bool) -> None:
        super().__init__()
        self.root = root
        self.verify = verify
        self.sites = Sites(names={module: name for name, module in root.named_modules()})
        self._stack: list[nn.Module] = []
        self._muted = False
        self._lineage = Lineage()
        self._tried: dict[Hashable, Failure | None] = {}
        self._telltales: list[tuple[Site, Telltale]] = []
        self._hooked = {module for module in self.sites.names if _has_hooks(module)}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While inside, calls of the model are seen."""
        token = OBSERVER.set(self)
        try:
            with ExitStack() as stack:
                for module in self.sites.names:
                    if isinstance(module, torch.jit.ScriptModule):
                        continue  # It takes no hooks, and nothing in it can be changed.
                    stack.callback(module.register_forward_pre_hook(self._enter).remove)
                    leave = module.register_forward_hook(
                        self._leave, with_kwargs=True, always_call=True
                    )
                    stack.callback(leave.remove)
                with self:
                    yield
        finally:
            OBSERVER.reset(token)

    def settle(self, output: Any) -> None:
        """Refuse the sites whose weights the run's output holds or someone used."""
        for site, telltale in self._telltales:
            if telltale.used or in_output(telltale, output):
                site.refuse("WEIGHTS_CONSUMED", "the attention weights are used")

    def settle_kept(self) -> None:
        """Refuse the sites whose weights are still held, once the run's output is let go."""
        if any(telltale.alive for _, telltale in self._telltales):
            gc.collect()  # what is left in a cycle isn't kept
        for site, telltale in self._telltales:
            if telltale.alive:
                site.refuse("WEIGHTS_CONSUMED", "the attention weights are kept")
        self._telltales.clear()
        for site in self.sites:
            if site.kind is RedirectedSdpa and site.code is None:
                self._refuse_over_others(site)

    def _refuse_over_others(self, site: Site) -> None:
        """A redirection covers the modules below; one of those that keeps its own vetoes it."""
        for other in self.sites:
            below = other is not site and other.module in set(site.module.modules())
            if below and other.code is not None and other.form == "sdpa":
                site.refuse(other.code, f"{other.fqn}, which it contains, keeps its own")

    # What is called from inside the model, in its own thread.

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        while self._stack and self._stack.pop() is not module:
            pass
        if isinstance(module, nn.MultiheadAttention) and output is not None:
            return self._multihead(module, args, kwargs, output)
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = self._stack[-1] if self._stack else self.root
        if self._muted or isinstance(owner, Patched):
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return self._sdpa(owner, *args, **kwargs)
        out = func(*args, **kwargs)
        if func is multi_head_attention_forward:
            if not isinstance(owner, nn.MultiheadAttention):
                self.sites.at(owner, "mha", "torch").refuse("HAND_WRITTEN")
            return out
        found = self._lineage.after(func, (args, tuple(kwargs.values())), out)
        if found is not None:
            self.sites.at(owner, "eager", "eager").refuse(found)
        return out

    def _sdpa(
        self,
        owner: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        site = self.sites.at(owner, "sdpa", "sdpa", RedirectedSdpa)
        code = refusal(
            query, key, value, attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa,
        )  # fmt: skip
        if code is not None:
            site.refuse(code)
        elif (reason := _no_kernel(query)) is not None:
            site.refuse("DEVICE", reason)
        elif "forward" in vars(owner):
            site.refuse("FORWARD_REPLACED", "the instance has a forward of its own")
        else:
            self._try(
                site, attempts.of_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            )
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def interface(self, call: InterfaceCall) -> Any:
        """One call of transformers' attention interface."""
        with self._mute():
            if isinstance(call.module, Patched):
                return call.run_original()
            eager = call.original == "eager"
            form: Form = "eager" if eager else "sdpa"
            site = self.sites.at(call.module, form, call.original, InterfaceSite)
            if eager:
                try:
                    eager_function(call.module)
                except LookupError as error:
                    site.refuse("HAND_WRITTEN", str(error))
                    raise
            code = call.refusal()
            if code is not None:
                site.refuse(code)
            elif (reason := _no_kernel(call.query)) is not None:
                site.refuse("DEVICE", reason)
            elif eager and call.module in self._hooked:
                site.refuse("HOOK_ON_WEIGHTS", "a forward hook sees the attention weights")
            else:
                self._try(site, attempts.of_interface(call))
            result = call.run_original()
            if eager and isinstance(result[1], Tensor):
                telltale = Telltale(result[1])
                self._telltales.append((site, telltale))
                return result[0], telltale.watched()
            return result

    def _multihead(self, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> Any:
        if isinstance(module, Patched):
            return None
        site = self.sites.at(module, "mha", "torch", FusedMultihead)
        if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
            site.refuse("FORWARD_REPLACED", "its forward isn't nn.MultiheadAttention's")
            return None
        call = attempts.MultiheadCall(module, *args, **kwargs)
        code = configuration_refusal(module) or multihead_refusal(
            module, call.query, call.key, call.value, call.key_padding_mask, call.attn_mask,
            call.is_causal,
        )  # fmt: skip
        reason = _no_kernel(call.query)
        if code is not None or reason is not None:
            site.refuse(code or "DEVICE", reason or "")
            return None
        with self._mute():
            self._try(site, attempts.of_multihead(call))
        if not call.need_weights or output[1] is None:
            return None
        if module in self._hooked:
            site.refuse("HOOK_ON_WEIGHTS", "a forward hook sees the attention weights")
        site.kind = FusedMultiheadWithoutWeights
        telltale = Telltale(output[1])
        self._telltales.append((site, telltale))
        return output[0], telltale.watched()

    def _try(self, site: Site, attempt: attempts.Attempt) -> None:
        """Hold the kernel against the original on this call and on those of its family."""
        if not self.verify or site.code is not None:
            return
        with self._mute():
            result = attempt.compare()
            if result is not None:
                if not result.within:
                    site.refuse("NUMERIC_FAIL", result.where, result.error)
                    return
                site.measured(result.error)
            for key, trial in attempt.trials:
                if key not in self._tried:
                    self._tried[key] = trial()
                failure = self._tried[key]
                if failure is not None:
                    site.refuse("NUMERIC_FAIL", failure.place, failure.error)
                    return

    @contextmanager
    def _mute(self) -> Iterator[None]:
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before


def _no_kernel(query: Tensor) -> str | None:
    """Why the kernel can't run where this tensor is; `None` where it can."""
    if not query.is_cuda:
        return None
    if find_spec("triton") is None:
        return "there is no Triton to compile it with"
    return unsupported_gpu(query.device.index)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a forward hook of the user's sees the module's output. transformers' own hooks
    collect outputs that were asked for, which is seen by other means."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.")
        for hook in module._forward_hooks.values()
    )
