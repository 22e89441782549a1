"""Budget tables: the textbook's formula, NVIDIA's occupancy rules, the order, what is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa_advisor
from fa_advisor.budgets import api
from fa_advisor.budgets.grid import KERNELS, Candidate, Direction, candidates
from fa_advisor.budgets.occupancy import Occupancy, occupancy
from fa_advisor.budgets.table import (
    LAUNCHED_STACK_BYTES,
    Problem,
    best_tile,
    budget_of,
    budget_table,
    refused,
    textbook_smem_bytes,
)
from fa_advisor.errors import UsageError
from fa_advisor.probes.compiler import Request
from fa_advisor.probes.gpus import KNOWN_GPUS, lookup
from fa_advisor.records import Compiled, DeviceSpec, TileConfig
from fa_advisor.views.tables import budget_frame
from fa_advisor.views.text_budget import to_text

MODERN = [gpu for gpu in KNOWN_GPUS if gpu.capability >= (8, 0)]


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def problem(head_dim: int = 128, **given: Any) -> Problem:
    options = {"value_head_dim": head_dim, "dtype": "bf16", "is_causal": False, **given}
    return Problem(head_dim=head_dim, **options)


def test_the_textbook_example() -> None:
    """D = 64, 64 x 64, fp16: five blocks of 64 x 64 x 2 bytes are 40 KiB."""
    assert textbook_smem_bytes(tile(64, 64, 4, 3), 64, 64, 2) == 40 * 1024


def test_occupancy_by_hand() -> None:
    """sm_80: 48 KiB + 1 KiB a block, 3 fit in 164 KiB; 8 warps of 128 registers, 2 blocks fit."""
    a100 = lookup("a100")
    by_smem = occupancy(a100, num_warps=8, smem_bytes=48 * 1024, registers_per_thread=64)
    assert by_smem == Occupancy(ctas_per_sm=3, occupancy=24 / 64, limiter="smem")
    by_registers = occupancy(a100, num_warps=8, smem_bytes=1024, registers_per_thread=128)
    assert by_registers == Occupancy(ctas_per_sm=2, occupancy=16 / 64, limiter="registers")
    by_warps = occupancy(a100, num_warps=8, smem_bytes=1024, registers_per_thread=24)
    assert by_warps == Occupancy(ctas_per_sm=8, occupancy=1.0, limiter="warps")
    by_ctas = occupancy(lookup("3090"), num_warps=1, smem_bytes=0, registers_per_thread=16)
    assert by_ctas == Occupancy(ctas_per_sm=16, occupancy=16 / 48, limiter="ctas")


def test_register_granularity_is_a_quarter_of_the_sm() -> None:
    """168 registers: 5,376 a warp, 3 in each quarter, 12 an SM: one block of 12 warps."""
    resident = occupancy(lookup("h100"), num_warps=12, smem_bytes=0, registers_per_thread=168)
    assert (resident.ctas_per_sm, resident.limiter) == (1, "registers")


def test_turing_has_half_the_warps_and_twice_the_granularity() -> None:
    """7.5: 1,024 threads an SM; 33,000 bytes take 33,024 of 65,536."""
    resident = occupancy(lookup("t4"), num_warps=8, smem_bytes=33_000, registers_per_thread=32)
    assert (resident.ctas_per_sm, resident.limiter) == (1, "smem")
    resident = occupancy(lookup("t4"), num_warps=8, smem_bytes=0, registers_per_thread=32)
    assert (resident.ctas_per_sm, resident.limiter) == (4, "warps")


def test_the_compilers_figures_go_before_the_models() -> None:
    a100, candidate = lookup("a100"), Candidate("forward", tile(128, 64, 4, 2))
    row = budget_of(
        candidate, problem(), a100, Compiled(registers=200, stack_bytes=8, smem_bytes=60_000)
    )
    assert (row.smem_bytes, row.registers_per_thread, row.spill_bytes) == (60_000, 200, 8)
    assert row.basis == "compiled" and row.smem_modelled_bytes != 60_000
    assert sum(row.in_smem.values()) == row.smem_modelled_bytes
    modelled = budget_of(candidate, problem(), a100)
    assert modelled.basis == "modelled" and modelled.spill_bytes is None
    failed = budget_of(candidate, problem(), a100, Compiled(error="aborted"))
    assert failed == replace(modelled, error="aborted")


def test_a_tile_over_the_limit_says_by_how_much() -> None:
    gpu = lookup("3090")
    row = budget_of(
        Candidate("forward", tile(128, 128, 8, 3)), problem(), gpu,
        Compiled(registers=255, smem_bytes=163_840),
    )  # fmt: skip
    assert not row.fits and row.time_ms is None
    assert (row.ctas_per_sm, row.occupancy, row.limiter) == (0, 0.0, "smem")
    assert row.warnings == ("needs 62,464 bytes of shared memory more than a block can have",)
    table = budget_table([row], problem(), gpu)
    assert best_tile(table.budgets) is None
    assert "No tile of these fits" in table.explanations["forward"]


def test_a_tile_beyond_tensor_memory_does_not_fit() -> None:
    """It compiles for a B200, to a kernel that can't be launched."""
    wide = Candidate("keys", tile(16, 128, 4, 1))
    for row in (
        budget_of(wide, problem(256), lookup("b200")),
        budget_of(
            wide, problem(256), lookup("b200"),
            Compiled(registers=4, smem_bytes=100_000, tensor_columns=640),
        ),
    ):  # fmt: skip
        assert not row.fits and row.ctas_per_sm == 0
        assert any("columns of tensor memory, of 512 there are" in w for w in row.warnings)


