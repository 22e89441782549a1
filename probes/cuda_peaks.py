"""The allocator's peak of each step of a script, taken without the script noticing.

The allocator keeps one peak since its last reset. Whoever wants every step's has to reset it, and
what a script then prints as its own `torch.cuda.max_memory_allocated()` would be the last step's.
So what a reset takes away is kept, and put back into what torch's functions answer.
"""

from __future__ import annotations

from typing import Any

import torch

_memory: Any = torch.cuda.memory


_idle: list[CudaPeaks] = []


class CudaPeaks:
    """Peaks of one device between `take`s. Borrowed ones may be nested.

    From the first on torch's functions answer with what was taken put back, to the process's end:
    a script may ask for its peak last of all.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._stats = _memory.memory_stats_as_nested_dict
        self._reset = _memory.reset_peak_memory_stats
        self._hidden: dict[str, Any] = {}  # the peaks that our resets took from the script
        self._ours: dict[str, Any] = {}  # those that the script's resets took from us
        modules: tuple[Any, ...] = (_memory, torch.cuda)
        for module in modules:
            module.memory_stats_as_nested_dict = self._answer
            module.reset_peak_memory_stats = self._script_resets
        self.take()

    @classmethod
    def borrow(cls, index: int) -> CudaPeaks:
        """One that nobody takes from; until `give_back`."""
        for each in _idle:
            if each._index == index:
                _idle.remove(each)
                each.take()
                return each
        return cls(index)

    def give_back(self) -> None:
        """Nobody takes from it any more; what it has taken stays put back."""
        _idle.append(self)

    def take(self) -> tuple[int, int]:
        """Bytes allocated and reserved at their peaks since the last time."""
        now = self._stats(self._index)
        peaks = _with_peaks(now, self._ours)
        self._hidden = _with_peaks(now, self._hidden)
        self._ours = {}
        self._reset(self._index)
        return _peak(peaks, "allocated_bytes"), _peak(peaks, "reserved_bytes")

    def _answer(self, device: Any = None) -> dict[str, Any]:
        stats: dict[str, Any] = self._stats(device)
        return _with_peaks(stats, self._hidden) if self._is_ours(device) else stats

    def _script_resets(self, device: Any = None) -> None:
        if self._is_ours(device):
            self._ours = _with_peaks(self._stats(device), self._ours)
            self._hidden = {}
        self._reset(device)

    def _is_ours(self, device: Any) -> bool:
        index: int = torch.cuda._utils._get_device_index(device, optional=True)
        return index == self._index


def _with_peaks(stats: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The nested statistics with every peak as high as it is in `kept`."""
    made: dict[str, Any] = {}
    for name, value in stats.items():
        other = kept.get(name)
        if isinstance(value, dict):
            made[name] = _with_peaks(value, other if isinstance(other, dict) else {})
        else:
            made[name] = max(value, other) if name == "peak" and other is not None else value
    return made


def _peak(stats: dict[str, Any], name: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get("peak", 0))
