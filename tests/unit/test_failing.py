"""What a report says of a request that found no memory, from the allocator's state then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import samples
from fa_advisor.attribution.failure import Fallen
from fa_advisor.attribution.replay import Above
from fa_advisor.attribution.steps import StepLog
from fa_advisor.attribution.workspaces import workspaces_on
from fa_advisor.failing import Raised, with_failure
from fa_advisor.gpu_ledger import GpuLedger
from fa_advisor.probes.events import NOWHERE, Phase
from fa_advisor.records import DeviceSpec, OutOfMemory
from fa_advisor.report import Report

MIB = 2**20
STATE = Above(97 * MIB, 98 * MIB, 0, MIB, 0, 0, MIB)


def failed(
    monkeypatch: pytest.MonkeyPatch,
    allowed: int | None,
    device_free: int,
    *,
    state: Above = STATE,
    others: int | None = None,
) -> tuple[OutOfMemory, DeviceSpec]:
    """A GiB was asked for; and the GPU for which the whole step was modelled: 4.2 GiB, 241 MiB
    without attention's."""
    monkeypatch.setattr("fa_advisor.failing.used_by_others_bytes", lambda index: others)
    report = samples.report()
    asked: list[DeviceSpec] = []

    def foresee(device: DeviceSpec) -> Report:
        asked.append(device)
        memory = replace(report.memory, peak_allocated_bytes=4300 * MIB)
        advice = replace(report.advice, counterfactual_peak_bytes=241 * MIB)
        return replace(report, memory=memory, advice=advice)

    gpu = GpuLedger(0, report.device)
    gpu.allowed = allowed
    fallen = Fallen(
        StepLog([], 0), 1024 * MIB, device_free, state, "bmm", NOWHERE, Phase.FORWARD, None, None
    )
    made = with_failure(report, fallen, Raised("out of memory", ""), gpu, foresee)
    assert made.out_of_memory is not None
    return made.out_of_memory, asked[0]


def test_what_the_model_of_the_whole_step_assumed_is_said() -> None:
    report = samples.report()
    gpu = GpuLedger(0, report.device)
    fallen = Fallen(StepLog([], 0), MIB, 0, STATE, "bmm", NOWHERE, Phase.FORWARD, None, None)

    def foresee(device: DeviceSpec) -> Report:
        return replace(report, notes=(*report.notes, "it ran uncompiled"))

    notes = with_failure(report, fallen, Raised("out of memory", ""), gpu, foresee).notes
    assert notes == (*report.notes, "of the whole step, as it was modelled: it ran uncompiled")


def test_under_a_limit_of_the_process_the_limit_is_what_there_was(monkeypatch: Any) -> None:
    told, device = failed(monkeypatch, 1024 * MIB, 140_000 * MIB)
    assert told.cause == "limit"
    assert told.capacity_bytes == device.total_memory_bytes == 1024 * MIB
    assert told.missing_bytes == 98 * MIB
    assert any(r.kind == "patch" and r.enough for r in told.remedies)


def test_a_limit_that_torch_doesnt_tell_is_where_it_stood(monkeypatch: Any) -> None:
    told, _ = failed(monkeypatch, None, 140_000 * MIB)
    assert told.cause == "limit"
    assert told.capacity_bytes == 98 * MIB and told.missing_bytes == 0


def test_a_full_device_is_smaller_than_what_is_allowed(monkeypatch: Any) -> None:
    told, _ = failed(monkeypatch, 80_000 * MIB, 600 * MIB)
    assert told.cause == "memory"
    assert told.capacity_bytes == 698 * MIB and told.missing_bytes == 424 * MIB


def test_a_limit_is_missing_bytes_too_where_the_device_is_full(monkeypatch: Any) -> None:
    """Other processes hold enough, but without them the limit would refuse the request."""
    told, _ = failed(monkeypatch, 98 * MIB, 600 * MIB, others=60_000 * MIB)
    assert told.cause == "memory" and told.missing_bytes == 1024 * MIB
    assert told.capacity_bytes == 98 * MIB
    told, _ = failed(monkeypatch, 80_000 * MIB, 600 * MIB, others=60_000 * MIB)
    assert told.cause == "other_processes" and told.missing_bytes == 424 * MIB


def test_what_lies_in_pieces_under_a_limit_is_said(monkeypatch: Any) -> None:
    pieces = Above(1000 * MIB, 3000 * MIB, 0, 2000 * MIB, 0, 0, 500 * MIB)
    told, _ = failed(monkeypatch, 3000 * MIB, 140_000 * MIB, state=pieces)
    assert told.cause == "limit" and told.missing_bytes == 1024 * MIB
    assert [r.kind for r in told.remedies][:2] == ["limit", "allocator"]
    told, _ = failed(monkeypatch, None, 140_000 * MIB, state=pieces)
    assert told.missing_bytes == 0
    assert [r.kind for r in told.remedies][:2] == ["limit", "allocator"]
    told, _ = failed(monkeypatch, 1024 * MIB, 140_000 * MIB)
    assert "allocator" not in {r.kind for r in told.remedies}


@pytest.mark.parametrize(
    ("cublas", "cublaslt", "expected"),
    [
        (None, None, (8_519_680, 1 << 20)),
        (":4096:2:16:8", "", (8_519_680, 1 << 20)),
        (":4096:8", "4096", (32 * MIB, 4 * MIB)),
        (":0:0", "0", (0, 0)),
        ("nonsense", "nonsense", (8_519_680, 1 << 20)),
        (":4096:2 or so", " +4096KB", (8 * MIB, 4 * MIB)),
        (":\u0664:\u0662", "\u00b2", (8_519_680, 1 << 20)),
        (":4096:9999999999", "99999999999", (8_519_680, 1 << 20)),
        (f":{'9' * 5000}:1", "9" * 5000, (8_519_680, 1 << 20)),
    ],
)
def test_the_workspaces_are_as_large_as_the_environment_says(
    cublas: str | None,
    cublaslt: str | None,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", cublas), ("CUBLASLT_WORKSPACE_SIZE", cublaslt)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert workspaces_on(samples.device())[:2] == expected
