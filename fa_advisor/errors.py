"""The project's exceptions. Each carries the exit status that the command line ends with."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit status of every `fa-advisor` command (docs/reference.md)."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    TARGET_RAISED = 3
    OVER_BUDGET = 4
    NO_DEVICE = 5
    INTERRUPTED = 130


class FaAdvisorError(Exception):
    """A fault that is told to the user in one message, without a traceback of ours.

    `hint` says what to do about it; `detail` is longer text shown below the message (the
    target's own traceback, three lines of code to add).
    """

    status: ExitStatus = ExitStatus.INTERNAL

    def __init__(self, message: str, *, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail


class UsageError(FaAdvisorError):
    """An argument, a target or a file that can't be used."""

    status = ExitStatus.USAGE


class TargetError(FaAdvisorError):
    """The user's own code raised, exited or crashed; `detail` holds its traceback."""

    status = ExitStatus.TARGET_RAISED


class OverBudget(FaAdvisorError):
    """A gate (`--max-peak`, `--baseline`) was not met; the report itself is complete."""

    status = ExitStatus.OVER_BUDGET


class DeviceError(FaAdvisorError):
    """A device was asked for that isn't there."""

    status = ExitStatus.NO_DEVICE


class Interrupted(FaAdvisorError):
    """The user pressed Ctrl-C."""

    status = ExitStatus.INTERRUPTED
