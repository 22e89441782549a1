"""The table of GPUs: the limits of each, and finding one by a forgiving name.

Limits that belong to a compute capability (shared memory, registers, warps, blocks) are stated
once per capability; the rest once per GPU. docs/gpus.md says where the figures come from, why
`total_memory_bytes` isn't the number on the box, and what the peak rates mean.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from fa_advisor.errors import UsageError
from fa_advisor.records import DeviceSpec, PeakFlops

KIB = 2**10
MIB = 2**20
REGISTERS_PER_SM = 65536


@dataclass(frozen=True, slots=True)
class CapabilityLimits:
    """What one SM of a compute capability has, and what one block may take of it."""

    smem_per_sm_bytes: int
    smem_per_block_optin_bytes: int
    max_warps_per_sm: int
    max_ctas_per_sm: int


CAPABILITIES: dict[str, CapabilityLimits] = {
    "7.0": CapabilityLimits(96 * KIB, 96 * KIB, 64, 32),
    "7.5": CapabilityLimits(64 * KIB, 64 * KIB, 32, 16),
    "8.0": CapabilityLimits(164 * KIB, 163 * KIB, 64, 32),
    "8.6": CapabilityLimits(100 * KIB, 99 * KIB, 48, 16),
    "8.9": CapabilityLimits(100 * KIB, 99 * KIB, 48, 24),
    "9.0": CapabilityLimits(228 * KIB, 227 * KIB, 64, 32),
    "10.0": CapabilityLimits(228 * KIB, 227 * KIB, 64, 32),
    "10.3": CapabilityLimits(228 * KIB, 227 * KIB, 64, 32),
    "12.0": CapabilityLimits(100 * KIB, 99 * KIB, 48, 24),
}


def _peaks(
    half: float, *, bf16: bool = True, fp32: float, tf32: float | None, fp8: float | None = None
) -> PeakFlops:
    """Dense TFLOP/s; 16-bit and fp8 on tensor cores with fp32 accumulation, fp32 off them."""
    return PeakFlops(
        bf16=half * 1e12 if bf16 else None,
        fp16=half * 1e12,
        fp32=fp32 * 1e12,
        tf32=None if tf32 is None else tf32 * 1e12,
        fp8=None if fp8 is None else fp8 * 1e12,
    )


_V100 = _peaks(125, bf16=False, fp32=15.7, tf32=None)
_A100 = _peaks(312, fp32=19.5, tf32=156)
_HOPPER_SXM = _peaks(989.4, fp32=66.9, tf32=494.7, fp8=1978.9)
_BLACKWELL_SXM = _peaks(2250, fp32=75, tf32=1125, fp8=4500)

# The driver's name, capability, memory in MiB, SMs, L2 in MiB, DRAM GB/s, peaks; then the names
# that also mean it, as `_key` writes them. The first of those is the one to show to users.
_Row = tuple[str, str, int, int, float, float, PeakFlops, tuple[str, ...]]
_ROWS: tuple[_Row, ...] = (
    ("Tesla V100-SXM2-16GB", "7.0", 16384, 80, 6, 900, _V100, ("v10016gb",)),
    ("Tesla V100-SXM2-32GB", "7.0", 32768, 80, 6, 900, _V100, ("v100", "v10032gb", "v100sxm2")),
    ("Tesla T4", "7.5", 15360, 40, 4, 320, _peaks(65, bf16=False, fp32=8.1, tf32=None), ("t4",)),
    ("NVIDIA A100-SXM4-40GB", "8.0", 40960, 108, 40, 1555, _A100, ("a10040gb", "a100sxm40gb")),
    (
        "NVIDIA A100-SXM4-80GB", "8.0", 81920, 108, 40, 2039, _A100,
        ("a100", "a10080gb", "a100sxm", "a100sxm4", "a100sxm80gb"),
    ),
    ("NVIDIA A100-PCIE-40GB", "8.0", 40960, 108, 40, 1555, _A100, ("a100pcie40gb",)),
    (
        "NVIDIA A100 80GB PCIe", "8.0", 81920, 108, 40, 1935, _A100,
        ("a100pcie", "a100pcie80gb"),
    ),
    ("NVIDIA A30", "8.0", 24576, 56, 24, 933, _peaks(165, fp32=10.3, tf32=82), ("a30",)),
    ("NVIDIA A10", "8.6", 23028, 72, 6, 600, _peaks(125, fp32=31.2, tf32=62.5), ("a10",)),
    ("NVIDIA A40", "8.6", 46068, 84, 6, 696, _peaks(149.7, fp32=37.4, tf32=74.8), ("a40",)),
    (
        "NVIDIA RTX A6000", "8.6", 49140, 84, 6, 768, _peaks(154.8, fp32=38.7, tf32=77.4),
        ("a6000",),
    ),
    (
        "NVIDIA GeForce RTX 3090", "8.6", 24576, 82, 6, 936, _peaks(71, fp32=35.6, tf32=35.6),
        ("rtx3090", "3090"),
    ),
    (
        "NVIDIA GeForce RTX 4090", "8.9", 24564, 128, 72, 1008,
        _peaks(165.2, fp32=82.6, tf32=82.6, fp8=330.3), ("rtx4090", "4090"),
    ),
    ("NVIDIA L4", "8.9", 23034, 58, 48, 300, _peaks(121, fp32=30.3, tf32=60, fp8=242), ("l4",)),
    (
        "NVIDIA L40S", "8.9", 46068, 142, 96, 864, _peaks(362, fp32=91.6, tf32=183, fp8=733),
        ("l40s",),
    ),
    (
        "NVIDIA H100 80GB HBM3", "9.0", 81559, 132, 50, 3350, _HOPPER_SXM,
        ("h100", "h100sxm", "h100sxm5", "h10080gb", "h100sxm80gb", "h100sxm580gb"),
    ),
    (
        "NVIDIA H100 PCIe", "9.0", 81559, 114, 50, 2000,
        _peaks(756, fp32=51, tf32=378, fp8=1513), ("h100pcie", "h100pcie80gb"),
    ),
    (
        "NVIDIA H100 NVL", "9.0", 95830, 132, 50, 3900,
        _peaks(835, fp32=60, tf32=417.5, fp8=1670.5), ("h100nvl", "h10094gb", "h100nvl94gb"),
    ),
    (
        "NVIDIA H200", "9.0", 143771, 132, 60, 4800, _HOPPER_SXM,
        ("h200", "h200sxm", "h200141gb", "h200sxm141gb"),
    ),
    (
        "NVIDIA GH200 480GB", "9.0", 97871, 132, 60, 4000, _HOPPER_SXM,
        ("gh200", "gh20096gb", "gh200hbm3", "gh20096gbhbm3"),
    ),
    (
        "NVIDIA GH200 144G HBM3e", "9.0", 145920, 132, 60, 4900, _HOPPER_SXM,
        ("gh200144gb", "gh200hbm3e", "gh200144gbhbm3e"),
    ),
    ("NVIDIA B200", "10.0", 183359, 148, 126, 7700, _BLACKWELL_SXM, ("b200", "b200sxm")),
    ("NVIDIA B300 SXM6 AC", "10.3", 275040, 148, 126, 7700, _BLACKWELL_SXM, ("b300", "b300sxm")),
    (
        "NVIDIA GeForce RTX 5090", "12.0", 32607, 170, 96, 1792,
        _peaks(209.5, fp32=104.8, tf32=104.8, fp8=419), ("rtx5090", "5090"),
    ),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 97887, 188, 128, 1792,
        _peaks(503.8, fp32=126, tf32=251.9, fp8=1007.6),
        ("rtxpro6000", "rtxpro6000blackwell", "pro6000", "rtxpro6000blackwellserveredition"),
    ),
)  # fmt: skip

# What `--gpu sm_86` means: the GPU of that capability that most people have.
_REPRESENTATIVES: dict[str, str] = {
    "7.0": "Tesla V100-SXM2-32GB",
    "7.5": "Tesla T4",
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.6": "NVIDIA GeForce RTX 3090",
    "8.9": "NVIDIA GeForce RTX 4090",
    "9.0": "NVIDIA H100 80GB HBM3",
    "10.0": "NVIDIA B200",
    "10.3": "NVIDIA B300 SXM6 AC",
    "12.0": "NVIDIA GeForce RTX 5090",
}


def _spec(row: _Row) -> DeviceSpec:
    name, capability, memory_mib, sm_count, l2_mib, dram_gb_per_s, peaks, _ = row
    limits = CAPABILITIES[capability]
    return DeviceSpec(
        name=name,
        compute_capability=capability,
        basis="table",
        total_memory_bytes=memory_mib * MIB,
        sm_count=sm_count,
        smem_per_sm_bytes=limits.smem_per_sm_bytes,
        smem_per_block_optin_bytes=limits.smem_per_block_optin_bytes,
        registers_per_sm=REGISTERS_PER_SM,
        max_warps_per_sm=limits.max_warps_per_sm,
        max_ctas_per_sm=limits.max_ctas_per_sm,
        l2_bytes=int(l2_mib * MIB),
        dram_bytes_per_s=dram_gb_per_s * 1e9,
        peak_flops=peaks,
    )


KNOWN_GPUS: tuple[DeviceSpec, ...] = tuple(_spec(row) for row in _ROWS)
SHORT_NAMES: dict[str, str] = {row[0]: row[7][0] for row in _ROWS}
"""The driver's name of each known GPU -> the short name to give to `--gpu`."""


