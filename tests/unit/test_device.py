"""The GPU found through NVML and torch, with either, both or neither there."""

from __future__ import annotations

import importlib.abc
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fa_advisor.errors import UsageError
from fa_advisor.probes import device
from fa_advisor.probes.gpus import DEFAULT_GPU, lookup

MIB = 2**20


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """`pynvml` over a list of GPUs; what a GPU lacks raises as NVML does."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __init__(self, *devices: dict[str, Any]) -> None:
        super().__init__(devices=devices, open=0)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if index >= len(self.devices):
            raise NVMLError("Invalid Argument")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for gpu in self.devices:
            if gpu.get("uuid") == uuid:
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> bytes:
        return str(gpu["name"]).encode()

    def nvmlDeviceGetCudaComputeCapability(self, gpu: dict[str, Any]) -> tuple[int, int]:
        return gpu["capability"]

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=gpu["memory"])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: dict[str, Any]) -> list[SimpleNamespace]:
        if "processes" not in gpu:
            raise NVMLError("No Permission")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu["processes"]]

    def nvmlDeviceGetNumGpuCores(self, gpu: dict[str, Any]) -> int:
        return self._fact(gpu, "cores")

    def nvmlDeviceGetMaxClockInfo(self, gpu: dict[str, Any], which: int) -> int:
        return self._fact(gpu, "sm_mhz" if which == 1 else "memory_mhz")

    def nvmlDeviceGetMemoryBusWidth(self, gpu: dict[str, Any]) -> int:
        return self._fact(gpu, "bus")

    def _fact(self, gpu: dict[str, Any], key: str) -> int:
        if key not in gpu:
            raise NVMLError("Not Supported")
        return int(gpu[key])


H200 = {"name": "NVIDIA H200", "capability": (9, 0), "memory": 143771 * MIB, "uuid": "GPU-2"}
A100 = {"name": "NVIDIA A100-SXM4-40GB", "capability": (8, 0), "memory": 40960 * MIB}
RTX_6000_ADA = {
    "name": "NVIDIA RTX 6000 Ada Generation",
    "capability": (8, 9),
    "memory": 49140 * MIB,
    "cores": 18176,
    "sm_mhz": 2505,
    "memory_mhz": 10001,
    "bus": 384,
}


def torch_with(*properties: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: bool(properties),
            device_count=lambda: len(properties),
            get_device_properties=lambda index: properties[index],
        ),
        version=SimpleNamespace(cuda="13.0", hip=None),
    )


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVML and no CUDA, whatever the machine under the test has."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", torch_with())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, Any]) -> FakeNvml:
    nvml = FakeNvml(*gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_without_nvml_and_cuda_there_is_no_gpu() -> None:
    assert device.find() is None
    assert device.outside_allocator_bytes(0, 0) is None
    spec, note = device.advise_for(None)
    assert spec is DEFAULT_GPU
    assert note == ("no GPU found: advising for an A100-SXM4-80GB; choose another with --gpu")


def test_a_named_gpu_wins_and_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H200)
    assert device.advise_for("4090") == (lookup("4090"), None)
    with pytest.raises(UsageError, match="unknown GPU 'h1000'"):
        device.advise_for("h1000")


def test_nvml_names_the_gpu_and_the_table_adds_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, {**H200, "memory": 140000 * MIB})
    spec, note = device.advise_for(None)
    assert note is None
    assert (spec.name, spec.basis) == ("NVIDIA H200", "nvml")
    assert spec.total_memory_bytes == 140000 * MIB
    assert spec.peak_flops == lookup("h200").peak_flops
    assert nvml.open == 0


def test_torch_adds_the_limits_of_the_very_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, A100, H200)
    slice_of_h200 = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        uuid="2",
        total_memory=1,
        multi_processor_count=16,
        shared_memory_per_block_optin=232448,
        L2_cache_size=60 * MIB,
    )
    monkeypatch.setitem(sys.modules, "torch", torch_with(slice_of_h200))
    spec = device.find(0)
    assert spec is not None
    assert (spec.name, spec.sm_count, spec.total_memory_bytes) == ("NVIDIA H200", 16, 143771 * MIB)


def test_torch_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090",
        major=8,
        minor=9,
        total_memory=24000 * MIB,
        multi_processor_count=128,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
    )
    monkeypatch.setitem(sys.modules, "torch", torch_with(properties))
    spec = device.find()
    assert spec is not None
    assert (spec.basis, spec.max_warps_per_sm) == ("torch", 48)
    assert spec.total_memory_bytes == 24000 * MIB
    assert spec.dram_bytes_per_s == lookup("4090").dram_bytes_per_s


def test_a_gpu_outside_the_table_is_rated_by_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, RTX_6000_ADA)
    spec, note = device.advise_for(None)
    assert note is not None and "worked out from its clocks" in note
    assert spec.sm_count == 142
    assert spec.smem_per_block_optin_bytes == 99 * 1024
    assert spec.dram_bytes_per_s == pytest.approx(960e9, rel=0.01)  # the vendor's figure
    assert spec.peak_flops.fp32 == pytest.approx(91.1e12, rel=0.01)
    assert spec.peak_flops.bf16 == pytest.approx(364.2e12, rel=0.01)


def test_a_gpu_outside_the_table_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"name": "NVIDIA Odd", "capability": (12, 1), "memory": 8 * MIB})
    spec = device.find()
    assert spec is not None
    assert (spec.compute_capability, spec.max_ctas_per_sm) == ("12.1", 24)
    install(monkeypatch, {"name": "Tesla P100", "capability": (6, 0), "memory": 8 * MIB})
    assert device.find() is None


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [
        ("1", 0, "NVIDIA H200"),
        ("1,0", 1, "NVIDIA A100-SXM4-40GB"),
        ("GPU-2", 0, "NVIDIA H200"),
        ("", 0, None),
        ("-1", 0, None),
        ("0", 1, None),
    ],
)
def test_cuda_visible_devices_numbers_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, index: int, name: str | None
) -> None:
    install(monkeypatch, A100, H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec = device.find(index)
    assert (spec.name if spec else None) == name


def test_memory_outside_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    install(monkeypatch, {**H200, "processes": [(me, 900), (1, 5000)]})
    assert device.outside_allocator_bytes(0, 400) == 500
    assert device.outside_allocator_bytes(0, 1000) == 0
    install(monkeypatch, {**H200, "processes": [(me, None)]})
    assert device.outside_allocator_bytes(0, 400) is None
    install(monkeypatch, {**H200, "processes": [(1, 5000)]})
    assert device.outside_allocator_bytes(0, 400) is None
    install(monkeypatch, H200)
    assert device.outside_allocator_bytes(0, 400) is None


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H200)
    environment = device.environment()
    assert environment.python == sys.version.split()[0]
    assert environment.cuda == "13.0"
    assert environment.driver == "580.95.05"
    assert environment.torch


class Blocker(importlib.abc.MetaPathFinder):
    """Makes imports fail as they do where a package isn't installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("torch", "triton", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_everything_works_where_nothing_is_installed() -> None:
    code = (
        "import sys; from test_device import Blocker; sys.meta_path.insert(0, Blocker())\n"
        "for name in [m for m in sys.modules if m.partition('.')[0] in ('torch', 'pynvml')]:\n"
        "    del sys.modules[name]\n"
        "from fa_advisor.probes import device\n"
        "print(device.find(), device.advise_for(None)[0].name)\n"
        "print(device.outside_allocator_bytes(0, 0), device.environment().driver)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
    )
    assert run.stdout.split() == ["None", "NVIDIA", "A100-SXM4-80GB", "None", "None"], run.stderr


def test_versions_are_learnt_without_importing_torch() -> None:
    code = (
        "import sys; from fa_advisor.probes import device\n"
        "environment = device.environment()\n"
        "print(environment.torch is not None, 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["True", "False", "False"], run.stderr
