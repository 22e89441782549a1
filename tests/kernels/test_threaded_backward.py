"""The gradients of Hopper's kernels without a Hopper GPU: their source run by threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import threaded_gluon as threaded
import torch
from attention_cases import Case, hopper_cases, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_advisor.kernels import launch as launches
from fa_advisor.kernels import reference
from fa_advisor.kernels.arguments import check
from fa_advisor.kernels.hopper import dealing
from fa_advisor.kernels.kinds import Inputs
from fa_advisor.kernels.op import options_of

LOG2E = math.log2(math.e)
KERNELS = {
    "hopper_backward": ("backward", "backward_kernel"),
    "hopper_wide_keys": ("wide", "wide_keys_kernel"),
    "hopper_wide_queries": ("wide", "wide_queries_kernel"),
}


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is planned as for a Hopper GPU with few processors, and run by threads."""
    monkeypatch.setattr(dealing, "processors", lambda _: 3)
    threaded.plan_as_on_hopper(monkeypatch, run)


def run(launch: Any, _: int, *pointers: Any) -> None:
    """In `Launch.__call__`'s place."""
    grid, static = launch._geometry(launch._tile)
    if launch._name in KERNELS:
        file, name = KERNELS[launch._name]
        kernel = getattr(threaded.module(file), name)
        threaded.launch(kernel, grid, pointers, static, launch._descriptors(launch._tile))
        return
    given = dict(zip(launch._kernel.arg_names, (*pointers, *static), strict=True))
    {"hopper_prepare": prepare, "hopper_finish": finish}[launch._name](given)


def heads(given: dict[str, Any], batch: int) -> list[tuple[Any, int, int]]:
    """Of each sequence and head: how to find its rows, where its padded rows begin, its length."""
    cu, found = given["cu_q"], []
    for b in range(batch):
        first, end = cu[b : b + 2].tolist() if cu is not None else (0, given["len_q"])
        start = b * given["row_stride_b"]
        if cu is not None:
            start = (first + b * given["BLOCK_M"]) // given["BLOCK_M"] * given["BLOCK_M"]
        for h in range(given["heads"]):
            index = (slice(first, end), h) if cu is not None else (b, h)
            found.append((index, start + h * given["row_stride_h"], end - first))
    return found


