"""Following a script: from its first model's first call on, step by step, with the one engine."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fa_advisor.attribution.ledger import Ledger
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.following.account import StepFacts, facts_of, report_of
from fa_advisor.following.boundaries import Boundaries
from fa_advisor.following.failure import Failure, failure_of
from fa_advisor.following.family import Family
from fa_advisor.following.patches import Patches
from fa_advisor.following.schedule import Kind, wanted
from fa_advisor.following.wording import which_step
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.probes.compiled import hush
from fa_advisor.probes.device import advise_for
from fa_advisor.probes.events import Event
from fa_advisor.probes.modules import parameters_of
from fa_advisor.probes.opstream import OpStream
from fa_advisor.probes.watch import Call, Watch, keywords
from fa_advisor.records import DeviceSpec
from fa_advisor.report import Report
from fa_advisor.unfollowed import explained, in_words

F = TypeVar("F", bound=Callable[..., Any])


def _guarded(method: F) -> F:
    """What fails in here is a fault of ours, and none that the script should notice."""

    @wraps(method)
    def guarded(self: Follower, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.fault = error
            try:
                self._leave()
            except Exception:
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
        self._live = False
        self._watch: Watch  # these four from the first call on
        self._ledger: Ledger | GpuLedger | None = None
        self._device: DeviceSpec
        self._steps: Boundaries
        self._followed: dict[Kind, int] = {}
        self._cuda_index: int | None = None
        self._gpu_ledger: GpuLedger | None = None
        self._notes: tuple[str, ...] = ()
        self._waiting: list[Any] = []
        if limit != 0 or patches is not None:
            self._wait()

    # -- beginning -----------------------------------------------------------------------------

    def _wait(self) -> None:
        hush()
        self._waiting = [
            nn_module.register_module_forward_pre_hook(self._first_call),
            register_optimizer_step_pre_hook(self._first_step),
        ]

    def _wait_no_more(self) -> None:
        for handle in self._waiting:
            handle.remove()
        self._waiting = []

    @_guarded
    def _first_call(self, module: nn.Module, args: Any) -> None:
        if self._is_none_of_a_script(module):
            return
        if self._patches is not None:
            self._patches.apply(self._family.root_of(module), (args, keywords()))
        if self._limit != 0 and self._begin(_device_of(module)):
            self._watch.add_model(self._family.root_of(module))
            self._know_all()
            self._watch.scopes.enter(module, args)

    @_guarded
    def _first_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A training without modules: parameters and functions alone."""
        groups = optimizer.param_groups
        device = next((p.device for group in groups for p in group["params"]), None)
        if self._limit != 0 and device is not None and self._begin(device):
            self._know_all()

    def _begin(self, device: torch.device) -> bool:
        if _get_current_dispatch_mode_stack():
            return False  # in a block of somebody's, whose end would take our mode for its own
        self._wait_no_more()
        cuda = device.type == "cuda"
        self._cuda_index = (device.index or 0) if cuda else None
        self._device, note = advise_for(self._gpu, self._cuda_index or 0)
        self._notes = (note,) if note else ()
        index = self._cuda_index
        gpu = GpuLedger(index, self._device, warmup=True) if index is not None else None
        self._gpu_ledger = gpu.__enter__() if gpu is not None else None
        self._ledger = gpu or Ledger(
            modelled=True,
            total_memory_bytes=self._device.total_memory_bytes,
            workspaces=workspaces_on(self._device),
            warmup=True,
        )
        self._steps = Boundaries(_an_optimizer_lives)
        self._followed = {"train": 0, "infer": 0}
        self._watch = Watch(
            self._feed,
            self._device,
            device_type="cuda" if cuda else "cpu",
            stamp=gpu.stamp if gpu is not None else None,
        )
        self._watch.on_end = gpu.end_step if gpu is not None else None
        self._watch.as_block = False
        self._watch.scopes.root_of = self._family.root_of
        self._watch.on_enter = self._enters
        if threading.current_thread() is not threading.main_thread():
            self._watch.scopes.on_elsewhere = self._enters_elsewhere
        self._watch.on_leave = self._leaves
        self._watch.on_step = self._optimizer_stepped
        self._watch.__enter__()
        self._live = True
        return True

    def _know_all(self) -> None:
        """Every living model is in memory, whether it runs or not."""
        for root in self._family.roots():
            self._watch.add_model(root)
        self._begin_step()

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
        if not self._live or self._is_none_of_a_script(model):
            return
        watch, steps = self._watch, self._steps
        if self._patches is not None:
            self._patch(self._patches, self._family.root_of(model), (args, keywords()))
        if self._cuda_index is None and _device_of(model).type == "cuda":
            self._leave()  # what ran on the CPU was a rehearsal: the model has moved since
            self._first_call(model, args)
            return
        unseen = watch.paused and torch.is_grad_enabled()
        if steps.by_hand(watch.gradients, unseen=unseen) and not self._step_ends("train"):
            return
        between = steps.between
        kind = steps.begins(graph=torch.is_grad_enabled(), trained=watch.trained)
        if between:
            self._choose(kind)

    @_guarded
    def _enters_elsewhere(self, model: nn.Module, args: Any) -> None:
        """Another thread called a module first, a check of the input's shapes for example; where
        nothing was trained there, the main thread is the one to follow."""
        if (
            not self._live
            or threading.current_thread() is not threading.main_thread()
            or self._watch.trained
            or _get_current_dispatch_mode_stack()
            or self._is_none_of_a_script(model)
        ):
            return
        self._leave()
        self._first_call(model, args)
        self._notes += ("what another thread ran before the main one did is not in this report",)

    @_guarded
    def _leaves(self, model: nn.Module) -> None:
        if not self._live or self._is_none_of_a_script(model):
            return
        if isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            return  # not an end, but a failure that `finish` may have to tell of
        graph, trained = torch.is_grad_enabled(), self._watch.trained
        if self._steps.forward_ends(graph=graph, trained=trained):
            self._step_ends("infer")

    @_guarded
    def _optimizer_stepped(self) -> None:
        if self._live:
            surplus, self._watch.cycle.surplus = self._watch.cycle.surplus, 0
            self._steps.optimizer_stepped(surplus)
            self._followed["train"] -= surplus
            self._step_ends("train")

    def _step_ends(self, kind: Kind) -> bool:
        """Whether there is anything to follow yet."""
        watch, steps = self._watch, self._steps
        steps.ended(kind)
        if not watch.paused:
            watch.look_again()
            watch.end_step(kind, self._facts(steps.done[kind], kind))
            self._followed[kind] += 1
        watch.calls.clear()
        watch.scopes.step_ends()
        if self._limit is not None and steps.over(kind, self._limit):
            self._leave()
            if (
                self._patches is not None and not watch.met_compiled
            ):  # the models that are still to come
                self._waiting = [nn_module.register_module_forward_pre_hook(self._first_call)]
                self._limit = 0
            self._on_limit()
            return False
        self._choose(kind)
        return True

    def _choose(self, kind: Kind) -> None:
        """Follow the next step from here on, or don't. With a limit, everything until then."""
        watch = self._watch
        follow = self._limit is not None or wanted(kind, self._steps.done[kind] + 1)
        if watch.paused and follow:
            if self._gpu_ledger is not None:
                self._gpu_ledger.resume()
            watch.resume()
            self._begin_step()
        elif not watch.paused and not follow:
            watch.pause()
            if self._gpu_ledger is not None:
                self._gpu_ledger.pause()
            if watch.met_compiled:  # what is compiled now must neither see our hooks nor be again
                self._leave()

    def _begin_step(self) -> None:
        assert self._ledger is not None
        self._watch.stream.flush()
        self._ledger.begin_step()

    def _patch(self, patches: Patches, root: nn.Module, call: Any) -> None:
        if patches.knows(root):
            return
        seeing = not self._watch.paused
        if seeing:
            self._watch.pause()
        patches.apply(root, call)
        if seeing:
            self._watch.resume()

    def _is_none_of_a_script(self, module: nn.Module) -> bool:
        """A checkpoint's forward within a backward, the patcher's, a loss's, a transform's."""
        return (
            torch._C._current_graph_task_id() != -1
            or (self._patches is not None and self._patches.busy)
            or next(parameters_of(module), None) is None
        )

    def _main_call(self) -> Call | None:
        return max(self._watch.calls.values(), key=lambda each: each.operators, default=None)

    def _facts(self, number: int, kind: Kind) -> StepFacts:
        call = self._main_call()
        called = call.model if call is not None else None
        root = self._family.root_of(called) if called is not None else None
        return facts_of(
            self._watch,
            root,
            call,
            number=number,
            mode=kind,
            path=self._path,
            kind_of_device="cpu" if self._cuda_index is None else "cuda",
            patch=self._patches.outcome(root) if self._patches and root is not None else None,
        )

    # -- ending --------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._live = False
        self._watch.__exit__(None, None, None)
        self._stop_recording()

    def abandon(self) -> None:
        """See nothing more: in a forked child, or where we have failed."""
        self._wait_no_more()
        if self._live:
            self._live = False
            self._watch.abandon()

    def _stop_recording(self) -> None:
        if self._gpu_ledger is not None:
            self._gpu_ledger.__exit__(None, None, None)

    def finish(self, cut_short: str, error: BaseException | None = None) -> Report | None:
        """End, and report on the step with the highest peak; `None` where no step was seen.

        `cut_short`: what ended the script, where that wasn't its own end. `error`: what it raised;
        where that is want of the GPU's memory, the report is of the moment of failure.
        """
        if not (self._patches is not None and self._limit == 0):
            self._wait_no_more()
        ledger = self._ledger
        if ledger is None or self.fault is not None:
            return None
        failure: Failure | None = None
        if self._live:
            steps, watch = self._steps, self._watch
            watch.stream.flush()
            kind: Kind = "train" if steps.training else "infer"
            if not watch.paused:
                failure = failure_of(error, watch, self._main_call(), kind, self._gpu_ledger)
            if failure is not None or not (watch.paused or steps.between):
                facts = self._facts(sum(steps.done.values()) + 1, kind)
                if failure is None:
                    ledger.end_step("", facts)
                else:
                    failure.fallen.step.about = facts
            self._leave()
        ledger.begin_step()  # the last that ended may be waiting to be taken in
        step = ledger.best
        if step is None or not isinstance(step.about, StepFacts):
            return None
        which = which_step(
            step.kind, step.about.number, self._steps.done, self._followed, cut_short
        )
        notes = [which]
        missed = self._gpu_ledger.missed if self._gpu_ledger is not None else 0
        if missed > step.peak_bytes:
            notes.append(
                f"steps that were not followed had a higher peak: {missed:,} bytes; --steps N"
                " follows all of the first N"
            )
        if failure is None:
            notes += filter(None, [self.shortage(error)])
        report = report_of(
            step, step.about, self._watch, self._device, self._gpu_ledger, (*notes, *self._notes)
        )
        return failure.told_in(report) if failure is not None else report

    def shortage(self, error: BaseException | None) -> str:
        """What is to be said of an out-of-memory error where no step was followed."""
        if not isinstance(error, torch.OutOfMemoryError):
            return ""
        found = explained(error)
        return in_words(found) if found is not None else ""


def _device_of(module: nn.Module) -> torch.device:
    for parameter in parameters_of(module):
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def _an_optimizer_lives() -> bool:
    return any(issubclass(type(each), Optimizer) for each in gc.get_objects())
