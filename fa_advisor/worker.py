"""The child process in which the user's target runs: `python -P -m fa_advisor.worker`.

It reads one request from the first pipe, sends events and at last a report or a failure down the
second, and leaves stdin, stdout and stderr to the target.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import msgspec

from fa_advisor import messages
from fa_advisor.attribution.frames import encodable
from fa_advisor.errors import ExitStatus, FaAdvisorError
from fa_advisor.inheritance import adopt
from fa_advisor.records import Failure, ProfileRequest, Progress
from fa_advisor.report import encoded


class Sender:
    """Writes messages to the parent, and to nobody else."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._pipe = self._identity()

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def send(self, message: messages.Message) -> None:
        """Raises: OSError where the target has closed the pipe."""
        if os.getpid() != self._pid:
            return  # the target forked, and its copy of us came this far: it has no say
        if self._identity() != self._pipe:
            # The target closed our pipe and the number now means a file of its own.
            raise OSError("the target closed the pipe to fa-advisor")
        view = memoryview(messages.encode(message))
        while view:
            view = view[os.write(self._fd, view) :]

    def progress(self, progress: Progress) -> None:
        """Tell the parent how far the profile has come."""
        self.send(messages.ProgressMessage(progress))


def main() -> int:
    """Run the request; the exit status is 0 once a report or a failure has been sent."""
    request_fd = adopt(sys.argv[1], os.O_RDONLY)
    sender = Sender(adopt(sys.argv[2], os.O_WRONLY))
    request = messages.decode_request(_read_line(request_fd))
    threading.Thread(target=_die_with_parent, args=(request_fd,), daemon=True).start()
    try:
        sender.progress(Progress(stage="start"))
        sender.send(_outcome(request, sender))
    except OSError:
        return messages.PIPE_LOST
    return ExitStatus.OK


def _outcome(request: ProfileRequest, sender: Sender) -> messages.Message:
    try:
        from fa_advisor.pipeline import profile_target

        report = profile_target(request, sender.progress)
        return messages.ReportMessage(msgspec.Raw(encoded(report)))
    except FaAdvisorError as error:
        failure = Failure(
            status=error.status,
            message=encodable(error.message),
            hint=encodable(error.hint),
            detail=encodable(error.detail),
        )
    except KeyboardInterrupt:
        failure = Failure(status=ExitStatus.INTERRUPTED, message="interrupted")
    except SystemExit as error:
        failure = Failure(
            status=ExitStatus.TARGET_RAISED, message=f"the target called sys.exit({error.code!r})"
        )
    except BaseException as error:
        failure = _fault_of_ours(error)
    return messages.FailureMessage(failure)


def _fault_of_ours(error: BaseException) -> Failure:
    last_line = traceback.format_exception_only(type(error), error)[-1].strip()
    debug = os.environ.get("FA_ADVISOR_DEBUG") == "1"
    detail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(
        status=ExitStatus.INTERNAL,
        message=encodable(f"fa-advisor failed while profiling: {last_line}"),
        hint="" if debug else "this is a fault of fa-advisor; FA_ADVISOR_DEBUG=1 shows where",
        detail=encodable(detail) if debug else "",
    )


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            raise SystemExit("fa_advisor.worker: no request came; run `fa-advisor profile` instead")
        line += chunk
    return line


def _die_with_parent(request_fd: int) -> None:
    """The parent keeps its end of the request pipe open for as long as it lives."""
    try:
        while os.read(request_fd, 4096):
            pass
    except OSError:
        return  # the target closed it: no watch then
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(ExitStatus.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
