"""What the child process tells the parent: one JSON object a line, on a pipe of its own."""

from __future__ import annotations

import json

import msgspec

from fa_advisor.records import Failure, ProfileRequest, Progress
from fa_advisor.report import encoded

# The worker's exit status where the target has closed the pipe, so that nothing can be said on it.
PIPE_LOST = 74


class ProgressMessage(msgspec.Struct, frozen=True, tag="progress"):
    """The profile has come this far."""

    progress: Progress


class FailureMessage(msgspec.Struct, frozen=True, tag="failure"):
    """There will be no report, and why."""

    failure: Failure


class ReportMessage(msgspec.Struct, frozen=True, tag="report"):
    """The report's JSON, undecoded: `fa_advisor.report.parse` reads it as it reads a file."""

    report: msgspec.Raw


Message = ProgressMessage | FailureMessage | ReportMessage

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(
    ProgressMessage | FailureMessage | ReportMessage
)


def encode(message: Message) -> bytes:
    """One line, newline included. JSON escapes newlines, so there is none inside."""
    return encoded(message) + b"\n"


def decode(line: bytes) -> Message:
    """Raises: msgspec.DecodeError, msgspec.ValidationError where the line is none of ours."""
    return _decoder.decode(line)


def encode_request(request: ProfileRequest) -> bytes:
    """One line. A name that isn't UTF-8 arrives as it is: Python's JSON escapes what is no text."""
    return json.dumps(msgspec.to_builtins(request)).encode() + b"\n"


def decode_request(line: bytes) -> ProfileRequest:
    """Raises: ValueError where the line is none of ours."""
    return msgspec.convert(json.loads(line), ProfileRequest)