def prepare(given: dict[str, Any]) -> None:
    """What `prepare_kernel` makes: interpreted_hopper.py has it from the source."""
    out, grad, lse, up = (given[name] for name in ("out", "grad_out", "lse", "grad_lse"))
    packed = given["cu_q"] is not None
    for index, start, length in heads(given, len(given["cu_q"]) - 1 if packed else len(out)):
        in_lse = index[::-1] if packed else index
        delta = (out[index].float() * grad[index].float()).sum(-1)
        if up is not None:
            delta = delta - up[in_lse]
        empty = lse[in_lse] == -math.inf
        rows = -(-length // given["BLOCK_M"]) * given["BLOCK_M"]
        given["base"][start : start + rows] = math.inf
        given["delta"][start : start + rows] = 0.0
        given["base"][start : start + length] = (lse[in_lse] * LOG2E).masked_fill(empty, math.inf)
        given["delta"][start : start + length] = delta.masked_fill(empty, 0.0)
        if given["rows_delta"] is not None:
            given["rows_delta"][in_lse] = delta
    if given["ZERO"]:
        given["total"].zero_()
    if given["taken"] is not None:
        given["taken"].zero_()


def finish(given: dict[str, Any]) -> None:
    """What `finish_kernel` makes: interpreted_hopper.py has it from the source."""
    total, dq, block, wide = (given[name] for name in ("total", "grad_query", "BLOCK_M", "D"))
    packed = given["cu_q"] is not None
    order = (0, 2, 5, 3, 1, 4, 6) if block == 128 else (2, 5, 3, 0, 1, 4, 6)
    for index, start, length in heads(given, len(given["cu_q"]) - 1 if packed else len(dq)):
        for first in range(0, length, block):
            tile = total.view(-1)[(start + first) * wide :][: block * wide]
            tile = tile.reshape(2, 8, 4, 8, 4, 2, 2).permute(order).reshape(block, wide)
            rows = min(block, length - first)
            dq[index][first : first + rows] = tile[:rows, : given["DIM"]] * given["scale"]


def assert_gradients_agree(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    given = inputs(case, "cpu", dtype)
    o, longest = case.options, {}
    if case.lengths:
        longest = {i: max(pair[i] for pair in case.lengths) for i in range(2)}
    names = ("query", "key", "value")
    sinks = given.get("sinks")
    cu = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    q, k, v, _, call = check(
        *(given[name].detach() for name in names), None, 0.0, o["is_causal"], o["scale"], True,
        o["window"], o["softcap"], sinks, None, *cu, longest.get(0), longest.get(1),
        o["causal_alignment"],
    )  # fmt: skip
    wide = {
        name: x.detach().double().requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
    }
    true_out, true_lse = reference.attention(**wide, **o)
    grad_out = torch.randn_like(true_out).to(dtype)
    grad_lse = torch.randn_like(true_lse).float().masked_fill(true_lse == -math.inf, 0.0)
    leaves = [wide[name] for name in names]
    x = Inputs(q, k, v, None, None if sinks is None else sinks.detach(), None, *cu, None)
    out, lse = true_out.detach().to(dtype), true_lse.detach().float()
    # delta is of O as it was rounded: where dP is nearly that, what is left is that rounding.
    rounding = (grad_out.double() * (out.double() - true_out.detach())).sum(-1)
    if cu[0] is not None:
        rounding = rounding.T
    expected = torch.autograd.grad(
        [true_out, true_lse], leaves, [grad_out.double(), grad_lse.double() - rounding]
    )
    if q.numel() == 0 or k.numel() == 0:
        return
    made = launches._plan_backward(x, options_of(call), grad_out, grad_lse, out, lse, False, False)
    assert made.hopper is not None, "not Hopper's"
    found = launches.backward(x, options_of(call), grad_out, grad_lse, out, lse, None, False)
    floor = 2e-3 * float(grad_out.float().norm())
    for name, one, other in zip(names, found, expected, strict=False):
        assert one is not None
        error = float((one.double() - other).norm()) / max(float(other.norm()), floor)
        assert error < (8e-3 if dtype == torch.bfloat16 else 1.5e-3), (name, error)


CASES = {
    "full": Case(batch=1, len_q=300, len_k=300, head_dim=128),
    "full, head dim 64": Case(batch=2, len_q=130, len_k=260, head_dim=64),
    "causal": Case(batch=1, heads=2, len_q=400, len_k=400, head_dim=128, is_causal=True),
    "causal, head dim 64": Case(batch=1, len_q=420, len_k=420, head_dim=64, is_causal=True),
    "bottom-right, rows that see nothing": Case(
        batch=1, len_q=300, len_k=130, head_dim=64, is_causal=True, bottom_right=True
    ),
    "window": Case(batch=1, len_q=420, len_k=390, head_dim=128, window=(70, 30)),
    "window to the left, whole tiles": Case(
        batch=1, len_q=512, len_k=512, head_dim=64, window=(100, -1)
    ),
    "grouped": Case(batch=1, heads=6, kv_heads=2, len_q=140, len_k=200, head_dim=96),
    "packed": Case(
        heads=2, lengths=((140, 140), (0, 70), (30, 0), (1, 1), (200, 90)), head_dim=64
    ),
    "packed, causal": Case(
        heads=2, kv_heads=1, lengths=((190, 190), (0, 0), (65, 65), (64, 128)), head_dim=128,
        is_causal=True, bottom_right=True,
    ),
    "softcap": Case(batch=1, len_q=150, len_k=200, head_dim=64, softcap=15.0, magnitude=4.0),
    "192 and 128": Case(batch=1, len_q=140, len_k=200, head_dim=192, value_dim=128),
    "head dim 256": Case(batch=1, len_q=190, len_k=150, head_dim=256, is_causal=True),
    "head dim 256, window": Case(batch=1, len_q=190, len_k=250, head_dim=256, window=(40, 9)),
    "head dim 256, window to the left": Case(
        batch=1, len_q=448, len_k=256, head_dim=256, window=(100, -1)
    ),
    "head dim 256, packed": Case(heads=2, kv_heads=1, lengths=((70, 130), (9, 65)), head_dim=256),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_backward(name: str) -> None:
    torch.manual_seed(len(name))
    assert_gradients_agree(CASES[name])


def has_a_kernel(case: Case) -> bool:
    return case.mask is None


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=hopper_cases(65, 330).filter(has_a_kernel),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_the_backward_with_every_feature(case: Case, dtype: torch.dtype) -> None:
    assert_gradients_agree(case, dtype)


@pytest.mark.parametrize(
    ("file", "healthy", "ill"),
    [
        ("backward", "        consumers_sync()\n        none", "        none"),
        ("backward", "        mbarrier.wait(dq_free.index(W), (it & 1) ^ 1)", "        #"),
        (
            "backward",
            "    dk, s = warpgroup_mma_wait(0, deps=(dk, product))\n"
            "    mbarrier.arrive(q_free.index(i), count=1)\n",
            "    mbarrier.arrive(q_free.index(i), count=1)\n"
            "    dk, s = warpgroup_mma_wait(0, deps=(dk, product))\n",
        ),
        (
            "backward",
            "            mbarrier.wait(dq_free.index(c), (last & 1) ^ 1)\n",
            "            dq_free.index(c)\n",
        ),
        ("backward", "        mbarrier.wait(kv_free, turn ^ 1)", "        #"),
        ("backward", "        mbarrier.arrive(kv_free, count=1)\n", "        pass\n"),
        ("wide", "    fence_async_shared()  # For wgmma, and before the barrier.\n", ""),
        ("wide", "        mbarrier.arrive(v_free.index(n), count=1)\n", ""),
    ],
    ids=[
        "alone",
        "dQ overwritten",
        "given back early",
        "dV over dQ",
        "K overwritten",
        "never told",
        "no fence",
        "never given back",
    ],
)
def test_a_fault_shows(file: str, healthy: str, ill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads find what would be a race or a hang on a GPU."""
    monkeypatch.setattr(threaded, "PATIENCE_S", 1.0)
    monkeypatch.setattr(threaded, "OFTEN", 0.5)
    threaded.spoil(monkeypatch, file, healthy, ill)
    dim = 128 if file == "backward" else 256
    with pytest.raises((AssertionError, threaded.Broken)):
        for _ in range(8):  # A race shows when a thread happens to be slow enough.
            assert_gradients_agree(
                Case(batch=1, len_q=900, len_k=300, head_dim=dim, is_causal=True)
            )
