"""The table of known GPUs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa_advisor.records import DeviceSpec
from fa_advisor.views.sizes import KIB, format_bytes


def to_text(devices: Sequence[DeviceSpec], short_names: Mapping[str, str]) -> str:
    """A line a GPU: memory, SMs, shared memory a block, bandwidth, dense 16-bit peak."""
    lines = [
        ("--gpu", "name", "sm", "memory", "SMs", "smem/block", "GB/s", "TFLOP/s bf16 (fp16)"),
        *(_line(device, short_names[device.name]) for device in devices),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


def _line(device: DeviceSpec, short_name: str) -> tuple[str, ...]:
    peaks = device.peak_flops
    if peaks.bf16:
        rate = f"{peaks.bf16 / 1e12:.0f}"
    else:
        rate = f"({peaks.fp16 / 1e12:.0f})" if peaks.fp16 else "-"
    return (
        short_name,
        device.name,
        device.compute_capability,
        format_bytes(device.total_memory_bytes),
        str(device.sm_count),
        f"{device.smem_per_block_optin_bytes // KIB} KiB",
        f"{device.dram_bytes_per_s / 1e9:.0f}",
        rate,
    )
