"""The calls of a model that its sites are looked for in: the user's example, or made-up inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fa_advisor.errors import UsageError
from fa_advisor.target import synthesise

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Long enough for more than one tile, short enough for a comparison in float64.
BATCH_SIZE, SEQ_LEN = 2, 160


def calls(model: nn.Module, example: Any) -> list[Call]:
    """Arguments of each run: the example, and it again with padding where that can be said.

    Raises: UsageError where there is no example and none can be made up.
    """
    first = given(example) if example is not None else made(model)
    padded = _padded(model, first)
    return [first] if padded is None else [first, padded]


def given(example: Any) -> Call:
    """A tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def made(model: nn.Module) -> Call:
    """Inputs from the model's structure, on its device and in its dtype."""
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    dtype = torch.float32 if like is None else like.dtype
    for seq_len in (SEQ_LEN, None):
        try:
            call = synthesise(
                model, batch_size=BATCH_SIZE, seq_len=seq_len, mode="infer", dtype=dtype
            )
        except UsageError as error:
            if seq_len is None:
                raise UsageError(
                    f"{error.message}; patch(model) needs inputs to find its attention with",
                    hint="give them: patch(model, example=inputs)",
                    detail=error.detail,
                ) from error
        else:
            break
    device = torch.device("cpu") if like is None else like.device
    moved: Call = tree_map_only(Tensor, lambda each: each.to(device), call)
    return moved


def _padded(model: nn.Module, call: Call) -> Call | None:
    """The call with the first row padded on the left, for models of text that take a mask."""
    args, kwargs = call
    ids = kwargs.get("input_ids")
    if args or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 4:
        return None
    if kwargs.get("attention_mask") is not None or not _takes_mask(model):
        return None
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 4] = 0
    return (), {**kwargs, "attention_mask": mask}


def _takes_mask(model: nn.Module) -> bool:
    import inspect

    return "attention_mask" in inspect.signature(model.forward).parameters
