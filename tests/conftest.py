"""What every test can count on: no network, no colour forced from outside, and known skips."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# Set before transformers is imported: models are built from configs, never fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What a terminal or a CI service asks of colour must not reach the output that tests compare.
for _name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLORTERM", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# The machine's load is no property of the code: no deadline. On CI the examples are fixed, so that
# a red run is red again on the next machine.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine can't run; torch is asked only if a test wants to know."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if find_spec("timm") is None:
        for item in items:
            if item.get_closest_marker("vision"):
                item.add_marker(pytest.mark.skip(reason="no timm: run `make test-vision`"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
