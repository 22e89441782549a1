"""What operators take beside their tensors on CUDA, and a model of the allocator has to know: the
workspaces that torch gives to cuBLAS and cuBLASLt, one a handle and stream, and keeps; the parts of
sums."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from fa_advisor.attribution.reductions import Machine
from fa_advisor.records import DeviceSpec

_CUBLAS, _CUBLASLT = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
_DEFAULT_CUBLASLT = 1 << 20


class Workspaces(NamedTuple):
    """Bytes of each, as torch asks for them (aten/src/ATen/cuda/CublasHandlePool.cpp); and the GPU
    that parts sums."""

    cublas: int
    cublaslt: int
    machine: Machine


def workspaces_on(device: DeviceSpec) -> Workspaces:
    """Torch's defaults on this GPU, or what CUBLAS_WORKSPACE_CONFIG (":KIB:COUNT" once or more) and
    CUBLASLT_WORKSPACE_SIZE (KiB) say, read as torch reads them. What the GPU can't have or nobody
    can read is as if it weren't set."""
    config = re.findall(r":([0-9]{1,18}):([0-9]{1,18})", os.environ.get(_CUBLAS, ""))
    cublas = sum(int(kib) * int(count) << 10 for kib, count in config)
    if not config or cublas > device.total_memory_bytes:
        cublas = 32 << 20 if device.capability[0] == 9 else (2 * 4096 + 8 * 16) << 10
    number = re.match(r"\s*\+?([0-9]{1,18})", os.environ.get(_CUBLASLT, ""))
    cublaslt = int(number[1]) << 10 if number else _DEFAULT_CUBLASLT
    if cublaslt > device.total_memory_bytes:
        cublaslt = _DEFAULT_CUBLASLT
    machine = Machine(device.sm_count, 32 * device.max_warps_per_sm)
    return Workspaces(cublas, cublaslt, machine)
