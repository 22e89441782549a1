"""What Hopper's kernels compute, without a Hopper GPU: their source run by threads."""

from __future__ import annotations

import math
import random
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
from fa_advisor.kernels.fp8 import E4M3, Descales, widened
from fa_advisor.kernels.hopper import dealing, fp8_plan
from fa_advisor.kernels.kinds import Inputs, Options
from fa_advisor.kernels.op import options_of

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
PROCESSORS = 3
# A race shows when a thread happens to be slow enough.
ATTEMPTS = 8
# By the name of a launch: the file and the kernel.
KERNELS = {
    "hopper_forward": ("forward", "forward_kernel"),
    "hopper_fp8_forward": ("fp8", "fp8_forward_kernel"),
}


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is planned as for a GPU with few processors, and run by threads."""
    threaded.plan_as_on_hopper(monkeypatch, run, fp8_plan)
    monkeypatch.setattr(dealing, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def run(launch: Any, _: int, *pointers: Any) -> None:
    """In `Launch.__call__`'s place."""
    grid, static = launch._geometry(launch._tile)
    if launch._name in KERNELS:
        file, name = KERNELS[launch._name]
        kernel = getattr(threaded.module(file), name)
        threaded.launch(kernel, grid, pointers, static, launch._descriptors(launch._tile))
    elif launch._name == "hopper_transpose":
        turn_over(*pointers, *static)
    elif launch._name == "hopper_order":
        in_order(*pointers, *static)
    else:
        assert launch._name == "spans"
        spans_of(*pointers)


