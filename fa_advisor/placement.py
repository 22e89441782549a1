"""Where a model runs, and getting the model and its inputs there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fa_advisor.errors import DeviceError, UsageError
from fa_advisor.probes.modules import parameters_of
from fa_advisor.probes.structure import tensors_in
from fa_advisor.records import TensorSpec

DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


_TOKENS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Placement:
    """`index` is the CUDA device's number, 0 elsewhere."""

    kind: Literal["cuda", "cpu", "fake"]
    index: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.kind == "cuda" else torch.device("cpu")


def resolve(device: str) -> Placement:
    """`auto`, `cuda`, `cuda:1`, `cpu` or `fake`.

    Raises: DeviceError where the GPU asked for isn't there; UsageError for another name.
    """
    if device == "auto":
        return Placement("cuda" if torch.cuda.is_available() else "fake", 0)
    if device == "cpu":
        return Placement("cpu", 0)
    if device == "fake":
        return Placement("fake", 0)
    name, _, index = device.partition(":")
    if name != "cuda" or (index and not index.isdigit()):
        raise UsageError(f"--device {device!r}: expected auto, cuda, cuda:N, cpu or fake")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        there = f"{count} CUDA device(s) here" if count else "torch sees no CUDA device here"
        raise DeviceError(
            f"--device {device}: {there}",
            hint="--device fake models the run without a GPU; --gpu says which GPU to model",
        )
    return Placement("cuda", int(index or 0))


def check_built(model: nn.Module, name: str, *, on_fake: bool = True) -> None:
    """Raises: UsageError where a parameter has no shape yet, or no memory where it needs some."""
    for fqn, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"{name} has parameters without a shape ({fqn}): a lazy module gets them when it"
                " first runs",
                hint="call the model once on an example before it is handed over",
            )
        if not on_fake and parameter.device.type == "meta":
            raise UsageError(
                f"{name} has parameters without memory ({fqn} is on the meta device)",
                hint="profile it with --device fake, which needs none",
            )


def move(value: Any, placement: Placement, dtype: torch.dtype | None) -> Any:
    """A module (in place) or a structure of tensors, on the device; floating ones as `dtype`."""
    if isinstance(value, nn.Module):
        if placement.kind == "cuda":
            value.to(placement.device)
        return value if dtype is None else value.to(dtype)
    if isinstance(value, Tensor):
        if placement.kind == "cuda" and value.device != placement.device:
            value = value.to(placement.device)
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {k: move(v, placement, dtype) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        moved = [move(v, placement, dtype) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most of the model's floating-point parameters' elements; float32 without any."""
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters_of(model):
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda d: counts[d]) if counts else torch.float32


def sizes_of(inputs: Any) -> tuple[int | None, int | None]:
    """(batch size, sequence length) as the inputs' shapes tell: the first token ids
    [batch, length], else the first floating [batch, length, features]."""
    found = list(tensors_in(inputs))
    ids = next((t for t in found if t.dtype in _TOKENS and t.ndim == 2), None)
    if ids is not None:
        return int(ids.shape[0]), int(ids.shape[1])
    sequence = next((t for t in found if t.is_floating_point() and t.ndim == 3), None)
    if sequence is not None:
        return int(sequence.shape[0]), int(sequence.shape[1])
    first = next((t for t in found if t.ndim), None)
    return (int(first.shape[0]) if first is not None else None), None


def specs_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TensorSpec, ...]:
    """Names, shapes and dtypes of the inputs, named as the forward's signature names them."""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    made = []
    named = [(names[i] if i < len(names) else f"arg{i}", a) for i, a in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        tensors = list(tensors_in(value))
        for index, tensor in enumerate(tensors):
            made.append(
                TensorSpec(
                    name=name if len(tensors) == 1 else f"{name}[{index}]",
                    shape=tuple(int(n) for n in tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                )
            )
    return tuple(made)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put parameters, buffers and gradients back as they were, from copies on the host."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = [t.detach().to("cpu", copy=True) for t in tensors]
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient
