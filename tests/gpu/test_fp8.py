"""float8_e4m3fn on a Hopper GPU: the kernel, what is done in bf16, and torch around both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import grown
from torch import Tensor

from fa_advisor.kernels import launch, reference
from fa_advisor.kernels.api import flash_attention
from fa_advisor.kernels.fp8 import E4M3
from fa_advisor.kernels.hopper import fp8_plan, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU",
    ),
]

# Of a weight: e4m3 has three bits of mantissa, so it is off by 2^-4 at most, evenly spread. V's
# signs are random here, so that the norms of a row's output and of its error shrink alike.
ROUNDING = 2**-4 / math.sqrt(3)
DESCALES = ("q_descale", "k_descale", "v_descale")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FA_ADVISOR_KERNELS", raising=False)
    plan.available.cache_clear()
    launch._plans.clear()
    yield
    monkeypatch.undo()
    plan.available.cache_clear()
    launch._plans.clear()


@pytest.fixture
def planned(afresh: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every kind of call that was planned, whether for the kernel."""
    seen: list[bool] = []
    original = fp8_plan.forward

    def spy(*args: Any) -> Any:
        found = original(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(fp8_plan, "forward", spy)
    return seen


def tensors(
    shape_q: tuple[int, ...], shape_k: tuple[int, ...], dim_v: int | None = None, batch: int = 2
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v and their descales; shapes [B, H, L, D], or packed [total, H, D]."""
    torch.manual_seed(0)
    shape_v = (*shape_k[:-1], dim_v or shape_k[-1])
    three = [torch.randn(s, device="cuda").to(E4M3) for s in (shape_q, shape_k, shape_v)]
    descales = {
        name: torch.rand(batch, x.shape[1], device="cuda") + 0.5
        for name, x in zip(DESCALES, three, strict=True)
    }
    return three, descales


def wide(
    three: list[Tensor], descales: dict[str, Tensor], lengths: list[int] | None = None
) -> list[Tensor]:
    """What the three stand for, in float64."""
    found = []
    for x, factor in zip(three, descales.values(), strict=True):
        if lengths is None:
            found.append(x.double() * factor.double()[:, :, None, None])
        else:
            of_tokens = factor.repeat_interleave(torch.tensor(lengths, device="cuda"), 0)
            found.append(x.double() * of_tokens.double()[:, :, None])
    return found


def assert_close(
    found: Any, expected: tuple[Tensor, Tensor], most: float = ROUNDING, most_lse: float = 3e-3
) -> None:
    out, lse = found
    true, true_lse = expected
    assert out.dtype == torch.bfloat16
    assert float((out - true).norm() / true.norm()) < most
    empty = true_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    torch.testing.assert_close(
        lse.double().masked_fill(empty, 0), true_lse.masked_fill(empty, 0), rtol=0, atol=most_lse
    )


@pytest.mark.parametrize(
    ("dim", "dim_v"), [(128, None), (64, None), (96, None), (16, None), (128, 64), (64, 120)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_head_dims(planned: list[bool], dim: int, dim_v: int | None, is_causal: bool) -> None:
    three, descales = tensors((2, 4, 1000, dim), (2, 2, 1000, dim), dim_v)
    found = flash_attention(
        *three, is_causal=is_causal, enable_gqa=True, return_lse=True, **descales
    )
    assert_close(found, reference.attention(*wide(three, descales), is_causal=is_causal))
    assert planned == [True]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "causal_alignment": "bottom-right"},
        {"window": (200, 30)},
        {"window": (100, 0), "causal_alignment": "bottom-right"},
        {"window": (-1, 70)},
        {"softcap": 5.0, "is_causal": True},
        {"sinks": True, "window": (60, 10)},
        {"scale": -0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize(("len_q", "len_k"), [(700, 1111), (1111, 700), (1, 5000), (130, 3)])
def test_features(planned: list[bool], options: dict[str, Any], len_q: int, len_k: int) -> None:
    three, descales = tensors((2, 4, len_q, 128), (2, 2, len_k, 128))
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(4, device="cuda")}
    found = flash_attention(*three, enable_gqa=True, return_lse=True, **options, **descales)
    assert_close(found, reference.attention(*wide(three, descales), **options))
    assert planned == [True]


def test_without_descales_and_heads_inside_of_tokens(planned: list[bool]) -> None:
    q, k, v = (torch.randn(2, 640, 4, 128, device="cuda").to(E4M3).transpose(1, 2) for _ in "qkv")
    found = flash_attention(q, k, v, return_lse=True)
    assert found[0].transpose(1, 2).is_contiguous()
    assert_close(found, reference.attention(q.double(), k.double(), v.double()))
    assert planned == [True]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (100, 40)}], ids=str)
def test_packed_sequences(planned: list[bool], options: dict[str, Any]) -> None:
    lengths = [700, 0, 3, 512, 129]
    total = sum(lengths)
    three, descales = tensors((total, 4, 128), (total, 2, 128), batch=len(lengths))
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    found = flash_attention(
        *three, enable_gqa=True, return_lse=True, cu_seqlens_q=cu, cu_seqlens_k=cu,
        max_seqlen_q=700, max_seqlen_k=700, **options, **descales,
    )  # fmt: skip
    assert planned == [True]
    out, lse = found
    true, true_lse = reference.attention(
        *wide(three, descales, lengths), cu_seqlens_q=cu, cu_seqlens_k=cu, **options
    )
    assert float((out - true).norm() / true.norm()) < ROUNDING
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=3e-3)


def test_a_neighbour_may_hold_nan() -> None:
    lengths = [700, 300, 513]
    three, _ = tensors((sum(lengths), 2, 128), (sum(lengths), 2, 128))
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    options: dict[str, Any] = {
        "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 700, "max_seqlen_k": 700,
    }  # fmt: skip
    clean = flash_attention(*three, **options)
    for x in three:
        x.view(torch.uint8)[700:1000] = 0x7F
    dirty = flash_attention(*three, **options)
    for rows in (slice(0, 700), slice(1000, None)):
        assert torch.equal(dirty[rows], clean[rows])


@pytest.mark.parametrize("times", [2.0, 6.0, 16.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_logits_that_grow_from_tile_to_tile(times: float, is_causal: bool) -> None:
    """What came before is as good as nothing then."""
    (q, k, v), descales = tensors((2, 2, 1100, 128), (2, 2, 1100, 128))
    k = grown(k.float(), times).clamp(-448, 448).to(E4M3)
    found = flash_attention(q, k, v, **descales, is_causal=is_causal, return_lse=True)
    true = reference.attention(*wide([q, k, v], descales), is_causal=is_causal)
    # The product of Q and K loses bits of logits as large.
    assert_close(found, true, most_lse=float(true[1].abs().max()) * 2**-9)


def test_a_key_that_outweighs_the_others() -> None:
    """By 2^11, with a thousand others: they still count, and are still told apart."""
    for at in (0, 1000, 2047):
        (q, k, v), descales = tensors((1, 2, 300, 64), (1, 2, 2048, 64), batch=1)
        q, k = q.float(), k.float()
        q[..., 0], k[..., 0] = 8.0, 0.0
        k[..., at, 0] = 7.6 * math.sqrt(64) / 8.0
        q, k, descales = q.to(E4M3), k.to(E4M3), {name: d * 0 + 1 for name, d in descales.items()}
        found = flash_attention(q, k, v, **descales, return_lse=True)
        assert_close(found, reference.attention(*wide([q, k, v], descales)), most_lse=1e-2)


@pytest.mark.parametrize("sink", [-20.0, 8.0, 11.0, 20.0, 80.0])
def test_a_sink_costs_no_weight_its_bits(sink: float) -> None:
    three, _ = tensors((1, 2, 300, 64), (1, 2, 1016, 64))
    sinks = torch.full((2,), sink, device="cuda")
    found = flash_attention(*three, sinks=sinks, return_lse=True)
    assert_close(found, reference.attention(*(x.double() for x in three), sinks=sinks))


def test_a_sink_beside_which_all_is_nothing() -> None:
    """Also of rows that see no key."""
    three, _ = tensors((1, 2, 300, 64), (1, 2, 200, 64))
    for sink in (300.0, 1e30):
        sinks = torch.full((2,), sink, device="cuda")
        out, lse = flash_attention(*three, sinks=sinks, window=(5, -1), return_lse=True)
        assert not out.any()
        torch.testing.assert_close(lse, torch.full_like(lse, sink))


@pytest.mark.parametrize("times", [4, 80])
def test_a_rows_bits_are_its_own(times: int) -> None:
    """However large its neighbours' logits are: later tokens don't change earlier."""
    three, _ = tensors((1, 2, 2048, 128), (1, 2, 2048, 128))
    q, k, v = three
    later = q.float()
    later[:, :, 2000:] = (later[:, :, 2000:] * times).clamp(-448, 448)
    rows = []
    for query in (q, later.to(E4M3)):
        out, lse = flash_attention(query, k, v, is_causal=True, return_lse=True)
        rows.append((out[:, :, :2000], lse[:, :, :2000]))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_no_descale_that_is_no_number_is_lost(which: int, wrong: float) -> None:
    three, descales = tensors((2, 2, 300, 64), (2, 2, 500, 64))
    descales[DESCALES[which]][1] = wrong
    out, lse = flash_attention(*three, **descales, return_lse=True)
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(lse[0]).all()
    assert not torch.isfinite(out[1]).any()
    assert torch.isnan(lse[1]).all() == (which < 2)


def test_long_sums_are_not_cut_off() -> None:
    """A sum of 16k products in the tensor cores' own numbers came out 14 % too short."""
    three, descales = tensors((1, 1, 16384, 128), (1, 1, 16384, 128), batch=1)
    three[2] = (three[2].float() + 1).to(E4M3)
    out = flash_attention(*three, **descales)[..., ::64, :]
    q, k, v = wide(three, descales)
    true, _ = reference.attention(q[..., ::64, :], k, v)
    assert float((out - true).norm() / true.norm()) < 0.006


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (128, {"attn_mask": "bool"}),
        (128, {"attn_mask": "bf16"}),
        (64, {"alibi_slopes": "H"}),
        (192, {}),
        (40, {}),
    ],
    ids=str,
)
def test_the_rest_is_done_in_bf16(planned: list[bool], dim: int, options: dict[str, Any]) -> None:
    three, descales = tensors((2, 4, 600, dim), (2, 4, 600, dim))
    if options.get("attn_mask") == "bool":
        options = {"attn_mask": torch.rand(2, 1, 600, 600, device="cuda") < 0.5}
    elif "attn_mask" in options:
        options = {"attn_mask": torch.randn(600, 600, device="cuda").bfloat16()}
    elif "alibi_slopes" in options:
        options = {"alibi_slopes": torch.rand(4, device="cuda")}
    found = flash_attention(*three, return_lse=True, **options, **descales)
    # Each of the three is rounded to bf16 once, and P and the result are: a logit of some size by
    # a share of 2^-8.
    expected = reference.attention(*wide(three, descales), **options)
    assert_close(found, expected, most=0.01, most_lse=0.03)
    assert planned == [False]


def test_dropout_and_nothing() -> None:
    three, descales = tensors((2, 4, 600, 64), (2, 4, 600, 64))
    assert torch.isfinite(flash_attention(*three, dropout_p=0.2, **descales)).all()
    assert flash_attention(three[0][:, :, :0], *three[1:], **descales).shape == (2, 4, 0, 64)
    assert not flash_attention(three[0], three[1][:, :, :0], three[2][:, :, :0]).any()


def test_the_same_bits_again_compiled_and_captured() -> None:
    three, descales = tensors((2, 4, 1000, 128), (2, 4, 1000, 128))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, is_causal=True, **descales)

    expected = attend(*three)
    assert torch.equal(attend(*three), expected)
    assert torch.equal(torch.compile(attend, fullgraph=True)(*three), expected)
    launch._plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*three)
    graph.replay()
    assert torch.equal(out, expected)
