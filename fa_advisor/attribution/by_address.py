"""A dict by address that finds what lies at or before one, without looking at all of it."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TypeVar

V = TypeVar("V")


class ByAddress(dict[int, V]):
    """A dict of addresses, set and deleted by item alone. Its order is made up for when it is
    asked for: a trace that never asks pays nothing but a list of what is new."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[int] = []
        self._new: list[int] = []

    def __setitem__(self, address: int, value: V) -> None:
        if address not in self:
            self._new.append(address)
        super().__setitem__(address, value)

    def floor(self, address: int) -> int | None:
        """The highest key that isn't above `address`."""
        if len(self._new) > 32 + len(self._order) // 16:
            self._order = sorted(self)
        else:
            for new in self._new:
                if new in self:
                    insort(self._order, new)
        self._new.clear()
        at = end = bisect_right(self._order, address)
        while at and self._order[at - 1] not in self:
            at -= 1
        del self._order[at:end]  # deleted since: each is passed over once
        return self._order[at - 1] if at else None
