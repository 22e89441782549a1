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
    met: dict[int, Any] = {}
    before = _codes()
    _open.append(met)
    if before is not None:
        _listen(before)
    try:
        yield
    finally:
        _open[:] = [other for other in _open if other is not met]
        codes = _codes()
        if before is None and codes is not None:  # it was imported meanwhile
            met.update((id(code), code) for ref in list(codes.seen) if (code := ref()) is not None)
        if codes is not None and not _open:
            vars(codes).pop("add", None)
        if met:
            from torch._C._dynamo.eval_frame import reset_code

            for code in met.values():
                reset_code(code)
            on_met()


# What Dynamo has been shown, a dict (code objects by id) for each of those that watch.
_open: list[dict[int, Any]] = []


def _codes() -> Any:
    """Dynamo's own set of the code objects that it has ever been shown, if it has been imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)


def _listen(codes: Any) -> None:
    """Until the last one has stopped watching: what it has been shown before doesn't count."""
    if "add" in vars(codes):
        return
    add = codes.add

    def shown(code: Any) -> None:
        for met in _open:
            met[id(code)] = code
        add(code)

    codes.add = shown
