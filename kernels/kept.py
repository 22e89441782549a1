"""Where findings about this machine's GPUs and compilers are kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path:
    """FA_ADVISOR_CACHE_DIR, or `fa-advisor` in the user's cache directory.

    Raises: RuntimeError where there is no home directory.
    """
    if ours := os.environ.get("FA_ADVISOR_CACHE_DIR"):
        return Path(ours)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "fa-advisor"


def write(path: Path, text: str) -> None:
    """All of it or nothing, whoever else writes there. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
