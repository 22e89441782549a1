"""Source lines: which line of the user's code an operator belongs to."""

from __future__ import annotations

from types import CodeType, FrameType

import torch

_LIBRARY = (
    f"{torch.__path__[0]}/",
    __file__.rsplit("/", 1)[0] + "/",
    "<",
)
_is_library: dict[CodeType, bool] = {}


def user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame outside torch and the probes."""
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code)
        if library is None:
            library = _is_library[code] = code.co_filename.startswith(_LIBRARY)
        if not library:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