def test_a_tile_that_a_launch_refuses_does_not_come_first() -> None:
    """On an H200 the first of these is the faster; a launch takes a lighter one in its place."""
    gpu, asked = lookup("h200"), problem(256, is_causal=True)
    heavy = budget_of(
        Candidate("keys", tile(64, 64, 8, 2)), asked, gpu,
        Compiled(registers=255, stack_bytes=304, smem_bytes=197_696),
    )  # fmt: skip
    light = budget_of(
        Candidate("keys", tile(32, 32, 4, 2)), asked, gpu,
        Compiled(registers=255, stack_bytes=56, smem_bytes=100_000),
    )  # fmt: skip
    assert heavy.fits and heavy.time_ms is not None and light.time_ms is not None
    assert refused(heavy) and not refused(light)
    assert not any("not to be used" in warning for warning in light.warnings)
    table = budget_table([replace(heavy, time_ms=light.time_ms / 2), light], asked, gpu)
    assert [row.block_m for row in table.budgets] == [32, 64]
    assert best_tile(table.budgets) == tile(32, 32, 4, 2)
    assert "the only one that a launch accepts" in table.explanations["keys"]
    said = "not to be used: over 256 bytes of stack a launch takes a lighter tile instead"
    assert said in heavy.warnings and said in " ".join(to_text((table,), width=200).split())
    alone = budget_table([heavy], asked, gpu)
    assert best_tile(alone.budgets) is None
    assert "accepts none of these tiles" in alone.explanations["keys"]
    # Nothing is known of the launches of somebody's own kernel, whatever its name.
    assert not refused(replace(heavy, smem_modelled_bytes=None))


def test_what_a_launch_refuses_is_what_the_launcher_says() -> None:
    launcher = pytest.importorskip("fa_advisor.kernels.launcher", reason="no Triton")
    limits = dict.fromkeys(LAUNCHED_STACK_BYTES, launcher._MOST_STACK_BYTES_ELSEWHERE)
    assert {**limits, **launcher._MOST_STACK_BYTES} == LAUNCHED_STACK_BYTES


def test_what_only_shows_between_rows() -> None:
    gpu = lookup("a100")
    taken = {"registers": 128, "smem_bytes": 60_000}
    rows = [
        budget_of(Candidate("forward", tile(64, 64, 4, 2)), problem(), gpu, Compiled(**taken)),
        budget_of(Candidate("forward", tile(64, 64, 4, 3)), problem(), gpu, Compiled(**taken)),
        budget_of(
            Candidate("keys", tile(64, 64, 4, 2)), problem(), gpu,
            Compiled(registers=255, smem_bytes=200_000),
        ),
    ]  # fmt: skip
    table = budget_table(rows, problem(), gpu)
    warned = {(row.kernel, row.num_stages): row.warnings for row in table.budgets}
    assert "fits forward, but no backward with such a tile does" in warned["forward", 2]
    third = "the third stage buys nothing"
    assert (third in warned["forward", 3]) or (third not in warned["forward", 2])


