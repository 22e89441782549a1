"""float8_e4m3fn off the GPU: what it stands for, what is refused, and that it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_advisor
from fa_advisor.kernels import reference
from fa_advisor.kernels.fp8 import E4M3

flash_attention = fa_advisor.flash_attention


def eight(*shape: int) -> Tensor:
    return torch.randn(shape).to(E4M3)


Q, K, V = eight(2, 4, 9, 16), eight(2, 2, 13, 16), eight(2, 2, 13, 8)
DESCALES = {
    "q_descale": torch.tensor([[0.5, 1.5, 0.25, 3.0], [1.0, 2.0, 0.7, 0.1]]),
    "k_descale": torch.tensor([0.75, 1.25]),
    "v_descale": torch.tensor([[3.0], [0.3]]),
}
LENGTHS = {
    "cu_seqlens_q": torch.tensor([0, 4, 4, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 6, 8, 13], dtype=torch.int32),
    "max_seqlen_q": 5,
    "max_seqlen_k": 6,
}


def assert_close(found: Any, expected: tuple[Tensor, Tensor]) -> None:
    out, lse = found
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    # The inputs are exact in float32: what is left is one rounding to bfloat16.
    assert float((out - expected[0]).norm() / expected[0].norm()) < 2**-8
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_alignment": "bottom-right"},
        {"window": (3, 1), "softcap": 2.0, "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
        {"attn_mask": torch.rand(2, 1, 9, 13) < 0.7},
        {"attn_mask": torch.randn(9, 13)},
        {"attn_mask": torch.randn(9, 13).bfloat16()},
        {"scale": -0.2},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_call_is_that_of_what_its_numbers_stand_for(options: dict[str, Any]) -> None:
    found = flash_attention(Q, K, V, enable_gqa=True, return_lse=True, **options, **DESCALES)
    expected = reference.attention(
        Q.double() * DESCALES["q_descale"][:, :, None, None],
        K.double() * DESCALES["k_descale"][:, None, None],
        V.double() * DESCALES["v_descale"][:, :, None, None],
        **options,
    )
    assert_close(found, expected)


@pytest.mark.parametrize("dim", [8, 200])
def test_without_descales(dim: int) -> None:
    x = eight(1, 2, 7, dim)
    wide = x.double()
    assert_close(flash_attention(x, x, x, return_lse=True), reference.attention(wide, wide, wide))


def test_packed_sequences_have_descales_of_their_own() -> None:
    q, k, v = eight(9, 4, 16), eight(13, 2, 16), eight(13, 2, 16)
    descales = [torch.rand(3, heads) + 0.5 for heads in (4, 2, 2)]
    found = flash_attention(
        q, k, v, enable_gqa=True, return_lse=True, **LENGTHS,
        q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
    )  # fmt: skip
    wide = []
    for x, descale, side in zip((q, k, v), descales, "qkk", strict=True):
        lengths = LENGTHS[f"cu_seqlens_{side}"].diff()
        wide.append(x.double() * descale.repeat_interleave(lengths, 0)[:, :, None])
    cu = {name: LENGTHS[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert_close(found, reference.attention(*wide, **cu))


def test_autocast_leaves_it() -> None:
    expected = flash_attention(Q, Q, Q)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(flash_attention(Q, Q, Q), expected)


def grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "descale of bf16": (
        lambda: flash_attention(Q.bfloat16(), Q.bfloat16(), Q.bfloat16(), k_descale=torch.ones(4)),
        ValueError,
        "k_descale: expected None with query in torch.bfloat16",
    ),
    "mixed": (
        lambda: flash_attention(Q, Q.bfloat16(), Q),
        TypeError,
        "key: expected query's dtype torch.float8_e4m3fn, got torch.bfloat16",
    ),
    "the other eight bits": (
        lambda: flash_attention(*[Q.to(torch.float8_e5m2)] * 3),
        TypeError,
        "query: expected float16, bfloat16, float32 or float8_e4m3fn",
    ),
    "descale's shape": (
        lambda: flash_attention(Q, K, V, enable_gqa=True, v_descale=torch.ones(2, 4)),
        ValueError,
        r"v_descale: expected a shape that broadcasts to \(2, 2\), got \(2, 4\)",
    ),
    "descale's dims": (
        lambda: flash_attention(Q, Q, Q, q_descale=torch.ones(1, 2, 4)),
        ValueError,
        r"q_descale: expected a shape that broadcasts to \(2, 4\), got \(1, 2, 4\)",
    ),
    "descale's dtype": (
        lambda: flash_attention(Q, Q, Q, q_descale=torch.ones(4).double()),
        TypeError,
        "q_descale: expected float32, got torch.float64",
    ),
    "descale's device": (
        lambda: flash_attention(Q, Q, Q, q_descale=torch.ones(4, device="meta")),
        ValueError,
        "q_descale: expected query's device cpu, got meta",
    ),
    "no tensor": (
        lambda: flash_attention(Q, Q, Q, q_descale=2.0),  # type: ignore[call-overload]
        TypeError,
        "q_descale: expected a Tensor or None, got float",
    ),
    "gradient": (
        lambda: flash_attention(grad(Q), Q, Q),
        ValueError,
        "query: expected a tensor that doesn't require grad",
    ),
    "gradient of sinks": (
        lambda: flash_attention(Q, Q, Q, sinks=grad(torch.ones(4))),
        ValueError,
        "sinks: expected a tensor that doesn't require grad",
    ),
    "gradient of a descale": (
        lambda: flash_attention(Q, Q, Q, v_descale=grad(torch.ones(4))),
        ValueError,
        "v_descale: expected a tensor that doesn't require grad",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    run, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        run()


def test_without_gradients_nothing_requires_them() -> None:
    with torch.no_grad():
        out = flash_attention(grad(Q), Q, Q, sinks=grad(torch.ones(4)))
    assert not out.requires_grad


def test_a_compiled_call_is_one_graph() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return flash_attention(q, k, v, is_causal=True, enable_gqa=True, q_descale=scale)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    given = (Q, K, V, DESCALES["q_descale"])
    torch.testing.assert_close(compiled(*given), attend(*given))


@pytest.mark.parametrize("packed", [False, True])
def test_the_op_gives_shapes_without_a_gpu(packed: bool) -> None:
    """As torch.compile and export see a CUDA call."""
    pytest.importorskip("triton")
    from fa_advisor.kernels import fp8_op
    from fa_advisor.kernels.kinds import Inputs, Options

    shape = (12, 4, 16) if packed else (2, 6, 4, 16)
    q = torch.empty(shape, device="meta", dtype=E4M3)
    q = q if packed else q.transpose(1, 2)
    cu = torch.empty(3, device="meta", dtype=torch.int32) if packed else None
    inputs = Inputs(q, q, q[..., :8], None, None, None, cu, cu, None)
    options = Options(0.25, True, False, None, None, 0.0, 0.0, 6, 6)
    descale = torch.empty(2, 4, device="meta")
    out, lse = fp8_op._op.flash_attention_fp8(*inputs, descale, None, None, *options)
    assert out.dtype == torch.bfloat16
    assert out.shape == (*q.shape[:-1], 8)
    assert lse.shape == ((4, 12) if packed else (2, 4, 6))
    if not packed:
        assert out.transpose(1, 2).is_contiguous()


def test_what_the_kernel_leaves_is_done_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fa_advisor.kernels import fp8_op, launch
    from fa_advisor.kernels.fp8 import Descales
    from fa_advisor.kernels.kinds import Inputs, Options

    def forward(x: Inputs, _: Options) -> Callable[[Inputs], tuple[Tensor, Tensor, None]]:
        assert x.query.dtype == x.key.dtype == x.value.dtype == torch.bfloat16
        return lambda x: (*reference.attention(x.query, x.key, x.value), None)

    monkeypatch.setattr(launch, "forward_fp8", lambda *_: None)
    monkeypatch.setattr(launch, "forward", forward)
    inputs = Inputs(Q, K, V, *[None] * 6)
    options = Options(0.25, False, False, None, None, 0.0, 0.0, 9, 13)
    out, lse = fp8_op._run(inputs, Descales(DESCALES["q_descale"], None, None), options)
    wide = Q.double() * DESCALES["q_descale"][:, :, None, None]
    expected = reference.attention(wide, K.double(), V.double())
    assert float((out - expected[0]).norm() / expected[0].norm()) < 2**-8
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=0.02)
