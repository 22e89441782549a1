"""What the stack of an allocation tells: the user's line, and whether Inductor's code made it.

Innermost frame first, as torch's snapshots have them. For generated code torch puts the frames
that it was generated from right behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Frames = Sequence[Mapping[str, Any]]

# Torch (installed, or built in its source tree), what compiles for it, fa-advisor, and what of
# Python's own stands between; `<...>` and `??` are no files.
_LIBRARY = (
    r"[/\\](?:site|dist)-packages[/\\](?:torch|functorch|torchgen|triton|fa_advisor)[/\\]"
    r"|/torch/(?:_\w+|nn|autograd|utils|optim|cuda|distributed|amp|fx|func)/"
    r"|/torch/(?:_tensor|_ops|_compile|functional|overrides|serialization)\.py$"
    r"|/(?:runpy|threading|contextlib|functools|selectors)\.py$|^<|^\?\?$|^$"
)
_SYSTEM = r"\.(?:c|cc|cpp|cu|h|hpp|cxx|pyx|so)[.\d]*$|^(?:Python|Objects|Modules)/"
_INDUCTOR = r"/torchinductor_[^/]*/|/c[a-z2-7]{51}\.py$"
_NOT_THE_USERS = re.compile(f"{_LIBRARY}|{_SYSTEM}|{_INDUCTOR}")
_GENERATED = re.compile(_INDUCTOR)


# What stands between an operator and whoever called it, whosever it is.
INTERPOSED = ("__torch_dispatch__", "__torch_function__")


def encodable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 and so JSON can't carry: as `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def user_line(frames: Frames, ours: tuple[str, ...] = ()) -> tuple[str, int] | None:
    """(file, line) of the innermost frame that is the user's; `ours`: prefixes to leave out."""
    for frame in users(frames, ours):
        return frame["filename"], frame["line"]
    return None


def users(frames: Frames, ours: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """The frames that are the user's, innermost first."""
    for frame in frames:
        file = frame["filename"]
        if frame["name"] in INTERPOSED:
            continue
        if not (_NOT_THE_USERS.search(file) or (ours and file.startswith(ours))):
            yield frame


def generated_frame(frames: Frames) -> Mapping[str, Any] | None:
    """Where in code that Inductor generated this was allocated; `None`: not there."""
    return next((frame for frame in frames[:3] if _GENERATED.search(frame["filename"])), None)


def generated(frames: Frames) -> bool:
    """Did code that Inductor generated allocate this?"""
    return generated_frame(frames) is not None


def in_backward(frames: Frames) -> bool:
    """Does a compiled backward stand among the callers?"""
    return any(
        frame["name"] in ("backward", "_backward_impl") and "/_functorch/" in frame["filename"]
        for frame in frames
    )