def test_padding_is_told() -> None:
    table = budget_table([], problem(80), lookup("a100"))
    assert table.notes == ("head dim 80 is padded to 128: 37.5% of its products are with zeros",)
    assert budget_table([], problem(128), lookup("a100")).notes == ()
    wide = budget_table([], problem(192, value_head_dim=128), lookup("a100"))
    assert len(wide.notes) == 1 and "192" in wide.notes[0]


@given(
    head_dim=st.integers(1, 256),
    value_head_dim=st.integers(1, 256),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    gpu=st.sampled_from(MODERN),
    is_causal=st.booleans(),
)
def test_rows_hold_together(
    head_dim: int, value_head_dim: int, dtype: str, gpu: DeviceSpec, is_causal: bool
) -> None:
    asked = problem(head_dim, value_head_dim=value_head_dim, dtype=dtype, is_causal=is_causal)
    rows = [budget_of(each, asked, gpu) for each in candidates(("fwd", "bwd"))]
    table = budget_table(rows, asked, gpu)
    assert len(table.budgets) == len(rows)
    assert list(table.explanations) == ["forward", "keys", "queries"]
    for row in table.budgets:
        if gpu.capability[0] == 10:  # Where tensor memory may be what is too little.
            assert row.fits <= (row.smem_bytes <= gpu.smem_per_block_optin_bytes)
        else:
            assert row.fits == (row.smem_bytes <= gpu.smem_per_block_optin_bytes)
        assert row.fits == (row.ctas_per_sm > 0) == (row.time_ms is not None)
        assert row.occupancy == row.ctas_per_sm * row.num_warps / gpu.max_warps_per_sm
        assert 1 <= (row.registers_per_thread or 0) <= 255
    for kernel in table.explanations:
        fits = [row.fits for row in table.budgets if row.kernel == kernel]
        assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize("gpu", MODERN, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_gpu_has_a_tile_for_every_head_dim(gpu: DeviceSpec, direction: Direction) -> None:
    for head_dim in (1, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256):
        for kernel in KERNELS[direction]:
            rows = [
                budget_of(each, problem(head_dim), gpu)
                for each in candidates((direction,))
                if each.kernel == kernel
            ]
            assert best_tile(budget_table(rows, problem(head_dim), gpu).budgets) is not None


def test_every_combination_of_what_is_given() -> None:
    found = candidates(("fwd",), tiles=[(64, 64), (128, 256)], warps=[2, 4], stages=[1, 5])
    assert len(found) == 8
    grid = candidates(("fwd", "bwd"))
    assert 40 <= len(grid) <= 60  # A minute on two cores, at two seconds each.
    assert len(set(grid)) == len(grid)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"head_dim": 0}, "head_dim: expected 1 to 256, got 0"),
        ({"head_dim": 257}, "head_dim: expected 1 to 256, got 257"),
        ({"head_dim": 64, "value_head_dim": 0}, "value_head_dim: expected 1 to 256, got 0"),
        ({"head_dim": 64, "dtype": "int8"}, "dtype: expected bf16, fp16 or fp32, got 'int8'"),
        ({"head_dim": 64, "gpu": "a1000x"}, "unknown GPU 'a1000x'"),
        ({"head_dim": 64, "gpu": "t4"}, "the bundled kernels need 8.0 or later"),
        ({"head_dim": 64, "tiles": [(48, 64)]}, "tiles: expected powers of two .* got 48x64"),
        ({"head_dim": 64, "num_warps": [3]}, "num_warps: expected one of .* got 3"),
        ({"head_dim": 64, "num_stages": [0]}, "num_stages: expected one of .* got 0"),
        ({"head_dim": 64, "direction": "up"}, "direction: expected fwd, bwd or both"),
        ({"head_dim": "64"}, "head_dim: expected 1 to 256, got '64'"),
        ({"head_dim": True}, "head_dim: expected 1 to 256, got True"),
        ({"head_dim": 64, "dtype": None}, "dtype: expected bf16, fp16 or fp32, got None"),
        ({"head_dim": 64, "gpu": 5}, "gpu: expected a name or None, got int"),
        ({"head_dim": 64, "is_causal": "yes"}, "is_causal: expected a bool, got str"),
        ({"head_dim": 64, "tiles": "64x64"}, "tiles: expected pairs .* got '64x64'"),
        ({"head_dim": 64, "tiles": (64, 64)}, "tiles: expected pairs .* got 64 among them"),
        ({"head_dim": 64, "tiles": [(64,)]}, "tiles: expected pairs"),
        ({"head_dim": 64, "num_warps": 4}, "num_warps: expected a list of ints, got 4"),
        ({"head_dim": 64, "num_stages": []}, "num_stages: expected a list of ints, got none"),
        ({"head_dim": 64, "timeout_s": -1}, "timeout: expected seconds above 0, got -1"),
        ({"head_dim": 64, "arguments": {"x": 1}}, "arguments: expected none without a kernel"),
        ({"kernel": 5}, "kernel: expected FILE:FUNCTION, got int"),
        ({"kernel": "nope"}, "kernel: expected FILE:FUNCTION, got 'nope'"),
        ({"kernel": "nope.py:f"}, "kernel: there is no file nope.py"),
        ({"kernel": "nope.py:f", "modelled": True}, "there is no model of nope.py:f"),
    ],
)
def test_bad_arguments_are_named(
    given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "available", lambda: None)
    with pytest.raises(UsageError, match=said):
        fa_advisor.budget(**{"gpu": "a100", **given})


