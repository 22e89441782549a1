"""From a request to the user's model, and the inputs where the user gave some."""

from __future__ import annotations

import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fa_advisor.records import ProfileRequest
from fa_advisor.target.execute import import_module, run_file
from fa_advisor.target.find import find_model
from fa_advisor.target.given import given_inputs
from fa_advisor.target.reference import parse
from fa_advisor.target.sizes import check_sizes

BUNDLED_EXAMPLE = "nanogpt.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to profile.

    `args` and `kwargs` are what its forward is called with, both `None` where the user gave no
    inputs and `synthesise` has to make some. `path` is the file that was run or imported.
    """

    model: nn.Module
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None
    path: str | None
    name: str

    @property
    def inputs_given(self) -> bool:
        """Whether the inputs are the user's own."""
        return self.args is not None


def load(request: ProfileRequest) -> Target:
    """Run the target's file (the bundled example's, without a target) and build its model.

    Takes nothing from tensors but their shapes, so that it works on fake ones.

    Raises: UsageError where there is no model, or more than one; TargetError with what the
    user's code raises.
    """
    check_sizes(request.batch_size, request.seq_len)
    module, label, name = _run(request)
    found = find_model(module, name, label)
    call = given_inputs(module, found, label, request.batch_size, request.seq_len)
    return Target(
        model=found.model,
        args=None if call is None else call[0],
        kwargs=None if call is None else call[1],
        path=_path(module),
        name=found.name,
    )


def _run(request: ProfileRequest) -> tuple[ModuleType, str, str | None]:
    if request.target is None:
        resource = importlib.resources.files("fa_advisor.examples") / BUNDLED_EXAMPLE
        with importlib.resources.as_file(resource) as file:
            return run_file(file, request.argv), file.name, None
    reference = parse(request.target)
    if reference.file is not None:
        return run_file(reference.file, request.argv), reference.label, reference.name
    module = import_module(reference.label, request.argv)
    return module, reference.label, reference.name


def _path(module: ModuleType) -> str | None:
    """The file, as short as it can be named from the working directory."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    here = Path(os.getcwd())
    path = Path(file)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
