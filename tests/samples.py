"""Reports made by hand, for tests of what reads reports."""

from __future__ import annotations

from dataclasses import replace

from fa_advisor import records as r
from fa_advisor.report import Report

MIB = 2**20


def device() -> r.DeviceSpec:
    return r.DeviceSpec(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        basis="table",
        total_memory_bytes=80 * 1024 * MIB,
        sm_count=108,
        smem_per_sm_bytes=164 * 1024,
        smem_per_block_optin_bytes=163 * 1024,
        registers_per_sm=65536,
        max_warps_per_sm=64,
        max_ctas_per_sm=32,
        l2_bytes=40 * MIB,
        dram_bytes_per_s=2.039e12,
        peak_flops=r.PeakFlops(bf16=312e12, fp16=312e12, fp32=19.5e12, tf32=156e12, fp8=None),
    )


def site(layer: int, *, backend: str = "eager", attention_bytes: int = 48 * MIB) -> r.AttentionSite:
    fused = backend != "eager"
    return r.AttentionSite(
        fqn=f"blocks.{layer}.attn",
        source="model.py:88",
        form="sdpa" if fused else "eager",
        backend=backend,
        why_not={} if fused else {"flash": ("HAND_WRITTEN", "MASK")},
        calls=1,
        batch=2,
        num_heads=12,
        num_kv_heads=12,
        seqlen_q=1024,
        seqlen_k=1024,
        head_dim=64,
        dtype="bfloat16",
        is_causal=True,
        has_mask=not fused,
        dropout_p=0.0,
        attention_bytes_at_peak=0 if fused else attention_bytes,
        saved_for_backward_bytes=8 * MIB if fused else attention_bytes,
    )


def report(layers: int = 12) -> Report:
    """A GPT-2-like report whose sums are right: sum(categories) + unattributed == peak."""
    attention = 48 * MIB * layers
    categories = {
        "parameter": 237 * MIB,
        "gradient": 237 * MIB,
        "optimizer_state": 474 * MIB,
        "input": 16384,
        "attention_score": attention // 2,
        "attention_prob": attention // 2,
        "activation": 900 * MIB,
        "temporary": 100 * MIB,
        "workspace": 8519680,
        "allocator_slack": 3 * MIB,
    }
    peak = sum(categories.values())
    timeline = tuple(
        r.TimelinePoint(
            t=t,
            phase="forward" if t < 60 else "backward" if t < 90 else "optimizer",
            allocated_bytes=int(peak * (0.5 + 0.5 * (1 - abs(t - 60) / 60))),
            attention_bytes=int(attention * max(0.0, 1 - abs(t - 60) / 60)),
        )
        for t in range(0, 101)
    )
    return Report(
        environment=r.Environment(
            python="3.11.7",
            torch="2.13.0",
            triton="3.7.1",
            cuda=None,
            driver=None,
            fa_advisor="0.1.0",
        ),
        device=device(),
        target=r.TargetSpec(
            path="model.py",
            name="model",
            mode="train",
            dtype="bfloat16",
            batch_size=2,
            seq_len=1024,
            parameters=124_439_808,
            trainable_parameters=124_439_808,
            inputs=(r.TensorSpec(name="idx", shape=(2, 1024), dtype="int64"),),
        ),
        memory=r.Memory(
            basis="modelled",
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak + 64 * MIB,
            peak_phase="backward",
            categories=categories,
            unattributed_bytes=0,
            outside_allocator_bytes=None,
            timeline=timeline,
        ),
        modules=(
            r.ModuleMemory(fqn="", type="GPT", categories={"input": 16384}),
            *(
                r.ModuleMemory(
                    fqn=f"blocks.{i}.attn",
                    type="CausalSelfAttention",
                    categories={
                        "attention_score": 24 * MIB,
                        "attention_prob": 24 * MIB,
                        "parameter": 5 * MIB,
                    },
                )
                for i in range(layers)
            ),
        ),
        sites=tuple(site(i) for i in range(layers)),
        budgets=(
            r.TileBudget(
                head_dim=64,
                dtype="bf16",
                direction="fwd",
                kernel="flash_attention",
                block_m=128,
                block_n=64,
                num_warps=4,
                num_stages=3,
                smem_bytes=65536,
                smem_textbook_bytes=65536,
                registers_per_thread=None,
                spill_bytes=None,
                ctas_per_sm=2,
                occupancy=0.125,
                limiter="smem",
                fits=True,
                basis="modelled",
            ),
        ),
        advice=r.Advice(
            verdict="attention-bound",
            summary="Attention's N x N intermediates are 23 % of the peak.",
            counterfactual_peak_bytes=peak - attention,
            max_seq_len=r.Limit(now=9000, advised=30000),
            max_batch_size=r.Limit(now=60, advised=100),
            recommendations=(
                r.Recommendation(
                    sites=tuple(f"blocks.{i}.attn" for i in range(layers)),
                    backend="flash",
                    tile=None,
                    predicted=r.Predicted(peak_allocated_bytes=peak - attention, time_ms=None),
                    basis="modelled",
                    reasons=("seqlen 1024 is 512 or more",),
                    rejections={"cudnn": ("NOT_SM90",)},
                ),
            ),
        ),
        ledger=(
            r.LedgerRow(
                category="attention_prob",
                fqn="blocks.0.attn",
                op="_softmax",
                source="model.py:91",
                shape=(2, 12, 1024, 1024),
                dtype="bfloat16",
                count=1,
                bytes=48 * MIB,
            ),
        ),
    )


def renamed(name: str) -> Report:
    """A report whose module and target names are `name` (for markup and HTML tests)."""
    base = report(1)
    return replace(
        base,
        target=replace(base.target, name=name),
        sites=(replace(base.sites[0], fqn=name, source=name),),
        modules=(r.ModuleMemory(fqn=name, type=name, categories={"parameter": 5}),),
    )
