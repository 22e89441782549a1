"""The table of GPUs and its forgiving names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fa_advisor.errors import ExitStatus, UsageError
from fa_advisor.probes.gpus import (
    DEFAULT_GPU,
    KNOWN_GPUS,
    SHORT_NAMES,
    by_device_name,
    lookup,
    representative,
    stand_in,
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("a100 40gb", "NVIDIA A100-SXM4-40GB"),
        ("a100-pcie", "NVIDIA A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB"),
        ("v100", "Tesla V100-SXM2-32GB"),
        ("V100 16GB", "Tesla V100-SXM2-16GB"),
        ("t4", "Tesla T4"),
        ("NVIDIA T4", "Tesla T4"),
        ("a6000", "NVIDIA RTX A6000"),
        ("rtx a6000", "NVIDIA RTX A6000"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100_SXM5", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("h100 nvl", "NVIDIA H100 NVL"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("gh200-144gb", "NVIDIA GH200 144G HBM3e"),
        ("b300", "NVIDIA B300 SXM6 AC"),
        ("RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("sm_90", "NVIDIA H100 80GB HBM3"),
        ("sm90", "NVIDIA H100 80GB HBM3"),
        ("sm_90a", "NVIDIA H100 80GB HBM3"),
        ("9.0", "NVIDIA H100 80GB HBM3"),
        ("sm_120", "NVIDIA GeForce RTX 5090"),
        ("10.3", "NVIDIA B300 SXM6 AC"),
        (" 8.6 ", "NVIDIA GeForce RTX 3090"),
    ],
)
def test_a_forgiving_name_finds_its_gpu(given: str, meant: str) -> None:
    assert lookup(given).name == meant


@pytest.mark.parametrize("given", ["3090 ti", "rtx 6000", "a10g", "sm_61", "h1000", "", "gpu"])
def test_another_gpu_is_not_taken_for_a_known_one(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        lookup(given)
    assert repr(given) in caught.value.message
    assert "fa-advisor gpus" in caught.value.hint
    assert caught.value.status is ExitStatus.USAGE


def test_an_unknown_name_names_its_neighbours() -> None:
    with pytest.raises(UsageError, match="did you mean h100"):
        lookup("h1000")


def test_every_gpu_is_found_by_its_own_and_its_short_name() -> None:
    assert len({spec.name for spec in KNOWN_GPUS}) == len(KNOWN_GPUS)
    for spec in KNOWN_GPUS:
        assert by_device_name(spec.name) is spec
        assert lookup(spec.name) is spec
        assert lookup(SHORT_NAMES[spec.name]) is spec
        assert representative(spec.compute_capability) is not None


def test_figures_hang_together() -> None:
    """No row is off by a power of ten, a sparse rate, or a mixed-up column."""
    for spec in KNOWN_GPUS:
        peaks = spec.peak_flops
        assert peaks.fp16 is not None and peaks.fp32 is not None
        assert spec.basis == "table"
        assert 15e9 < spec.total_memory_bytes < 300e9
        assert spec.smem_per_block_optin_bytes <= spec.smem_per_sm_bytes
        assert spec.registers_per_sm == 65536
        assert 2e11 < spec.dram_bytes_per_s < 1e13
        assert 1.9 <= peaks.fp16 / peaks.fp32 <= 30
        assert (peaks.bf16 is None) == (spec.capability < (8, 0))
        assert (peaks.tf32 is None) == (spec.capability < (8, 0))
        assert (peaks.fp8 is None) == (spec.capability < (8, 9))
        if peaks.tf32 and peaks.bf16:
            assert peaks.bf16 / peaks.tf32 == pytest.approx(2, rel=0.02)
        if peaks.fp8 and peaks.bf16:
            assert peaks.fp8 / peaks.bf16 == pytest.approx(2, rel=0.02)


def test_peak_rates_are_what_the_clocks_allow() -> None:
    """Dense FLOP a clock and SM is a power of two times a boost clock between 1.2 and 2.7 GHz."""
    per_sm = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "9.0": 4096, "10.0": 8192, "10.3": 8192}
    for spec in KNOWN_GPUS:
        rate = per_sm.get(spec.compute_capability, 512 if "GeForce" in spec.name else 1024)
        assert spec.peak_flops.fp16 is not None
        clock = spec.peak_flops.fp16 / spec.sm_count / rate
        assert 1.2e9 < clock < 2.7e9, spec.name


def test_what_the_driver_reports_where_it_is_known() -> None:
    mib = 2**20
    assert lookup("h200").total_memory_bytes == 143771 * mib
    assert lookup("a100").total_memory_bytes == 81920 * mib
    assert lookup("h100").smem_per_block_optin_bytes == 227 * 1024
    assert lookup("4090").smem_per_block_optin_bytes == 101376
    assert DEFAULT_GPU.name == "NVIDIA A100-SXM4-80GB"


def test_a_capability_without_a_gpu_is_stood_in_for_by_its_elder() -> None:
    twelve = stand_in("12.1")
    assert twelve is not None and twelve.compute_capability == "12.0"
    assert stand_in("6.1") is None


def test_the_table_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys, fa_advisor.probes.gpus, fa_advisor.probes.device, fa_advisor.probes.sdpa,"
        " fa_advisor.budgets.api\n"
        "print(*[m for m in ('torch', 'triton', 'pynvml') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "", run.stderr
    assert run.returncode == 0
