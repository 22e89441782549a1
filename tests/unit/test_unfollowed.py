"""Out of memory where no step was followed: what an error's text and the allocator's state tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_advisor.unfollowed import explained, in_words

MIB = 2**20
TEXT = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 24.00 GiB of"
    " which {free} is free. Including non-PyTorch memory, this process has 2.20 GiB memory in use."
)


def snapshot(*sizes: tuple[int, str]) -> dict[str, Any]:
    blocks = [{"size": size, "requested_size": size, "state": state} for size, state in sizes]
    total = sum(size for size, _ in sizes)
    segment = {"address": 1 << 40, "total_size": total, "device": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [[]], "allocator_settings": {}}


def told(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], asked: str, free: str
) -> tuple[str, str]:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: state)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    try:
        raise torch.OutOfMemoryError(TEXT.format(asked=asked, free=free))
    except torch.OutOfMemoryError as error:
        found = explained(error)
    assert found is not None and found.request is not None
    return found.request.cause, in_words(found)


def test_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    state = snapshot((900 * MIB, "active_allocated"))
    cause, text = told(monkeypatch, state, "96.00 MiB", "32.00 MiB")
    assert cause == "memory"
    assert text.startswith("out of memory at test_unfollowed.py:")
    assert "96.00 MiB were asked for, and 64.00 MiB were missing" in text
    assert "torch held 900.00 MiB of 900.00 MiB reserved" in text


def test_fragmentation_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    state = snapshot(*[(9 * MIB, "active_allocated"), (11 * MIB, "inactive")] * 50)
    cause, text = told(monkeypatch, state, "96.00 MiB", "1.50 MiB")
    assert cause == "fragmentation" and "expandable_segments:True" in text
    cause, text = told(monkeypatch, state, "96.00 MiB", "3.00 GiB")
    assert cause == "limit" and "set_per_process_memory_fraction" in text


def test_a_message_of_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot())
    assert explained(torch.OutOfMemoryError("the accelerator is full")) is None
