"""Memory that ran out where no step was followed: while a model was built, moved, or in between.

There is no report of a step then, but what the allocator holds still tells the cause.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch

from fa_advisor.attribution.frames import encodable
from fa_advisor.attribution.postmortem import Postmortem, explain
from fa_advisor.attribution.remedies import size
from fa_advisor.attribution.replay import Trace
from fa_advisor.attribution.snapshots import checked

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_GPU = re.compile(r"\bGPU (\d+)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Lines that hold less than this share of what is allocated aren't worth a word.
_SHARE = 0.05


def in_words(found: Postmortem) -> str:
    """The request, its cause, who holds what, what helps: a few sentences."""
    request = found.request
    if request is None:
        return ""
    where = f" at {request.source}" if request.source else ""
    missing = f", and {size(request.missing_bytes)} were missing" if request.missing_bytes else ""
    parts = [
        f"out of memory{where}: {size(request.bytes)} were asked for{missing}",
        f"torch held {size(found.allocated_bytes)} of {size(found.reserved_bytes)} reserved",
    ]
    holders = [
        f"{size(line.bytes)} from {line.source}"
        for line in found.lines[:3]
        if line.source and line.bytes >= _SHARE * found.allocated_bytes
    ]
    if holders:
        parts[-1] += f" ({', '.join(holders)})"
    return "; ".join((*parts, *(remedy.text for remedy in found.remedies)))


def explained(error: BaseException) -> Postmortem | None:
    """What the allocator holds now, against what an out-of-memory error says; `None` where its
    message can't be read. Without a recorded history: nothing says which line holds what."""
    message = str(error)
    asked, free, gpu = _ASKED.search(message), _FREE.search(message), _GPU.search(message)
    if asked is None or free is None or gpu is None or not torch.cuda.is_initialized():
        return None
    index = int(gpu.group(1))
    trace = checked(torch.cuda.memory._snapshot()).traces.get(index)
    if trace is None:
        return None
    event = {
        "action": "oom",
        "size": _bytes(asked),
        "device_free": _bytes(free),
        "frames": [
            {"filename": encodable(frame.filename), "line": frame.lineno or 0, "name": frame.name}
            for frame in reversed(traceback.extract_tb(error.__traceback__))
        ],
    }
    now = Trace([event], trace.segments, trace.settings)
    return explain(now, snapshot="", device=index)


def _bytes(found: Any) -> int:
    return int(float(found.group(1)) * _UNITS[found.group(2)])
