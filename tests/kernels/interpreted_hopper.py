"""What test_interpreter.py runs of Hopper's backward with TRITON_INTERPRET=1: its plain kernels.

`prepare_kernel` and `finish_kernel` are Triton's own language, and are launched here as planned;
what is between them is Gluon, which has no interpreter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fa_advisor.kernels.fp8 import E4M3, Descales
from fa_advisor.kernels.hopper import backward as kernels
from fa_advisor.kernels.hopper import dealing, fp8_plan, plan
from fa_advisor.kernels.hopper.order import order_kernel
from fa_advisor.kernels.kinds import Inputs, Options, kind_of, like

HEADS = 2
PACKED = (520, 0, 3, 64, 65)
LOG2E = math.log2(math.e)


@pytest.fixture(autouse=True)
def planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available", lambda _: True)
    monkeypatch.setattr(plan, "by_descriptor", lambda *_: True)
    monkeypatch.setattr(fp8_plan, "by_descriptor", lambda *_: True)
    monkeypatch.setattr(dealing, "processors", lambda _: 132)
    monkeypatch.setattr(plan, "compiles", lambda *_: True)


class Given(NamedTuple):
    """A backward's tensors and plan."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None
    cu: Tensor | None
    plan: Any


def given(
    dim: int, dim_v: int, *, packed: bool = False, blhd: bool = False, grad_lse: bool = False
) -> Given:
    torch.manual_seed(dim + dim_v)

    def tensor(width: int) -> Tensor:
        if packed:
            return torch.randn(sum(PACKED), HEADS, width).half()
        if blhd:
            return torch.randn(2, 550, HEADS, width).half().transpose(1, 2)
        return torch.randn(2, HEADS, 550, width).half()

    q, v, out, grad = tensor(dim), tensor(dim_v), tensor(dim_v), tensor(dim_v)
    shape = (HEADS, q.shape[0]) if packed else tuple(q.shape[:3])
    lse = torch.randn(shape) * 5
    lse[..., 5:70] = -math.inf  # As in rows that see no key.
    up = None
    if grad_lse:
        up = torch.randn((*shape[::-1],)).permute(*range(len(shape))[::-1])
    cu = None
    if packed:
        cu = torch.tensor([0, *PACKED]).cumsum(0).int()
    longest = max(PACKED) if packed else 550
    o = Options(0.3, False, False, None, None, 0.0, 0.0, longest, longest)
    x = Inputs(q, q, v, None, None, None, cu, cu, None)
    made = plan.backward(kind_of(x, o), o, x, grad, up, out, lse, False)
    assert made is not None
    return Given(q, grad, out, lse, up, cu, made)


def sequences(g: Given) -> list[tuple[Any, Any]]:
    """For each sequence and head: how to find its rows in [.., L, D], and in lse and its like."""
    if g.cu is not None:
        return [
            ((slice(a, b), h), (h, slice(a, b))) for a, b in pairwise(g.cu.tolist())
            for h in range(HEADS)
        ]  # fmt: skip
    return [((b, h), (b, h)) for b in range(2) for h in range(HEADS)]


