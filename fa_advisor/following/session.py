"""From the command to the report: what a run of a script needs before torch is imported."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from fa_advisor.following.arrival import Arrival

if TYPE_CHECKING:
    from fa_advisor.following.follow import Follower
    from fa_advisor.report import Report

_FATAL = ("SIGTERM", "SIGHUP")
# Those that `os` builds the others on.
_AT_ONCE = ("_exit", "execv", "execve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for. `limit`: see `--steps`; `path`: what the report calls the script."""

    path: str
    gpu: str | None
    limit: int | None
    patch: bool


class Session:
    """Follows the script that runs in this process between `begin` and `end`.

    `deliver` gets the report, once, as soon as there is nothing more to follow; `tell` sentences
    for the user. In a forked child all of it is off.
    """

    def __init__(
        self, wish: Wish, deliver: Callable[[Report], None], tell: Callable[[str], None]
    ) -> None:
        self._wish = wish
        self._deliver = deliver
        self._tell = tell
        self._pid = os.getpid()
        self._follower: Follower | None = None
        self._fault: Exception | None = None
        self._over = False
        self._ending = False
        # A signal that came where the ledger wasn't whole, or the report not yet handed on.
        self._pending: int | None = None
        self._handlers: dict[int, Any] = {}

    def begin(self) -> None:
        """Wait for torch; take the signals that would end the process without a word."""
        self._take_signals()
        for name in _AT_ONCE:
            self._report_before(name)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        Arrival("torch", self._attach)

    def end(self, cut_short: str = "", error: BaseException | None = None) -> None:
        """Make the report and hand it on. `cut_short`: what ended the script before its end;
        `error`: what it raised."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = self._ending = True
        try:
            self._finish(cut_short, error)
        finally:
            self._ending = False
        self._act_on_pending()

    def _finish(self, cut_short: str, error: BaseException | None) -> None:
        follower = self._follower
        if follower is None:
            if self._fault is None:
                self._tell(f"no report: {self._wish.path} never imported torch")
        else:
            try:
                report = follower.finish(cut_short, error)
                self._fault = self._fault or follower.fault
                if report is not None:
                    self._deliver(report)
                elif self._fault is None and self._wish.limit != 0:
                    self._tell(
                        f"no report: no model ran in {self._wish.path} itself (processes that it"
                        " starts aren't followed)"
                    )
                    told = follower.shortage(error)
                    if told:
                        self._tell(told)
            except Exception as fault:
                self._fault = fault
        if self._fault is not None:
            self._tell_fault(self._fault)

    def _attach(self) -> None:
        try:
            from fa_advisor.following.follow import Follower
            from fa_advisor.following.patches import Patches

            wish = self._wish
            self._follower = Follower(
                path=wish.path,
                gpu=wish.gpu,
                limit=wish.limit,
                patches=Patches(self._tell) if wish.patch else None,
                on_limit=self.end,
                on_pause=self._act_on_pending,
            )
        except Exception as error:  # the script has its torch all the same
            self._fault = error

    def _tell_fault(self, error: Exception) -> None:
        if os.environ.get("FA_ADVISOR_DEBUG") == "1":
            import traceback

            self._tell("".join(traceback.format_exception(error)).rstrip())
        self._tell(
            f"no report: fa-advisor failed while following: {type(error).__name__}: {error}"
            " (this is a fault of fa-advisor; FA_ADVISOR_DEBUG=1 shows where)"
        )

    def _forked(self) -> None:
        """A DataLoader's worker, say: it is its own, as if we weren't there."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) in (self._end_by, self._interrupt):
                signal.signal(number, handler)
        if self._follower is not None:
            self._follower.abandon()

    def _report_before(self, name: str) -> None:
        """A function of `os` that ends this program at once: have it wait for the report."""
        original = getattr(os, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def reporting(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():  # not amid what it does
                self.end()
            return original(*args, **kwargs)

        setattr(os, name, reporting)

    # -- signals -------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for name in _FATAL:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._end_by)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def _end_by(self, number: int, frame: FrameType | None) -> None:
        """Report, then die of the signal as if it had never been taken."""
        follower = self._follower
        if self._ending or (follower is not None and follower.feeding and not self._over):
            self._pending = number
            return
        signal.signal(number, signal.SIG_DFL)
        self.end(f"signal {signal.Signals(number).name}")
        os.kill(os.getpid(), number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """KeyboardInterrupt, but not in a weak reference's callback, which would swallow it."""
        follower = self._follower
        waits = self._ending and self._pending is None  # who insists needn't wait for the report
        if waits or (follower is not None and follower.at_work(frame)):
            self._pending = number
            return
        signal.default_int_handler(number, frame)

    def _act_on_pending(self) -> None:
        if self._ending:
            return
        number, self._pending = self._pending, None
        if number is not None and threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), number)  # signals are the main thread's
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            self._end_by(number, None)


def tell(message: str) -> None:
    """A sentence on the process's own stderr, whatever the script has made of sys.stderr."""
    put(f"fa-advisor: {message}")


def put(text: str) -> None:
    """Lines on the process's own stderr."""
    try:
        print(text, file=sys.__stderr__, flush=True)
    except (OSError, ValueError):  # closed
        return
    except RuntimeError:  # in a signal's handler, while the script itself was printing
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
