"""The one way through the house: a model is run under the watch, the ledger filled, a report made.

`profile_target` is what the child process runs for the command line; `profile` and `record` are
the Python API, in the user's own process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn

from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.storage import Origin
from fa_advisor.errors import TargetError, UsageError
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.measure import OnProgress, Run
from fa_advisor.placement import (
    DTYPES,
    Placement,
    check_built,
    dtype_of,
    move,
    resolve,
    state_kept,
)
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.fake import FakeDevice
from fa_advisor.probes.masks import mark_triangular
from fa_advisor.probes.watch import Watch
from fa_advisor.recording import record
from fa_advisor.records import DeviceSpec, Mode, ProfileRequest, Progress
from fa_advisor.report import Report, write_whole
from fa_advisor.steps import OptimizerName
from fa_advisor.target import load, synthesise, target_code
from fa_advisor.unfollowed import in_words

__all__ = ["profile", "profile_target", "record"]


def profile_target(request: ProfileRequest, progress: OnProgress) -> Report:
    """Load the target, run it twice, report on the second step. For the child process.

    Raises: UsageError, TargetError, DeviceError as the contract's exit status says.
    """
    placement = resolve(request.device)
    device, note = advise_for(request.gpu, placement.index)
    with ExitStack() as stack:
        gpu_ledger = None
        if placement.kind == "cuda":  # from before the model is built
            keep = request.snapshot is not None or request.trace is not None
            gpu_ledger = GpuLedger(placement.index, device, keep_trace=keep)
            stack.enter_context(gpu_ledger)
        try:
            notes = (note,) if note else ()
            return _profile(request, progress, placement, device, gpu_ledger, notes)
        except TargetError as error:
            told = gpu_ledger.explain() if gpu_ledger is not None else None
            if told is None:
                raise
            raise TargetError(error.message, hint=in_words(told), detail=error.detail) from None


def _profile(
    request: ProfileRequest,
    progress: OnProgress,
    placement: Placement,
    device: DeviceSpec,
    gpu_ledger: GpuLedger | None,
    notes: tuple[str, ...],
) -> Report:
    fake = FakeDevice() if placement.kind == "fake" else None
    dtype = DTYPES[request.dtype]
    progress(Progress(stage="load", note=request.target or "the bundled example"))
    with _building(fake, device) as build:
        target = load(request)
        progress(Progress(stage="build", note=type(target.model).__name__))
        model = target.model
        check_built(model, target.name, on_fake=fake is not None)
        if fake is not None:
            fake.convert(model, dtype)
            build.note_causal_buffers(model)
        else:
            with target_code(target.name):
                move(model, placement, dtype)
        args, kwargs = target.args, target.kwargs
        if args is None or kwargs is None:
            args, kwargs = synthesise(
                model,
                batch_size=request.batch_size,
                seq_len=request.seq_len,
                mode=request.mode,
                dtype=dtype_of(model),
            )
        asked = dtype_of(model) if dtype is not None else None
        args, kwargs = move((args, kwargs), placement, asked)
    run = Run(
        model=model,
        args=args,
        kwargs=kwargs,
        mode=request.mode,
        optimizer=request.optimizer,
        placement=placement,
        fake=fake,
        device=device,
        label=target.path or target.name,
        progress=progress,
        gpu_ledger=gpu_ledger,
    )
    report_of = run.measure(wrap=lambda: target_code(run.label), lr=1e-4)
    notes = (*notes, *_write_traces(request, gpu_ledger))
    return report_of(target.path, target.name, request.seq_len, notes)


def _write_traces(request: ProfileRequest, gpu: GpuLedger | None) -> list[str]:
    """Write what was asked for of the allocator's trace; a note for each that couldn't be."""
    notes = []
    for path, made in (
        (request.snapshot, gpu.snapshot if gpu else None),
        (request.trace, gpu.chrome_trace if gpu else None),
    ):
        if path is None:
            continue
        data = made() if made is not None else None
        if data is None:
            notes.append(f"{path} was not written: only a run on a GPU has an allocator's trace")
            continue
        try:
            write_whole(path, data)
        except UsageError as error:
            notes.append(f"{path} was not written: {error.message}")
    return notes


def profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    mode: Mode = "train",
    batch_size: int | None = None,
    seq_len: int | None = None,
    optimizer: OptimizerName = "adamw",
    gpu: str | None = None,
) -> Report:
    """Profile a model in this process, and leave it as it was.

    A model on a GPU is run there (measured); any other is run on fake tensors as `gpu`, or an
    A100-80GB, would run it (modelled), so its size doesn't matter. `inputs`: a tensor, a tuple of
    arguments, a dict of keyword arguments, or `None` to make some of `batch_size` and `seq_len`.

    Raises: UsageError for inputs that can't be made; what the model itself raises.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"profile takes an nn.Module, not {type(model).__name__}")
    check_built(model, "the model")
    if optimizer not in ("adamw", "sgd", "none"):
        raise UsageError(f"optimizer {optimizer!r}: expected 'adamw', 'sgd' or 'none'")
    if mode not in ("train", "infer"):
        raise UsageError(f"mode {mode!r}: expected 'train' or 'infer'")
    on_gpu = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    placement = Placement("cuda", on_gpu.index or 0) if on_gpu else Placement("fake", 0)
    device, note = advise_for(gpu, placement.index)
    fake = None if on_gpu else FakeDevice()
    with ExitStack() as stack:
        gpu_ledger = None
        if on_gpu is not None:
            gpu_ledger = stack.enter_context(GpuLedger(placement.index, device))
        if inputs is None:
            args, kwargs = synthesise(
                model, batch_size=batch_size, seq_len=seq_len, mode=mode, dtype=dtype_of(model)
            )
            args, kwargs = move((args, kwargs), placement, None)
        else:
            args, kwargs = _as_call(inputs)
        subject = model if fake is None else fake.copy_of(model)
        run = Run(
            model=subject,
            args=args,
            kwargs=kwargs,
            mode=mode,
            optimizer=optimizer,
            placement=placement,
            fake=fake,
            device=device,
            label=type(model).__name__,
            progress=lambda _: None,
            gpu_ledger=gpu_ledger,
        )
        # A rate of 0 keeps the weights; what a step changes all the same is put back.
        keep: AbstractContextManager[None] = nullcontext() if fake else state_kept(model)
        with keep:
            report_of = run.measure(wrap=nullcontext, lr=0.0)
    return report_of(None, type(model).__name__, seq_len, (note,) if note else ())


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


class _building:
    """Around the user's building code: on fake tensors, what is big has no memory."""

    def __init__(self, fake: FakeDevice | None, device: DeviceSpec) -> None:
        self._fake = fake
        self._ledger = Ledger(modelled=False)
        self._watch = Watch(self._ledger.feed, device, fake=fake) if fake else None

    def __enter__(self) -> _building:
        if self._watch is not None and self._fake is not None:
            self._fake.building = True
            self._watch.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._watch is not None and self._fake is not None:
            self._fake.building = False
            self._watch.__exit__(*exc)

    def note_causal_buffers(self, model: nn.Module) -> None:
        """Mark the buffers that building derived from tril or triu."""
        if self._watch is None:
            return
        stream = self._watch.stream
        stream.flush()
        for buffer in model.buffers():
            storage = self._ledger.storage(stream.sid(buffer))
            if storage is not None and storage.origin & Origin.TRIANGULAR:
                mark_triangular(buffer)
