"""`patch(model)`: what the user calls, and what it returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fa_advisor.errors import UsageError
from fa_advisor.patching import fallback
from fa_advisor.patching.configs import IMPLEMENTATION, OwnConfigs, name_originals
from fa_advisor.patching.discover import Discovery
from fa_advisor.patching.elsewhere import elsewhere
from fa_advisor.patching.encoder import UnfusedEncoderLayer, around
from fa_advisor.patching.example import Call, calls
from fa_advisor.patching.interface import KEYS, InterfaceSite
from fa_advisor.patching.mha import FusedMultihead
from fa_advisor.patching.sites import BACKEND, Site
from fa_advisor.patching.swap import is_patched, restore, swap
from fa_advisor.records import Form, PatchedSite, PatchOutcome, Predicted

_UNMEASURED = Predicted(peak_allocated_bytes=None, time_ms=None)


class Handle:
    """A patched model: what was done to it, and the way back.

    `report` says site by site what was patched or why not; `details` has a sentence for each
    refusal that has more to say. As a context manager it restores the model at exit.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list[nn.Module],
        configs: OwnConfigs | None,
        report: PatchOutcome,
        details: dict[str, str],
        *,
        adopted: bool,
    ) -> None:
        # Weakly: a handle that is kept for a second `patch` must not keep the model.
        self._model = ref(model)
        self.report = report
        self.details = details
        self._modules = WeakSet(modules)
        self._configs = configs
        self._adopted = adopted
        self._active = True

    @property
    def active(self) -> bool:
        """Whether the model is patched still."""
        return self._active

    @property
    def model(self) -> nn.Module | None:
        """The model; `None` once it is gone."""
        return self._model()

    @property
    def patched(self) -> int:
        """How many sites were patched."""
        return sum(site.status == "patched" for site in self.report.sites)

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        """{fqn: {code: calls}} of the calls that ran a patched site's original code."""
        model = self.model
        return {} if model is None else fallback.counts(model.named_modules())

    def unpatch(self) -> None:
        """Give every module its own class back; a second time does nothing."""
        if not self._active:
            return
        self._active = False
        for module in self._modules:
            restore(module)
            _OWNERS.pop(module, None)
        model = self.model
        if self._configs is not None:
            self._configs.undo()
        elif self._adopted and model is not None:
            name_originals(model)
        if model is not None and _HANDLES.get(model) is self:
            del _HANDLES[model]

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        state = "" if self._active else ", undone"
        return f"<Handle: {self.patched} of {len(self.report.sites)} sites patched{state}>"


