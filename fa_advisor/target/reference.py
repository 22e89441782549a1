"""TARGET as the user writes it: `model.py`, `model.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from fa_advisor.errors import UsageError

FORMS = "TARGET is model.py, model.py:name or package.module:name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where the model is: a file or a module (the other is `None`), and a name in it, if given."""

    file: Path | None
    module: str | None
    name: str | None

    @property
    def label(self) -> str:
        """What messages call the file or module."""
        return self.file.name if self.file is not None else str(self.module)


def parse(text: str) -> Reference:
    """Raises: UsageError where `text` has none of the three forms or the file isn't there."""
    place, name = _split(text)
    path = Path(place)
    if path.is_file():
        if path.suffix not in (".py", ""):
            raise UsageError(f"{place} is not a Python file", hint=FORMS)
        return Reference(file=path, module=None, name=name)
    looks_like_path = place.endswith(".py") or os.sep in place or "/" in place
    if path.is_dir() and (looks_like_path or not place.isidentifier()):
        raise UsageError(f"{place} is a directory; the target is a file in it", hint=FORMS)
    if looks_like_path or not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"no such file: {place}", hint=_similar(path) or FORMS)
    return Reference(file=None, module=place, name=name)


def _split(text: str) -> tuple[str, str | None]:
    if os.path.exists(text):
        return text, None
    # A colon may belong to the path: C:\models\gpt.py
    drive, rest = os.path.splitdrive(text)
    place, colon, name = rest.rpartition(":")
    if not colon:
        return text, None
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{text!r} is no target: {name!r} after the colon is not the name of a model"
            if place
            else f"{text!r} is no target: there is no file or module before the colon",
            hint=FORMS,
        )
    return drive + place, name


def _similar(path: Path) -> str:
    try:
        there = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, there, n=2, cutoff=0.75)
    return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