@pytest.mark.parametrize(
    ("value", "said"),
    [("{foo}", "{foo} stands for nothing"), ("*fp17:16", "is no type"), ("", "is no type")],
)
def test_arguments_of_a_kernel_that_say_nothing(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "available", lambda: None)
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(UsageError, match=said):
        fa_advisor.budget(gpu="l4", kernel=f"{tmp_path}/mine.py:f", arguments={"x": value})


def test_sixteen_warps_share_the_registers() -> None:
    """512 threads have 128 registers each: what wants more spills, and doesn't lie idle."""
    row = budget_of(Candidate("forward", tile(128, 128, 16, 1)), problem(), lookup("a10"))
    assert row.registers_per_thread is not None and row.registers_per_thread <= 128
    assert row.ctas_per_sm > 0 or not row.fits


def test_exact_fp32_is_not_unrolled_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def compiled(requests: list[Request], **_: Any) -> list[Compiled]:
        asked.extend(requests)
        return [Compiled(registers=99, smem_bytes=9000) for _ in requests]

    monkeypatch.setattr(api, "available", lambda: None)
    monkeypatch.setattr(api, "compile_all", compiled)
    table = fa_advisor.budget(256, gpu="a100", dtype="fp32")
    assert 0 < len(asked) < len(table.budgets)
    assert {row.basis for row in table.budgets} == {"compiled", "modelled"}


def test_dtypes_by_either_name() -> None:
    named = [fa_advisor.budget(64, gpu="a100", dtype=d, modelled=True)
             for d in ("bf16", "bfloat16", "torch.bfloat16")]  # fmt: skip
    assert named[0] == named[1] == named[2]


def _outcomes(requests: list[Request], **_: Any) -> list[Compiled]:
    return [
        Compiled(error="not compiled within 1 s") if r.block_m == 128
        else Compiled(registers=100, smem_bytes=40_000)
        for r in requests
    ]  # fmt: skip


def test_what_fails_to_compile_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "available", lambda: None)
    monkeypatch.setattr(api, "compile_all", _outcomes)
    table = fa_advisor.budget(64, gpu="h100", tiles=[(64, 64), (128, 64)], direction="fwd")
    failed = [row for row in table.budgets if row.error]
    assert {row.block_m for row in failed} == {128}
    assert {row.basis for row in failed} == {"modelled"}
    assert table.budgets[0].basis == "compiled"
    text = to_text((table,))
    assert "no figures: not compiled within 1 s" in text
    assert "✓ 64 x 64" in text and "✗ 128 x 64" in text


def test_without_triton_it_is_modelled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "available", lambda: "Triton isn't installed")
    table = fa_advisor.budget(64, gpu="a100")
    assert {row.basis for row in table.budgets} == {"modelled"}
    assert "Triton isn't installed" in table.notes


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_text_fits_its_width(width: int, ascii: bool) -> None:
    tables = tuple(
        fa_advisor.budget(head_dim, gpu=gpu, modelled=True, is_causal=True)
        for head_dim, gpu in ((80, "4090"), (256, "b200"))
    )
    text = to_text(tables, width=width, ascii=ascii)
    assert max(map(len, text.splitlines())) <= width
    assert not ascii or text.isascii()


def test_frame_has_a_row_a_tile() -> None:
    table = fa_advisor.budget(64, gpu="a100", modelled=True)
    frame = budget_frame([table, table])
    assert len(frame) == 2 * len(table.budgets)
    assert set(frame["gpu"]) == {"NVIDIA A100-SXM4-80GB"}
    assert frame["in_smem"].str.contains(": ").all()


