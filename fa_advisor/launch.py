"""The parent's side of a profile: the target runs in a child process, the report comes back."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from fa_advisor import errors, messages, report
from fa_advisor.child import Child, Closed, Printed
from fa_advisor.records import Failure, ProfileRequest, Progress

# How long a child may take to end once its report is in (the target's atexit handlers run then),
# and how long its pipes may stay open once it has ended (a process it left behind holds them).
GRACE_S = 2.0
_POLL_S = 0.05


def run_child(
    request: ProfileRequest,
    on_progress: Callable[[Progress], None],
    on_output: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> report.Report:
    """Profile `request` in a child process.

    The target's stdout and stderr go to this process's stderr, or, with `on_output`, to it: a
    line a call, without its end. Both callbacks run in the calling thread. Setting `cancel` from
    another thread, Ctrl-C and SIGTERM (the last two in the main thread) end the child.

    Raises: Interrupted; TargetError where the target ended or crashed the child; otherwise what
    the child failed with.
    """
    try:
        with _signals_interrupt(), Child(request, capture=on_output is not None) as child:
            outcome, started = _follow(child, on_progress, on_output, cancel)
            if outcome is None:
                raise _ended_early(child.process, started)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            "interrupted: the target was stopped before it had a report"
        ) from None
    if isinstance(outcome, messages.FailureMessage):
        raise _error(outcome.failure)
    return report.parse(bytes(outcome.report), "the report from the child process")


def _follow(
    child: Child,
    on_progress: Callable[[Progress], None],
    on_output: Callable[[str], None] | None,
    cancel: threading.Event | None,
) -> tuple[messages.ReportMessage | messages.FailureMessage | None, bool]:
    """Pass on what the child says until it has ended; its outcome, and whether it began at all."""
    outcome: messages.ReportMessage | messages.FailureMessage | None = None
    started = False
    deadline: float | None = None
    while child.open or child.process.poll() is None:
        if cancel is not None and cancel.is_set():
            raise KeyboardInterrupt
        ending = outcome is not None or "messages" not in child.open
        if deadline is None and (ending or child.process.poll() is not None):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        try:
            event = child.events.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if isinstance(event, Closed):
            child.open.discard(event.stream)
        elif isinstance(event, Printed):
            if on_output is not None:
                on_output(event.text)
        elif outcome is None:
            message = _decode(event.line)
            started = True
            if isinstance(message, messages.ProgressMessage):
                on_progress(message.progress)
            else:
                outcome = message
    return outcome, started


def _decode(line: bytes) -> messages.Message:
    try:
        return messages.decode(line)
    except msgspec.MsgspecError as error:
        raise errors.FaAdvisorError(
            f"the child process sent something that is no message: {error}",
            hint="does the target write to file descriptors that it did not open?",
        ) from error


def _error(failure: Failure) -> errors.FaAdvisorError:
    kinds = (
        errors.UsageError,
        errors.TargetError,
        errors.OverBudget,
        errors.DeviceError,
        errors.Interrupted,
    )
    kind = next((kind for kind in kinds if kind.status == failure.status), errors.FaAdvisorError)
    return kind(failure.message, hint=failure.hint, detail=failure.detail)


def _ended_early(process: subprocess.Popen[bytes], started: bool) -> errors.FaAdvisorError:
    returncode = process.poll()
    if not started:
        return errors.FaAdvisorError(
            f"the child process for the profile did not start (exit status {returncode})",
            hint=f"can `{sys.executable} -c 'import fa_advisor.worker'` import it?",
        )
    if returncode in (None, messages.PIPE_LOST):
        return errors.TargetError(
            "the target closed the pipe that the report travels on before the profile finished",
            hint="it should close no file descriptors that it did not open",
        )
    if returncode >= 0:
        return errors.TargetError(
            f"the target ended the process with os._exit({returncode}) before the profile finished",
            hint="keep os._exit out of what runs when the file is loaded or the model is called",
        )
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = str(-returncode)
    out_of_memory = name == "SIGKILL"
    return errors.TargetError(
        f"the target was killed by signal {name}{' (out of memory?)' if out_of_memory else ''} "
        "before the profile finished",
        hint="try --device fake, or a smaller --batch-size" if out_of_memory else "",
    )


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that no child outlives us."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # Whoever ignores a signal (nohup) goes on ignoring it.
    previous = {
        number: handler
        for number in numbers
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    try:
        for number in previous:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
