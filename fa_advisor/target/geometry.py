"""What a model's structure says about the inputs it takes: vocabulary, positions, width, image."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_HOLDERS = ("config", "cfg", "args", "params", "hparams", "model_args", "model_config")
_POSITION_SETTINGS = (
    "max_position_embeddings",
    "block_size",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "context_length",
    "context_len",
    "n_positions",
    "n_ctx",
    "ctx_len",
    "seq_len",
    "max_len",
)
_WIDTH_SETTINGS = ("d_model", "hidden_size", "embed_dim", "n_embd", "hidden_dim", "dim", "width")
_IMAGE_SETTINGS = ("image_size", "img_size", "input_size", "sample_size", "resolution")
_DEFAULT_IMAGE_SIDE = 224
_POSITIONAL = re.compile(r"(^|_)(pos|wpe$|pe$)")
_CAUSAL = re.compile(r"mask|tril|causal")
_RELATIVE = re.compile(r"(^|_)rel|bias|bucket")


def setting(model: nn.Module, names: tuple[str, ...]) -> Any:
    """The first of `names` that the model or its configuration has as a number or a pair."""
    for holder in (*(getattr(model, name, None) for name in _HOLDERS), model):
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, bool) or not isinstance(value, int | tuple | list):
                continue
            if isinstance(value, int) and value < 1:
                continue
            return value
    return None


def whole(model: nn.Module, names: tuple[str, ...]) -> int | None:
    """As `setting`, for a single number."""
    value = setting(model, names)
    return value if isinstance(value, int) else None


def is_positional(name: str) -> bool:
    """Whether a module, parameter or buffer of this name holds one row a position."""
    return _POSITIONAL.search(name.rpartition(".")[2].lower()) is not None


def token_embeddings(model: nn.Module) -> list[nn.Module]:
    """The embeddings that are looked up by token, in the order in which they were registered."""
    return [
        module
        for name, module in model.named_modules()
        if "Embedding" in type(module).__name__
        and isinstance(getattr(module, "num_embeddings", None), int)
        and not is_positional(name)
        and not _RELATIVE.search(name.rpartition(".")[2])
    ]


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence the model has positions, or a causal mask, for; `None`: any length."""
    stored = list(_stored_positions(model))
    return min(stored) if stored else whole(model, _POSITION_SETTINGS)


def _stored_positions(model: nn.Module) -> Iterator[int]:
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and is_positional(name):
            # With a padding index, positions count from behind it (RoBERTa and its kin).
            yield module.num_embeddings - (
                0 if module.padding_idx is None else module.padding_idx + 1
            )
    buffers = dict(model.named_buffers())
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        last = name.rpartition(".")[2].lower()
        if tensor.ndim < 2 or _RELATIVE.search(last.removesuffix("bias")):
            continue
        # A buffer is also positions where it belongs to a module called so (`pos_encoder.table`).
        owners = name.split(".") if name in buffers else [last]
        rows = [size for size in tensor.shape[:-1] if size > 1]
        square = tensor.shape[-1] == tensor.shape[-2] > 1
        if square and (_CAUSAL.search(last) or (last == "bias" and tensor.ndim == 4)):
            yield tensor.shape[-1]
        elif any(map(is_positional, owners)) and tensor.ndim <= 3 and len(rows) == 1:
            yield rows[0]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def width(model: nn.Module) -> int | None:
    """The size of the model's hidden states, as it names it."""
    return whole(model, _WIDTH_SETTINGS)


def takes_sequence_first(model: nn.Module) -> bool:
    """Whether attention layers of torch's own read [L, B, D], as they do unless told otherwise."""
    return any(
        isinstance(module, nn.MultiheadAttention) and not module.batch_first
        for module in model.modules()
    )


def has_sequence_first_positions(model: nn.Module) -> bool:
    """Whether a table of positions is [L, 1, D]: then so are the hidden states, [L, B, D]."""
    return any(
        is_positional(name) and tensor.ndim == 3 and tensor.shape[0] > 1 == tensor.shape[1]
        for name, tensor in _tensors(model)
    )


def has_language_head(model: nn.Module, vocabulary: int) -> bool:
    """Whether a linear layer maps hidden states to the vocabulary."""
    return any(
        isinstance(module, nn.Linear) and module.out_features == vocabulary
        for module in model.modules()
    )


def image_shape(model: nn.Module) -> tuple[int, int, int]:
    """[C, H, W] of the images that the model takes; 224 x 224 where nothing says otherwise."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first.in_channels if first is not None else 3
    sides = (getattr(each, "img_size", None) for each in model.modules())
    given = next((each for each in sides if isinstance(each, int | tuple | list)), None)
    if given is None:
        given = setting(model, _IMAGE_SETTINGS)
    if given is None:
        card = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        given = card.get("input_size") if isinstance(card, Mapping) else None
    if given is None and first is not None:
        given = _side_from_patches(model, first)
    if given is None:
        given = _DEFAULT_IMAGE_SIDE
    height, width_ = (given, given) if isinstance(given, int) else tuple(given)[-2:]
    return channels, height, width_


def _side_from_patches(model: nn.Module, patches: nn.Conv2d) -> int | None:
    """The side of the image whose patches, and a few extra tokens, the positions are for."""
    if patches.kernel_size != patches.stride or patches.stride[0] == 1:
        return None
    positions = max_positions(model)
    if positions is None:
        return None
    return math.isqrt(positions) * patches.stride[0]
