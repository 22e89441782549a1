"""stdout is data, stderr is talk: how commands print, and what a terminal is."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO, TypedDict

from fa_advisor.errors import FaAdvisorError, UsageError


def emit(data: bytes | str) -> None:
    """Print data on stdout. A reader that has gone away (`| head`) is no fault.

    Raises: UsageError where stdout can't be written to.
    """
    data = data.encode(sys.stdout.encoding or "utf-8", "replace") if isinstance(data, str) else data
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        # What Python flushes at exit goes nowhere, or it would complain about the pipe again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"can't write to stdout: {error.strerror or error}") from error


def say(message: str) -> None:
    """Tell the user something on stderr; a closed stderr is no fault."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def say_error(error: FaAdvisorError) -> None:
    """A fault as `error:` and `hint:`, its detail between them, on stderr."""
    say(f"error: {_shown(error.message)}")
    if error.detail:
        say(_shown(error.detail).rstrip("\n"))
    if error.hint:
        say(f"hint: {_shown(error.hint)}")


def _shown(text: str) -> str:
    """Foreign text without what would move a terminal's cursor; lines and tabs stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def check_outputs(outputs: Sequence[str], others: Sequence[str | None] = ()) -> None:
    """Of the report's files, and of the others: before a long run, not after it."""
    paths = [*outputs, *(path for path in others if path is not None)]
    if not paths:
        return
    from fa_advisor.views.formats import check_writable, format_of

    for path in outputs:
        format_of(path)
    for path in paths:
        check_writable(path)


def attempted(actions: Iterable[Callable[[], None]]) -> list[FaAdvisorError]:
    """Do all of them, each on its own; what failed, and how."""
    faults: list[FaAdvisorError] = []
    for action in actions:
        try:
            action()
        except FaAdvisorError as fault:
            faults.append(fault)
        except OSError as error:
            faults.append(UsageError(str(error)))
    return faults


def raise_all(faults: Sequence[FaAdvisorError]) -> None:
    """Tell of every fault; the last is raised, and with it its exit status."""
    for fault in faults[:-1]:
        say_error(fault)
    if faults:
        raise faults[-1]


class TextOptions(TypedDict):
    """What the text views' `to_text` takes."""

    width: int
    color: bool
    ascii: bool


def text_options(ascii: bool = False, stream: TextIO | None = None) -> TextOptions:
    """The text views' options that suit a stream (default: stdout); `ascii` as the user asked."""
    stream = sys.stdout if stream is None else stream
    terminal = stream.isatty()
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else 100
    if terminal:
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(stream.fileno()).columns or width
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return TextOptions(
        width=min(width, 120),
        color=terminal and not plain,
        ascii=ascii or not _encodes("█▏→·", stream.encoding),
    )


def _encodes(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def has_dashboard_terminal() -> bool:
    """Whether a dashboard can open: it reads stdin and draws on stderr."""
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stderr.isatty() and not dumb