def in_order(order: torch.Tensor, cu: torch.Tensor, _: torch.Tensor, *static: Any) -> None:
    """An order of the pieces that there are; interpreted_hopper.py has `order_kernel`'s."""
    _entries, blocks, heads = static[:3]
    rows = static[10]
    pieces = [
        (sequence * heads + head) * blocks + block
        for sequence, length in enumerate(cu.diff().tolist())
        for head in range(heads)
        for block in range(-(-length // rows))
    ]
    random.shuffle(pieces)
    order[: len(pieces) + 2] = torch.tensor([0, len(pieces), *pieces])


def turn_over(
    value: torch.Tensor, transposed: torch.Tensor, cu: torch.Tensor | None, *static: Any
) -> None:
    """What `transpose_kernel` makes of values: interpreted_hopper.py has it from the source."""
    block = static[-1]
    packed = cu is not None
    offsets = cu.tolist() if cu is not None else [0, value.shape[2]]
    for sequence in range(len(offsets) - 1 if packed else value.shape[0]):
        first, end = offsets[sequence : sequence + 2] if packed else offsets
        to = (first // block + sequence) * block if packed else 0
        rows = value[first:end].transpose(0, 1) if packed else value[sequence]
        keys = torch.arange(-(-(end - first) // block) * block)
        slots = keys // 16 * 16 + keys % 8 // 2 * 4 + keys % 16 // 8 * 2 + keys % 2
        turned = torch.zeros((*transposed.shape[1:3], len(keys)), dtype=torch.uint8)
        turned[:, : rows.shape[2], slots[: end - first]] = rows.transpose(1, 2)
        transposed[0 if packed else sequence, :, :, to : to + len(keys)] = turned


def spans_of(mask: torch.Tensor, spans: torch.Tensor) -> None:
    """What `spans_kernel` makes of a mask with one row for all queries."""
    assert mask.shape[2] == 1 == spans.shape[2]
    none = (2**31 - 1, 0)
    for b in range(spans.shape[0]):
        for h in range(spans.shape[1]):
            seen = mask[b, h, 0].nonzero().flatten().tolist()
            stretch = (seen[0], seen[-1] + 1) if seen else none
            whole = stretch if stretch[1] - stretch[0] == len(seen) > 0 else none
            spans[b, h, 0] = torch.tensor([*stretch, *whole])


def planned(case: Case, given: dict[str, torch.Tensor]) -> tuple[Inputs, Options]:
    """A case's tensors and options as its kernels are given them."""
    longest = {}
    if case.lengths:
        longest = {
            f"max_seqlen_{side}": max(pair[i] for pair in case.lengths)
            for i, side in enumerate("qk")
        }
    names = ("query", "key", "value")
    mask, sinks = given.get("attn_mask"), given.get("sinks")
    cu = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    o = case.options
    q, k, v, bias, call = check(
        *(given[name] for name in names), mask, 0.0, o["is_causal"], o["scale"], True, o["window"],
        o["softcap"], sinks, None, *cu, longest.get("max_seqlen_q"), longest.get("max_seqlen_k"),
        o["causal_alignment"],
    )  # fmt: skip
    return Inputs(q, k, v, bias, sinks, None, *cu, None), options_of(call)


def assert_near(
    case: Case, given: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor, most: float
) -> None:
    """Hold out and lse against the reference in float64."""
    wide = {
        name: t.double() if t.is_floating_point() else t for name, t in given.items()
    }  # fmt: skip
    true_out, true_lse = reference.attention(**wide, **case.options)
    empty = true_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    error = (out.double() - true_out).norm() / true_out.norm().clamp(min=1e-9)
    assert float(error) < most, float(error)
    torch.testing.assert_close(
        lse.double().masked_fill(empty, 0.0), true_lse.masked_fill(empty, 0.0), atol=2e-3, rtol=2e-3
    )


def assert_forward_agrees(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    given = {name: x.detach() for name, x in inputs(case, "cpu", dtype).items()}
    x, options = planned(case, given)
    made = launches.forward(x, options)
    assert made.launch is None or isinstance(made.launch, (dealing.Scheduled, dealing.Ordered)), (
        "not Hopper's"
    )
    out, lse, _ = made(x)
    assert_near(case, given, out, lse, 6e-3)


def assert_fp8_agrees(case: Case, zero: int | None = None) -> None:
    """The same in eight bits, with descales; zero: those of query (0) or key (1) are 0."""
    given = {name: x.detach() for name, x in inputs(case, "cpu", torch.float32).items()}
    names = ("query", "key", "value")
    given |= {name: given[name].to(E4M3) for name in names}
    x, options = planned(case, given)
    if 0 in (x.query.numel(), x.key.numel(), options.max_seqlen_q, options.max_seqlen_k):
        return
    batch = len(case.lengths) or case.batch
    descales = Descales(*(torch.rand(batch, t.shape[1]) + 0.5 for t in x[:3]))
    if zero is not None:
        descales[zero].zero_()
    found = launches.forward_fp8(x, options, descales)
    assert found is not None, "not Hopper's"
    cu = (x.cu_seqlens_q, x.cu_seqlens_k, x.cu_seqlens_k)
    for name, descale, offsets in zip(names, descales, cu, strict=True):
        given[name] = widened(given[name], descale, offsets, torch.float32)
    # Weights are rounded to three bits.
    assert_near(case, given, *found, 2**-4)


CASES = {
    "full": Case(batch=1, len_q=300, len_k=300, head_dim=128),
    "one processor's many pieces": Case(batch=2, heads=3, len_q=256, len_k=128, head_dim=128),
    "three consumers, rows for one": Case(batch=1, len_q=200, len_k=260, head_dim=64),
    "causal": Case(batch=1, heads=3, len_q=400, len_k=400, head_dim=128, is_causal=True),
    "causal, head dim 64": Case(batch=1, len_q=420, len_k=420, head_dim=64, is_causal=True),
    "bottom-right, more keys": Case(
        batch=1, len_q=130, len_k=300, head_dim=64, is_causal=True, bottom_right=True
    ),
    "bottom-right, rows that see nothing": Case(
        batch=1, len_q=300, len_k=130, head_dim=64, is_causal=True, bottom_right=True
    ),
    "window": Case(batch=1, len_q=420, len_k=390, head_dim=64, window=(70, 30)),
    "window to the left": Case(
        batch=1, len_q=420, len_k=420, head_dim=128, is_causal=True, window=(40, 0)
    ),
    "window past the end": Case(batch=1, len_q=500, len_k=100, head_dim=64, window=(90, 20)),
    "grouped": Case(batch=1, heads=6, kv_heads=2, len_q=140, len_k=200, head_dim=64),
    "packed": Case(
        heads=2, lengths=((140, 140), (0, 70), (30, 0), (1, 1), (200, 90)), head_dim=64
    ),
    "packed, causal": Case(
        heads=2, kv_heads=1, lengths=((190, 190), (0, 0), (65, 65), (64, 128)), head_dim=128,
        is_causal=True, bottom_right=True,
    ),
    "softcap, sinks": Case(
        batch=1, len_q=150, len_k=200, head_dim=64, softcap=15.0, sinks=True, magnitude=4.0
    ),
    "sinks, rows that see nothing": Case(
        batch=1, len_q=300, len_k=130, head_dim=64, is_causal=True, bottom_right=True, sinks=True
    ),
    "key padding": Case(batch=2, len_q=150, len_k=300, head_dim=64, mask="B11K", mask_kind="band"),
    "key padding with holes": Case(batch=2, len_q=150, len_k=300, head_dim=128, mask="B11K"),
    "head dim 96": Case(batch=1, len_q=140, len_k=140, head_dim=96, is_causal=True),
    "192 and 128": Case(batch=1, len_q=140, len_k=200, head_dim=192, value_dim=128),
    "head dim 256": Case(batch=2, len_q=190, len_k=150, head_dim=256, is_causal=True),
    "head dim 256, pieces that see nothing": Case(
        batch=8, heads=1, len_q=256, len_k=1, head_dim=256, mask="B11K"
    ),
    "head dim 256, packed": Case(
        heads=1, lengths=((300, 130), (5, 0), (0, 9), (130, 300)), head_dim=256, is_causal=True,
        bottom_right=True,
    ),
    "a limit to the left alone": Case(batch=1, len_q=300, len_k=420, head_dim=64, window=(40, -1)),
    "a limit to the right alone": Case(
        batch=1, len_q=300, len_k=420, head_dim=128, window=(-1, 40), bottom_right=True
    ),
    "a left window that rows leave behind": Case(
        batch=1, len_q=400, len_k=270, head_dim=64, window=(30, -1)
    ),
    "logits that grow": Case(batch=1, len_q=128, len_k=512, head_dim=64, growth=16.0),
    "logits that grow, head dim 128, a window": Case(
        batch=1, len_q=300, len_k=700, head_dim=128, window=(400, 250), growth=16.0
    ),
    "logits that grow slowly": Case(batch=1, len_q=128, len_k=640, head_dim=64, growth=3.0),
    "logits that grow, head dim 256, sinks": Case(
        batch=1, len_q=128, len_k=512, head_dim=256, sinks=True, growth=16.0
    ),
    "another layout": Case(batch=2, len_q=130, len_k=140, head_dim=72, layout="BLHD"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_forward(name: str) -> None:
    torch.manual_seed(len(name))
    assert_forward_agrees(CASES[name])


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_heads_with_pieces_that_see_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long keys: then such a piece stands between others."""
    torch.manual_seed(seed)
    monkeypatch.setattr(dealing, "_BYTES_SIDE_BY_SIDE", 1)
    for head_dim in (128, 256):
        shape = {"batch": 4, "heads": 2, "len_q": 300, "len_k": 130, "head_dim": head_dim}
        assert_forward_agrees(Case(**shape, is_causal=True, bottom_right=True))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hopper_cases(65, 330), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_the_forward_with_every_feature(case: Case, dtype: torch.dtype) -> None:
    assert_forward_agrees(case, dtype)


def in_eight_bits(case: Case) -> bool:
    return case.mask is None and max(case.head_dim, case.value_dim or 0) <= 128


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if in_eight_bits(case)])
def test_the_forward_on_eight_bits(name: str) -> None:
    torch.manual_seed(len(name))
    assert_fp8_agrees(CASES[name])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", ["full", "causal", "window", "softcap, sinks"])
def test_a_head_of_zeros_in_eight_bits(name: str, zero: int) -> None:
    assert_fp8_agrees(CASES[name], zero)


def eight_bits(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A call in eight bits without descales: what the reference is to be given, out and lse."""
    given = {"query": q.to(E4M3), "key": k.to(E4M3), "value": v.to(E4M3), **more}
    x, options = planned(case, given)
    found = launches.forward_fp8(x, options, Descales(None, None, None))
    assert found is not None, "not Hopper's"
    return {name: t.float() for name, t in given.items()}, found


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("sink", [None, -20.0, 8.0, 11.0, 20.0, 80.0])
def test_a_sink_costs_no_weight_its_bits(alike: bool, sink: float | None) -> None:
    """One that outweighs each key, or all. All keys alike: none is rounded."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64, 64) * (not alike), torch.randn(1, 1, 1016, 64)
    v = torch.randn(1, 1, 1016, 64) + 1.0
    case = Case(batch=1, len_q=64, len_k=1016, head_dim=64)
    sinks = {} if sink is None else {"sinks": torch.tensor([sink])}
    given, found = eight_bits(case, q, k, v, **sinks)
    assert_near(case, given, *found, 4e-3)


@pytest.mark.parametrize("window", [None, (5, -1)])
def test_a_sink_beside_which_all_is_nothing_in_eight_bits(window: tuple[int, int] | None) -> None:
    """Also of rows that see no key."""
    case = Case(batch=1, len_q=200, len_k=140, head_dim=64, window=window)
    q, k, v = (torch.randn(1, 1, n, 64) for n in (200, 140, 140))
    for sink in (300.0, 1e30):
        _given, (out, lse) = eight_bits(case, q, k, v, sinks=torch.tensor([sink]))
        assert not out.any()
        torch.testing.assert_close(lse, torch.full_like(lse, sink))
    _given, (out, lse) = eight_bits(case, q, k, v, sinks=torch.tensor([float("-inf")]))
    _given, without = eight_bits(case, q, k, v)
    assert torch.equal(out, without[0])
    assert torch.equal(lse, without[1])


@pytest.mark.parametrize("bits", [5, 11, 12])
@pytest.mark.parametrize("at", [1990, 1000, 7])
def test_a_key_that_outweighs_the_others_in_eight_bits(at: int, bits: int) -> None:
    """By a power of two, of two thousand: they still count, wherever it is."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64) for n in (128, 2048, 2048))
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[..., at, 0] = bits * math.log(2.0)
    case = Case(batch=1, len_q=128, len_k=2048, head_dim=64)
    given, found = eight_bits(case, q, k, v + 1.0)
    assert_near(case, given, *found, 4e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_no_descale_that_is_no_number_is_lost(which: int, wrong: float) -> None:
    given = [torch.randn(1, 1, n, 64).to(E4M3) for n in (64, 300, 300)]
    x, options = planned(
        Case(batch=1, len_q=64, len_k=300, head_dim=64),
        dict(zip(("query", "key", "value"), given, strict=True)),
    )
    descales = Descales(*(torch.ones(1, 1) for _ in "qkv"))
    descales[which].fill_(wrong)
    found = launches.forward_fp8(x, options, descales)
    assert found is not None
    assert not torch.isfinite(found[0]).any()
    assert torch.isnan(found[1]).all() == (which < 2)


def test_a_key_that_is_no_number_is_seen_in_eight_bits() -> None:
    q, k, v = (torch.randn(1, 1, n, 64) for n in (128, 500, 500))
    k[..., 100, :] = float("nan")
    case = Case(batch=1, len_q=128, len_k=500, head_dim=64, is_causal=True)
    _given, (out, lse) = eight_bits(case, q, k, v)
    assert torch.isfinite(out[:, :, :100]).all()
    assert torch.isfinite(lse[:, :, :100]).all()
    assert torch.isnan(out[:, :, 100:]).all()
    assert torch.isnan(lse[:, :, 100:]).all()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hopper_cases(1, 330).filter(in_eight_bits))
def test_the_forward_on_eight_bits_with_every_feature(case: Case) -> None:
    assert_fp8_agrees(case)


@pytest.mark.parametrize(
    ("file", "healthy", "ill"),
    [
        # V is given back before its product is over.
        (
            "forward",
            "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"
            "        mbarrier.arrive(v_empty.index(slot), count=1)\n"
            "        p = ",
            "        mbarrier.arrive(v_empty.index(slot), count=1)\n"
            "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"
            "        p = ",
        ),
        # Two phases of a barrier are taken for one.
        ("consumers", "            phase ^= 1\n    return slot, phase", "    return slot, phase"),
        ("forward", "    fence_async_shared()\n    a, b, first_row", "    a, b, first_row"),
        # A tile that only others see isn't told of, or no turn is taken for it.
        (
            "consumers",
            "        mbarrier.arrive(v_empty.index(slot), count=1)\n        slot",
            "        slot",
        ),
        ("consumers", "                end_turn(CID, CONSUMERS)\n", "                pass\n"),
        ("consumers", "            if some | (tile > low):\n", "            if tile >= low:\n"),
        ("forward", "        elif beyond != 0:\n", "        elif beyond == 7:\n"),
    ],
    ids=[
        "given back early", "a phase left out", "no fence", "never given back", "a turn not ended",
        "a turn too many", "a base that stays",
    ],
)  # fmt: skip
def test_a_fault_shows(file: str, healthy: str, ill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads find what would be a race or a hang on a GPU."""
    monkeypatch.setattr(threaded, "PATIENCE_S", 1.0)
    monkeypatch.setattr(threaded, "OFTEN", 0.5)
    threaded.spoil(monkeypatch, file, healthy, ill)
    with pytest.raises(AssertionError):
        for _ in range(ATTEMPTS):
            for case in (
                CASES["window"],
                CASES["logits that grow"],
                Case(batch=1, len_q=128, len_k=1500, head_dim=128),
            ):
                assert_forward_agrees(case)


def test_k_given_back_before_its_tile_is_done_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "PATIENCE_S", 1.0)
    monkeypatch.setattr(threaded, "OFTEN", 0.5)
    given_back = "        mbarrier.arrive(k_empty.index(following), count=1)\n"
    packed = "        p = _packed(weights, dtype, BM, BN)\n        if MASKED:\n"
    threaded.spoil(
        monkeypatch, "forward", given_back + "        z +=", "        z +=",
        (packed, given_back + packed),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        for _ in range(ATTEMPTS):
            assert_forward_agrees(CASES["logits that grow, head dim 256, sinks"])


def test_float16_keeps_weights_that_it_can_hold() -> None:
    """A weight 2^16.5 times those that its row's base is of: as float16 it would be inf."""
    q = torch.zeros(1, 1, 128, 64, dtype=torch.float16)
    k, v = torch.zeros(1, 1, 640, 64, dtype=torch.float16), torch.randn(1, 1, 640, 64).half()
    q[..., 0], k[..., 100, 0] = 8.0, 16.5 * math.log(2.0)
    case = Case(batch=1, len_q=128, len_k=640, head_dim=64)
    given = {"query": q, "key": k, "value": v}
    x, options = planned(case, given)
    out, lse, _ = launches.forward(x, options)(x)
    assert_near(case, given, out, lse, 2e-3)


def test_a_rows_bits_are_its_own() -> None:
    """Also where its neighbours' weights outgrow their base: later tokens don't change earlier."""
    case = Case(batch=1, len_q=640, len_k=640, head_dim=64, is_causal=True)
    torch.manual_seed(0)
    given = {name: x.detach() for name, x in inputs(case, "cpu", torch.bfloat16).items()}
    later = {**given, "query": given["query"].clone()}
    later["query"][:, :, 600:] *= 30
    rows = []
    for tensors in (given, later):
        x, options = planned(case, tensors)
        rows.append(launches.forward(x, options)(x)[0][:, :, :600])
    assert torch.equal(*rows)


@pytest.mark.parametrize("times", [4, 80])
def test_a_rows_bits_are_its_own_in_eight_bits(times: int) -> None:
    """However large its neighbours' logits are: later tokens don't change earlier."""
    case = Case(batch=1, len_q=640, len_k=640, head_dim=64, is_causal=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 640, 64) for _ in "qkv")
    later = q.clone()
    later[:, :, 600:] *= times
    rows = []
    for query in (q, later):
        _given, (out, lse) = eight_bits(case, query, k, v)
        rows.append((out[:, :, :600], lse[:, :, :600]))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize(
    ("file", "healthy", "ill"),
    [
        ("pieces", "handed.index(turn)", "handed.index(0)"),
        (
            "forward",
            "mbarrier.wait(q_empty.index(c), q_phase)\n            mbarrier.arrive(q_ready",
            "mbarrier.arrive(q_ready",
        ),
        ("forward", "    EACH: gl.constexpr = SHARED_O or ORDERED\n", "    EACH = SHARED_O\n"),
    ],
    ids=["one place for two pieces", "the end told early", "a piece without a word"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_telling_of_pieces_shows(
    file: str, healthy: str, ill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded, "PATIENCE_S", 1.0)
    monkeypatch.setattr(threaded, "OFTEN", 0.5)
    threaded.spoil(monkeypatch, file, healthy, ill)
    with pytest.raises(AssertionError):
        for _ in range(ATTEMPTS):
            assert_forward_agrees(CASES["packed"])
