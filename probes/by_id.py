"""A weak dictionary of objects that are asked nothing: neither hashed nor compared."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ById(Generic[V]):
    """A value for each of some objects, for as long as they live. Keeps none alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, key: Any, value: V) -> None:
        number, entries = id(key), self._entries

        def gone(reference: weakref.ref[Any]) -> None:
            if number in entries and entries[number][0] is reference:
                del entries[number]

        entries[number] = (weakref.ref(key, gone), value)

    def __contains__(self, key: Any) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> V | None:
        """The object's value, `None` where it has none."""
        return self._entries[id(key)][1] if key in self else None

    def keys(self) -> list[Any]:
        """Those that live, in the order in which they came."""
        found = [reference() for reference, _ in list(self._entries.values())]
        return [key for key in found if key is not None]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
