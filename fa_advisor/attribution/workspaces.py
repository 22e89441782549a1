"""The workspaces that torch gives to cuBLAS and cuBLASLt, one a handle and stream, and keeps."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from fa_advisor.records import DeviceSpec


class Workspaces(NamedTuple):
    """Bytes of each, as torch asks for them (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

    cublas: int
    cublaslt: int


def workspaces_on(device: DeviceSpec) -> Workspaces:
    """Torch's defaults on this GPU, or what CUBLAS_WORKSPACE_CONFIG (":KIB:COUNT" once or more) and
    CUBLASLT_WORKSPACE_SIZE (KiB) say."""
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    cublas = sum(int(kib) * int(count) << 10 for kib, count in config)
    if not config:
        cublas = 32 << 20 if device.capability[0] == 9 else (2 * 4096 + 8 * 16) << 10
    kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "").strip()
    return Workspaces(cublas, (int(kib) if kib.isdecimal() else 1024) << 10)
