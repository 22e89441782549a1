"""Two steps of a model under the watch, the second measured, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fa_advisor.assemble import assemble
from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.errors import TargetError
from fa_advisor.failing import Raised, raised, with_failure
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.placement import Placement, dtype_of, sizes_of, specs_of
from fa_advisor.probes.events import Event
from fa_advisor.probes.fake import FakeDevice
from fa_advisor.probes.opstream import torch_version
from fa_advisor.probes.watch import Watch
from fa_advisor.records import DeviceSpec, Mode, Progress, TargetSpec
from fa_advisor.report import Report
from fa_advisor.steps import OptimizerName, Step, make_optimizer
from fa_advisor.target.faults import target_traceback
from fa_advisor.target.geometry import max_positions

OnProgress = Callable[[Progress], None]
UNCOMPILED = "what torch.compile compiles ran uncompiled here: compiled, it may hold less"


@dataclass
class Run:
    """A model with its inputs, on the device where it runs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    optimizer: OptimizerName
    placement: Placement
    fake: FakeDevice | None
    device: DeviceSpec
    label: str
    progress: OnProgress
    gpu_ledger: GpuLedger | None = None  # entered before the model was built; CUDA only
    error: Raised | None = None  # once it has run out of memory

    def measure(
        self, *, wrap: Callable[[], AbstractContextManager[None]], lr: float
    ) -> Callable[[str | None, str, int | None, tuple[str, ...]], Report]:
        """Two steps, the second measured. `wrap` is put around the user's code."""
        gpu = self.gpu_ledger
        ledger = Ledger(
            modelled=True,
            total_memory_bytes=self.device.total_memory_bytes,
            workspaces=workspaces_on(self.device),
        )
        watch = Watch(
            self._reporting(gpu.feed if gpu else ledger.feed),
            self.device,
            device_type="cuda" if gpu else None,
            fake=self.fake,
            stamp=gpu.stamp if gpu else None,
        )
        if gpu is not None:
            watch.on_step = lambda: None  # the step ends where `Step` does
        self._watch = watch
        training = self.model.training
        self.model.train(self.mode == "train")
        try:
            with watch:
                self._run_twice(watch, gpu or ledger, wrap, lr)
        except (TargetError, torch.OutOfMemoryError):
            if self.error is None:
                raise
        finally:
            self.model.train(training)
        fallen = None
        if self.error is not None and gpu is not None:
            self.model.zero_grad(set_to_none=True)
            fallen = gpu.fall(watch.stream.failed.sids if watch.stream.failed else ())
            if fallen is None:
                raise TargetError(
                    f"{self.label} ran out of memory, and the allocator's trace doesn't tell where",
                    detail=self.error.traceback,
                )
        else:
            (gpu or ledger).end_step()
        measured = gpu.measured() if gpu else None
        step = (gpu or ledger).best
        if step is None or not watch.stream.op_count:
            raise TargetError("the model ran no operator, so there is nothing to profile")
        self.progress(Progress(stage="analyse"))

        def report_of(
            path: str | None, name: str, seq_len: int | None, notes: tuple[str, ...]
        ) -> Report:
            batch, length = sizes_of((self.args, self.kwargs))
            report = assemble(
                step=step,
                types=watch.scopes.types,
                device=self.device,
                target=TargetSpec(
                    path=path,
                    name=name,
                    mode=self.mode,
                    dtype=str(dtype_of(self.model)).removeprefix("torch."),
                    batch_size=batch,
                    seq_len=seq_len or length,
                    parameters=sum(p.numel() for p in self.model.parameters()),
                    trainable_parameters=sum(
                        p.numel() for p in self.model.parameters() if p.requires_grad
                    ),
                    inputs=specs_of(self.model, self.args, self.kwargs),
                ),
                torch_version=torch_version(),
                measured=measured,
                max_positions=max_positions(self.model),
                notes=(
                    *notes,
                    *(self.fake.assumptions if self.fake else ()),
                    *((UNCOMPILED,) if watch.met_compiled or self._left_compiled else ()),
                    *(gpu.notes if gpu else ()),
                ),
            )
            if fallen is not None and gpu is not None and self.error is not None:
                report = with_failure(report, fallen, self.error, gpu, self._foresee)
            self.progress(Progress(stage="done"))
            return report

        return report_of

    @property
    def _left_compiled(self) -> bool:
        return self.fake is not None and self.fake.left_compiled

    def _run_twice(
        self,
        watch: Watch,
        ledger: Ledger | GpuLedger,
        wrap: Callable[[], AbstractContextManager[None]],
        lr: float,
    ) -> None:
        watch.add_model(self.model)
        watch.add_inputs((self.args, self.kwargs))
        optimizer = None
        if self.mode == "train":
            foreach = None if self.placement.kind == "cuda" else True
            optimizer = make_optimizer(self.model, self.optimizer, foreach=foreach, lr=lr)
        step = Step(self.model, self.args, self.kwargs, self.mode, optimizer, self._stage)

        def run() -> None:
            try:
                step.run()
            except torch.OutOfMemoryError as error:
                if self.gpu_ledger is not None:
                    self.error = raised(error, target_traceback(error))
                raise

        self._total: int | None = None
        with wrap():
            self._begin("warmup", 0)
            run()
        watch.stream.flush()
        self._total = watch.stream.op_count
        ledger.start_measuring()
        with wrap():
            self._begin("measure", watch.stream.op_count)
            run()

    def _foresee(self, device: DeviceSpec) -> Report | None:
        return foresee(
            self.model, self.args, self.kwargs, mode=self.mode, optimizer=self.optimizer,
            device=device,
        )  # fmt: skip

    # -- progress ------------------------------------------------------------------------------

    def _begin(self, stage: Any, op_count: int) -> None:
        self._stage_name, self._base, self._note = stage, op_count, ""

    def _stage(self, note: str) -> None:
        self._note = note
        self._tell()

    def _tell(self) -> None:
        done = self._watch.stream.op_count - self._base
        total = max(self._total, done) if self._total else None
        self.progress(Progress(stage=self._stage_name, note=self._note, done=done, total=total))

    def _reporting(self, sink: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
        def feed(events: list[Event]) -> None:
            sink(events)
            if self._stage_name:
                self._tell()

        self._stage_name = ""
        return feed


def foresee(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: Mode,
    optimizer: OptimizerName,
    device: DeviceSpec,
) -> Report | None:
    """The report of the same step on fake tensors, as `device` would run it; `None` where fake
    tensors can't run it. Needs no memory, and leaves the model alone."""
    fake = FakeDevice()
    try:
        original = getattr(model, "_orig_mod", model)
        subject = fake.copy_of(original)
        fake.left_compiled |= original is not model
        run = Run(
            model=subject,
            args=_on_host(args),
            kwargs=_on_host(kwargs),
            mode=mode,
            optimizer=optimizer,
            placement=Placement("fake", 0),
            fake=fake,
            device=device,
            label=type(model).__name__,
            progress=lambda _: None,
        )
        return run.measure(wrap=nullcontext, lr=0.0)(None, type(model).__name__, None, ())
    except Exception:  # it needs values, a kernel of its own, ...: then there is no estimate
        return None


def _on_host(value: Any) -> Any:
    """The same inputs on the CPU; those without memory as zeros."""

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if tensor.device.type == "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().cpu()

    return tree_map(move, value)
