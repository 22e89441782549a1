"""The step in which a followed script ran out of the GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from fa_advisor.attribution.failure import Fallen
from fa_advisor.failing import Raised, raised, with_failure
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.measure import foresee
from fa_advisor.probes.watch import Call, Watch
from fa_advisor.records import DeviceSpec, Mode
from fa_advisor.report import Report
from fa_advisor.steps import name_of
from fa_advisor.target.faults import target_traceback


@dataclass(frozen=True)
class Failure:
    """The step up to its failure, and what is needed to say what it would have taken."""

    fallen: Fallen
    error: Raised
    gpu: GpuLedger
    call: Call | None
    mode: Mode
    optimizer: Optimizer | None

    def told_in(self, report: Report) -> Report:
        """The report of the moment, with the failure in it."""
        return with_failure(report, self.fallen, self.error, self.gpu, self._foresee)

    def _foresee(self, device: DeviceSpec) -> Report | None:
        model = self.call.model if self.call is not None else None
        if self.call is None or model is None:
            return None
        return foresee(
            model, self.call.args, self.call.kwargs, mode=self.mode,
            optimizer=name_of(self.optimizer), device=device,
        )  # fmt: skip


def failure_of(
    error: BaseException | None, watch: Watch, call: Call | None, mode: Mode, gpu: GpuLedger | None
) -> Failure | None:
    """What `error` says of the step that runs; `None` where it isn't about the GPU's memory, or
    the allocator's trace has nothing of it."""
    if gpu is None or not isinstance(error, torch.OutOfMemoryError):
        return None
    failed = watch.stream.failed
    fallen = gpu.fall(failed.sids if failed is not None else ())
    if fallen is None:
        return None
    if call is not None and call.makes_graph:  # it may not have come to backward
        mode = "train"
    optimizer = next(iter(watch.optimizers()), None)
    frames = error.__traceback__
    told = raised(error, target_traceback(error))
    error.__traceback__ = frames  # Python is still to print it
    return Failure(fallen, told, gpu, call, mode, optimizer)
