"""The public function: what it refuses and in what words, and the shapes that it takes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fa_advisor
from fa_advisor.kernels import api, arguments
from fa_advisor.kernels.reference import attention as reference

flash_attention = fa_advisor.flash_attention


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


Q = x(2, 4, 6, 8)
PACKED = x(6, 4, 8)
LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": offsets(0, 2, 6),
    "cu_seqlens_k": offsets(0, 2, 6),
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
}


def call(
    query: Any = Q, key: Any = None, value: Any = None, mask: Any = None, **options: Any
) -> Callable[[], Any]:
    key = query if key is None else key
    return lambda: flash_attention(query, key, key if value is None else value, mask, **options)


def packed(query: Tensor = PACKED, key: Tensor = PACKED, **options: Any) -> Callable[[], Any]:
    return lambda: flash_attention(query, key, key, **{**LENGTHS, **options})


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (call([[1.0]], Q), TypeError, "query: expected a Tensor, got list"),
    "key no tensor": (call(Q, 3, Q), TypeError, "key: expected a Tensor, got int"),
    "nested": (
        call(torch.nested.nested_tensor([x(4, 6, 8)], layout=torch.strided)),
        TypeError,
        "query: expected a strided tensor, got a nested one; pass its values()",
    ),
    "rank 2": (call(x(6, 8)), ValueError, "query: expected [..., H, L, D], at least 3 dims"),
    "ranks": (call(Q, Q[0], Q[0]), ValueError, "key: expected query's rank, got shape (4, 6, 8)"),
    "integers": (
        call(Q.int()),
        TypeError,
        "query: expected float16, bfloat16, float32 or float8_e4m3fn",
    ),
    "mixed dtypes": (
        call(Q, Q.half(), Q),
        TypeError,
        "key: expected query's dtype torch.float32, got torch.float16",
    ),
    "value dtype": (call(Q, Q, Q.double()), TypeError, "value: expected query's dtype"),
    "devices": (
        call(Q, Q.to("meta"), Q),
        ValueError,
        "key: expected query's device cpu, got meta",
    ),
    "head dim of 0": (
        call(x(1, 2, 3, 0)),
        ValueError,
        "query: expected a head dim from 1 to 256, got 0",
    ),
    "head dim": (call(x(1, 2, 3, 257)), ValueError, "head dim from 1 to 256, got 257"),
    "value dim": (
        call(Q, Q, x(2, 4, 6, 300)),
        ValueError,
        "value: expected a head dim from 1 to 256, got 300",
    ),
    "key's head dim": (
        call(Q, x(2, 4, 6, 9)),
        ValueError,
        "key: expected query's head dim 8, got 9",
    ),
    "value's length": (
        call(Q, Q, x(2, 4, 7, 8)),
        ValueError,
        "value: expected key's heads and length (4, 6), got (4, 7)",
    ),
    "batches": (call(Q, x(3, 4, 6, 8)), ValueError, "expected leading dims that broadcast"),
    "no head": (call(x(2, 0, 6, 8)), ValueError, "query: expected at least one head"),
    "heads that don't divide": (
        call(Q, x(2, 3, 6, 8), enable_gqa=True),
        ValueError,
        "key: expected a number of heads that divides query's 4, got 3",
    ),
    "groups unasked": (
        call(Q, x(2, 2, 6, 8)),
        ValueError,
        "key: expected query's 4 heads, got 2; pass enable_gqa=True",
    ),
    "mask no tensor": (call(mask=[1]), TypeError, "attn_mask: expected a Tensor or None, got list"),
    "mask of integers": (
        call(mask=torch.ones(6, 6, dtype=torch.long)),
        TypeError,
        "attn_mask: expected bool, float32 or query's dtype torch.float32, got torch.int64;"
        " mask.bool() makes True what takes part",
    ),
    "mask dtype": (call(mask=x(6, 6).half()), TypeError, "got torch.float16"),
    "mask device": (
        call(mask=x(6, 6, device="meta")),
        ValueError,
        "attn_mask: expected query's device cpu, got meta",
    ),
    "mask shape": (
        call(mask=x(6, 7)),
        ValueError,
        "attn_mask: expected a shape that broadcasts to (2, 4, 6, 6), got (6, 7)",
    ),
    "mask rank": (call(mask=x(1, 2, 4, 6, 6)), ValueError, "got (1, 2, 4, 6, 6)"),
    "key padding": (
        call(mask=torch.ones(2, 6, dtype=torch.bool)),
        ValueError,
        "a key-padding mask [B, Lk] is passed as mask[:, None, None, :]",
    ),
    "mask and causal": (
        call(mask=x(6, 6), is_causal=True),
        ValueError,
        "attn_mask: expected None with is_causal=True",
    ),
    "scale type": (call(scale="big"), TypeError, "scale: expected a float or None, got str"),
    "scale tensor": (call(scale=torch.tensor(1.0)), TypeError, "scale: expected a float or None"),
    "scale nan": (call(scale=float("nan")), ValueError, "scale: expected a finite number, got nan"),
    "window": (call(window=-2), ValueError, "window: expected 0 or more keys on a side, or -1"),
    "window side": (call(window=(3, -5)), ValueError, "window: expected 0 or more"),
    "window type": (call(window=1.5), TypeError, "window: expected an int or two, (left, right)"),
    "window length": (call(window=(1, 2, 3)), TypeError, "window: expected an int or two"),
    "softcap": (call(softcap=-1.0), ValueError, "softcap: expected 0 (none) or a positive number"),
    "softcap type": (call(softcap="no"), TypeError, "softcap: expected a float, got str"),
    "softcap inf": (call(softcap=float("inf")), ValueError, "softcap: expected 0"),
    "dropout": (call(dropout_p=1.0), ValueError, "dropout_p: expected a probability in [0, 1)"),
    "dropout below": (call(dropout_p=-0.1), ValueError, "got -0.1"),
    "alignment": (
        call(causal_alignment="bottom"),
        ValueError,
        "causal_alignment: expected 'top-left' or 'bottom-right', got 'bottom'",
    ),
    "sinks shape": (call(sinks=x(5)), ValueError, "sinks: expected shape (4,), got (5,)"),
    "sinks dtype": (
        call(sinks=torch.ones(4).int()),
        TypeError,
        "sinks: expected float16, bfloat16",
    ),
    "sinks sparse": (call(sinks=x(4).to_sparse()), TypeError, "sinks: expected a strided tensor"),
    "a flag that is none": (
        call(is_causal="False"),
        TypeError,
        "is_causal: expected a bool, got str",
    ),
    "a scale beyond floats": (call(scale=10**400), ValueError, "scale: expected a finite number"),
    "sinks type": (call(sinks=0.5), TypeError, "sinks: expected a Tensor or None, got float"),
    "sinks device": (call(sinks=x(4, device="meta")), ValueError, "sinks: expected query's device"),
    "alibi shape": (
        call(alibi_slopes=x(4, 2)),
        ValueError,
        "alibi_slopes: expected shape (4,) or (2, 4), got (4, 2)",
    ),
    "alibi gradient": (
        call(alibi_slopes=x(4).requires_grad_()),
        ValueError,
        "alibi_slopes: expected a tensor that doesn't require grad",
    ),
    "lengths without offsets": (
        call(max_seqlen_q=3),
        ValueError,
        "max_seqlen_q, max_seqlen_k: expected None without cu_seqlens_q",
    ),
    "one kind of offsets": (
        packed(cu_seqlens_k=None),
        TypeError,
        "cu_seqlens_k: expected an int32 Tensor [B + 1] (cu_seqlens_q and cu_seqlens_k go"
        " together), got NoneType",
    ),
    "offsets' dtype": (
        packed(cu_seqlens_q=offsets(0, 6, dtype=torch.int64)),
        TypeError,
        "cu_seqlens_q: expected int32, got torch.int64",
    ),
    "offsets' rank": (
        packed(cu_seqlens_q=offsets(0, 6)[None]),
        ValueError,
        "cu_seqlens_q: expected shape [B + 1], one sequence at least, got (1, 2)",
    ),
    "no sequence": (packed(cu_seqlens_q=offsets(0)), ValueError, "one sequence at least, got (1,)"),
    "offsets' device": (
        packed(cu_seqlens_k=offsets(0, 2, 6).to("meta")),
        ValueError,
        "cu_seqlens_k: expected query's device cpu, got meta",
    ),
    "numbers of sequences": (
        packed(cu_seqlens_k=offsets(0, 6)),
        ValueError,
        "cu_seqlens_k: expected cu_seqlens_q's 3 entries, got 2",
    ),
    "no longest": (
        packed(max_seqlen_k=None),
        TypeError,
        "max_seqlen_k: expected the longest sequence's length, an int",
    ),
    "longest on a tensor": (
        packed(max_seqlen_q=torch.tensor(4)),
        TypeError,
        "max_seqlen_q: expected the longest sequence's length, an int (reading it off cu_seqlens_q",
    ),
    "longest below 0": (packed(max_seqlen_q=-1), ValueError, "max_seqlen_q: expected 0 or more"),
    "longest too short": (
        packed(max_seqlen_k=3),
        ValueError,
        "max_seqlen_k: expected 4, the longest of cu_seqlens_k, got 3",
    ),
    "offsets that fall": (
        packed(cu_seqlens_q=offsets(0, 7, 6)),
        ValueError,
        "cu_seqlens_q: expected values that rise from 0 to the 6 tokens given, got [0, 7, 6]",
    ),
    "offsets that end early": (
        packed(cu_seqlens_q=offsets(0, 2, 5)),
        ValueError,
        "cu_seqlens_q: expected values that rise from 0 to the 6 tokens given, got [0, 2, 5]",
    ),
    "packed rank": (
        packed(Q, Q),
        ValueError,
        "query: expected [total, heads, dim] with cu_seqlens, got shape (2, 4, 6, 8)",
    ),
    "packed head dim": (
        packed(key=x(6, 4, 9)),
        ValueError,
        "key: expected query's head dim 8, got 9",
    ),
    "packed mask": (
        packed(attn_mask=x(6, 6)),
        ValueError,
        "attn_mask: expected None with cu_seqlens, got a mask",
    ),
    "packed alibi": (packed(alibi_slopes=x(3, 4)), ValueError, "expected shape (4,) or (2, 4)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_call_says_what_was_expected(name: str) -> None:
    attempt, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        attempt()
    assert type(caught.value) is kind
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "hip", "message"),
    [
        (
            (7, 5),
            None,
            "expected a tensor on a GPU of compute capability 8.0 or higher, got one on",
        ),
        ((9, 4), "6.2", "expected a tensor on an NVIDIA GPU, got one on Thing (ROCm)"),
        ((8, 0), None, None),
        ((12, 0), None, None),
    ],
)
def test_unsupported_gpu_is_named(
    capability: tuple[int, int], hip: str | None, message: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Thing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    said = arguments.unsupported_gpu(0)
    if message is None:
        assert said is None
    else:
        assert said is not None and message in said and "scaled_dot_product_attention" in said


def test_unsupported_gpu_is_refused_before_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_refusals", {0: "query: no such GPU"})
    with pytest.raises(ValueError, match="query: no such GPU"):
        api._gpu_attention(SimpleNamespace(get_device=lambda: 0))  # type: ignore[arg-type]


def test_cuda_without_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_refusals", {0: None})
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("fa_advisor.kernels.")]:
        if name.rsplit(".", 1)[1] in {"op", "launch", "kinds", "forward", "backward", "score"}:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="needs Triton, which isn't installed: pip install"):
        api._gpu_attention(SimpleNamespace(get_device=lambda: 0))  # type: ignore[arg-type]


def test_signature_begins_as_torchs_does() -> None:
    names = list(inspect.signature(flash_attention).parameters)
    assert names[:8] == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ]
    keyword_only = inspect.signature(flash_attention).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in list(keyword_only)[8:])


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((4, 6, 8), (4, 9, 8), (4, 9, 5)),
        ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 5)),
        ((2, 4, 6, 8), (1, 4, 9, 8), (1, 4, 9, 8)),
        ((2, 3, 4, 6, 8), (2, 1, 4, 9, 8), (1, 3, 4, 9, 8)),
        ((2, 4, 6, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
        ((0, 4, 6, 8), (0, 4, 9, 8), (0, 4, 9, 8)),
        ((2, 4, 0, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
        ((2, 4, 1, 8), (2, 4, 1, 8), (2, 4, 1, 8)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_shapes_as_torch_takes_them(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], masked: bool
) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (query, key, value))
    mask = torch.randn((*query[:-3], 1, query[-2], key[-2])) if masked else None
    out, lse = flash_attention(q, k, v, mask, return_lse=True)
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    assert lse.shape == out.shape[:-1]
    if out.numel():
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), (q, k, v)),
            torch.autograd.grad(expected.sum(), (q, k, v)),
        )


@pytest.mark.parametrize(
    "shape", [(), (1,), (9,), (6, 1), (3, 1, 1, 9), (3, 1, 6, 9), (2, 1, 1, 6, 9)]
)
def test_masks_of_extra_leading_dims(shape: tuple[int, ...]) -> None:
    q, k = x(2, 3, 4, 6, 8), x(2, 3, 4, 9, 8)
    mask = torch.rand(shape) < 0.7
    torch.testing.assert_close(
        flash_attention(q, k, k, mask), F.scaled_dot_product_attention(q, k, k, mask)
    )


def test_only_a_strided_last_dim_is_copied() -> None:
    def check(*tensors: Tensor) -> tuple[Tensor, ...]:
        options = (None, 0.0, False, None, False, None, 0.0, *[None] * 6, "top-left")
        return arguments.check(*tensors, *options)[:3]

    heads_last = x(2, 6, 4, 8).transpose(1, 2)
    expanded = x(1, 4, 6, 8).expand(2, 4, 6, 8)
    sliced = x(2, 4, 6, 16)[..., ::2]
    query, key, value = check(heads_last, expanded, sliced)
    assert query is heads_last and key is expanded
    assert value.stride(-1) == 1 and torch.equal(value, sliced)


def test_a_call_comes_in_one_form() -> None:
    def options(**given: Any) -> arguments.Call:
        defaults: dict[str, Any] = {
            name: p.default if p.default is not p.empty else Q
            for name, p in inspect.signature(flash_attention).parameters.items()
            if name != "return_lse" and "descale" not in name
        }
        return arguments.check(**(defaults | given))[-1]

    assert options().scale == 8**-0.5
    for same in ({"is_causal": True}, {"window": (-1, 0)}, {"is_causal": True, "window": (-1, 7)}):
        call = options(**same)
        assert (call.is_causal, call.window_left, call.window_right) == (True, None, None)
    assert options(window=3).window_left == options(window=3).window_right == 3
    assert options(is_causal=True, window=3).window_right is None
    assert options(window=-1) == options()
    assert options(scale=-2.0).scale == 2.0


def test_autocast_casts_what_torch_casts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(Q, Q.bfloat16(), Q, x(6, 6))
        wide = flash_attention(Q.double(), Q.double(), Q.double())
    assert out.dtype == torch.bfloat16 and wide.dtype == torch.float64
    expected, _ = reference(Q, Q, Q)
    torch.testing.assert_close(wide, reference(*[Q.double()] * 3)[0])
    assert (flash_attention(Q, Q, Q).double() - expected).abs().max() < 1e-6


def test_lse_is_float32_for_narrow_dtypes() -> None:
    _, lse = flash_attention(Q.half(), Q.half(), Q.half(), return_lse=True)
    assert lse.dtype == torch.float32


def test_module_is_the_function_with_its_options() -> None:
    module = fa_advisor.FlashAttention(
        is_causal=True, num_sinks=4, window=(3, 0), softcap=4.0, alibi_slopes=torch.rand(4)
    )
    assert list(dict(module.named_parameters())) == ["sinks"]
    assert list(module.state_dict()) == ["sinks"]
    assert module.alibi_slopes is not None and module.sinks is not None
    expected = flash_attention(
        Q,
        Q,
        Q,
        is_causal=True,
        window=(3, 0),
        softcap=4.0,
        sinks=module.sinks,
        alibi_slopes=module.alibi_slopes,
    )
    out = module(Q, Q, Q)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert module.sinks.grad is not None
    assert repr(module) == (
        "FlashAttention(is_causal=True, window=(3, 0), softcap=4.0, num_sinks=4)"
    )
    assert module.double().alibi_slopes.dtype == torch.float64
    assert fa_advisor.FlashAttention()(PACKED, PACKED, PACKED, **LENGTHS).shape == (6, 4, 8)


def test_import_loads_no_torch_until_asked() -> None:
    code = (
        "import sys, fa_advisor; assert 'flash_attention' in dir(fa_advisor);"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
