"""What test_interpreter.py runs with TRITON_INTERPRET=1: forward and every gradient, small sizes.

float32 and float16 (the interpreter has no bfloat16 products), against float64.
"""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import band
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_advisor.kernels import cpu, kinds, launch
from fa_advisor.kernels.api import flash_attention
from fa_advisor.kernels.arguments import Call
from fa_advisor.kernels.op import attention, options_of


def by_kernel(*tensors: Tensor, **options: Any) -> Tensor:
    """The public function, with the kernels in the place of its way for CPU tensors."""
    through_torch = cpu.attention
    cpu.attention = attention
    try:
        return flash_attention(*tensors, **options)
    finally:
        cpu.attention = through_torch


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def call(q: Tensor, k: Tensor, **given: Any) -> Call:
    packed = q.ndim == 3
    options: dict[str, Any] = {
        **{"scale": q.shape[-1] ** -0.5, "is_causal": False, "bottom_right": False},
        **{"window_left": None, "window_right": None, "softcap": 0.0, "dropout_p": 0.0},
        **{"varlen": packed, "max_seqlen_q": q.shape[-2], "max_seqlen_k": k.shape[-2]},
        **{"num_heads": q.shape[1], "num_kv_heads": k.shape[1]},
    }
    return Call(**{**options, **given})


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Call,
    bias: Any = None,
    sinks: Any = None,
    slopes: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse in float64, [B, H, Lq, Dv] and [B, H, Lq]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * c.scale
    len_q, len_k = s.shape[-2:]
    if c.softcap:
        s = c.softcap * torch.tanh(s / c.softcap)
    ahead = torch.arange(len_k)[None] - torch.arange(len_q)[:, None]
    ahead = ahead - (len_k - len_q if c.bottom_right else 0)
    if slopes is not None:
        s = s - slopes.double().view(-1, q.shape[1], 1, 1) * ahead.abs()
    right = 0 if c.is_causal else c.window_right
    seen = torch.ones(len_q, len_k, dtype=torch.bool)
    if right is not None:
        seen &= ahead <= right
    if c.window_left is not None:
        seen &= ahead >= -c.window_left
    if bias is not None:
        s = s + bias if bias.is_floating_point() else s.masked_fill(~bias, -math.inf)
    s = s.masked_fill(~seen, -math.inf)
    columns = [s]
    if sinks is not None:
        columns.append(sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1))
    s = torch.cat(columns, -1)
    if s.shape[-1] == 0:
        return s @ v, s.new_full(s.shape[:3], -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    safe = s.masked_fill(empty, 0.0)
    p = safe.softmax(-1).masked_fill(empty, 0.0)
    # torch.logsumexp's own gradient loses log(n) beside finfo.min.
    highest = safe.amax(-1, keepdim=True).detach()
    lse = (safe - highest).exp().sum(-1).log() + highest.squeeze(-1)
    lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
    return p[..., :len_k] @ v, lse


def gradients(out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor, leaves: Any) -> Any:
    finite = torch.where(lse.isinf(), 0.0, lse)
    loss = (out * grad.to(out.dtype)).sum() + (finite * grad_lse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.isfinite().all(), what
    error = (got.double() - want).norm()
    assert error <= TOLERANCE[dtype] * want.norm() + 1e-5, (what, float(error), float(want.norm()))


def check(
    batch: int, heads: int, kv_heads: int, len_q: int, len_k: int, dim: int, dim_v: int,
    dtype: torch.dtype = torch.float32, bias: Tensor | None = None, sinks: bool = False,
    slopes: int = 0, **options: Any,
) -> None:  # fmt: skip
    """The kernels against the reference: out, lse and the gradients of all that has one."""
    q = torch.randn(batch, heads, len_q, dim).to(dtype)
    # The layout of a projection: tokens outside of heads.
    k = torch.randn(batch, len_k, kv_heads, dim).to(dtype).transpose(1, 2)
    v = torch.randn(batch, kv_heads, len_k, dim_v).to(dtype)
    sink = torch.randn(heads) if sinks else None
    slope = torch.rand((heads,) if slopes == 1 else (batch, heads)) if slopes else None
    c = call(q, k, **options)

    def leaf(t: Tensor | None, double: bool) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        return (t.double() if double else t).detach().clone().requires_grad_()

    ours = [leaf(t, False) for t in (q, k, v, bias, sink)]
    theirs = [leaf(t, True) for t in (q, k, v, bias, sink)]
    out, lse = attention(*ours, slope, None, None, c)  # type: ignore[arg-type]
    want, want_lse = reference(*theirs[:3], c, *theirs[3:], slope)  # type: ignore[arg-type]
    assert torch.equal(lse.isinf(), want_lse.isinf())
    grad, grad_lse = torch.randn_like(want).to(dtype), torch.randn_like(want_lse)
    grad_lse = grad_lse.where(~want_lse.isinf(), 0.0)
    got = gradients(
        out, lse, grad, grad_lse, [t for t in ours if t is not None and t.requires_grad]
    )
    expected = gradients(
        want, want_lse, grad, grad_lse, [t for t in theirs if t is not None and t.requires_grad]
    )
    assert_close(out, want, dtype, "out")
    assert_close(lse.where(~lse.isinf(), 0.0), want_lse.where(~lse.isinf(), 0.0), dtype, "lse")
    for name, a, b in zip(("query", "key", "value", "4th", "5th"), got, expected, strict=False):
        assert_close(a, b, dtype, f"gradient of {name}")


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "bottom_right": True},
        {"window_left": 7, "window_right": 3},
        {"is_causal": True, "window_left": 20, "sinks": True},
        {"softcap": 2.0},
        {"slopes": 2, "is_causal": True},
        {"dtype": torch.float16, "is_causal": True},
    ],
)
def test_features(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check(1, 2, 1, 50, 37, 16, 24, **case)


@pytest.mark.parametrize("lengths", [(1, 40), (40, 1), (0, 40), (40, 0), (33, 33)])
@pytest.mark.parametrize("additive", [False, True])
def test_features_at_odd_lengths(lengths: tuple[int, int], additive: bool) -> None:
    check(1, 2, 2, *lengths, 5, 1, bias=torch.randn(1, 2, *lengths) if additive else None)


@settings(max_examples=12, deadline=None)
@given(
    len_q=st.integers(1, 50),
    len_k=st.integers(1, 50),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([1, 8, 20]),
    bias=st.sampled_from(["none", "bool", "band", "additive"]),
    shape=st.tuples(*[st.booleans()] * 4),
    causal=st.booleans(),
    bottom_right=st.booleans(),
    window=st.sampled_from([None, 0, 9]),
    softcap=st.sampled_from([0.0, 3.0]),
    slopes=st.sampled_from([0, 1, 2]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(35, 40, 1, 8, "additive", (False, True, True, True), True, True, 9, 3.0, 1, True, 0)
@example(
    35, 40, 1, 8, "additive", (False, False, False, True), False, False, None, 0.0, 0, False, 0
)
def test_grid(
    len_q: int, len_k: int, kv_heads: int, dim: int, bias: str, shape: tuple[bool, ...],
    causal: bool, bottom_right: bool, window: int | None, softcap: float, slopes: int,
    sinks: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    full = (2, 2, len_q, len_k)
    size = tuple(n if own else 1 for n, own in zip(full, shape, strict=True))
    masks = {"none": None, "bool": torch.rand(size) < 0.7, "additive": torch.randn(size)}
    mask = band(list(size), "cpu") if bias == "band" else masks[bias]
    check(
        2, 2, kv_heads, len_q, len_k, dim, dim, bias=mask, sinks=sinks, slopes=slopes,
        is_causal=causal, bottom_right=bottom_right, window_left=window, softcap=softcap,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 2, 60, 70), (2, 1, 1, 70), (1, 2, 60, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("axis", [2, 3])
def test_spans_of_a_mask(shape: tuple[int, int, int, int], axis: int) -> None:
    """Of rows with one stretch, with several, with none and with all."""
    torch.manual_seed(0)
    mask = band(list(shape), "cpu")
    mask[:1, :1] = torch.rand(mask[:1, :1].shape) < 0.5
    mask[-1:, -1:, -1:] = True
    full = (2, 2, 60, 70)
    q, k = torch.randn(2, 2, 60, 8), torch.randn(2, 2, 70, 8)
    inputs = kinds.Inputs(q, k, k, mask, None, None, None, None, None)
    kind = kinds.kind_of(inputs, options_of(call(q, k)))
    planned = launch._plan_spans(kind, axis, full[5 - axis])
    assert planned is not None
    spans = planned(0, mask.view(torch.uint8)).tolist()
    expanded = mask.expand(*shape[:axis], *full[axis:]) if axis == 3 else mask
    expanded = expanded.expand(*shape[:2], *(full[2:] if shape[axis] > 1 else (60, 70)))
    for b in range(shape[0]):
        for h in range(shape[1]):
            for i in range(shape[axis]):
                seen = expanded[b, h].select(axis - 2, i).nonzero().flatten().tolist()
                first, past, whole_from, whole_to = spans[b][h][i]
                if not seen:
                    assert past <= first and whole_to <= whole_from
                    continue
                assert (first, past) == (seen[0], seen[-1] + 1)
                if len(seen) == past - first:
                    assert (whole_from, whole_to) == (first, past)
                else:
                    assert whole_to <= whole_from


def test_packed_sequences_equal_one_call_each() -> None:
    torch.manual_seed(0)
    lens_q, lens_k = (0, 5, 33, 40), (3, 0, 40, 20)
    cu = [
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32)
        for n in (lens_q, lens_k)
    ]
    q, k, v = torch.randn(78, 2, 8), torch.randn(63, 1, 8), torch.randn(63, 1, 12)
    sinks, slopes = torch.randn(2), torch.rand(2)
    options = {"is_causal": True, "bottom_right": True, "window_left": 9}
    c = call(q, k, max_seqlen_q=40, max_seqlen_k=40, **options)
    ours = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    theirs = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    out, lse = attention(*ours[:3], None, ours[3], slopes, *cu, c)  # type: ignore[call-arg]
    parts = []
    for (a, b), (d, e) in zip(*(pairwise(x.tolist()) for x in cu), strict=True):
        one = [theirs[0][a:b], theirs[1][d:e], theirs[2][d:e]]
        parts.append(
            reference(*(t.transpose(0, 1)[None] for t in one), c, None, theirs[3], slopes)  # type: ignore[arg-type]
        )
    want = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    want_lse = torch.cat([part[1][0] for part in parts], 1)
    grad, grad_lse = torch.randn_like(want), torch.randn_like(want_lse)
    for a, b in zip(
        (out, lse, *gradients(out, lse, grad, grad_lse, ours)),
        (want, want_lse, *gradients(want, want_lse, grad, grad_lse, theirs)),
        strict=True,
    ):
        assert_close(a, b, torch.float32, "packed")


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_drops_the_same_in_backward(causal: bool) -> None:
    torch.manual_seed(1)
    p, n = 0.25, 40
    q, k = torch.randn(1, 2, n, 16), torch.randn(1, 1, n, 16)
    c = call(q, k, dropout_p=p, is_causal=causal)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attention(q, k, v, None, None, None, None, None, c)[0]

    # With V = 1 the output is the dropped-out probabilities themselves.
    kept = run(q, k, torch.eye(n)[None, None]) != 0
    seen = torch.ones(n, n, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    assert abs(kept[..., seen].float().mean() - (1 - p)) < 0.05
    v = torch.randn(1, 1, n, 16)
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    s = (theirs[0] @ theirs[1].transpose(-1, -2) / 4).masked_fill(~seen, -math.inf)
    want = (s.softmax(-1) * kept / (1 - p)) @ theirs[2]
    out, grad = run(*ours), torch.randn(want.shape)
    got = torch.autograd.grad((out * grad).sum(), ours)
    expected = torch.autograd.grad((want * grad).sum(), theirs)
    for a, b in zip((out, *got), (want, *expected), strict=True):
        assert_close(a, b, torch.float32, "dropout")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_finfo_min_is_not_minus_infinity(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    n = 40
    bias = torch.zeros(1, 1, n, n, dtype=dtype)
    bias[..., :7, :] = torch.finfo(dtype).min
    bias[..., :5] = torch.finfo(dtype).min
    bias[..., 9, :] = -math.inf
    check(1, 2, 2, n, n, 16, 16, dtype=dtype, bias=bias)


def _leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3)]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, None, None, None, None, None, call(q, k, is_causal=True))[0]


def test_op_is_one_node_under_compile_and_export() -> None:
    leaves = _leaves()
    compiled = torch.compile(_causal, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    want = torch.autograd.grad(_causal(*leaves).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(q, k, v)

    graph = torch.export.export(Model(), tuple(t.detach() for t in leaves)).graph
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert sum("flash_attention_forward" in name for name in names) == 1


def test_op_passes_opcheck() -> None:
    arguments = (*_leaves(), *[None] * 6, 0.25, True, False, None, None, 0.0, 0.0, 20, 20)
    torch.library.opcheck(torch.ops.fa_advisor.flash_attention_forward.default, arguments)


def test_op_under_functorch() -> None:
    q, k, v = (t.detach() for t in _leaves())
    got = torch.func.grad(lambda q: _causal(q, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    assert torch.equal(got, torch.autograd.grad(_causal(leaf, k, v).sum(), leaf)[0])


def test_op_refuses_double_backward() -> None:
    leaves = _leaves()
    (first,) = torch.autograd.grad(_causal(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward isn't supported"):
        torch.autograd.grad(first.sum(), leaves[0])


def test_op_refuses_what_the_interpreter_computes_wrong() -> None:
    q = torch.randn(1, 1, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float16 or float32 under TRITON_INTERPRET"):
        _causal(q, q, q)


def test_op_keeps_no_tensor_alive() -> None:
    import weakref

    leaves = _leaves()
    out = _causal(*leaves)
    gradients = torch.autograd.grad(out.sum(), leaves)
    watched = [weakref.ref(t) for t in (*leaves, out, *gradients)]
    del leaves, out, gradients
    assert all(reference() is None for reference in watched)


# What a tester found.


@pytest.mark.parametrize("given", ["sinks", "alibi_slopes", "both cu_seqlens", "negative mask"])
def test_operands_by_any_stride(given: str) -> None:
    """The kernels read the small ones at consecutive addresses, and no bit of theirs is lost."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 20, 16) for _ in range(3))
    options: dict[str, Any] = {}
    if given == "sinks":
        options = {"sinks": torch.randn(4, 2)[:, 0]}
    elif given == "alibi_slopes":
        options = {"alibi_slopes": torch.rand(4, 2).T}
    elif given == "negative mask":
        options = {"attn_mask": torch.randn(1, 1, 20, 20, dtype=torch.complex64).conj().imag}
    else:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        offsets = torch.tensor([[0, 0], [7, 1], [20, 2]], dtype=torch.int32)[:, 0]
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": 13, "max_seqlen_k": 13}
    expected = flash_attention(q, k, v, **options)
    assert_close(by_kernel(q, k, v, **options), expected, torch.float32, given)


@pytest.mark.parametrize("mask", [(2, 1, 5, 1), (1, 1, 1, 1), (2, 1, 1, 5)])
def test_a_mask_expanded_to_nothing(mask: tuple[int, ...]) -> None:
    """It has no entry, and nothing is read of it."""
    lengths = (0, 5) if mask[-1] == 5 else (5, 0)
    q, k = (torch.randn(2, 2, n, 8, requires_grad=True) for n in lengths)
    shown = torch.ones(mask, dtype=torch.bool).expand(2, 2, *lengths)
    out = by_kernel(q, k, k, shown)
    assert out.shape == (2, 2, lengths[0], 8) and not out.any()
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and not k.grad.any()


def test_a_mask_of_far_rows() -> None:
    """Rows of a mask 7.5e7 elements apart: a tile reaches over more than 2^31."""
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    stride = 75 * 10**6
    room = torch.empty(39 * stride + 40, dtype=torch.bool)  # Not touched, so not taken.
    mask = room.as_strided((1, 1, 40, 40), (0, 0, stride, 1))
    mask.copy_(torch.rand(40, 40) < 0.7)
    expected = flash_attention(q, k, v, mask.contiguous())
    assert_close(by_kernel(q, k, v, mask), expected, torch.float32, "far rows")


@pytest.mark.parametrize("p", [0.999, 0.9999])
def test_dropout_near_one_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 400, 16), torch.randn(1, 1, 400, 16)
    mean = float(by_kernel(q, k, torch.ones(1, 1, 400, 16), dropout_p=p).mean())
    kept = (1 - round(p * 2**16) / 2**16) * 400 * 400
    assert abs(mean - 1) < 5 / kept**0.5


def test_tf32_by_either_of_torchs_interfaces() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("an older torch")
    code = (
        "import torch; from fa_advisor.kernels.kinds import allow_tf32 as allowed\n"
        "cuda = torch.backends.cuda.matmul\n"
        "assert not allowed(); cuda.fp32_precision = 'tf32'; assert allowed()\n"
        "cuda.fp32_precision = 'ieee'; assert not allowed()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forward_mode_and_vmap_over_a_gradient_are_refused_in_words() -> None:
    q, k, v = (torch.randn(2, 2, 8, 16) for _ in range(3))
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda a: by_kernel(a, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        by_kernel(torch.autograd.forward_ad.make_dual(q, q), k, v)
    with pytest.raises(RuntimeError, match="vmap over a gradient"):
        torch.func.vmap(torch.func.grad(lambda a: by_kernel(a, k, v).sum()))(torch.stack([q, q]))


def test_what_was_saved_may_come_back_with_other_strides() -> None:
    """As from a hook that keeps activations elsewhere: the second backward of a kind of call."""
    x = [torch.randn(1, 20, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, 2, 20, 16)
    plain = torch.autograd.grad(by_kernel(*x, is_causal=True), x, grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        out = by_kernel(*x, is_causal=True)
    for a, b in zip(torch.autograd.grad(out, x, grad), plain, strict=True):
        torch.testing.assert_close(a, b)
