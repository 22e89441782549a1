"""The reference, held against torch's own math path and against cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_advisor.kernels.reference import attention


def qkv(
    len_q: int = 7,
    len_k: int = 9,
    heads: int = 4,
    kv_heads: int = 4,
    dims: tuple[int, int] = (5, 3),
) -> tuple[Tensor, Tensor, Tensor]:
    options: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    return (
        torch.randn(2, heads, len_q, dims[0], **options),
        torch.randn(2, kv_heads, len_k, dims[0], **options),
        torch.randn(2, kv_heads, len_k, dims[1], **options),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"scale": -0.7},
        {"attn_mask": torch.rand(7, 9) < 0.6},
        {"attn_mask": torch.rand(2, 1, 1, 9) < 0.6},
        {"attn_mask": torch.randn(4, 7, 9, dtype=torch.float64)},
        {"attn_mask": torch.zeros(7, 9).masked_fill(torch.rand(7, 9) < 0.4, -math.inf).double()},
        {"attn_mask": torch.zeros(7, 9, dtype=torch.bool)},
    ],
    ids=["plain", "causal", "scale", "negative", "QK", "B11K", "HQK", "-inf", "nothing"],
)
def test_agrees_with_torchs_math(options: dict[str, Any]) -> None:
    tensors = qkv()
    out, _ = attention(*tensors, **options)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad)
    )


def test_grouped_heads_as_torch_groups_them() -> None:
    tensors = qkv(heads=6, kv_heads=2)
    expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    torch.testing.assert_close(attention(*tensors)[0], expected)


def one_head(logits: list[list[float]], values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one head whose unscaled logits and one-dimensional values these are.

    Query i is the i-th row of logits and the keys are unit vectors; pass scale=1.
    """
    query = torch.tensor(logits, dtype=torch.float64)
    key = torch.eye(query.shape[1], dtype=torch.float64)
    value = torch.tensor(values, dtype=torch.float64)[:, None]
    return query[None, None], key[None, None], value[None, None]


LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("options", "out", "lse"),
    [
        ({}, [(3 + 2 * 6) / 3], LN3),
        ({"sinks": [LN3]}, [(3 + 2 * 6) / 6], math.log(6)),
        ({"sinks": [-math.inf]}, [5], LN3),
        ({"attn_mask": [[0.0, LN2]]}, [(3 + 4 * 6) / 5], math.log(5)),
        ({"attn_mask": [[True, False]]}, [3], 0.0),
        ({"attn_mask": [[False, False]]}, [0], -math.inf),
        ({"attn_mask": [[False, False]], "sinks": [1.5]}, [0], 1.5),
        ({"attn_mask": [[-math.inf, -math.inf]]}, [0], -math.inf),
        ({"alibi_slopes": [LN2]}, [(3 + 6) / 2], LN2),
        ({"alibi_slopes": [LN2], "causal_alignment": "bottom-right"}, [(1.5 + 12) / 2.5], None),
        ({"is_causal": True}, [3], 0.0),
        ({"is_causal": True, "causal_alignment": "bottom-right"}, [5], LN3),
        ({"window": (0, -1), "causal_alignment": "bottom-right"}, [6], LN2),
        ({"window": 0}, [3], 0.0),
        ({"softcap": 0.5}, None, math.log(1 + math.exp(0.5 * math.tanh(2 * LN2)))),
        ({"keep": [[[[True, False]]]], "dropout_p": 0.5}, [2 * 3 / 3], LN3),
    ],
)
def test_worked_out_by_hand(options: dict[str, Any], out: Any, lse: float | None) -> None:
    """Logits 0 and ln 2, values 3 and 6: weights 1/3 and 2/3."""
    tensors = {"attn_mask", "sinks", "alibi_slopes", "keep"}
    given = {
        name: torch.tensor(x, dtype=torch.bool if name == "keep" else None)
        if name in tensors
        else x
        for name, x in options.items()
    }
    given = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    result, log_sum = attention(*one_head([[0.0, LN2]], [3.0, 6.0]), scale=1.0, **given)
    if out is not None:
        torch.testing.assert_close(result.flatten(), torch.tensor(out, dtype=torch.float64))
    if lse is not None:
        assert log_sum.item() == pytest.approx(lse, rel=1e-6)


def test_row_at_finfo_min_is_uniform_with_a_gradient() -> None:
    query, key, value = one_head([[0.0, LN2]], [3.0, 6.0])
    value.requires_grad_()
    query.requires_grad_()
    mask = torch.full((1, 2), torch.finfo(torch.float64).min, dtype=torch.float64)
    out, lse = attention(query, key, value, mask, scale=1.0)
    assert out.item() == 4.5 and lse.item() == torch.finfo(torch.float64).min
    dq, dv = torch.autograd.grad(out, (query, value), retain_graph=True)
    assert dv.flatten().tolist() == [0.5, 0.5]
    assert dq.flatten().tolist() == [-0.75, 0.75]
    assert torch.autograd.grad(lse, query)[0].flatten().tolist() == [0.5, 0.5]


def test_packed_sequences_are_sequences_apart() -> None:
    lengths = ((3, 5), (0, 2), (4, 0), (2, 2))
    total_q, total_k = map(sum, zip(*lengths, strict=True))
    query, key, value = (
        torch.randn(n, 2, 4, dtype=torch.float64) for n in (total_q, *[total_k] * 2)
    )
    offsets = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True)]
    slopes = torch.rand(4, 2, dtype=torch.float64)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom-right"}
    out, lse = attention(
        query,
        key,
        value,
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        alibi_slopes=slopes,
        **options,
    )
    assert out.shape == (9, 2, 4) and lse.shape == (2, 9)
    last = [x[None, -2:].transpose(1, 2) for x in (query, key, value)]
    alone, alone_lse = attention(*last, alibi_slopes=slopes[3], **options)
    torch.testing.assert_close(out[-2:], alone[0].transpose(0, 1))
    torch.testing.assert_close(lse[:, -2:], alone_lse[0])
    assert (out[3:7] == 0).all() and (lse[:, 3:7] == -math.inf).all()


def test_computes_in_the_dtype_asked_for() -> None:
    query, key, value = (x.detach().bfloat16() for x in qkv())
    out, lse = attention(query, key, value, dtype=torch.bfloat16)
    assert out.dtype == lse.dtype == torch.bfloat16
    assert attention(query, key, value)[0].dtype == torch.float64