def test_the_kernel_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def compiled(requests: list[Request], **_: Any) -> list[Compiled]:
        seen.extend(requests)
        return [Compiled(registers=50, smem_bytes=1000 * r.num_stages) for r in requests]

    monkeypatch.setattr(api, "available", lambda: None)
    monkeypatch.setattr(api, "compile_all", compiled)
    file = tmp_path / "mine.py"
    file.write_text("")
    table = fa_advisor.budget(
        96, gpu="l4", kernel=f"{file}:attention", tiles=[(64, 32)], num_warps=[4],
        arguments={"q": "*fp16:16", "n": "i32", "M": "{m}", "N": "{n}", "D": "{d}", "ON": "True"},
    )  # fmt: skip
    assert seen[0].signature == {"q": "*fp16:16", "n": "i32"}
    assert seen[0].constants == {"M": 64, "N": 32, "D": 96, "ON": True}
    assert [row.num_stages for row in table.budgets] == [2, 3]
    assert all(row.kernel == "attention" and row.time_ms is None for row in table.budgets)


class TestHopper:
    """The kernels whose tiles aren't chosen: a row each on compute capability 9.0."""

    @pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 160, 192, 256])
    @pytest.mark.parametrize("value_head_dim", [None, 64, 128])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_rows(self, head_dim: int, value_head_dim: int | None, is_causal: bool) -> None:
        table = fa_advisor.budget(
            head_dim, value_head_dim=value_head_dim, is_causal=is_causal, gpu="h100", modelled=True
        )
        rows = [row for row in table.budgets if row.kernel.startswith("hopper ")]
        wide = max(head_dim, value_head_dim or 0) > 128
        backward = ["hopper keys", "hopper queries"] if wide else ["hopper backward"]
        assert [row.kernel for row in rows] == ["hopper forward", *backward]
        for row in rows:
            assert row.fits and row.ctas_per_sm >= 1
            assert row.smem_bytes == sum(row.in_smem.values())
        assert any("FA_ADVISOR_KERNELS" in note for note in table.notes)
        assert "hopper, forward" in to_text((table,))

    @pytest.mark.parametrize(
        "given",
        [{"gpu": "a100"}, {"gpu": "b200"}, {"dtype": "fp32"}, {"tiles": [(64, 64)]}],
    )
    def test_none_where_they_do_not_run(self, given: dict[str, Any]) -> None:
        table = fa_advisor.budget(64, **{"gpu": "h100", "modelled": True, **given})
        assert not [row for row in table.budgets if row.kernel.startswith("hopper ")]
        assert not any("FA_ADVISOR_KERNELS" in note for note in table.notes)

    def test_none_for_dims_that_they_leave(self) -> None:
        for head_dim in (16, 32, 44, 72 + 1):
            table = fa_advisor.budget(head_dim, gpu="h100", modelled=True)
            assert not [row for row in table.budgets if row.kernel.startswith("hopper ")]

    def test_one_direction(self) -> None:
        table = fa_advisor.budget(64, gpu="h100", modelled=True, direction="bwd")
        kernels = {row.kernel for row in table.budgets}
        assert kernels == {"keys", "queries", "hopper backward"}


def test_what_was_not_compiled_comes_after_what_was() -> None:
    """Exact fp32 tiles that the compiler would take minutes over, and that would spill."""
    device, fp32 = lookup("h100"), problem(128, dtype="fp32")
    grid = candidates(("fwd", "bwd"))
    slow = Compiled(registers=128, stack_bytes=0, smem_bytes=40_000)
    rows = [
        budget_of(each, fp32, device, slow if i % 3 == 0 else None) for i, each in enumerate(grid)
    ]
    table = budget_table(rows, fp32, device)
    for kernel in ("forward", "keys", "queries"):
        bases = [row.basis for row in table.budgets if row.kernel == kernel and row.fits]
        assert bases == sorted(bases)  # "compiled" before "modelled".
        assert bases[0] == "compiled" and bases[-1] == "modelled"


def test_a_function_of_ones_own_keeps_its_name_as_heading() -> None:
    rows = [
        replace(
            budget_of(candidates(("fwd",))[0], problem(), lookup("h100")), smem_modelled_bytes=None
        )
    ]
    text = to_text((budget_table(rows, problem(), lookup("h100")),))
    assert "out and lse" not in text
