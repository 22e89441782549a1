"""`flash_attention` on a real GPU: the suite that the CPU runs, and what only a GPU shows."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, assert_agrees, assert_close, cases, inputs
from attention_suite import FaultsSeenInTheField, TorchsOwnCases, Transforms
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_advisor.kernels import reference
from fa_advisor.kernels.api import flash_attention

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(params=DTYPES, ids=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestFaults(FaultsSeenInTheField):
    pass


class TestTorchsOwnCases(TorchsOwnCases):
    pass


class TestTransforms(Transforms):
    pass


# In shards, so that several processes can compile at once.
@pytest.mark.parametrize("shard", range(15))
@settings(max_examples=20)
@given(case=cases(longest=300, widest=256), dtype=st.sampled_from(DTYPES))
def test_every_feature_with_every_other(shard: int, case: Case, dtype: torch.dtype) -> None:
    assert_agrees(case, "cuda", dtype)


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1025, 1088, 2049])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_real_lengths(length: int, is_causal: bool, head_dim: int) -> None:
    case = Case(
        batch=1, heads=2, len_q=length, len_k=length, head_dim=head_dim, is_causal=is_causal
    )
    assert_agrees(case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("head_dim", range(1, 257))
def test_every_head_dim(head_dim: int) -> None:
    case = Case(batch=1, heads=1, len_q=130, len_k=130, head_dim=head_dim, is_causal=True)
    assert_agrees(case, "cuda", torch.bfloat16)


class TestOffsetsPast31Bits:
    """pytorch#190857, ffpa-attn#299, SageAttention#386, sglang#20389, flash-attention#1500."""

    def _tail_agrees(self, tensors: list[Tensor], tail: tuple[slice, ...], packed: bool) -> None:
        """Hold the last sequence's out and gradients against it alone."""
        leaves = [x.detach().requires_grad_() for x in tensors]
        options = {"is_causal": True}
        if packed:
            total, length = tensors[0].shape[0], 1024
            offsets = torch.arange(0, total + 1, length, dtype=torch.int32, device="cuda")
            options |= {
                "cu_seqlens_q": offsets,
                "cu_seqlens_k": offsets,
                "max_seqlen_q": length,
                "max_seqlen_k": length,
            }
        out = flash_attention(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results = [x[tail].clone() for x in (out, *grads)]
        parts = [x[tail] for x in tensors]
        del out, grads, leaves
        if packed:
            parts = [x.transpose(0, 1)[None] for x in parts]
            results = [x.transpose(0, 1)[None] for x in results]
        for dtype in (torch.float64, torch.bfloat16):
            own = [x.detach().to(dtype).requires_grad_() for x in parts]
            alone, _ = reference.attention(*own, is_causal=True, dtype=dtype)
            truth = [alone, *torch.autograd.grad(alone, own, torch.ones_like(alone))]
            if dtype is torch.float64:
                exact = truth
        for name, ours, true, plain in zip(
            ("out", "dq", "dk", "dv"), results, exact, truth, strict=True
        ):
            assert_close("past 2^31 elements", name, ours, true, plain, 0.02)

    def test_batch(self) -> None:
        x = [torch.randn(33, 16, 1024, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(1)]
        # Strided: 64 of every 4,096 elements, so that offsets pass 2^31 with little to compute.
        view = x[0][..., :64]
        self._tail_agrees([view, view, view], (slice(-1, None), slice(-1, None)), packed=False)

    def test_packed_tokens(self) -> None:
        tokens = 17 * 1024
        x = torch.randn(tokens, 2, 65536, device="cuda", dtype=torch.bfloat16)[..., :64]
        self._tail_agrees([x, x, x], (slice(-1024, None),), packed=True)

    def test_mask(self) -> None:
        """A dense mask of more than 2^31 elements."""
        query = torch.randn(1, 9, 16384, 16, device="cuda", dtype=torch.bfloat16)
        mask = torch.rand(1, 9, 16384, 16384, device="cuda") < 0.5
        out = flash_attention(query, query, query, mask)
        last = (slice(None), slice(-1, None))
        rows = (*last, slice(-256, None))
        args = (query[rows], query[last], query[last], mask[rows])
        true, plain = (
            reference.attention(*args, dtype=dtype)[0] for dtype in (torch.float64, torch.bfloat16)
        )
        assert_close("mask", "out", out[rows], true, plain, 0.02)


def test_peak_memory_is_linear_in_the_length() -> None:
    """Over inputs, output and gradients: twice the length, at most twice as much."""
    extra = []
    for length in (8192, 16384):
        x = torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(x, x, x, is_causal=True).sum().backward()
        torch.cuda.synchronize()
        extra.append(torch.cuda.max_memory_allocated() - before)
        del x
    assert extra[1] <= 2.2 * extra[0]
    assert extra[1] < 4 * 16384 * 16384  # Less than a byte a weight.


def test_nothing_waits_for_the_gpu() -> None:
    """Not even packed lengths: no copy to the host in forward or backward."""
    case = Case(lengths=((5, 9), (16, 3)), alibi="BH", sinks=True)
    x = inputs(case, "cuda", torch.bfloat16)
    more = {"max_seqlen_q": 16, "max_seqlen_k": 9}

    def step() -> None:
        out, lse = flash_attention(**x, **case.options, **more, return_lse=True)
        torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])

    step()  # Compiles.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replays_with_fresh_dropout() -> None:
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attention(x, x, x, dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain = flash_attention(x, x, x, is_causal=True)
        dropped = flash_attention(x, x, x, dropout_p=0.5)
    graph.replay()
    first = dropped.clone()
    graph.replay()
    assert not torch.equal(first, dropped)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(plain, flash_attention(x, x, x, is_causal=True))


def test_packed_sequences_in_cuda_graphs_and_streams_have_their_own_order() -> None:
    """Hopper puts them in order on the GPU and counts what is taken: at each replay anew."""
    x = torch.randn(2100, 4, 64, device="cuda", dtype=torch.bfloat16)
    ends = [[0, 900, 1000, 2100], [0, 1, 1, 2100], [0, 0, 0, 2100], [0, 700, 1400, 2100]]
    cus = [torch.tensor(cu, device="cuda", dtype=torch.int32) for cu in ends]

    def attend(cu: Tensor) -> Tensor:
        more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2100, "max_seqlen_k": 2100}
        return flash_attention(x, x, x, is_causal=True, **more)

    expected = [attend(cu) for cu in cus]
    torch.cuda.synchronize()
    given = cus[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(given)
    streams = [torch.cuda.Stream() for _ in cus]
    for _ in range(3):
        for cu, out in zip(cus, expected, strict=True):
            given.copy_(cu)
            graph.replay()
            assert torch.equal(found, out)
        torch.cuda.synchronize()
        beside = []
        for stream, cu in zip(streams, cus, strict=True):
            with torch.cuda.stream(stream):
                beside.append(attend(cu))
        torch.cuda.synchronize()
        for one, out in zip(beside, expected, strict=True):
            assert torch.equal(one, out)


def test_float32_is_ieee_unless_tf32_is_allowed() -> None:
    x = torch.randn(3, 1, 2, 256, 64, device="cuda")
    truth, _ = reference.attention(*x)

    def error() -> float:
        return float((flash_attention(*x).double() - truth).norm() / truth.norm())

    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        ieee = error()
        torch.backends.cuda.matmul.allow_tf32 = True
        tf32 = error()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert ieee < 2e-6
    assert 10 * ieee < tf32 < 2e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats_to_the_bit(deterministic: bool) -> None:
    x = inputs(Case(len_q=700, len_k=900, head_dim=64, heads=4, kv_heads=1), "cuda", torch.bfloat16)
    leaves = [x[name] for name in ("query", "key", "value")]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = []
        for _ in range(3):
            out = flash_attention(*leaves, enable_gqa=True)
            runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    finally:
        torch.use_deterministic_algorithms(before)
    # Hopper's dQ is a sum in no order, unless determinism is asked for.
    hopper = torch.cuda.get_device_capability() == (9, 0)
    kept = (0, 2, 3) if hopper and not deterministic else (0, 1, 2, 3)
    for run in runs[1:]:
        assert all(torch.equal(run[i], runs[0][i]) for i in kept)


def test_double_backward_is_refused() -> None:
    x = torch.randn(1, 1, 16, 16, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_float64_is_refused() -> None:
    x = torch.randn(1, 1, 4, 8, device="cuda", dtype=torch.float64)
    with pytest.raises(TypeError, match="query: expected float16, bfloat16 or float32"):
        flash_attention(x, x, x)


class TestRepeatedCalls:
    """The second call of a kind skips the checks: it must be the same call all the same."""

    def _tensors(self) -> list[Tensor]:
        return [torch.randn(2, 2, 40, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def test_same_bits(self) -> None:
        x = self._tensors()
        leaves = [t.clone().requires_grad_() for t in x]
        mask = torch.rand(2, 1, 40, 40, device="cuda") < 0.5
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"window": (3, -1)}):
            outs = [flash_attention(*leaves, **options, return_lse=True) for _ in range(3)]
            grads = [torch.autograd.grad(out.sum(), leaves) for out, _ in outs]
            for (out, lse), grad in zip(outs[1:], grads[1:], strict=True):
                assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])
                assert all(torch.equal(a, b) for a, b in zip(grad, grads[0], strict=True))
            with torch.no_grad():
                assert torch.equal(flash_attention(*x, **options), outs[0][0])

    def test_dropout_is_drawn_anew(self) -> None:
        x = self._tensors()
        torch.manual_seed(3)
        first = [flash_attention(*x, dropout_p=0.5) for _ in range(3)]
        torch.manual_seed(3)
        again = [flash_attention(*x, dropout_p=0.5) for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[1], first[2])

    def test_bad_calls_stay_bad(self) -> None:
        x = self._tensors()
        slopes = torch.rand(2, device="cuda")
        for _ in range(3):
            flash_attention(*x, alibi_slopes=slopes)
            flash_attention(*x, window=2)
            with pytest.raises(ValueError, match="alibi_slopes"):
                flash_attention(*x, alibi_slopes=slopes.clone().requires_grad_())
            with pytest.raises(TypeError, match="value"):
                flash_attention(x[0], x[1], x[2].half())
            with pytest.raises(ValueError, match="causal_alignment"):
                flash_attention(*x, causal_alignment="middle")
        assert torch.equal(flash_attention(*x, window=[2, 2]), flash_attention(*x, window=2))

    def test_autocast_and_float32(self) -> None:
        x = [t.float() for t in self._tensors()]
        for _ in range(2):
            assert flash_attention(*x).dtype is torch.float32
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cuda", dtype):
                    assert flash_attention(*x).dtype is dtype

    def test_addresses_that_move(self) -> None:
        """Kernels are compiled for aligned pointers where the first call had some."""
        x = self._tensors()
        plain = flash_attention(*x)
        for which in range(3):
            moved = list(x)
            room = torch.zeros(x[which].numel() + 1, device="cuda", dtype=torch.bfloat16)
            moved[which] = room[1:].view_as(x[which]).copy_(x[which])
            for _ in range(2):
                assert torch.equal(flash_attention(*moved), plain)
