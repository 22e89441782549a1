"""Hopper's own kernels: the same grid as the portable ones', at lengths that reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_agrees, hopper_cases, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_advisor.kernels import launch, reference, repeated
from fa_advisor.kernels.api import flash_attention
from fa_advisor.kernels.hopper import dealing, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU",
    ),
]

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FA_ADVISOR_KERNELS", raising=False)
    plan.available.cache_clear()
    launch._plans.clear()
    repeated._kinds.clear()
    yield
    monkeypatch.undo()
    plan.available.cache_clear()
    launch._plans.clear()
    repeated._kinds.clear()


@pytest.fixture
def planned(afresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What was planned: forward or backward, and whether for Hopper's kernels."""
    seen: list[tuple[str, bool]] = []
    for name in ("forward", "backward"):
        original = getattr(plan, name)

        def spy(*args: Any, name: str = name, original: Any = original) -> Any:
            found = original(*args)
            seen.append((name, found is not None))
            return found

        monkeypatch.setattr(plan, name, spy)
    yield seen


@pytest.mark.parametrize("shard", range(15))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hopper_cases(513, 1100), dtype=st.sampled_from(HALF))
def test_every_feature_with_every_other(
    planned: list[tuple[str, bool]], shard: int, case: Case, dtype: torch.dtype
) -> None:
    assert_agrees(case, "cuda", dtype)
    assert ("forward", False) not in planned, "the portable kernel ran"


PLAIN = {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 1024, "len_k": 1024}


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, None), (96, None), (128, None), (192, 128), (256, None)]
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_both_directions_run_on_them(
    planned: list[tuple[str, bool]], head_dim: int, value_dim: int | None, is_causal: bool,
    exact: bool,
) -> None:  # fmt: skip
    torch.use_deterministic_algorithms(exact)
    try:
        case = Case(**PLAIN, head_dim=head_dim, value_dim=value_dim, is_causal=is_causal)
        assert_agrees(case, "cuda", torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert planned == [("forward", True), ("backward", True)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_causal": True, "head_dim": 64},
        {"is_causal": True, "bottom_right": True, "len_q": 700},
        {"window": (100, 30), "len_k": 1500},
        {"kv_heads": 1, "len_q": 513, "len_k": 1025},
        {"lengths": ((1024, 1024), (0, 7), (5, 0), (1, 1), (130, 700)), "is_causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("exact", [False, True])
def test_few_blocks_take_all_pieces(
    more: dict[str, Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as where there are more than processors."""
    monkeypatch.setattr(dealing, "processors", lambda _: 5)
    torch.use_deterministic_algorithms(exact)
    try:
        assert_agrees(Case(**{**PLAIN, "head_dim": 128, **more}), "cuda", torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_backward_can_be_replayed() -> None:
    """The pieces that were taken are counted anew each time, on two streams each their own."""
    leaves = [
        torch.randn(4, 16, 1024, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in "qkv"
    ]
    grad = torch.randn_like(leaves[0])

    def run() -> tuple[torch.Tensor, ...]:
        out = flash_attention(*leaves, is_causal=True)
        return torch.autograd.grad(out, leaves, grad)

    run()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    torch.cuda.synchronize()
    found = []
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            found.append(run())
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        expected = run()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for gradients in found:
            for name, one, other in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
                error = (one - other).float().norm() / other.float().norm()
                assert float(error) < 1e-3, name


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": ((1024, 1024), (0, 7), (5, 0), (1, 1), (130, 700)), "is_causal": True},
        {"head_dim": 192, "value_dim": 128},
        {"head_dim": 256, "is_causal": True},
        {"mask": "B11K", "mask_kind": "band"},
        {"window": (100, 30), "bottom_right": True, "len_k": 1500},
        {"softcap": 20.0, "sinks": True, "is_causal": True},
        {"layout": "BLHD"},
        {"window": (100, -1)},
        {"head_dim": 256, "len_q": 1500, "is_causal": True, "bottom_right": True},
        {"scale": 0.3},
    ],
)
def test_the_forward_runs_on_them(planned: list[tuple[str, bool]], more: dict[str, Any]) -> None:
    assert_agrees(Case(**{**PLAIN, "head_dim": 128, **more}), "cuda", torch.bfloat16)
    assert ("forward", True) in planned


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_logits_that_grow_from_tile_to_tile(
    head_dim: int, is_causal: bool, dtype: torch.dtype
) -> None:
    """By more than the base of a row's weights allows for: that tile's are made again."""
    more = {"head_dim": head_dim, "is_causal": is_causal, "growth": 16.0}
    case = Case(**{**PLAIN, "len_k": 1400}, **more)
    given = {name: x.detach() for name, x in inputs(case, "cuda", dtype).items()}
    out, lse = flash_attention(**given, **case.options, enable_gqa=True, return_lse=True)
    wide = {name: x.double() for name, x in given.items()}
    true, true_lse = reference.attention(**wide, **case.options)
    assert float((out - true).norm() / true.norm()) < 2.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_a_scale_that_turns_the_order(scale: float) -> None:
    case = Case(**PLAIN, head_dim=128, scale=scale, is_causal=True)
    assert_agrees(case, "cuda", torch.bfloat16)


def test_a_neighbour_may_hold_anything() -> None:
    """Packed: a sequence's tiles reach into the next one, whose inf and NaN must not be seen."""
    lengths = [700, 300, 513]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    x = torch.randn(3, sum(lengths), 2, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x[0])
    options: dict[str, Any] = {
        "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 700, "max_seqlen_k": 700,
        "is_causal": True,
    }  # fmt: skip

    def run(tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = flash_attention(*leaves, **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    clean = run(x)
    x[0, 700:1000], x[1, 700:1000], x[2, 700:1000] = float("inf"), float("nan"), float("-inf")
    for name, dirty, before in zip(("out", "dq", "dk", "dv"), run(x), clean, strict=True):
        for rows in (slice(0, 700), slice(1000, None)):
            assert torch.isfinite(dirty[rows]).all(), name
            error = (dirty[rows] - before[rows]).float().norm() / before[rows].float().norm()
            assert float(error) < 1e-3, name


def test_a_causal_call_can_be_captured_first() -> None:
    """A schedule is copied to the GPU, which a capture forbids: then the call goes without."""
    x = torch.randn(1, 2, 700, 64, device="cuda", dtype=torch.bfloat16)
    expected = flash_attention(x, x, x, is_causal=True)
    launch._plans.clear()
    repeated._kinds.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(x, x, x, is_causal=True)
    graph.replay()
    assert torch.equal(out, expected)


def test_portable_kernels_run_where_they_are_asked_for(
    planned: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA_ADVISOR_KERNELS", "portable")
    plan.available.cache_clear()
    assert_agrees(Case(**PLAIN, head_dim=64), "cuda", torch.bfloat16)
    assert planned == [("forward", False), ("backward", False)]
