"""torch.compile under a dispatch mode: Dynamo runs the code as it is, and would go on doing so.

It marks what it meets meanwhile as not to be compiled, for good. Those marks are taken back at the
end, so that a model is compiled when nobody watches any more.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def hush() -> None:
    """No warning that hooks on all modules fire once more for a compiled module's wrapper: they are
    ours, and it is of no consequence."""
    warnings.filterwarnings(
        "ignore", "Using `torch.compile\\(module\\)` when there are global hooks"
    )


@contextmanager
def uncompiled(on_met: Callable[[], None]) -> Iterator[None]:
    """`on_met` is called at the end where Dynamo was to compile something and didn't."""
    before = {id(code) for code in _met()}
    try:
        yield
    finally:
        new = [code for code in _met() if id(code) not in before]
        if new:
            from torch._C._dynamo.eval_frame import reset_code

            for code in new:
                reset_code(code)
            on_met()


def _met() -> list[Any]:
    """The code objects that Dynamo has been shown, if it has been imported at all."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    tracker = getattr(frames, "input_codes", None)
    references = getattr(tracker, "seen", ())
    return [code for reference in list(references) if (code := reference()) is not None]
