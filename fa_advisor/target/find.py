"""The model in the user's module: by name, or in the order that docs/targets.md gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fa_advisor.errors import UsageError
from fa_advisor.target.faults import target_code

FACTORIES = ("build_model", "get_model", "make_model", "create_model")
THREE_LINES = """\
Add these lines to {label}:

    def build_model():
        model = {example}
        return model
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model, the name it was found under, and the inputs its factory returned with it."""

    model: nn.Module
    name: str
    inputs: Any = None


def find_model(module: ModuleType, name: str | None, label: str) -> Found:
    """Raises: UsageError where there is no model, or more than one; TargetError."""
    if name is not None:
        return _build(_lookup(module, name, label), name, label)
    model = getattr(module, "model", None)
    if isinstance(model, nn.Module) or (callable(model) and not _missing_arguments(model)):
        return _build(model, "model", label)
    for candidates in (_factories(module), _classes(module)):
        buildable = [each for each in candidates if not _missing_arguments(getattr(module, each))]
        if len(buildable) > 1:
            raise UsageError(
                f"{label} has more than one model: {', '.join(buildable)}",
                hint=f"name one: {label}:{buildable[-1]}",
            )
        if buildable:
            return _build(getattr(module, buildable[0]), buildable[0], label)
    raise _no_model(module, label)


def _lookup(module: ModuleType, name: str, label: str) -> Any:
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            there = _instances(module) + _factories(module) + _classes(module)
            raise UsageError(
                f"{label} has no {name!r}",
                hint=f"it has {', '.join(there)}" if there else "it has no model at all",
                detail=_three_lines(module, label),
            ) from None
    return value


def _build(value: Any, name: str, label: str) -> Found:
    """Call what has to be called, once, and check what came of it."""
    if isinstance(value, nn.Module):
        return Found(model=_eager(value, name, label), name=name)
    if not callable(value) or (inspect.isclass(value) and not issubclass(value, nn.Module)):
        raise UsageError(
            f"{name} in {label} is {_a(value)}; "
            "expected an nn.Module, a class of them, or a function that returns one"
        )
    missing = _missing_arguments(value)
    if missing:
        raise UsageError(
            f"{name} in {label} can't be called without arguments: it needs {', '.join(missing)}",
            hint="name a function that calls it with arguments of yours",
            detail=THREE_LINES.format(label=label, example=f"{name}({', '.join(missing)})"),
        )
    with target_code(label):
        built = value()
    inputs = None
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        built, inputs = built
        if not isinstance(inputs, torch.Tensor | tuple | list | Mapping):
            inputs = None  # its tokenizer or its config, for example
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"{name}() in {label} returned {_a(built)}; "
            "expected an nn.Module, or a pair of an nn.Module and its inputs"
        )
    return Found(model=_eager(built, name, label), name=name, inputs=inputs)


def _eager(model: nn.Module, name: str, label: str) -> nn.Module:
    """Raises: UsageError for a TorchScript module, whose inner modules can't be followed."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"{name} in {label} is a TorchScript module, whose operators can't be followed",
            hint="name the module that it was scripted or traced from",
        )
    return model


def _missing_arguments(factory: Callable[..., Any]) -> list[str]:
    """The arguments without which it can't be called."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return []  # a builtin: calling it will tell
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _factories(module: ModuleType) -> list[str]:
    return _own(module, [name for name in FACTORIES if callable(getattr(module, name, None))])


def _classes(module: ModuleType) -> list[str]:
    classes = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and not inspect.isabstract(value)
        and value.__module__.partition(".")[0] not in ("torch", "transformers", "timm")
        and value.__name__ == name
    ]
    return _own(module, classes)


def _own(module: ModuleType, names: list[str]) -> list[str]:
    """Those that the module itself defines, if there are any, else those that it imports."""
    own = [
        name
        for name in names
        if getattr(getattr(module, name), "__module__", None) == module.__name__
    ]
    return own or names


def _instances(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, nn.Module)]


def _no_model(module: ModuleType, label: str) -> UsageError:
    message = (
        f"found no model in {label}: looked for `model`, "
        f"{', '.join(f'`{name}`' for name in FACTORIES)}, "
        "and an nn.Module class that needs no arguments"
    )
    almost = [f"{label}:{name}" for name in _instances(module)]
    if almost:
        return UsageError(message, hint=f"did you mean {' or '.join(almost)}?")
    return UsageError(message, hint=_needing(module), detail=_three_lines(module, label))


def _needing(module: ModuleType) -> str:
    """Why those that came near are no models."""
    near: Iterable[str] = _factories(module) + _classes(module)
    return "; ".join(
        f"{name} needs {', '.join(_missing_arguments(getattr(module, name)))}" for name in near
    )


def _three_lines(module: ModuleType, label: str) -> str:
    classes = _classes(module)
    return THREE_LINES.format(label=label, example=f"{classes[-1] if classes else 'MyModel'}(...)")


def _a(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__qualname__}"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
