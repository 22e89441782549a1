"""`flash_attention` on the CPU against the float64 reference, over all features crossed."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, assert_agrees, cases, inputs
from attention_suite import FaultsSeenInTheField, TorchsOwnCases, Transforms
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_advisor.kernels import cpu
from fa_advisor.kernels.api import flash_attention
from fa_advisor.kernels.module import FlashAttention


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestFaults(FaultsSeenInTheField):
    pass


class TestTorchsOwnCases(TorchsOwnCases):
    pass


class TestTransforms(Transforms):
    pass


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=30)
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_every_feature_with_every_other(case: Case, dtype: torch.dtype) -> None:
    assert_agrees(case, "cpu", dtype)


@settings(max_examples=5)
@given(case=cases(longest=30))
def test_blocks_of_queries_make_no_difference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_SCORES", 100)
        assert_agrees(case, "cpu", torch.float64)


def test_memory_stays_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward holds an N x N tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    monkeypatch.setattr(cpu, "BLOCK_SCORES", 1 << 14)
    x = torch.randn(1, 1, 1024, 8, requires_grad=True)
    with Watch():
        flash_attention(x, x, x, is_causal=True).sum().backward()
    assert 0 < largest <= (1 << 14) * 8  # int64 distances of a block, not 1024 x 1024.


@pytest.mark.parametrize(
    "case",
    [
        Case(len_q=5, len_k=6, head_dim=3, value_dim=2, is_causal=True, bottom_right=True),
        Case(len_q=4, len_k=5, head_dim=3, mask="BHQK", mask_kind="-inf", sinks=True),
        Case(len_q=4, len_k=5, head_dim=3, heads=4, kv_heads=2, softcap=2.0, alibi="H", window=1),
        Case(lengths=((2, 3), (3, 2)), head_dim=3, alibi="BH", sinks=True),
    ],
)
def test_first_and_second_derivatives(case: Case) -> None:
    given_tensors = inputs(case, "cpu", torch.float64)
    names = [name for name, x in given_tensors.items() if x.requires_grad]
    given_tensors["sinks"] = given_tensors.get("sinks", torch.zeros(case.heads)).double()
    if "sinks" in names:
        given_tensors["sinks"] = given_tensors["sinks"].detach().requires_grad_()
    more = {}
    if case.lengths:
        more = {"max_seqlen_q": 3, "max_seqlen_k": 3}

    def attend(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        tensors = given_tensors | dict(zip(names, leaves, strict=True))
        return flash_attention(**tensors, **case.options, **more, enable_gqa=True, return_lse=True)

    leaves = [given_tensors[name] for name in names]
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x)[0], leaves, atol=1e-4)


def test_vmap_over_a_further_dim() -> None:
    x = torch.randn(3, 2, 2, 6, 8)
    out = torch.vmap(lambda q: flash_attention(q, q, q, is_causal=True))(x)
    torch.testing.assert_close(out, flash_attention(x, x, x, is_causal=True))


def test_compile_with_dynamic_lengths() -> None:
    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 14):
        x = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(
            compiled(x, x, x, is_causal=True, window=(3, 0)),
            flash_attention(x, x, x, is_causal=True, window=(3, 0)),
        )


def test_export_module() -> None:
    x = torch.randn(1, 2, 6, 8)
    module = FlashAttention(is_causal=True, num_sinks=2)
    exported = torch.export.export(module, (x, x, x))
    torch.testing.assert_close(exported.module()(x, x, x), module(x, x, x))


@pytest.mark.parametrize("varlen", [False, True])
def test_meta_and_fake_tensors_give_shapes(varlen: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def attend(device: str) -> tuple[Tensor, Tensor]:
        if not varlen:
            x = torch.empty(2, 4, 6, 8, device=device, dtype=torch.bfloat16)
            return flash_attention(x, x, x[..., :5], return_lse=True)
        x = torch.empty(12, 4, 8, device=device, dtype=torch.bfloat16)
        offsets = torch.zeros(4, dtype=torch.int32, device=device)
        packed = {
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "max_seqlen_q": 6,
            "max_seqlen_k": 6,
        }
        return flash_attention(x, x, x[..., :5], **packed, return_lse=True)

    expected = ((12, 4, 5), (4, 12)) if varlen else ((2, 4, 6, 5), (2, 4, 6))
    results = [attend("meta")]
    with FakeTensorMode():
        results.append(attend("cpu"))
    for out, lse in results:
        assert (out.shape, lse.shape) == expected and out.dtype == torch.bfloat16
