"""One step of training or inference, as a plain loop would run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fa_advisor.errors import TargetError
from fa_advisor.records import Mode

OptimizerName = Literal["adamw", "sgd", "none"]


def make_optimizer(
    model: nn.Module, name: OptimizerName, *, foreach: bool | None, lr: float = 1e-4
) -> Optimizer | None:
    """The optimizer over the trainable parameters; `None` where there are none, or none is wanted.

    `foreach`: True makes CPU and fake runs use CUDA's default implementation; None leaves it to
    torch.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "none" or not trainable:
        return None
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=lr, momentum=0.9, foreach=foreach)
    return torch.optim.AdamW(trainable, lr=lr, foreach=foreach)


def name_of(optimizer: Optimizer | None) -> OptimizerName:
    """The optimizer of ours whose state is as large as this one's."""
    if optimizer is None:
        return "none"
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    if "betas" in group:
        return "adamw"
    return "sgd" if group.get("momentum") else "none"


class Step:
    """Runs the model once on its inputs: forward, and in train mode loss, backward, optimizer."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: Mode,
        optimizer: Optimizer | None,
        on_stage: Callable[[str], None],
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._mode = mode
        self._optimizer = optimizer
        self._on_stage = on_stage

    def run(self) -> None:
        """Raises: what the model raises; TargetError where its output can't be trained on."""
        self._on_stage("forward")
        if self._mode == "infer":
            with torch.no_grad():
                output = self._forward()
            if not any(True for _ in tensors_in(output)):
                raise _no_tensor(output)
            return
        output = self._forward()
        loss = loss_of(output)
        del output
        self._on_stage("backward")
        loss.backward()
        del loss
        if self._optimizer is not None:
            self._on_stage("optimizer")
            self._optimizer.step()
        self._model.zero_grad(set_to_none=True)

    def _forward(self) -> Any:
        with warnings.catch_warnings():
            # The watch's own hooks; they fire once more for the wrapper, which names no module.
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are")
            return self._model(*self._args, **self._kwargs)


def loss_of(output: Any) -> Tensor:
    """The loss the model returns, else the mean of its floating-point output.

    A returned loss is an attribute or key `loss`, or a scalar that requires grad, alone or in a
    tuple. Raises: TargetError where nothing in the output can be trained on.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.requires_grad:
        return named if named.ndim == 0 else named.mean()
    found = list(tensors_in(output))
    if not found:
        raise _no_tensor(output)
    floating = [t for t in found if t.is_floating_point() or t.is_complex()]
    trainable = [t for t in floating if t.requires_grad]
    if not trainable:
        raise TargetError(
            "the model's output doesn't require grad, so there is nothing to train",
            hint="profile with --mode infer, or check that some parameter requires grad",
        )
    scalar = next((t for t in trainable if t.ndim == 0), None)
    if scalar is not None:
        return scalar
    first = trainable[0]
    return first.abs().mean() if first.is_complex() else first.mean()


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a model's output: tensors, sequences, mappings, dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 6:
        if isinstance(value, Mapping):
            items: Any = value.values()
        elif isinstance(value, (list, tuple)):
            items = value
        else:
            items = vars(value).values() if hasattr(value, "__dict__") else ()
        for item in items:
            yield from tensors_in(item, depth + 1)


def _no_tensor(output: Any) -> TargetError:
    return TargetError(
        f"the model returned no tensor but {type(output).__name__}",
        hint="its forward must return a tensor, or a tuple, dict or dataclass that holds one",
    )
