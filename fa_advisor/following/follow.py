"""Following a script: from its first model's first call on, step by step, with the one engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fa_advisor.assemble import Measured, assemble
from fa_advisor.attribution.ledger import Ledger, StepLog, cublas_workspace_bytes
from fa_advisor.following.family import Family
from fa_advisor.following.patches import Patches
from fa_advisor.following.schedule import Kind, wanted
from fa_advisor.following.wording import which_step
from fa_advisor.probes.device import advise_for, outside_allocator_bytes
from fa_advisor.probes.events import Event
from fa_advisor.probes.opstream import OpStream, torch_version
from fa_advisor.probes.watch import Call, Watch, keywords
from fa_advisor.recording import target_of
from fa_advisor.records import DeviceSpec, PatchOutcome, TargetSpec
from fa_advisor.report import Report
from fa_advisor.target.geometry import max_positions

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class StepFacts:
    """What of a step isn't in its log, kept as it was when the step ended."""

    number: int
    target: TargetSpec
    max_positions: int | None
    peaks: tuple[int, int] | None  # allocated and reserved, as CUDA's allocator counts
    elsewhere_bytes: int  # of parameters and optimizer state on another kind of device
    patch: PatchOutcome | None


def _guarded(method: F) -> F:
    """What fails in here is a fault of ours, and none that the script should notice."""

    @wraps(method)
    def guarded(self: Follower, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.fault = error
            self.abandon()

    return guarded  # type: ignore[return-value]


class Follower:
    """Begins when it is made, with torch imported; `finish` ends it and makes the report.

    `limit`: follow so many steps, all of them, and no more. `on_limit` is called when they are
    over. `on_pause`: called between two batches of events, where the ledger is whole.
    """

    def __init__(
        self,
        *,
        path: str,
        gpu: str | None,
        limit: int | None,
        patches: Patches | None,
        on_limit: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        self.fault: Exception | None = None
        self.feeding = False
        self._path = path
        self._gpu = gpu
        self._limit = limit
        self._patches = patches
        self._on_limit = on_limit
        self._on_pause = on_pause
        self._family = Family()
        self._watch: Watch | None = None  # stays, for its names, when following is over
        self._live = False
        self._ledger: Ledger | None = None
        self._device: DeviceSpec | None = None
        self._cuda_index: int | None = None
        self._notes: tuple[str, ...] = ()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._done: dict[Kind, int] = {"train": 0, "infer": 0}
        self._followed: dict[Kind, int] = {"train": 0, "infer": 0}
        self._between = True  # two steps; else in the middle of one
        self._training = False  # a graph has been begun since the last step ended
        self._graphs = 0  # forwards that made one, while none had a backward
        self._gradients = 0
        self._without_optimizer: bool | None = None
        self._mark = 0
        self._waiting: list[Any] = []
        if limit != 0 or patches is not None:
            self._waiting = [
                nn_module.register_module_forward_pre_hook(self._first_call),
                register_optimizer_step_pre_hook(self._first_step),
            ]

    # -- beginning -----------------------------------------------------------------------------

    @_guarded
    def _first_call(self, module: nn.Module, args: Any) -> None:
        if _no_call_of_a_script(module) or (self._patches is not None and self._patches.busy):
            return
        if self._patches is not None:
            self._patches.apply(self._family.root_of(module), (args, keywords()))
        if self._limit != 0 and self._begin(_device_of(module)):
            assert self._watch is not None
            self._watch.add_model(self._family.root_of(module))
            self._know_all()
            self._watch.scopes.enter(module, args)

    @_guarded
    def _first_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A training without modules: parameters and functions alone."""
        if self._limit == 0:
            return
        groups = optimizer.param_groups
        device = next((p.device for group in groups for p in group["params"]), None)
        if device is not None and self._begin(device):
            self._know_all()

    def _begin(self, device: torch.device) -> bool:
        if _get_current_dispatch_mode_stack():
            return False  # in a block of somebody's, whose end would take our mode for its own
        for handle in self._waiting:
            handle.remove()
        self._waiting = []
        cuda = device.type == "cuda"
        index = device.index or 0 if cuda else None
        self._cuda_index = index
        self._device, note = advise_for(self._gpu, index or 0)
        self._notes = (note,) if note else ()
        self._ledger = Ledger(
            modelled=not cuda,
            total_memory_bytes=self._device.total_memory_bytes,
            workspace_bytes=0 if cuda else cublas_workspace_bytes(self._device),
            warmup=True,
        )
        watch = Watch(self._feed, self._device, device_type="cuda" if cuda else "cpu")
        watch.scopes.root_of = self._family.root_of
        watch.on_enter, watch.on_leave = self._enters, self._leaves
        watch.on_step = self._optimizer_stepped
        watch.__enter__()
        self._watch, self._live = watch, True
        if index is not None:
            torch.cuda.reset_peak_memory_stats(index)
        return True

    def _know_all(self) -> None:
        """Every living model is in memory, whether it runs or not."""
        watch, ledger = self._watch, self._ledger
        if watch is not None and ledger is not None:
            for root in self._family.roots():
                watch.add_model(root)
            watch.stream.flush()
            ledger.begin_step()

    def _feed(self, events: list[Event]) -> None:
        assert self._ledger is not None
        self.feeding = True
        try:
            self._ledger.feed(events)
        finally:
            self.feeding = False
        self._on_pause()

    def at_work(self, frame: FrameType | None) -> bool:
        """Whether a signal came where what it raises would be lost, or leave the ledger torn."""
        return self.feeding or (frame is not None and frame.f_code is OpStream.died.__code__)

    # -- the script's steps ---------------------------------------------------------------------

    @_guarded
    def _enters(self, model: nn.Module, args: Any) -> None:
        watch = self._watch
        if watch is None or not self._live or _no_call_of_a_script(model):
            return
        if self._patches is not None:
            if self._patches.busy:
                return
            self._patch(watch, self._family.root_of(model), (args, keywords()))
        if self._cuda_index is None and _device_of(model).type == "cuda":
            self._start_again(model)
            return
        graph = torch.is_grad_enabled() and (watch.trained or self._graphs < _GRAPHS)
        if watch.gradients > self._gradients and self._by_hand(watch):
            self._step_ends("train")
        if self._between:
            self._choose("train" if graph else "infer")
        self._between = False
        self._training = self._training or graph

    @_guarded
    def _leaves(self, model: nn.Module) -> None:
        watch = self._watch
        if watch is None or not self._live or _no_call_of_a_script(model):
            return
        if self._patches is not None and self._patches.busy:
            return
        if torch.is_grad_enabled() and not watch.trained:
            self._graphs += 1
            if self._graphs >= _GRAPHS:  # it infers, and doesn't mind that graphs are made
                self._training = False
        if not self._training:
            self._step_ends("infer")

    @_guarded
    def _optimizer_stepped(self) -> None:
        self._step_ends("train")

    def _by_hand(self, watch: Watch) -> bool:
        """Whether the script moves its parameters without an optimizer: a step is over, then, when
        a forward follows on a backward."""
        self._gradients = watch.gradients
        if watch.optimizers():
            return False
        if self._without_optimizer is None:
            self._without_optimizer = not _an_optimizer_lives()
        return self._without_optimizer

    def _step_ends(self, kind: Kind) -> None:
        watch = self._watch
        if watch is None or not self._live:
            return
        self._between, self._training = True, False
        self._done[kind] += 1
        if not watch.paused:
            watch.look_again()
            watch.end_step(kind, self._facts(kind))
            self._followed[kind] += 1
        watch.calls.clear()
        self._mark = watch.scopes.forget_steps_before(self._mark)
        if self._limit is not None and self._is_over(kind):
            self._stop()
            self._on_limit()
        else:
            self._choose(kind)

    def _is_over(self, kind: Kind) -> bool:
        if self._done[kind] < (self._limit or 0):
            return False
        # Forwards without a backward before a training's first step are no steps of it.
        return kind == "train" or not (self._done["train"] or _an_optimizer_lives())

    def _choose(self, kind: Kind) -> None:
        """Follow the next step from here on, or don't."""
        watch, ledger = self._watch, self._ledger
        assert watch is not None and ledger is not None
        # A limit is on trainings' steps where there are any: what else runs is followed until then.
        over = self._limit is None and not wanted(kind, self._done[kind] + 1, None)
        if over and not watch.paused:
            watch.pause()
        elif not over and watch.paused:
            watch.resume()
            watch.stream.flush()
            ledger.begin_step()
            if self._cuda_index is not None:
                torch.cuda.reset_peak_memory_stats(self._cuda_index)

    def _start_again(self, model: nn.Module) -> None:
        """What ran on the CPU was a rehearsal: the model has moved to the GPU since."""
        assert self._watch is not None
        self._live = False
        self._watch.__exit__(None, None, None)
        self._done = {"train": 0, "infer": 0}
        self._followed = {"train": 0, "infer": 0}
        self._waiting = [
            nn_module.register_module_forward_pre_hook(self._first_call),
            register_optimizer_step_pre_hook(self._first_step),
        ]

    def _patch(self, watch: Watch, root: nn.Module, call: Any) -> None:
        patches = self._patches
        if patches is None or patches.knows(root):
            return
        seeing = not watch.paused
        if seeing:
            watch.pause()
        patches.apply(root, call)
        if seeing:
            watch.resume()

    def _facts(self, kind: Kind | None) -> StepFacts:
        """`kind`: of the step that has ended; None for one that is cut short."""
        watch = self._watch
        assert watch is not None
        call = max(watch.calls.values(), key=_operators, default=None)
        called = call.model if call is not None else None
        root = self._family.root_of(called) if called is not None else None
        model = _unwrapped(root) if root is not None else None
        training = kind == "train" or (kind is None and self._training)
        target = target_of(model, call, "train" if training else "infer", self._path)
        peaks = None
        if self._cuda_index is not None:
            index = self._cuda_index
            peaks = torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)
            torch.cuda.reset_peak_memory_stats(index)
        return StepFacts(
            number=self._done[kind] if kind is not None else sum(self._done.values()) + 1,
            target=target,
            max_positions=max_positions(model) if model is not None else None,
            peaks=peaks,
            elsewhere_bytes=self._elsewhere(watch),
            patch=self._patches.outcome(root) if self._patches and root is not None else None,
        )

    def _elsewhere(self, watch: Watch) -> int:
        kind = "cpu" if self._cuda_index is None else "cuda"
        tensors: list[Tensor] = []
        for root in watch.scopes.roots():
            tensors += root.parameters()
            tensors += root.buffers()
        for optimizer in watch.optimizers():
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    tensors += [t for t in state.values() if isinstance(t, Tensor) and t.ndim]
        others = {id(t): t.nbytes for t in tensors if t.device.type not in (kind, "meta")}
        return sum(others.values())

    # -- ending --------------------------------------------------------------------------------

    def _stop(self) -> None:
        """The script goes on by itself; with `--patch`, its later models are patched still."""
        assert self._watch is not None
        self._live = False
        self._watch.__exit__(None, None, None)
        if self._patches is None:
            return
        self._limit = 0
        self._waiting = [nn_module.register_module_forward_pre_hook(self._first_call)]

    def abandon(self) -> None:
        """See nothing more: in a forked child, or where we have failed."""
        for handle in self._waiting:
            handle.remove()
        self._waiting = []
        self._live = False
        if self._watch is not None:
            self._watch.abandon()

    def finish(self, cut_short: str) -> Report | None:
        """End, and report on the step with the highest peak; `None` where no step was seen.

        `cut_short`: what ended the script, where that wasn't its own end.
        """
        for handle in self._waiting:
            handle.remove()
        watch, ledger = self._watch, self._ledger
        if watch is None or ledger is None or self.fault is not None:
            return None
        if self._live:
            watch.stream.flush()
            if not watch.paused and not self._between:
                ledger.end_step("", self._facts(None))
            self._live = False
            watch.__exit__(None, None, None)
        step = ledger.best
        if step is None or not isinstance(step.about, StepFacts):
            return None
        return self._report(step, step.about, watch, cut_short)

    def _report(self, step: StepLog, facts: StepFacts, watch: Watch, cut_short: str) -> Report:
        assert self._device is not None
        measured = None
        if facts.peaks is not None and self._cuda_index is not None:
            reserved = torch.cuda.memory_reserved(self._cuda_index)
            measured = Measured(
                peak_allocated_bytes=facts.peaks[0],
                peak_reserved_bytes=facts.peaks[1],
                outside_allocator_bytes=outside_allocator_bytes(self._cuda_index, reserved),
            )
        return assemble(
            step=step,
            types=watch.scopes.types,
            device=self._device,
            target=facts.target,
            torch_version=torch_version(),
            measured=measured,
            max_positions=facts.max_positions,
            notes=(
                which_step(step.kind, facts.number, self._done, self._followed, cut_short),
                *self._unseen(facts, watch),
                *self._notes,
            ),
            patch=facts.patch,
        )

    def _unseen(self, facts: StepFacts, watch: Watch) -> list[str]:
        """What the report can't show, in words."""
        notes = []
        if facts.elsewhere_bytes:
            where = "the GPU" if self._cuda_index is None else "the host"
            notes.append(
                f"{facts.elsewhere_bytes:,} bytes of parameters, buffers and optimizer state are"
                f" on {where}, and not in this report"
            )
        if facts.patch is not None and self._cuda_index is None:
            notes.append(
                "on the CPU a patched model's attention runs through torch: what it holds here is"
                " not what the kernel holds on a GPU"
            )
        if watch.scopes.calls_elsewhere:
            notes.append(
                f"{watch.scopes.calls_elsewhere:,} calls of modules in other threads were not"
                " followed: what they made is missing"
            )
        return notes


# So many forwards that make a graph, none of which has a backward, are an inference's.
_GRAPHS = 3


def _operators(call: Call) -> int:
    return call.operators


def _no_call_of_a_script(module: nn.Module) -> bool:
    """A loss or a transform, or a checkpoint's forward within a backward."""
    if torch._C._current_graph_task_id() != -1:
        return True
    return next(module.parameters(), None) is None


_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model, not what torch has put around it."""
    while (name := _WRAPPERS.get(type(model).__name__)) is not None:
        inner = model._modules.get(name)
        if inner is None:
            break
        model = inner
    return model


def _device_of(module: nn.Module) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def _an_optimizer_lives() -> bool:
    return any(issubclass(type(each), Optimizer) for each in gc.get_objects())
