"""The model of the kernels' budgets against the compiler: a handful, for GPUs that aren't here.

benchmarks/budget_model.py does it for some hundreds.
"""

from __future__ import annotations

import pytest

from fa_advisor.budgets.model import Kernel, estimate
from fa_advisor.probes.compiler import Request, available, compile_all

pytestmark = pytest.mark.skipif(available() is not None, reason="no Triton")

# Capability, kernel, block_m, block_n, warps, stages, head dim, dtype, call.
CONFIGS: list[tuple[int, Kernel, int, int, int, int, int, str, str]] = [
    (80, "forward", 128, 64, 4, 3, 64, "bf16", "plain"),
    (80, "keys", 32, 32, 4, 2, 64, "fp32", "plain"),
    (86, "queries", 64, 64, 4, 2, 64, "bf16", "causal"),
    (90, "forward", 64, 64, 4, 3, 128, "bf16", "causal"),
    (100, "keys", 64, 64, 8, 2, 128, "bf16", "causal"),
    (120, "queries", 64, 32, 4, 2, 128, "bf16", "plain"),
]


def test_shared_memory_is_what_the_compiler_takes() -> None:
    requests = [
        Request(
            capability=capability, kernel=kernel, block_m=m, block_n=n, num_warps=warps,
            num_stages=stages, dim=dim, dim_v=dim, dtype=dtype, call=call,
        )
        for capability, kernel, m, n, warps, stages, dim, dtype, call in CONFIGS
    ]  # fmt: skip
    for config, outcome in zip(CONFIGS, compile_all(requests), strict=True):
        capability, kernel, m, n, warps, stages, dim, dtype, call = config
        modelled = estimate(
            kernel, block_m=m, block_n=n, num_warps=warps, num_stages=stages, head_dim=dim,
            value_head_dim=dim, element_bytes=4 if dtype == "fp32" else 2, precision="ieee",
            capability=divmod(capability, 10), causal=call == "causal",
        )  # fmt: skip
        assert outcome.error is None, config
        assert modelled.smem_bytes == pytest.approx(outcome.smem_bytes, rel=0.05), config
        assert abs(modelled.registers - outcome.registers) < 100, config
