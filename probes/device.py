"""The GPU in this machine: NVML's and torch's facts, and the table's where neither says.

NVML names the GPU and knows its memory without loading torch or making a CUDA context; torch, if
this process has imported it already, adds the SM count and the limits of a block. Nothing here
needs either: without an NVIDIA driver, `find` says that there is no GPU.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from fa_advisor.probes import gpus
from fa_advisor.probes.rates import dram_bytes_per_s, peak_flops
from fa_advisor.records import DeviceSpec, Environment

# FP32 lanes of an SM, to get from NVML's core count to SMs.
_CORES_PER_SM = {"7.0": 64, "7.5": 64, "8.0": 64}
_OTHERWISE_CORES_PER_SM = 128


def find(index: int = 0) -> DeviceSpec | None:
    """The `index`-th CUDA device, as CUDA_VISIBLE_DEVICES numbers them; `None` if it isn't there.

    `basis` says who named it: "nvml", or "torch" where NVML can't be asked. Its bandwidth and peak
    rates are the vendor's where the table knows the name, else worked out from the clocks
    (`in_table` tells which).
    """
    properties = _torch_properties(index)
    with _nvml() as nvml:
        handle = _handle(nvml, index, properties) if nvml else None
        if nvml and handle is not None:
            return _from_nvml(nvml, handle, properties)
    return _from_torch(properties) if properties is not None else None


def in_table(device: DeviceSpec) -> bool:
    """Whether the vendor's bandwidth and peak rates are known for this GPU."""
    return gpus.by_device_name(device.name) is not None


def advise_for(gpu: str | None, index: int = 0) -> tuple[DeviceSpec, str | None]:
    """The GPU to advise for, and a note to show where something about it was assumed.

    `gpu` (a name, see `gpus.lookup`) wins over the GPU found; with neither, an A100 80 GB.

    Raises: UsageError where `gpu` names no known GPU.
    """
    if gpu is not None:
        return gpus.lookup(gpu), None
    found = find(index)
    if found is None:
        return gpus.DEFAULT_GPU, (
            f"no GPU found: advising for an {gpus.DEFAULT_GPU.name.removeprefix('NVIDIA ')};"
            " choose another with --gpu"
        )
    if not in_table(found):
        return found, (
            f"{found.name} isn't in the table of GPUs: its bandwidth and peak rates are worked out"
            " from its clocks"
        )
    return found, None


def outside_allocator_bytes(index: int, reserved: int) -> int | None:
    """GPU memory that this process uses beyond torch's `reserved` bytes (CUDA context, libraries'
    workspaces, NCCL); `None` where NVML can't say, as in most containers."""
    used = _used_by_process(index)
    mine = used.get(os.getpid()) if used else None
    return max(0, mine - reserved) if mine is not None else None


def allowed_bytes(index: int) -> int | None:
    """What torch's allocator may reserve on the CUDA device by the process's own limit
    (`torch.cuda.set_per_process_memory_fraction`); `None` where torch doesn't tell."""
    torch = sys.modules.get("torch")
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None) if torch else None
    properties = _torch_properties(index)
    if fraction is None or properties is None:
        return None
    return int(fraction(index) * properties.total_memory)


def used_by_others_bytes(index: int) -> int | None:
    """GPU memory that other processes use; `None` where NVML can't tell them apart."""
    used = _used_by_process(index)
    if not used or os.getpid() not in used:
        return None
    return sum(size for pid, size in used.items() if pid != os.getpid())


def _used_by_process(index: int) -> dict[int, int]:
    """Bytes of the CUDA device by process id, as far as NVML sees."""
    with _nvml() as nvml:
        handle = _handle(nvml, index, _torch_properties(index)) if nvml else None
        if not nvml or handle is None:
            return {}
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return {}
    used: dict[int, int] = {}
    for process in processes:
        if process.usedGpuMemory is not None:
            used[process.pid] = used.get(process.pid, 0) + int(process.usedGpuMemory)
    return used


