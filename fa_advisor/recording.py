"""`record`: the engine inside the user's own loop."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fa_advisor.assemble import assemble
from fa_advisor.attribution.failure import Fallen
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.errors import UsageError
from fa_advisor.failing import Raised, raised, with_failure
from fa_advisor.gpu_ledger import GpuLedger, Measured
from fa_advisor.measure import UNCOMPILED, foresee
from fa_advisor.placement import dtype_of, sizes_of, specs_of
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.events import Phase
from fa_advisor.probes.modules import parameters_of
from fa_advisor.probes.opstream import torch_version
from fa_advisor.probes.watch import Call, Watch
from fa_advisor.records import DeviceSpec, Mode, TargetSpec
from fa_advisor.report import Report
from fa_advisor.steps import name_of

_LATE = (
    "the recording ended under a dispatch mode that began inside it: what saw its operators stays,"
    " seeing nothing, on torch's stack of modes until another recording begins"
)


class Recording:
    """Between enter and exit every operator of the process is followed; then `report`.

    Steps end where an optimizer's do; the step with the highest peak is the one reported. On a GPU
    the peak is the allocator's, whose statistics read as they would without us; on the CPU it is
    modelled. Recordings nest. An exception inside passes through, and what was seen until then
    can still be reported.
    """

    def __init__(
        self, model: nn.Module | None, optimizer: Optimizer | None, gpu: str | None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._cuda_index = _cuda_index(model)
        self._device, note = advise_for(gpu, self._cuda_index or 0)
        self._notes = (note,) if note else ()
        self._gpu = (
            GpuLedger(self._cuda_index, self._device) if self._cuda_index is not None else None
        )
        self._ledger: Ledger | GpuLedger = self._gpu or Ledger(
            modelled=True, total_memory_bytes=self._device.total_memory_bytes
        )
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._measured: Measured | None = None
        self._report: Report | None = None
        self._fallen: Fallen | None = None
        self._error: Raised | None = None
        self._state = "new"

    def __enter__(self) -> Recording:
        if self._state != "new":
            raise UsageError(
                "this recording has been used", hint="make another: fa_advisor.record(model)"
            )
        with ExitStack() as stack:
            if self._gpu is not None:
                stack.enter_context(self._gpu)
            watch = Watch(
                self._ledger.feed,
                self._device,
                device_type="cuda" if self._gpu is not None else None,
                stamp=self._gpu.stamp if self._gpu is not None else None,
            )
            stack.enter_context(watch)
            if self._gpu is not None:
                watch.on_end = self._gpu.end_step
            if self._model is not None:
                watch.add_model(self._model)
            if self._optimizer is not None:
                watch.label_optimizer(self._optimizer)
            self._watch = watch
            self._stack = stack.pop_all()
        self._state = "running"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        frames: TracebackType | None = None,
    ) -> None:
        watch = self._watch
        if watch is not None:
            watch.stream.flush()
        if isinstance(error, torch.OutOfMemoryError) and self._gpu is not None:
            failed = watch.stream.failed if watch is not None else None
            self._fallen = self._gpu.fall(failed.sids if failed is not None else ())
            self._error = raised(error)
        if self._fallen is None:
            self._ledger.end_step()
        if self._gpu is not None:
            self._measured = self._gpu.measured()
        self._stack.close()
        self._state = "done"

    @property
    def report(self) -> Report:
        """Raises: UsageError while the recording runs, or where no operator ran in it."""
        if self._report is None:
            self._report = self._make()
        return self._report

    def _make(self) -> Report:
        step, watch = self._ledger.best, self._watch
        if self._state != "done" or watch is None:
            raise UsageError("the recording hasn't ended", hint="read .report after the with block")
        if step is None or not watch.stream.op_count:
            raise UsageError("nothing ran while recording", hint="call the model inside the block")
        model = self._model if self._model is not None else watch.scopes.first_root()
        called = watch.calls.values()
        call = next((c for c in called if c.model is model), next(iter(called), None))
        trained = any(entry.phase is not Phase.FORWARD for entry in step.entries)
        if self._fallen is not None and call is not None:  # it may not have come to backward
            trained = trained or call.makes_graph
        mode: Mode = "train" if trained else "infer"
        report = assemble(
            step=step,
            types=watch.scopes.types,
            device=self._device,
            target=target_of(model, call, mode),
            torch_version=torch_version(),
            measured=self._measured,
            notes=(
                *self._notes,
                *(self._gpu.notes if self._gpu is not None else ()),
                *((_LATE,) if watch.stream.late else ()),
                *((UNCOMPILED,) if watch.met_compiled else ()),
                *calls_elsewhere(watch),
            ),
        )
        if self._fallen is None or self._error is None or self._gpu is None:
            return report
        optimizer = self._optimizer or next(iter(watch.optimizers()), None)

        def whole_step(device: DeviceSpec) -> Report | None:
            if model is None or call is None:
                return None
            return foresee(
                model, call.args, call.kwargs, mode=mode, optimizer=name_of(optimizer),
                device=device,
            )  # fmt: skip

        return with_failure(report, self._fallen, self._error, self._gpu, whole_step)


def record(
    model: nn.Module | None = None, optimizer: Optimizer | None = None, *, gpu: str | None = None
) -> Recording:
    """Record the memory of a loop of the user's own: `with fa_advisor.record(model) as rec: ...`.

    `model` and `optimizer` may be left out: models are found when they are called, optimizers when
    they step. `gpu`: the GPU to advise for, where it isn't the one found.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(
            f"record takes an nn.Module, not {type(model).__name__}",
            hint="leave it out to follow several models: each is found when it is called",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"record takes a torch optimizer, not {type(optimizer).__name__}",
            hint="leave it out to follow several: each is found when it steps",
        )
    return Recording(model, optimizer, gpu)


def target_of(
    model: nn.Module | None, call: Call | None, mode: Mode, path: str | None = None
) -> TargetSpec:
    """What ran in a step: the model, and how it was called."""
    parameters = list(parameters_of(model)) if model is not None else []
    args, kwargs = (call.args, call.kwargs) if call is not None else ((), {})
    called = call.model if call is not None and call.model is not None else model
    batch, length = sizes_of((args, kwargs))
    dtype = dtype_of(model) if model is not None else torch.float32
    return TargetSpec(
        path=path,
        name=type(model).__name__ if model is not None else "",
        mode=mode,
        dtype=str(dtype).removeprefix("torch."),
        batch_size=batch,
        seq_len=length,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        inputs=specs_of(called, args, kwargs) if called is not None else (),
    )


def calls_elsewhere(watch: Watch) -> tuple[str, ...]:
    """A note where modules ran in threads that aren't followed."""
    count = watch.scopes.calls_elsewhere
    if not count:
        return ()
    return (
        f"{count:,} calls of modules in other threads were not followed: what they made is missing",
    )


def _cuda_index(model: nn.Module | None) -> int | None:
    """The CUDA device to follow; `None` where the model is on the CPU, or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    parameters: Any = parameters_of(model) if model is not None else ()
    for parameter in parameters:
        if parameter.device.type == "cuda":
            return parameter.device.index or 0
        return None
    return torch.cuda.current_device()