def _key(name: str) -> str:
    """Letters and digits only, without the maker's brand words: "NVIDIA A100-SXM4-80GB" ->
    "a100sxm480gb"."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", name.lower().replace("_", " "))
    return re.sub(r"[^a-z0-9]", "", words)


_BY_KEY: dict[str, DeviceSpec] = {
    key: spec
    for row, spec in zip(_ROWS, KNOWN_GPUS, strict=True)
    for key in (_key(row[0]), *row[7])
}
_BY_NAME: dict[str, DeviceSpec] = {spec.name: spec for spec in KNOWN_GPUS}
DEFAULT_GPU: DeviceSpec = _BY_NAME["NVIDIA A100-SXM4-80GB"]
"""Advised for where no GPU is found and none is named."""


def representative(compute_capability: str) -> DeviceSpec | None:
    """The known GPU that stands for a compute capability ("9.0" -> H100 SXM)."""
    name = _REPRESENTATIVES.get(compute_capability)
    return _BY_NAME[name] if name else None


def stand_in(compute_capability: str) -> DeviceSpec | None:
    """The representative of this capability, else of the nearest lower one of its major version
    (12.1 -> 12.0's); `None` where there is none."""
    major, minor = (int(part) for part in compute_capability.split("."))
    for lower in range(minor, -1, -1):
        if spec := representative(f"{major}.{lower}"):
            return spec
    return None


def by_device_name(name: str) -> DeviceSpec | None:
    """The table's entry for a name as the driver writes it, or `None`."""
    return _BY_KEY.get(_key(name))


def lookup(name: str) -> DeviceSpec:
    """The GPU that `name` means: "a100", "A100-80GB", "NVIDIA A100-SXM4-80GB", "4090", "sm_90".

    A name that fits several resolves to the usual one: a100 to the 80 GB SXM4, h100 to the SXM5,
    v100 to the 32 GB, gh200 to the 96 GB. A capability resolves to the GPU that stands for it.

    Raises: UsageError where nothing is meant, with the nearest names.
    """
    capability = re.fullmatch(
        r"(?:sm|compute)[_ -]?(\d{1,2})[._]?(\d)[af]?|(\d{1,2})\.(\d)", name.strip().lower()
    )
    if capability:
        major, minor = capability.group(1, 2) if capability.group(1) else capability.group(3, 4)
        known = representative(f"{major}.{minor}")
    else:
        known = _BY_KEY.get(_key(name))
    if known is not None:
        return known
    near = difflib.get_close_matches(_key(name), _BY_KEY, n=5, cutoff=0.6)
    meant = dict.fromkeys(SHORT_NAMES[_BY_KEY[key].name] for key in near)
    raise UsageError(
        f"unknown GPU {name!r}" + (f"; did you mean {', '.join(meant)}?" if meant else ""),
        hint="`fa-advisor gpus` lists the GPUs it knows",
    )