def environment() -> Environment:
    """Versions of what a report is made with. Imports neither torch nor triton to learn them."""
    return Environment(
        python=platform.python_version(),
        torch=_installed("torch"),
        triton=_installed("triton") or _installed("triton-windows"),
        cuda=_cuda_version(),
        driver=_driver_version(),
        fa_advisor=_installed("fa-advisor") or "unknown",
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    """The CUDA release that the installed torch was built for ("13.0"); `None`: a CPU build."""
    torch = sys.modules.get("torch")
    if torch is not None:
        built_for: str | None = getattr(torch.version, "cuda", None)
        return built_for
    try:
        source = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text()
    except (PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", source, flags=re.MULTILINE)
    return match[1] if match else None


def _driver_version() -> str | None:
    with _nvml() as nvml:
        if not nvml:
            return None
        try:
            return _text(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised `pynvml` module, or `None` where NVML isn't there."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no module, no library, no driver, no permission: all mean no NVML
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _torch_properties(index: int) -> Any:
    """torch's properties of the CUDA device, if torch is imported and sees it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    if getattr(torch.version, "hip", None):
        return None
    return torch.cuda.get_device_properties(index)


def _handle(nvml: Any, index: int, properties: Any) -> Any:
    """NVML's handle of the CUDA device. NVML numbers by bus, CUDA by CUDA_VISIBLE_DEVICES."""
    try:
        if properties is not None and hasattr(properties, "uuid"):
            uuid = str(properties.uuid)
            for prefix in ("GPU-", "MIG-"):
                try:
                    return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
                except nvml.NVMLError:
                    continue
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return nvml.nvmlDeviceGetHandleByIndex(index)
        names = [name.strip() for name in visible.split(",")]
        if index >= len(names) or names[index] in ("", "-1", "NoDevFiles"):
            return None
        name = names[index]
        if name.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None


def _from_nvml(nvml: Any, handle: Any, properties: Any) -> DeviceSpec | None:
    name = _text(nvml.nvmlDeviceGetName(handle))
    capability = "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    known = gpus.by_device_name(name)
    spec = known or _outline(nvml, handle, name, capability)
    if spec is None:
        return _from_torch(properties) if properties is not None else None
    spec = replace(
        spec,
        name=name,
        compute_capability=capability,
        basis="nvml",
        total_memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )
    return _with_torch(spec, properties)


def _outline(nvml: Any, handle: Any, name: str, capability: str) -> DeviceSpec | None:
    """A GPU that the table doesn't know, from its capability, cores and clocks."""
    stand_in = gpus.stand_in(capability)
    if stand_in is None:
        return None
    cores = _ask(nvml, "nvmlDeviceGetNumGpuCores", handle)
    per_sm = _CORES_PER_SM.get(capability, _OTHERWISE_CORES_PER_SM)
    sm_count = int(cores) // per_sm if cores else stand_in.sm_count
    sm_mhz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)
    memory_mhz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM)
    bus_bits = _ask(nvml, "nvmlDeviceGetMemoryBusWidth", handle)
    rates = peak_flops(name, capability, sm_count, sm_mhz * 1e6) if sm_mhz else None
    return replace(
        stand_in,
        sm_count=sm_count,
        dram_bytes_per_s=(
            dram_bytes_per_s(memory_mhz * 1e6, bus_bits)
            if memory_mhz and bus_bits
            else stand_in.dram_bytes_per_s
        ),
        peak_flops=rates or stand_in.peak_flops,
    )


def _from_torch(properties: Any) -> DeviceSpec | None:
    """The GPU as torch alone describes it."""
    capability = f"{properties.major}.{properties.minor}"
    known = gpus.by_device_name(properties.name)
    spec = known or gpus.stand_in(capability)
    if spec is None:
        return None
    if known is None:
        # torch's clocks are in kHz, where this release has them.
        clock = getattr(properties, "clock_rate", 0) * 1e3
        memory_clock = getattr(properties, "memory_clock_rate", 0) * 1e3
        bus_bits = getattr(properties, "memory_bus_width", 0)
        rates = peak_flops(properties.name, capability, properties.multi_processor_count, clock)
        spec = replace(
            spec,
            peak_flops=rates if rates and clock else spec.peak_flops,
            dram_bytes_per_s=dram_bytes_per_s(memory_clock, bus_bits)
            if memory_clock and bus_bits
            else spec.dram_bytes_per_s,
        )
    spec = replace(
        spec,
        name=properties.name,
        compute_capability=capability,
        basis="torch",
        total_memory_bytes=int(properties.total_memory),
    )
    return _with_torch(spec, properties)


def _with_torch(spec: DeviceSpec, properties: Any) -> DeviceSpec:
    """`spec` with the limits that torch reports of the very device (a MIG slice has fewer SMs)."""
    if properties is None:
        return spec

    def said(attribute: str, otherwise: int) -> int:
        return int(getattr(properties, attribute, 0) or otherwise)

    threads = said("max_threads_per_multi_processor", spec.max_warps_per_sm * 32)
    return replace(
        spec,
        sm_count=said("multi_processor_count", spec.sm_count),
        smem_per_sm_bytes=said("shared_memory_per_multiprocessor", spec.smem_per_sm_bytes),
        smem_per_block_optin_bytes=said(
            "shared_memory_per_block_optin", spec.smem_per_block_optin_bytes
        ),
        registers_per_sm=said("regs_per_multiprocessor", spec.registers_per_sm),
        max_warps_per_sm=threads // 32,
        l2_bytes=said("L2_cache_size", spec.l2_bytes),
    )


def _ask(nvml: Any, function: str, *arguments: Any) -> int:
    """What NVML answers, 0 where this GPU or driver can't."""
    try:
        return int(getattr(nvml, function)(*arguments))
    except (nvml.NVMLError, AttributeError):
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
