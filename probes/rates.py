"""Peak rates of a GPU that the table doesn't know, worked out from its clocks."""

from __future__ import annotations

from fa_advisor.records import PeakFlops

# Dense FLOP a clock and SM: 16-bit tensor core with fp32 accumulation, TF32, fp8, fp32 off the
# tensor cores. GeForce cards of 7.5, 8.6, 8.9 and 12.0 accumulate in fp32 at half the rate.
_PER_SM_AND_CLOCK: dict[str, tuple[int, int | None, int | None, int]] = {
    "7.0": (1024, None, None, 128),
    "7.5": (1024, None, None, 128),
    "8.0": (2048, 1024, None, 128),
    "8.6": (1024, 512, None, 256),
    "8.9": (1024, 512, 2048, 256),
    "9.0": (4096, 2048, 8192, 256),
    "10.0": (8192, 4096, 16384, 256),
    "10.3": (8192, 4096, 16384, 256),
    "12.0": (1024, 512, 2048, 256),
}
_GEFORCE_HALVED = ("7.5", "8.6", "8.9", "12.0")


def peak_flops(name: str, compute_capability: str, sm_count: int, sm_hz: float) -> PeakFlops | None:
    """Dense FLOP/s at the clock `sm_hz`; `None` where the capability isn't known."""
    per_sm = _PER_SM_AND_CLOCK.get(compute_capability)
    if per_sm is None:
        return None
    half, tf32, fp8, fp32 = per_sm
    share = 0.5 if "GeForce" in name and compute_capability in _GEFORCE_HALVED else 1.0
    clocks = sm_count * sm_hz
    return PeakFlops(
        bf16=half * share * clocks if tf32 is not None else None,  # both came with Ampere
        fp16=half * share * clocks,
        fp32=fp32 * clocks,
        tf32=None if tf32 is None else tf32 * share * clocks,
        fp8=None if fp8 is None else fp8 * share * clocks,
    )


def dram_bytes_per_s(memory_hz: float, bus_bits: int) -> float:
    """Double data rate over the bus: two transfers a clock."""
    return 2 * memory_hz * bus_bits / 8
