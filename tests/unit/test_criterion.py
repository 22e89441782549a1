"""The patch's criterion allows what a flash kernel must lose, and nothing that means otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fa_advisor.patching import attend as attending
from fa_advisor.patching.criterion import Comparison, compare

DTYPES = [torch.bfloat16, torch.float16]


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None, p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, *, softcap: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """As a flash kernel computes: exact, but for the rounding of results, and of O in backward."""
    wide = [each.double() for each in (query, key, value)]
    with attending.exact_but_for_the_output(query.dtype):
        out = attending.attend(*wide, mask, is_causal=is_causal, scale=scale, softcap=softcap)
    return out.to(query.dtype)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "flash_attention", flash)


def compared(dtype: torch.dtype, size: float, offset: float = 0.0, **options: Any) -> Comparison:
    """An original in `dtype` throughout against `attend` with `options`; logits of `size`."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 96, 32) * size, torch.randn(2, 3, 96, 32) + offset
    v = torch.randn(2, 3, 96, 32) + 3.0
    return compare(
        lambda x: (x[0] @ x[1].mT * 32**-0.5).softmax(-1) @ x[2],
        lambda x: attending.attend(x[0], x[1], x[2], **options),
        [each.to(dtype) for each in (q, k, v)],
        ("query", "key", "value"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_the_output_is_allowed(dtype: torch.dtype) -> None:
    """What keys have in common cancels in dQ, and doesn't in what the rounding of O does to it."""
    result = compared(dtype, 0.01, offset=8.0)
    assert result.within, result
    assert result.error > 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.01, 1.0])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"softcap": 0.01}])
def test_another_meaning_gains_nothing_by_it(
    dtype: torch.dtype, size: float, options: dict[str, Any]
) -> None:
    assert not compared(dtype, size, **options).within


def test_exact_is_the_same_attention() -> None:
    """Leading dims that broadcast, three dims, masks: `attend` in float64 is SDPA in float64."""

    def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
        leaves = [each.double().requires_grad_() for each in (q, k, v)]
        with attending.exact_but_for_the_output(torch.float64):
            ours = attending.attend(leaves[0], leaves[1], leaves[2], mask)
        true = sdpa(leaves[0], leaves[1], leaves[2], mask)
        torch.testing.assert_close(ours, true)
        found, expected = (
            torch.autograd.grad(each.square().sum(), leaves) for each in (ours, true)
        )
        torch.testing.assert_close(found, expected)

    check(torch.randn(2, 3, 9, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 5))
    check(torch.randn(3, 9, 8), torch.randn(3, 7, 8), torch.randn(3, 7, 5))
    check(torch.randn(2, 3, 9, 8), torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 5))
    q, k = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 7, 8)
    check(q, k, k, torch.randn(2, 1, 9, 7).double())
    check(q, k, k, torch.ones(9, 7, dtype=torch.bool).tril())
    check(q, k, k, torch.ones(2, 1, 1, 7, dtype=torch.bool))
