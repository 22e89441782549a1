"""Being told when the script has imported a package, without importing it first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class Arrival(MetaPathFinder):
    """Calls `then` once, as soon as the package `name` has been imported; at once if it has."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._looking = False
        if name in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that tells."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True  # find_spec comes by here again
        try:
            spec = find_spec(fullname)
        finally:
            self._looking = False
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
