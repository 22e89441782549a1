"""How many blocks of a kernel an SM holds, by the rules of CUDA's occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa_advisor.records import DeviceSpec

Limiter = Literal["smem", "registers", "warps", "ctas"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks resident on an SM, their share of its warps, and what keeps more out."""

    ctas_per_sm: int
    occupancy: float
    limiter: Limiter


def occupancy(
    device: DeviceSpec, *, num_warps: int, smem_bytes: int, registers_per_thread: int | None
) -> Occupancy:
    """Blocks that fit on an SM.

    Registers are given out by 256 a warp and to each quarter of the SM apart, warps by four;
    shared memory by 128 bytes (256 on 7.x), of which the driver keeps 1 KiB a block from 8.0 on.
    `registers_per_thread` `None`: not counted.
    """
    ampere_on = device.capability >= (8, 0)
    unit = 128 if ampere_on else 256
    block_smem = _round_up(smem_bytes + (1024 if ampere_on else 0), unit)
    resident: dict[Limiter, int] = {
        "smem": device.smem_per_sm_bytes // block_smem if block_smem else device.max_ctas_per_sm
    }
    if smem_bytes > device.smem_per_block_optin_bytes:
        resident["smem"] = 0
    if registers_per_thread is not None:
        per_warp = _round_up(32 * registers_per_thread, 256)
        warps = 4 * (device.registers_per_sm // 4 // per_warp)
        resident["registers"] = warps // _round_up(num_warps, 4)
    resident["warps"] = device.max_warps_per_sm // num_warps
    resident["ctas"] = device.max_ctas_per_sm
    limiter = min(resident, key=lambda name: resident[name])
    ctas = resident[limiter]
    return Occupancy(ctas, ctas * num_warps / device.max_warps_per_sm, limiter)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