def padded_rows(g: Given, block_m: int) -> list[int]:
    """Where each sequence's and head's rows begin among those padded to tiles."""
    if g.cu is not None:
        a_head = (g.query.shape[0] // block_m + len(PACKED)) * block_m
        begins = [
            (first + i * block_m) // block_m * block_m
            for i, first in enumerate(g.cu.tolist()[:-1])
        ]  # fmt: skip
        return [begin + h * a_head for begin in begins for h in range(HEADS)]
    a_head = -(-g.query.shape[2] // block_m) * block_m
    return [i * a_head for i in range(2 * HEADS)]


CASES: list[dict[str, Any]] = [
    {"dim": 64, "dim_v": 64},
    {"dim": 128, "dim_v": 128, "blhd": True, "grad_lse": True},
    {"dim": 72, "dim_v": 40, "packed": True, "grad_lse": True},
    {"dim": 64, "dim_v": 48, "packed": True},
    {"dim": 192, "dim_v": 128, "packed": True, "grad_lse": True},
    {"dim": 256, "dim_v": 200, "grad_lse": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_prepared(case: dict[str, Any]) -> None:
    g = given(**case)
    wide, _, block_m = plan.widths(case["dim"], case["dim_v"])
    nan = math.nan
    base, delta = (torch.full((g.plan.rows,), nan) for _ in range(2))
    total, rows_delta = torch.full((g.plan.rows * wide,), nan), torch.full_like(g.lse, nan)
    taken = torch.full((1,), 7, dtype=torch.int32)
    # With rows_delta where there are sinks; without the accumulator, head dims over 128 do.
    for asked in (None, rows_delta):
        g.plan.prepare(
            -1, g.out, g.grad_out, g.lse, g.grad_lse, base, delta,
            *((total, taken) if wide < 256 else (None, None)), asked, g.cu,
        )  # fmt: skip
    for (rows, of_lse), begin in zip(sequences(g), padded_rows(g, block_m), strict=True):
        lse = g.lse[of_lse]
        length = lse.shape[0]
        end = begin + -(-length // block_m) * block_m
        expected = (g.out[rows].float() * g.grad_out[rows].float()).sum(-1)
        if g.grad_lse is not None:
            expected = expected - g.grad_lse[of_lse]
        torch.testing.assert_close(rows_delta[of_lse], expected, rtol=1e-5, atol=1e-4)
        empty = lse == -math.inf
        expected = expected.masked_fill(empty, 0.0)
        torch.testing.assert_close(delta[begin : begin + length], expected, rtol=1e-5, atol=1e-4)
        assert (delta[begin + length : end] == 0).all()
        scaled = torch.where(empty, math.inf, lse * LOG2E)
        torch.testing.assert_close(base[begin : begin + length], scaled, rtol=1e-6, atol=1e-6)
        assert (base[begin + length : end] == math.inf).all()
        if wide < 256:
            assert (total[begin * wide : end * wide] == 0).all()
    assert taken == (0 if wide < 256 else 7)


def in_fragment_order(dq: Tensor, block_m: int) -> Tensor:
    """[rows, D] as the kernel between would have added it: halves of each tile, by `fragments`."""
    at = torch.zeros(1, 2, dtype=torch.long)
    for basis in kernels.fragments().offset_bases:
        at = torch.cat([at, at ^ torch.tensor(basis)])
    halves = []
    for tile in dq.split(block_m):
        for half in tile.split(64, dim=0 if block_m == 128 else 1):
            halves.append(half[at[:, 0], at[:, 1]])
    return torch.cat(halves)


@pytest.mark.parametrize("case", [c for c in CASES if c["dim"] <= 128], ids=str)
def test_what_is_finished(case: dict[str, Any]) -> None:
    g = given(**case)
    wide, _, block_m = plan.widths(case["dim"], case["dim_v"])
    total = torch.full((g.plan.rows * wide,), math.nan)
    expected = torch.full_like(like(g.query), 7.0)
    for (rows, _), begin in zip(sequences(g), padded_rows(g, block_m), strict=True):
        length, dim = expected[rows].shape
        padded = torch.randn(-(-length // block_m) * block_m, wide)
        if length:
            order = in_fragment_order(padded, block_m)
            total[begin * wide : begin * wide + order.numel()] = order
        expected[rows] = (padded[:length, :dim] * 0.3).half()
    dq = torch.full_like(like(g.query), 7.0)
    assert dq.stride() == g.plan.gradients[0][1]
    g.plan.finish(-1, total, dq, g.cu)
    torch.testing.assert_close(dq, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_turned_over_in_the_order_of_a_products_registers(packed: bool) -> None:
    """As the next product reads a thread's registers of P: see `transpose.key_of_slot`."""
    torch.manual_seed(0)
    dim, width, block = 40, 64, 128
    lengths = PACKED if packed else (200, 200)
    cu = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
    shape = (sum(lengths), HEADS, dim) if packed else (len(lengths), lengths[0], HEADS, dim)
    v = torch.randint(0, 255, shape, dtype=torch.uint8)
    longest = max(lengths)
    o = Options(1.0, False, False, None, None, 0.0, 0.0, longest, longest)
    given = v.view(E4M3) if packed else v.view(E4M3).transpose(1, 2)
    x = Inputs(given, given, given, None, None, None, cu, cu, None)
    made = fp8_plan.forward(kind_of(x, o), o, x, Descales(None, None, None))
    assert made is not None
    transposed = torch.full(made.transposed, 7.0).to(E4M3)
    made.transpose(-1, *fp8_plan._turned(x, transposed))
    found = transposed.view(torch.uint8)
    for sequence, length in enumerate(lengths):
        begin = int(cu[sequence]) if cu is not None else 0
        first = (begin // block + sequence) * block if packed else 0
        for head in range(HEADS):
            rows = v[begin : begin + length, head] if packed else v[sequence, :, head]
            tiles = -(-length // block) * block
            expected = torch.zeros(width, tiles, dtype=torch.uint8)
            for key in range(length):
                group, rest = divmod(key, 16)
                pairs, rest = divmod(rest, 8)
                slot = 16 * group + 4 * (rest // 2) + 2 * pairs + rest % 2
                expected[:dim, slot] = rows[key]
            at = (0 if packed else sequence, head, slice(None), slice(first, first + tiles))
            assert torch.equal(found[at], expected), (sequence, head)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0), (100, -1)])
@pytest.mark.parametrize("side_by_side", [1, 2, 5])
def test_packed_sequences_are_put_in_order(window: tuple[int, int], side_by_side: int) -> None:
    heads, rows, tile, blocks, levels = 5, 128, 64, 9, 16
    lengths = ((1100, 1100), (0, 40), (129, 700), (1, 0), (128, 64), (40, 900))
    cu_q, cu_k = (
        torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in range(2)
    )
    entries = len(lengths) * blocks
    order = torch.full((2 + entries * heads + levels,), -1, dtype=torch.int32)
    left, right = window
    order_kernel[(1,)](
        order, cu_q, cu_k, entries, blocks, heads, side_by_side, 1, max(left, 0), max(right, 0),
        left >= 0, right >= 0, True, rows, tile, levels, 16,
    )  # fmt: skip

    def tiles(sequence: int, block: int) -> int:
        len_q, len_k = lengths[sequence]
        row = block * rows + len_k - len_q
        end = min(len_k, max(row + rows + right, 0)) if right >= 0 else len_k
        begin = max(row - left, 0) // tile * tile if left >= 0 else 0
        return max(0, -(-(end - begin) // tile)) >> 1

    existing = [
        (sequence * heads + head) * blocks + block
        for sequence, (length, _) in enumerate(lengths)
        for head in range(heads)
        for block in range(-(-length // rows))
    ]
    taken, count, *pieces = order[: 2 + len(existing)].tolist()
    assert taken == 0 and count == len(existing) and sorted(pieces) == sorted(existing)
    groups = [piece // blocks % heads // side_by_side for piece in pieces]
    assert groups == sorted(groups)
    for group in set(groups):
        costs = [
            tiles(piece // blocks // heads, piece % blocks)
            for piece, own in zip(pieces, groups, strict=True)
            if own == group
        ]
        assert costs == sorted(costs, reverse=True)
