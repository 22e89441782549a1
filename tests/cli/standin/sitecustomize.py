"""Put on a child process's path by test_launch.py: a pipeline that only runs the target's file.

So the launcher is tested by itself, and without the seconds that importing torch takes.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any


def profile_target(request: Any, progress: Callable[[Any], None]) -> Any:
    import samples
    from fa_advisor.records import Progress

    if os.environ.get("STANDIN_FAILS"):
        raise ZeroDivisionError("a fault of ours")
    progress(Progress(stage="load", note=request.target))
    with open(request.target) as file:
        exec(compile(file.read(), request.target, "exec"), {"__name__": "target"})
    progress(Progress(stage="measure", done=1, total=2))
    return samples.report(1)


pipeline = types.ModuleType("fa_advisor.pipeline")
pipeline.profile_target = profile_target  # type: ignore[attr-defined]
sys.modules["fa_advisor.pipeline"] = pipeline
