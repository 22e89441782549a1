"""A user's script as `__main__`: what `python script.py` and `python -m module` set, is set."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any

from fa_advisor.errors import UsageError

# Between a user's call and what it raises stand, because of us, our own frames and, next to them,
# those of torch that lead to a dispatch mode and away from it.
_BESIDE = (
    "torch._compile",
    "torch._dynamo.eval_frame",
    "torch._ops",
    "torch.utils._python_dispatch",
    "torch.utils._stats",
)


@dataclass(frozen=True)
class Script:
    """What will be `__main__`, not yet compiled. `name` is what messages call it."""

    name: str
    main: ModuleType
    argv: tuple[str, ...]
    folder: str

    @classmethod
    def of_file(cls, path: str, arguments: tuple[str, ...]) -> Script:
        """`python path arguments`.

        Compiled files, folders and zip archives too.

        Raises: UsageError where there is no such file, or no `__main__` in it.
        """
        location = os.path.abspath(path)
        name = os.path.basename(path.rstrip("/"))
        holder = pkgutil.get_importer(location)
        if holder is not None:  # a folder, or a zip archive
            spec = holder.find_spec("__main__")
            if spec is None or spec.loader is None:
                kind = "a folder" if os.path.isdir(location) else "an archive"
                raise UsageError(f"{path} is {kind} without a __main__.py")
            main = _module(spec.loader, spec.origin or location, spec=spec, package="")
            return cls(name, main, (path, *arguments), location)
        folder = os.path.dirname(os.path.realpath(location))
        try:
            with open(location, "rb") as file:
                compiled = path.endswith(".pyc") or file.read(4) == importlib.util.MAGIC_NUMBER
        except OSError as error:
            raise UsageError(
                f"can't open {path}: {error.strerror or error}",
                hint="the script's own path comes after the options: fa-advisor run [options]"
                " script.py [its arguments]; a module's name after -m",
            ) from error
        loader = (
            importlib.machinery.SourcelessFileLoader("__main__", location)
            if compiled
            else importlib.machinery.SourceFileLoader("__main__", location)
        )
        main = _module(loader, location, spec=None, package=None)
        return cls(name, main, (path, *arguments), folder)

    @classmethod
    def of_module(cls, name: str, arguments: tuple[str, ...]) -> Script:
        """`python -m name arguments`; a package's `__main__` where `name` is one.

        Raises: UsageError where there is no such module; what a parent package raises.
        """
        folder = os.getcwd()
        with _first_on_path(folder):
            spec = _found(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = _found(f"{name}.__main__")
                if spec is None:
                    raise UsageError(
                        f"{name} is a package without a __main__: python -m can't run it either",
                        hint="name one of the modules in it",
                    )
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise UsageError(
                f"no module named {name!r} that can be run: looked in {folder} and among the"
                " installed packages",
                hint="-m takes a module's dotted name; a file is given without it",
            )
        origin = spec.origin or name
        main = _module(spec.loader, origin, spec=spec, package=spec.parent)
        return cls(name, main, (origin, *arguments), folder)

    def run(self) -> None:
        """Run it, here and now. What it raises passes, SystemExit too."""
        if not getattr(sys.flags, "safe_path", False) and sys.path:
            sys.path[0] = self.folder  # where the folder of `fa-advisor` itself stood
        sys.argv[:] = self.argv
        _kept.append(sys.modules["__main__"])
        sys.modules["__main__"] = self.main
        code: CodeType | None = None
        try:
            loader: Any = self.main.__loader__
            name = self.main.__spec__.name if self.main.__spec__ is not None else "__main__"
            code = loader.get_code(name)
            if code is None:
                raise ImportError(f"no code object available for {name}")
            exec(code, self.main.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            _show_without_us(error, code)
            raise


_kept: list[ModuleType] = []  # the module whose code still runs above the script's


def _module(loader: Any, file: str, *, spec: Any, package: str | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = loader
    main.__spec__ = spec
    main.__package__ = package
    names = main.__dict__
    names["__builtins__"] = builtins
    names["__cached__"] = getattr(spec, "cached", None)
    if "__annotations__" in vars(sys.modules["__main__"]):  # until Python 3.13
        names["__annotations__"] = {}
    return main


def _found(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise _of_the_package(name, error) from error
    except ValueError:  # a relative name, or a module without a spec
        return None
    except Exception as error:
        raise _of_the_package(name, error) from error


def _of_the_package(name: str, error: Exception) -> UsageError:
    return UsageError(f"can't import the package of {name}: {type(error).__name__}: {error}")


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _show_without_us(error: BaseException, code: CodeType | None) -> None:
    """Have the traceback that Python prints at the end begin where the script's code does.

    The exception itself goes on to the top, so that Python ends as it would have.
    """
    hook = sys.excepthook

    def shown(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        sys.excepthook = hook
        links, seen = [value], set[int]()
        while links:
            link = links.pop()
            if id(link) not in seen:
                seen.add(id(link))
                link.__traceback__ = _the_scripts(link.__traceback__, code)
                links += [each for each in (link.__cause__, link.__context__) if each is not None]
        hook(kind, value, value.__traceback__)

    sys.excepthook = shown


def _the_scripts(trace: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    if code is None:  # it doesn't compile: what there is to show is in the message
        return None
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    starts = [i for i, each in enumerate(frames) if each.tb_frame.f_code is code]
    if starts:
        frames = frames[starts[0] :]
    names = [str(each.tb_frame.f_globals.get("__name__", "")) for each in frames]
    ours = [name == "fa_advisor" or name.startswith("fa_advisor.") for name in names]
    for order in (range(1, len(names)), range(len(names) - 2, -1, -1)):
        for i in order:
            beside = ours[i - order.step]
            ours[i] = ours[i] or (beside and names[i] in _BESIDE)
    kept = [each for each, drop in zip(frames, ours, strict=True) if not drop]
    rebuilt: TracebackType | None = None
    for each in reversed(kept):
        rebuilt = TracebackType(rebuilt, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rebuilt
