"""Inputs for a model whose author gave none, from its structure and its forward's signature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fa_advisor.errors import UsageError
from fa_advisor.records import Mode
from fa_advisor.target import huggingface
from fa_advisor.target.arguments import Arguments
from fa_advisor.target.sizes import DEFAULT_BATCH_SIZE, check_sizes

Call = tuple[tuple[Any, ...], dict[str, Any]]


def synthesise(
    model: nn.Module,
    *,
    batch_size: int | None,
    seq_len: int | None,
    mode: Mode,
    dtype: torch.dtype,
) -> Call:
    """Arguments and keyword arguments for the model's forward, on the CPU.

    Floating-point inputs have `dtype`. In train mode, models that compute their own loss get
    labels. Without a `batch_size` it is 1 (2 to train with batch norm, which takes no fewer),
    without a `seq_len` 1024, or what the model has positions for where that is less.

    Raises: UsageError where the structure doesn't say what to make, for sizes below 1, and for a
    length beyond the model's positions.
    """
    check_sizes(batch_size, seq_len)
    model = _unwrapped(model)
    batch = batch_size or _default_batch_size(model, mode)
    if huggingface.is_transformers(model):
        inputs = huggingface.Inputs(
            model=model, batch=batch, seq_len=seq_len, training=mode == "train", dtype=dtype
        )
        return (), inputs.make()
    if type(model).forward is nn.Module.forward:
        raise UsageError(
            f"{type(model).__name__} has no forward to profile",
            hint="name a model that can be called",
        )
    arguments = Arguments(model=model, batch=batch, seq_len=seq_len, dtype=dtype)
    return _fill(list(inspect.signature(model.forward).parameters.values()), arguments, mode)


def _fill(parameters: list[inspect.Parameter], arguments: Arguments, mode: Mode) -> Call:
    named = [
        each
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.KEYWORD_ONLY)
    ]
    needed = [each for each in named if each.default is each.empty]
    if not needed:
        # Nothing is required: the inputs are those whose names say that they are (CLIP's image
        # and text), or the first parameter.
        needed = [each for each in named if arguments.is_main(each.name)] or named[:1]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if not needed:
        args.append(arguments.first(""))
    for index, parameter in enumerate(needed):
        value = arguments.first(parameter.name) if index == 0 else arguments.further(parameter.name)
        if parameter is named[len(args)] and not kwargs:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            kwargs[parameter.name] = arguments.further(parameter.name)
    if mode == "train":
        optional = [each.name for each in named if each not in needed]
        kwargs |= arguments.targets(optional)
    return tuple(args), kwargs


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's or a data-parallel wrapper."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and len(list(model.children())) == 1:
            return _unwrapped(inner)
    return model


def _default_batch_size(model: nn.Module, mode: Mode) -> int:
    norms = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())
    return 2 if norms and mode == "train" else DEFAULT_BATCH_SIZE
