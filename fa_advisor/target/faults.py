"""What the user's code raises, told with the user's own traceback and none of ours."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from fa_advisor.errors import FaAdvisorError, TargetError

# Frames that are on the stack only because fa-advisor runs the target: its own, the import
# system's, and what torch puts between an op and a dispatch mode or a fake tensor.
_NOT_THE_TARGETS = (
    "fa_advisor",
    "runpy",
    "importlib",
    "_frozen_importlib",
    "torch._subclasses",
    "torch._meta_registrations",
    "torch._refs",
    "torch._prims",
    "torch._prims_common",
    "torch._decomp",
    "torch._ops",
    "torch._library",
    "torch._compile",
    "torch._dynamo",
    "torch._higher_order_ops",
    "torch.utils._python_dispatch",
    "torch.utils._stats",
)
_LONGEST_MESSAGE = 500


@contextmanager
def target_code(label: str) -> Iterator[None]:
    """Code of the user's runs inside: what it raises becomes a TargetError.

    `label` is what the message calls it, "model.py" for example. Errors of ours and Ctrl-C pass
    through.
    """
    try:
        yield
    except (FaAdvisorError, KeyboardInterrupt):
        raise
    except SystemExit as exit_:
        raise TargetError(
            f"{label} called sys.exit({'' if exit_.code is None else repr(exit_.code)})",
            hint=_exit_hint(exit_),
            detail=target_traceback(exit_),
        ) from None
    except BaseException as error:
        raise TargetError(
            f"{label} raised {_one_line(error)}",
            hint=_import_hint(error),
            detail=target_traceback(error),
        ) from None


def target_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames that aren't the target's.

    With FA_ADVISOR_DEBUG=1 with all of them.
    """
    for link in _chain(error) if os.environ.get("FA_ADVISOR_DEBUG") != "1" else ():
        link.__traceback__ = _targets_frames(link.__traceback__)
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and what was being handled, each once."""
    links: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or any(link is seen for seen in links):
            continue
        links.append(link)
        waiting += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
    return links


def _targets_frames(frames: TracebackType | None) -> TracebackType | None:
    kept = []
    while frames is not None:
        module = str(frames.tb_frame.f_globals.get("__name__", ""))
        ours = any(module == name or module.startswith(f"{name}.") for name in _NOT_THE_TARGETS)
        if not ours and module != "torch":  # torch itself: its check of a fake op's arguments
            kept.append(frames)
        frames = frames.tb_next
    rebuilt: TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt


def _one_line(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "<its message can't be shown>"
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}..."
    return f"{name}: {text}" if text else name


def _exit_hint(exit_: SystemExit) -> str:
    if any(f.name == "parse_args" for f in traceback.extract_tb(exit_.__traceback__)):
        return "arguments for the target go after `--`: fa-advisor profile model.py -- --depth 4"
    return (
        'keep what shouldn\'t run when the model is built under `if __name__ == "__main__":`, '
        "and have a build_model() that returns the model"
    )


def _import_hint(error: BaseException) -> str:
    if not isinstance(error, ImportError):
        return ""
    if "relative import" in str(error):
        return "a file inside a package is named as package.module:name, not by its path"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"fa-advisor runs the target with {sys.executable}: is {error.name.split('.')[0]} "
            "installed there, or importable from the file's own folder?"
        )
    return f"fa-advisor runs the target with {sys.executable}"
