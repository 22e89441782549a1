"""What is kept of a step beside its log, and the report of the step that is reported."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fa_advisor.assemble import assemble
from fa_advisor.attribution.steps import StepLog
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.probes.modules import buffers_of, parameters_of
from fa_advisor.probes.opstream import torch_version
from fa_advisor.probes.watch import Call, Watch
from fa_advisor.recording import calls_elsewhere, target_of
from fa_advisor.records import DeviceSpec, Mode, PatchOutcome, TargetSpec
from fa_advisor.report import Report
from fa_advisor.target.geometry import max_positions

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


@dataclass(frozen=True)
class StepFacts:
    """As it was when the step ended: later the model may be gone."""

    number: int
    target: TargetSpec
    max_positions: int | None
    elsewhere_bytes: int  # of parameters, buffers, optimizer state on another kind of device
    patch: PatchOutcome | None


def facts_of(
    watch: Watch,
    root: nn.Module | None,
    call: Call | None,
    *,
    number: int,
    mode: Mode,
    path: str,
    kind_of_device: str,
    patch: PatchOutcome | None,
) -> StepFacts:
    """Of the step that ends now. `root`: the model of `call`, in which most operators ran."""
    model = unwrapped(root) if root is not None else None
    return StepFacts(
        number=number,
        target=target_of(model, call, mode, path),
        max_positions=_positions(model) if model is not None else None,
        elsewhere_bytes=_elsewhere(watch, kind_of_device),
        patch=patch,
    )


def report_of(
    step: StepLog,
    facts: StepFacts,
    watch: Watch,
    device: DeviceSpec,
    gpu: GpuLedger | None,
    notes: tuple[str, ...],
) -> Report:
    """The report of a step that was followed; `notes` come first among what it has to say."""
    return assemble(
        step=step,
        types=watch.scopes.types,
        device=device,
        target=facts.target,
        torch_version=torch_version(),
        measured=gpu.measured() if gpu is not None else None,
        max_positions=facts.max_positions,
        notes=(*notes, *_unseen(facts, watch, gpu is not None), *(gpu.notes if gpu else ())),
        patch=facts.patch,
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model, not what torch has put around it."""
    while (name := _WRAPPERS.get(type(model).__name__)) is not None:
        inner = model._modules.get(name)
        if inner is None:
            break
        model = inner
    return model


def _positions(model: nn.Module) -> int | None:
    try:
        return max_positions(model)
    except Exception:  # a property or a `__getattr__` of the user's own
        return None


def _elsewhere(watch: Watch, kind: str) -> int:
    tensors: list[Tensor] = []
    for root in watch.scopes.roots():
        tensors += [*parameters_of(root), *buffers_of(root)]
    for optimizer in watch.optimizers():
        for state in optimizer.state.values():
            if isinstance(state, dict):
                tensors += [t for t in state.values() if isinstance(t, Tensor) and t.ndim]
    others = {id(t): t.nbytes for t in tensors if t.device.type not in (kind, "meta")}
    return sum(others.values())


def _unseen(facts: StepFacts, watch: Watch, on_gpu: bool) -> list[str]:
    """What the report can't show, in words."""
    notes = []
    if facts.elsewhere_bytes:
        where = "the host" if on_gpu else "the GPU"
        notes.append(
            f"{facts.elsewhere_bytes:,} bytes of parameters, buffers and optimizer state are on"
            f" {where}, and not in this report"
        )
    if facts.patch is not None and not on_gpu:
        notes.append(
            "on the CPU a patched model's attention runs through torch: what it holds here is not"
            " what the kernel holds on a GPU"
        )
    if watch.met_compiled:
        notes.append(
            "what torch.compile compiles ran uncompiled while it was followed; compiled, it may"
            " hold less, and after these steps it is"
        )
    return [*notes, *calls_elsewhere(watch)]