_HANDLES: WeakKeyDictionary[nn.Module, Handle] = WeakKeyDictionary()
_OWNERS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def patch(model: nn.Module, *, example: Any = None, verify: bool = True) -> Handle:
    """Put `flash_attention` behind the attention of this model, site by site, where it holds.

    The model runs on `example` - a tensor, a tuple of arguments, a dict of keyword arguments;
    made up from the model's structure where it is None - in eval mode and without gradients, as
    it is. Each attention call found is computed both ways and compared, output and gradients, by
    FlashAttention's criterion, and so are further lengths, paddings and decoding steps; then the
    sites that passed are patched and the others left alone, each with a code (docs/patching.md).
    `verify=False` finds and patches without comparing.

    Only this instance is changed: no function is replaced, no other model of the same class or
    configuration affected. Patching a patched model returns the handle that it has.

    Raises: UsageError where `model` is no module, where no inputs can be made up, and where the
    model's forward raises on them.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"patch: expected an nn.Module, got {type(model).__name__}",
            hint="pass the model itself, not its class or its output",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"patch: expected a module in Python, got the scripted {type(model).__name__}",
            hint="patch the model before torch.jit.script, which then compiles the kernel's op",
        )
    handle = _HANDLES.get(model)
    if handle is not None and handle.active:
        return handle
    handle = _patch(model, example, verify)
    if handle.patched:  # where nothing was, a later call may find the reason gone
        _HANDLES[model] = handle
    return handle


def _patch(model: nn.Module, example: Any, verify: bool) -> Handle:
    # A compiled wrapper runs its graph; what is looked for is in the module that it wraps.
    inner = getattr(model, "_orig_mod", model)
    patched = [(name, each) for name, each in model.named_modules() if is_patched(each)]
    # A copy of a patched model, or one that was unpickled: nobody's yet.
    adopted = [(name, each) for name, each in patched if each not in _OWNERS]
    records = [
        _adopted_record(name, module)
        for name, module in patched
        if not isinstance(module, UnfusedEncoderLayer)
    ]
    sites: list[Site] = []
    configs = None
    if not adopted:
        sites, configs = _find(inner, calls(inner, example), verify)
        sites += elsewhere(inner, sites)
        names = {module: name for name, module in model.named_modules()}
        for site in sites:
            site.fqn = names.get(site.module, site.fqn)
    modules = [module for _, module in adopted]
    for site in sites:
        if site.code is None and site.kind is not None:
            try:
                swap(site.module, site.kind)
            except Exception as error:  # A metaclass or an __init_subclass__ may raise anything.
                kind = type(site.module).__name__
                site.refuse("CLASS_FIXED", f"{kind} can't be given another class: {error}")
                continue
            modules.append(site.module)
    for layer in list(around(modules, model)):
        with suppress(
            Exception
        ):  # It keeps torch's fused operator then, and is right all the same.
            swap(layer, UnfusedEncoderLayer)
            modules.append(layer)
    records += [site.record() for site in sites]
    records = records or [_no_attention()]
    for module in modules:
        _OWNERS[module] = True
    report = PatchOutcome(sites=tuple(records), before=_UNMEASURED, after=_UNMEASURED)
    details = {site.fqn: site.detail for site in sites if site.code is not None and site.detail}
    return Handle(model, modules, configs, report, details, adopted=bool(adopted))


def _find(model: nn.Module, runs: list[Call], verify: bool) -> tuple[list[Site], OwnConfigs | None]:
    """The model's sites, tried; and its own configurations where one of them needs those."""
    with _quiet(model):
        if has_interface(model):
            expected = [_outputs(model, run) for run in runs]
            configs = OwnConfigs(model)
            try:
                found = _observe(model, runs, verify, expected)
            except Exception:  # the model reads more into the name than transformers does
                found = None
            except BaseException:
                configs.undo()
                raise
            if found is not None and any(
                site.kind is InterfaceSite and site.code is None for site in found.sites
            ):
                return list(found.sites), configs
            configs.undo()
            if found is not None:
                return list(found.sites), None
        found = _observe(model, runs, verify, None)
        assert found is not None
        return list(found.sites), None


def _observe(
    model: nn.Module, runs: list[Call], verify: bool, expected: list[list[Tensor]] | None
) -> Discovery | None:
    """Run the model under observation; `None` where it doesn't give what is expected."""
    discovery = Discovery(model, verify=verify)
    for index, run in enumerate(runs):
        with discovery.attached():
            output = _run(model, run)
        discovery.settle(output)
        if expected is not None and not _same(_floats(output), expected[index]):
            return None
        del output
    discovery.settle_kept()
    return discovery


def has_interface(model: nn.Module) -> bool:
    """Whether every transformers model in here takes its attention from the interface."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return bool(models) and all(
        each._can_set_attn_implementation() and getattr(each.config, IMPLEMENTATION, None) in KEYS
        for each in models
    )


def _outputs(model: nn.Module, run: Call) -> list[Tensor]:
    return _floats(_run(model, run))


def _run(model: nn.Module, run: Call) -> Any:
    args, kwargs = run
    try:
        return model(*args, **kwargs)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__}'s forward raised {type(error).__name__} on the inputs that "
            f"its attention was looked for with: {error}",
            hint="give inputs that it takes: patch(model, example=inputs)",
        ) from error


def _floats(output: Any) -> list[Tensor]:
    return [
        each.detach()
        for each in tree_leaves(output)
        if isinstance(each, Tensor) and each.is_floating_point()
    ]


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), 1e-3, 1e-3, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and the random generators left as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {each.get_device() for each in model.parameters() if each.is_cuda}
    try:
        for module, _ in modes:
            module.training = False
        with (
            torch.random.fork_rng(sorted(devices)),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _adopted_record(name: str, module: nn.Module) -> PatchedSite:
    form: Form = "mha" if isinstance(module, FusedMultihead) else "sdpa"
    return PatchedSite(
        fqn=name, form=form, backend=BACKEND, status="patched", code=None, max_error=None
    )


def _no_attention() -> PatchedSite:
    return PatchedSite(
        fqn="", form="eager", backend="none", status="refused", code="NO_ATTENTION", max_error=None
    )
