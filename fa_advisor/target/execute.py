"""Running the user's file, or importing the user's module, once."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from fa_advisor.errors import TargetError, UsageError
from fa_advisor.target.faults import target_code


def run_file(path: Path, argv: tuple[str, ...]) -> ModuleType:
    """Run a file as Python runs a script, but under its own name instead of `__main__`.

    Its folder comes first on sys.path, sys.argv is its own, and it is in sys.modules, so that
    pickle, dataclasses and typing find what it defines. No bytecode is written beside it.

    Raises: UsageError where it can't be read or compiled; TargetError with what it raises.
    """
    location = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader(_module_name(path), location)
    spec = importlib.util.spec_from_file_location(loader.name, location, loader=loader)
    if spec is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        source = loader.get_data(location)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from error
    sys.path.insert(0, os.path.dirname(os.path.realpath(location)))
    sys.argv[:] = [os.fspath(path), *argv]
    sys.modules[module.__name__] = module
    try:
        code = loader.source_to_code(source, location)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise UsageError(
            f"{path.name} is not valid Python: {error}",
            detail="".join(traceback.format_exception_only(type(error), error)).rstrip(),
        ) from None
    with target_code(path.name):
        exec(code, module.__dict__)
    # A module may put something else in its place, as with any import.
    return sys.modules.get(module.__name__, module)


def import_module(name: str, argv: tuple[str, ...]) -> ModuleType:
    """Import a module by its dotted name, from the installed ones or the working directory.

    Raises: UsageError where there is no such module; TargetError with what it raises.
    """
    # Last, so that a folder that happens to be called like an installed package hides nothing.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.argv[:] = [name, *argv]
    try:
        with target_code(name):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
                missing = error.name
    except TargetError:
        sys.modules.pop(name, None)
        raise
    raise UsageError(
        f"no module named {missing!r}: looked in {os.getcwd()} and among the installed packages"
        + (f"; {name}.py is not there either" if "." not in name else ""),
        hint="a file is named with its suffix: model.py, or model.py:name",
    )


def _module_name(path: Path) -> str:
    """The file's stem; another name where a module that we run on has that one already."""
    return f"target_{path.stem}" if path.stem in sys.modules else path.stem
