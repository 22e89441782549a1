"""The child process that a profile runs in: started, listened to, and ended with all it started.

It has a session of its own, so that whatever the target starts can be ended with it, and a pipe
of its own for messages, so that whatever the target prints can't be taken for a report.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fa_advisor.inheritance import popen_arguments
from fa_advisor.messages import encode_request
from fa_advisor.records import ProfileRequest

_LONGEST_LINE = 65536
_WORKER = (
    ["-P", "-m", "fa_advisor.worker"]
    if sys.version_info >= (3, 11)
    else ["-c", "import sys; del sys.path[0]; from fa_advisor.worker import main; sys.exit(main())"]
)


@dataclass(frozen=True, slots=True)
class Said:
    """One undecoded message of `fa_advisor.messages`."""

    line: bytes


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of the target's stdout or stderr, or as much as there is of it at the end."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing more will come: "messages" or "output"."""

    stream: str


Event = Said | Printed | Closed


@dataclass(slots=True)
class Child:
    """A worker at work; a context manager, at whose end the whole session has been killed.

    `events` is bounded: a target that prints faster than anybody reads is slowed down. `open`
    names the streams that have not closed yet.
    """

    request: ProfileRequest
    capture: bool
    events: queue.Queue[Event] = field(default_factory=lambda: queue.Queue(maxsize=256))
    open: set[str] = field(default_factory=set)
    process: subprocess.Popen[bytes] = field(init=False)
    _request_fd: int = field(init=False)
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Child:
        child_request, self._request_fd = os.pipe()
        messages_fd, child_messages = os.pipe()
        inherit, tokens = popen_arguments(child_request, child_messages)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *_WORKER, *tokens],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.capture else 2,
                stderr=subprocess.STDOUT,
                **inherit,
            )
        except BaseException:
            os.close(self._request_fd)
            os.close(messages_fd)
            raise
        finally:
            os.close(child_request)
            os.close(child_messages)
        self._listen("messages", _read_messages, messages_fd)
        if self.process.stdout is not None:
            output_fd = os.dup(self.process.stdout.fileno())
            self.process.stdout.close()
            self._listen("output", _read_output, output_fd)
        # The pipe stays open for as long as we live: the worker ends when it closes.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._request_fd, encode_request(self.request))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        try:
            _end_session(self.process)
        finally:
            os.close(self._request_fd)

    def _listen(
        self, stream: str, read: Callable[[int, Callable[[Event], None]], None], fd: int
    ) -> None:
        def listen() -> None:
            read(fd, self._put)
            self._put(Closed(stream))

        self.open.add(stream)
        threading.Thread(target=listen, name=f"fa-advisor-{stream}", daemon=True).start()

    def _put(self, event: Event) -> None:
        while not self._done.is_set():
            with contextlib.suppress(queue.Full):
                return self.events.put(event, timeout=0.1)


def _read_messages(fd: int, put: Callable[[Event], None]) -> None:
    with open(fd, "rb") as pipe:
        for line in pipe:
            if line.endswith(b"\n"):  # else the child was killed in the middle of it
                put(Said(line))


def _read_output(fd: int, put: Callable[[Event], None]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pending = ""
    with open(fd, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65536):
            *lines, pending = (pending + decoder.decode(chunk)).split("\n")
            for line in lines:
                put(Printed(line.removesuffix("\r")))
            if len(pending) > _LONGEST_LINE:
                put(Printed(pending))
                pending = ""
    if pending := pending + decoder.decode(b"", final=True):
        put(Printed(pending))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and all that it started in its session; return when the child is gone."""
    if sys.platform == "win32":
        if process.poll() is None:
            tree = ["taskkill", "/T", "/F", "/PID", str(process.pid)]
            subprocess.run(tree, check=False, capture_output=True)
            process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
