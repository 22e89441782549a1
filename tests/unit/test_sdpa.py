"""SDPA's choice of backend, rule by rule against torch's sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_advisor.probes.gpus import KNOWN_GPUS, lookup
from fa_advisor.probes.sdpa import REASONS, AttentionCall, Choice, choose

PLAIN = AttentionCall(
    dtype="bfloat16",
    head_dim_q=128,
    head_dim_v=128,
    num_heads=16,
    num_kv_heads=16,
    batch=2,
    seqlen_q=1024,
    seqlen_k=1024,
)
NEWEST = (2, 14)


def on(
    gpu: str, torch: tuple[int, int] = (2, 13), cudnn: tuple[int, ...] | None = None, **call: Any
) -> Choice:
    return choose(replace(PLAIN, **call), lookup(gpu), torch, cudnn)


def codes(backend: str, gpu: str, torch: tuple[int, int] = (2, 13), **call: Any) -> tuple[str, ...]:
    return on(gpu, torch, **call).why_not.get(backend, ())


@pytest.mark.parametrize(
    ("gpu", "dtype", "backend"),
    [
        ("h100", "bfloat16", "cudnn"),
        ("h200", "fp16", "cudnn"),
        ("b200", "bf16", "cudnn"),
        ("b300", "bf16", "cudnn"),
        ("a100", "bfloat16", "flash"),
        ("3090", "float16", "flash"),
        ("l4", "bf16", "flash"),
        ("5090", "bf16", "flash"),
        ("t4", "float16", "efficient"),
        ("v100", "float32", "efficient"),
        ("t4", "bfloat16", "math"),
        ("a100", "float32", "efficient"),
        ("h100", "float32", "efficient"),
        ("a100", "float64", "math"),
    ],
)
def test_what_each_gpu_takes_by_default(gpu: str, dtype: str, backend: str) -> None:
    choice = on(gpu, dtype=dtype)
    assert choice.backend == backend
    assert all(choice.why_not.values())


def test_cudnn_is_only_tried_first_on_the_data_centre_parts() -> None:
    assert codes("cudnn", "a100") == ("NOT_PREFERRED",)
    assert codes("cudnn", "4090") == ("NOT_PREFERRED",)
    assert codes("cudnn", "t4", dtype="float16") == ("SM",)
    assert choose(PLAIN, lookup("h100"), (2, 13), cudnn_deprioritized=True).backend == "flash"


def test_an_old_cudnn_is_not_preferred() -> None:
    """A system's cuDNN in front of the wheel's: silent, and twice as slow."""
    assert on("h100", cudnn=(9, 15, 0)).why_not == {"cudnn": ("CUDNN_VERSION",)}
    assert on("h100", cudnn=(9, 15, 1)).backend == "cudnn"


def test_flash_takes_no_mask() -> None:
    assert on("a100", mask="bool", mask_ndim=4).backend == "efficient"
    assert codes("flash", "a100", mask="additive", mask_ndim=4) == ("MASK",)
    assert on("h100", mask="bool", mask_ndim=4).backend == "cudnn"


def test_masks_that_cudnn_refuses() -> None:
    learned = on("h100", mask="additive", mask_ndim=4, mask_requires_grad=True)
    assert learned.backend == "efficient"
    assert learned.why_not == {"cudnn": ("MASK_GRAD",), "flash": ("MASK",)}
    assert codes("cudnn", "h100", mask="bool", mask_ndim=3) == ("MASK_RANK",)
    assert on("h100", mask="bool", mask_ndim=2).backend == "cudnn"


def test_a_strided_mask_or_input_falls_to_math() -> None:
    mask = on("a100", mask="bool", mask_ndim=4, mask_last_stride_one=False)
    assert mask.backend == "math"
    assert mask.why_not["efficient"] == ("STRIDE",)
    assert on("a100", last_stride_one=False).backend == "math"
    one_wide = on("a100", last_stride_one=False, head_dim_q=1, head_dim_v=1)
    assert one_wide.backend == "flash"


def test_causal_with_different_lengths() -> None:
    call = {"is_causal": True, "seqlen_q": 1}
    assert codes("flash", "a100", **call) == ("CAUSAL_LQ_NE_LK",)
    assert on("a100", **call).backend == "efficient"
    assert on("h100", **call).backend == "cudnn"


@pytest.mark.parametrize(
    ("gpu", "torch", "dims", "grad", "backend"),
    [
        ("a100", (2, 13), (256, 256), True, "flash"),
        ("a100", (2, 13), (264, 264), False, "efficient"),
        ("a100", (2, 13), (100, 100), False, "flash"),  # padded to 104
        ("a100", (2, 13), (192, 128), False, "efficient"),
        ("a100", (2, 13), (300, 300), False, "math"),
        ("h100", (2, 11), (256, 256), True, "cudnn"),
        ("h100", (2, 11), (160, 160), True, "cudnn"),
        ("h100", (2, 11), (192, 128), True, "cudnn"),
        ("h100", (2, 13), (100, 100), True, "flash"),
        ("h100", (2, 14), (160, 160), True, "flash"),
        ("h100", (2, 14), (160, 160), False, "cudnn"),
        ("h100", (2, 14), (192, 128), True, "cudnn"),
        ("h100", (2, 14), (256, 256), True, "cudnn"),
        ("b200", (2, 13), (256, 256), False, "flash"),
        ("b200", (2, 13), (192, 128), True, "cudnn"),
        ("b200", (2, 14), (256, 256), True, "cudnn"),
    ],
)
def test_head_dims(
    gpu: str, torch: tuple[int, int], dims: tuple[int, int], grad: bool, backend: str
) -> None:
    choice = on(gpu, torch, head_dim_q=dims[0], head_dim_v=dims[1], requires_grad=grad)
    assert choice.backend == backend


def test_training_large_head_dims_on_small_shared_memory() -> None:
    large = {"head_dim_q": 208, "head_dim_v": 208, "requires_grad": True}
    assert codes("flash", "4090", **large) == ("GRAD_HEAD_DIM",)
    assert codes("flash", "5090", **large) == ("GRAD_HEAD_DIM",)
    assert on("a100", **large).backend == "flash"
    whole = {"head_dim_q": 256, "head_dim_v": 256, "requires_grad": True}
    assert on("4090", **whole).backend == "flash"
    assert codes("flash", "4090", **whole, dropout_p=0.1) == ("GRAD_HEAD_DIM",)


@pytest.mark.parametrize(
    ("gpu", "dtype", "dim", "fits"),
    [
        ("t4", "float16", 64, True),
        ("t4", "float16", 60, False),
        ("t4", "float32", 61, True),
        ("a100", "float32", 60, True),
        ("a100", "float32", 62, False),
    ],
)
def test_efficient_loads_whole_vectors(gpu: str, dtype: str, dim: int, fits: bool) -> None:
    choice = on(gpu, dtype=dtype, head_dim_q=dim, head_dim_v=dim)
    assert choice.backend == ("efficient" if fits else "math")
    assert ("HEAD_DIM" in choice.why_not.get("efficient", ())) is not fits


def test_dropout() -> None:
    assert on("h100", dropout_p=0.1).why_not == {"cudnn": ("DROPOUT",)}
    assert on("h100", dropout_p=0.125).backend == "cudnn"
    assert on("h100", (2, 11), dropout_p=0.1).backend == "cudnn"
    assert on("a100", dropout_p=0.1).backend == "flash"
    assert on("h100", cudnn=(9, 12, 0), dropout_p=0.5).why_not["cudnn"][0] == "DROPOUT"


def test_grouped_query_attention() -> None:
    grouped = {"num_kv_heads": 4, "enable_gqa": True}
    assert on("a100", **grouped).backend == "flash"
    masked = on("a100", **grouped, mask="bool", mask_ndim=4)
    assert masked.backend == "math"
    assert masked.why_not["efficient"] == ("GQA",)
    assert on("a100", NEWEST, **grouped, mask="bool", mask_ndim=4).backend == "efficient"
    assert codes("flash", "a100", num_kv_heads=5, enable_gqa=True) == ("HEADS",)
    assert codes("flash", "a100", num_kv_heads=1) == ("HEADS",)
    assert on("a100", NEWEST, num_kv_heads=1).backend == "flash"


def test_rank_three_counts_as_unbatched_from_2_14_on() -> None:
    assert on("a100", ndim=3).why_not["flash"] == ("RANK",)
    assert on("a100", ndim=3).backend == "math"
    assert on("a100", NEWEST, ndim=3).backend == "flash"
    assert on("a100", NEWEST, ndim=5).backend == "math"
    assert on("h100", NEWEST, ndim=3, mask="bool", mask_ndim=2).backend == "cudnn"


def test_the_rest() -> None:
    assert codes("cudnn", "h100", deterministic=True) == ("DETERMINISTIC",)
    assert codes("cudnn", "h100", seqlen_k=1) == ("SEQLEN_ONE",)
    assert codes("cudnn", "h100", batch=70000) == ("BATCH_HEADS",)
    assert on("h100", (2, 12), batch=70000).backend == "cudnn"
    assert on("a100", seqlen_q=0).backend == "math"
    unaligned = on("a100", dtype="float32", aligned=False)
    assert unaligned.why_not["efficient"] == ("ALIGNMENT",)
    assert on("a100", (2, 12), dtype="float32", aligned=False).backend == "efficient"


calls = st.builds(
    AttentionCall,
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64", "bf16"]),
    head_dim_q=st.integers(1, 512),
    head_dim_v=st.integers(1, 512),
    num_heads=st.integers(1, 64),
    num_kv_heads=st.integers(1, 64),
    batch=st.integers(1, 70000),
    seqlen_q=st.integers(0, 4096),
    seqlen_k=st.integers(0, 4096),
    is_causal=st.booleans(),
    mask=st.sampled_from([None, "bool", "additive"]),
    mask_ndim=st.sampled_from([2, 3, 4]),
    mask_requires_grad=st.booleans(),
    mask_last_stride_one=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.1, 0.125]),
    requires_grad=st.booleans(),
    enable_gqa=st.booleans(),
    ndim=st.integers(2, 5),
    last_stride_one=st.booleans(),
    aligned=st.booleans(),
    deterministic=st.booleans(),
)


@given(call=calls, gpu=st.sampled_from(KNOWN_GPUS), minor=st.integers(9, 16))
def test_every_faster_backend_has_a_reason(call: AttentionCall, gpu: Any, minor: int) -> None:
    choice = choose(call, gpu, (2, minor))
    faster = ("cudnn", "flash", "efficient", "math")
    assert tuple(choice.why_not) == faster[: faster.index(choice.backend)]
    for reasons in choice.why_not.values():
        assert reasons
        assert len(set(reasons)) == len(reasons)
        assert set(reasons) <= set(REASONS)
