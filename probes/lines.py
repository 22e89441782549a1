"""Source lines: which line of the user's code an operator belongs to."""

from __future__ import annotations

import os
from types import FrameType

import torch
import torch.utils.checkpoint

import fa_advisor

_PACKAGE = os.path.dirname(fa_advisor.__file__)
LIBRARY = (
    f"{torch.__path__[0]}/",
    f"{os.path.dirname(__file__)}/",
    f"{_PACKAGE}/",
    "<",
)
_EXAMPLES = f"{_PACKAGE}/examples/"  # where a wheel puts them: a user's code like any other
_is_library: dict[str, bool] = {}  # by file: a code object's hash is that of all its instructions


def user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame outside torch and the probes."""
    while frame is not None:
        file = frame.f_code.co_filename
        library = _is_library.get(file)
        if library is None:
            library = _is_library[file] = _of_a_library(file)
        if not library:
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def _of_a_library(file: str) -> bool:
    return file.startswith(LIBRARY) and not file.startswith(_EXAMPLES)


def in_checkpoint(frame: FrameType | None) -> bool:
    """Does torch.utils.checkpoint stand among the callers?"""
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
