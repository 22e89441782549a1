"""Tests of `flash_attention` that hold on every device.

tests/kernels/test_cases.py runs them on the CPU, tests/gpu/test_flash_attention.py through the
kernels: a subclass there gives the `device` and `dtype` fixtures.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, assert_agrees, assert_close, inputs
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from fa_advisor.kernels import reference
from fa_advisor.kernels.api import flash_attention
from fa_advisor.kernels.module import FlashAttention


def cases(**named: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", named.values(), ids=named.keys())


def true(*tensors: Tensor, **options: object) -> Tensor:
    return reference.attention(*tensors, **options)[0]  # type: ignore[arg-type]


class FaultsSeenInTheField:
    """Each was a fault of a kernel that people use; the number is its report's."""

    @cases(
        pytorch_196678_nan_dq_masked_length_64_mod_128=Case(
            batch=1, heads=1, len_q=192, len_k=192, head_dim=64, mask="B11K", mask_kind="-inf"
        ),
        trl_7181_nan_dq_padding_length_64_mod_128=Case(
            heads=1, len_q=64, len_k=64, head_dim=128, mask="B11K"
        ),
        cudnn_frontend_1072_nan_dk_dv_one_query=Case(
            len_q=1, len_k=192, head_dim=64, is_causal=True, bottom_right=True
        ),
        pytorch_193893_few_kv_heads=Case(heads=16, kv_heads=4, len_q=20, len_k=20),
        pytorch_193893_one_kv_head=Case(heads=8, kv_heads=1, len_q=20, len_k=20),
        pytorch_153799_nan_backward_length_mod_128=Case(
            batch=1, heads=1, len_q=200, len_k=200, window=(5, 5), is_causal=True
        ),
        pytorch_159247_partial_kv_block=Case(
            batch=1, heads=1, len_q=150, len_k=150, window=(70, 0)
        ),
        pytorch_103749_fully_masked_rows=Case(len_q=33, len_k=33, mask="BHQ1"),
        pytorch_110213_fully_masked_rows_additive=Case(
            len_q=9, len_k=5, mask="QK", mask_kind="-inf"
        ),
        pytorch_109517_finfo_min=Case(len_q=20, len_k=20, mask="B1Q1", mask_kind="min"),
        pytorch_191937_stride_0_kv_length_1_mod_32=Case(len_q=33, len_k=33, layout="expanded"),
        pytorch_191937_stride_0_kv_length_65=Case(len_q=8, len_k=65, layout="expanded"),
        triton_docs_tutorials_6_tf32_gradients=Case(
            batch=1, heads=1, len_q=64, len_k=64, head_dim=128, magnitude=4.0
        ),
        flash_attention_2562_zero_length_query=Case(lengths=((0, 5), (3, 4), (0, 0), (2, 0))),
        pytorch_143832_head_dim_256=Case(batch=1, heads=1, len_q=70, len_k=70, head_dim=256),
        kempnerforge_206_head_dim_192=Case(
            batch=1, heads=1, len_q=70, len_k=70, head_dim=192, value_dim=128, is_causal=True
        ),
        pytorch_133254_132075_float32_large_tiles=Case(
            batch=1, heads=1, len_q=130, len_k=130, head_dim=128, mask="B11K"
        ),
        unsloth_3142_sinks=Case(heads=4, kv_heads=2, sinks=True, window=(4, 0), is_causal=True),
    )  # fmt: skip
    def test_fault(self, case: Case, device: str, dtype: torch.dtype) -> None:
        assert_agrees(case, device, dtype)

    def test_pytorch_108108_causal_is_top_left(self, device: str, dtype: torch.dtype) -> None:
        query, key, value = (
            torch.randn(1, 1, n, 16, device=device, dtype=dtype) for n in (1, 4, 4)
        )
        out = flash_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(out, value[:, :, :1])
        out = flash_attention(query, key, value, is_causal=True, causal_alignment="bottom-right")
        torch.testing.assert_close(
            out, F.scaled_dot_product_attention(query, key, value), rtol=2e-2, atol=1e-2
        )

    def test_pytorch_109517_row_at_finfo_min_is_uniform(
        self, device: str, dtype: torch.dtype
    ) -> None:
        """Its log-sum-exp rounds to finfo.min; with that alone backward would have P = 1."""
        x = inputs(Case(len_q=6, len_k=12), device, dtype)
        mask = torch.zeros(6, 12, device=device)
        mask[2:4] = torch.finfo(torch.float32).min
        out = flash_attention(x["query"], x["key"], x["value"], mask)
        mean = x["value"].detach().double().mean(2, keepdim=True).expand(-1, -1, 2, -1)
        torch.testing.assert_close(out[:, :, 2:4].double(), mean, rtol=2e-2, atol=1e-2)
        (grad,) = torch.autograd.grad(out[:, :, 2:4].sum(), x["value"])
        torch.testing.assert_close(grad, torch.full_like(grad, 2 / 12), rtol=1e-2, atol=1e-3)

    def test_exllamav3_316_head_dim_72_repeats(self, device: str, dtype: torch.dtype) -> None:
        x = inputs(Case(len_q=50, len_k=50, head_dim=72, is_causal=True), device, dtype)
        first, second = (
            self._out_and_gradients(x["query"], x["key"], x["value"]) for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    @staticmethod
    def _out_and_gradients(*tensors: Tensor) -> list[Tensor]:
        out = flash_attention(*tensors, is_causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]

    def test_transformers_46960_too_wide_a_head_is_refused(
        self, device: str, dtype: torch.dtype
    ) -> None:
        x = torch.randn(1, 2, 4, 288, device=device, dtype=dtype)
        with pytest.raises(ValueError, match="query: expected a head dim from 1 to 256, got 288"):
            flash_attention(x, x, x)

    def test_pytorch_124464_dropout_is_off_in_eval(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(1, 2, 8, 16, device=device, dtype=dtype)
        module = FlashAttention(dropout_p=0.5)
        assert not torch.equal(module(x, x, x), flash_attention(x, x, x))
        assert torch.equal(module.eval()(x, x, x), flash_attention(x, x, x))


class TorchsOwnCases:
    """What PyTorch's test_transformers.py holds scaled_dot_product_attention to, restated."""

    @pytest.mark.parametrize("mask", ["K", "QK", "11QK", "HQK", "BHQK", "B11K"])
    @pytest.mark.parametrize("kind", ["bool", "additive"])
    def test_mask_variants(self, mask: str, kind: str, device: str, dtype: torch.dtype) -> None:
        case = Case(len_q=21, len_k=37, head_dim=24, mask=mask, mask_kind=kind)
        assert_agrees(case, device, dtype)

    @cases(
        plain=Case(),
        causal=Case(is_causal=True),
        causal_more_keys=Case(len_q=5, len_k=31, is_causal=True),
        causal_more_queries=Case(len_q=31, len_k=5, is_causal=True),
        bottom_right_more_queries=Case(len_q=31, len_k=5, is_causal=True, bottom_right=True),
        one_query_one_key=Case(len_q=1, len_k=1),
        one_key=Case(len_q=17, len_k=1),
        no_key=Case(len_q=17, len_k=0),
        no_query=Case(len_q=0, len_k=17),
        no_batch=Case(batch=0),
        singleton_head_dim=Case(head_dim=1),
        different_value_dim=Case(head_dim=8, value_dim=40),
        odd_head_dim=Case(head_dim=33, value_dim=17),
        grouped=Case(heads=6, kv_heads=3),
        multi_query=Case(heads=6, kv_heads=1),
        non_contiguous=Case(layout="sliced"),
        heads_last=Case(layout="BLHD", len_q=30),
        negative_scale=Case(scale=-0.3),
        zero_scale=Case(scale=0.0),
        packed=Case(lengths=((7, 3), (1, 12), (20, 20)), is_causal=True),
    )
    def test_agrees(self, case: Case, device: str, dtype: torch.dtype) -> None:
        assert_agrees(case, device, dtype)

    @pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 8, 15, 40, 72, 80, 96, 129, 160, 255, 256])
    def test_head_dims(self, head_dim: int, device: str, dtype: torch.dtype) -> None:
        assert_agrees(Case(len_q=18, len_k=18, head_dim=head_dim, batch=1), device, dtype)

    def test_fully_masked_rows_are_zero(self, device: str, dtype: torch.dtype) -> None:
        x = inputs(Case(len_q=8, len_k=8), device, dtype)
        tensors = [x[name] for name in ("query", "key", "value")]
        mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril(-1)
        for given in (mask, torch.zeros(8, 8, device=device).masked_fill(~mask, float("-inf"))):
            out, lse = flash_attention(*tensors, given, return_lse=True)
            assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == float("-inf")).all()
            grads = torch.autograd.grad([out, lse], tensors, [out, torch.ones_like(lse)])
            assert all(grad.isfinite().all() for grad in grads)
            assert (grads[0][:, :, 0] == 0).all()

    def test_causal_variants(self, device: str, dtype: torch.dtype) -> None:
        query, key, value = (
            torch.randn(2, 2, n, 16, device=device, dtype=dtype) for n in (9, 21, 21)
        )
        for variant, alignment in (
            (causal_upper_left(9, 21), "top-left"),
            (causal_lower_right(9, 21), "bottom-right"),
        ):
            out = flash_attention(query, key, value, is_causal=True, causal_alignment=alignment)
            mask = variant._materialize(torch.device(device)).bool()
            theirs = F.scaled_dot_product_attention(query, key, value, mask)
            torch.testing.assert_close(out, theirs, rtol=2e-2, atol=1e-2)

    def test_is_causal_and_mask_fails(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(1, 1, 4, 8, device=device, dtype=dtype)
        mask = torch.ones(4, 4, dtype=torch.bool, device=device)
        with pytest.raises(ValueError, match="attn_mask: expected None with is_causal=True"):
            flash_attention(x, x, x, mask, is_causal=True)
        out = flash_attention(x, x, x, mask, window=(-1, 0))
        # Another kernel, compiled with a mask: what is rounded when may differ in float32.
        torch.testing.assert_close(out, flash_attention(x, x, x, is_causal=True))

    def test_uniform_attention_over_a_long_sequence(self, device: str, dtype: torch.dtype) -> None:
        """Sums in the inputs' dtype would lose the last keys."""
        key = torch.ones(1, 1, 5000, 16, device=device, dtype=dtype)
        query = torch.ones(1, 1, 2, 16, device=device, dtype=dtype)
        value = torch.ones_like(key)
        out = flash_attention(query, key, value).double()
        # Some CPUs' float32 products add up 5,000 equal terms one by one: 6e-5 off.
        rtol = max(2e-4, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=rtol, atol=0.0)

    def test_logits_beyond_float16(self, device: str, dtype: torch.dtype) -> None:
        query = torch.full((1, 1, 4, 64), 60.0, device=device, dtype=dtype)
        value = torch.randn(1, 1, 4, 64, device=device, dtype=dtype)
        out = flash_attention(query, query, value, scale=1.0)
        mean = value.double().mean(2, keepdim=True).expand_as(value)
        torch.testing.assert_close(out.double(), mean, rtol=2e-2, atol=1e-2)

    def test_unaligned_storage(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(2 * 2 * 16 * 20 + 1, device=device, dtype=dtype)[1:].view(2, 2, 16, 20)
        out = flash_attention(x, x, x, is_causal=True)
        plain = true(x, x, x, is_causal=True)
        assert_close("unaligned", "out", out, plain, plain.to(dtype), torch.finfo(dtype).eps * 8)

    def test_expanded_and_transposed_masks(self, device: str, dtype: torch.dtype) -> None:
        x = inputs(Case(batch=3, len_q=12, len_k=20), device, dtype)
        tensors = [x[name].detach() for name in ("query", "key", "value")]
        row = torch.rand(3, 1, 1, 20, device=device) < 0.6
        expanded = flash_attention(*tensors, row.expand(3, 2, 12, 20))
        assert torch.equal(expanded, flash_attention(*tensors, row))
        turned = (torch.rand(20, 12, device=device) < 0.6).T
        outs = [flash_attention(*tensors, mask) for mask in (turned, turned.contiguous())]
        # Another layout may add up in another order.
        torch.testing.assert_close(*outs, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)

    def test_dropout_drops_the_same_in_backward(self, device: str, dtype: torch.dtype) -> None:
        case = Case(len_q=64, len_k=64, head_dim=16, is_causal=True)
        x = inputs(case, device, dtype)
        query, key, value = (x[name] for name in ("query", "key", "value"))
        eye = torch.eye(64, device=device, dtype=dtype).expand(2, 2, 64, 64)

        def dropped(value: Tensor) -> Tensor:
            torch.manual_seed(7)
            return flash_attention(query, key, value, dropout_p=0.25, is_causal=True)

        keep = (dropped(eye) != 0).detach()
        visible = torch.ones(64, 64, dtype=torch.bool, device=device).tril()
        kept = float(keep.float().sum() / (visible.sum() * 4))
        assert abs(kept - 0.75) < 0.03, kept
        assert not torch.equal(keep[0, 0], keep[0, 1]) and not torch.equal(keep[0, 0], keep[1, 0])

        wide = [t.detach().double().requires_grad_() for t in (query, key, value)]
        plain = [t.detach().requires_grad_() for t in (query, key, value)]
        options = {"is_causal": True, "keep": keep, "dropout_p": 0.25}
        outs = [
            dropped(value),
            reference.attention(*wide, **options)[0],
            reference.attention(*plain, **options, dtype=dtype)[0],
        ]
        results = [
            [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
            for out, leaves in zip(outs, ([query, key, value], wide, plain), strict=True)
        ]
        names = ("out", "dq", "dk", "dv")
        for name, ours, truth, plainly in zip(names, *results, strict=True):
            rounding = 4 * torch.finfo(dtype).eps
            assert_close("dropout", name, ours, truth, plainly, rounding)

    def test_dropout_follows_the_generator(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(1, 2, 16, 16, device=device, dtype=dtype)
        torch.manual_seed(3)
        first, second = (flash_attention(x, x, x, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(3)
        again = flash_attention(x, x, x, dropout_p=0.5)
        assert torch.equal(first, again) and not torch.equal(first, second)

    def test_infinite_mask_in_some_columns(self, device: str, dtype: torch.dtype) -> None:
        case = Case(len_q=10, len_k=70, mask="B11K", mask_kind="-inf", magnitude=4.0)
        assert_agrees(case, device, dtype)


class Transforms:
    """What torch does to a function: autocast, checkpoint, compile, functional gradients."""

    def test_autocast(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(1, 2, 8, 16, device=device)
        with torch.autocast(device, torch.bfloat16):
            out = flash_attention(x, x.to(torch.bfloat16), x, torch.zeros(8, 8, device=device))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(
            out.float(), F.scaled_dot_product_attention(x, x, x), rtol=3e-2, atol=3e-2
        )

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant: bool, device: str, dtype: torch.dtype) -> None:
        from torch.utils.checkpoint import checkpoint

        x = inputs(Case(len_q=12, len_k=12), device, dtype)
        tensors = [x[name] for name in ("query", "key", "value")]

        def attend(*tensors: Tensor) -> Tensor:
            return flash_attention(*tensors, dropout_p=0.3, is_causal=True)

        torch.manual_seed(5)
        attend(*tensors).sum().backward()
        expected = [t.grad for t in tensors]
        for t in tensors:
            t.grad = None
        torch.manual_seed(5)
        checkpoint(attend, *tensors, use_reentrant=use_reentrant).sum().backward()
        assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected, strict=True))

    def test_functional_gradient(self, device: str, dtype: torch.dtype) -> None:
        x = torch.randn(1, 2, 8, 16, device=device, dtype=dtype)

        def loss(query: Tensor) -> Tensor:
            return flash_attention(query, x, x, is_causal=True).float().square().sum()

        leaf = x.clone().requires_grad_()
        loss(leaf).backward()
        torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)

    def test_compile_without_graph_break(self, device: str, dtype: torch.dtype) -> None:
        case = Case(mask="B11K", sinks=True, alibi="H", softcap=5.0, window=(6, 2))
        x = inputs(case, device, dtype)
        compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
        eager = flash_attention(**x, **case.options, return_lse=True)
        out = compiled(**x, **case.options, return_lse=True)
        torch.testing.assert_close(out, eager)
        leaves = [x[name] for name in ("query", "key", "value", "sinks")]
        for ours, theirs in zip(
            torch.autograd.grad(out, leaves, [torch.ones_like(t) for t in out]),
            torch.autograd.grad(eager, leaves, [torch.ones_like(t) for t in eager]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
