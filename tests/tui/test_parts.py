"""The parts that need no app: bars, curve, tree, shortened names."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fa_advisor.records import CATEGORIES, ModuleMemory, TimelinePoint
from fa_advisor.tui import moduletree
from fa_advisor.tui.bars import cells
from fa_advisor.tui.curve import samples, stacked
from fa_advisor.tui.look import COLORS, LETTERS
from fa_advisor.tui.wording import shorten


@given(st.lists(st.integers(0, 2**40), max_size=16), st.integers(-3, 200))
def test_a_bar_of_the_whole_fills_its_width(counts: list[int], width: int) -> None:
    whole = sum(counts)
    drawn = cells(counts, whole, width)
    assert all(count >= 0 for count in drawn)
    assert sum(drawn) == (max(0, width) if whole else 0)


def test_every_category_has_its_own_letter_and_colour() -> None:
    assert set(CATEGORIES) < set(LETTERS) == set(COLORS)
    assert len(set(LETTERS.values())) == len(LETTERS)


def point(t: int, count: int) -> TimelinePoint:
    return TimelinePoint(t=t, phase="forward", allocated_bytes=count, attention_bytes=count // 2)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=300), st.integers(1, 120))
def test_the_curve_keeps_the_peak(counts: list[int], width: int) -> None:
    drawn = samples([point(t * 3, count) for t, count in enumerate(counts)], width)
    assert len(drawn) == width
    assert max(sample.allocated for sample in drawn) == max(counts)


def test_a_column_without_a_point_repeats_the_one_before() -> None:
    drawn = samples([point(0, 5), point(9, 7)], 10)
    assert [sample.allocated for sample in drawn] == [5] * 9 + [7]


def test_a_moments_height_is_not_carried_on() -> None:
    drawn = samples([point(t, n) for t, n in ((0, 1), (1, 1000), (2, 1), (1000, 1))], 80)
    assert [sample.allocated for sample in drawn] == [1000] + [1] * 79


def test_attention_is_at_the_bottom_and_what_is_unknown_on_top() -> None:
    known = {"parameter": 5, "attention_prob": 3, "activation": 2, "of another version": 4}
    drawn = stacked(replace(point(0, 14), categories=known))
    assert drawn.names == ("attention_prob", "parameter", "activation", "unattributed")
    assert drawn.tops == (3, 8, 10, 14)
    unknown = stacked(replace(point(0, 10), categories={"of another version": 10}))
    assert dict(zip(unknown.names, unknown.tops, strict=True)) == {
        "attention_score": 5, "unattributed": 10,
    }  # fmt: skip


NAMES = st.text("ab.", max_size=8)


@given(st.lists(st.tuples(NAMES, st.integers(0, 1000)), max_size=30))
def test_the_tree_loses_no_byte(modules: list[tuple[str, int]]) -> None:
    root = moduletree.build(
        ModuleMemory(fqn=name, type="", categories={"parameter": count}) for name, count in modules
    )
    assert root.bytes == sum(count for _, count in modules)
    for node, _ in moduletree.rows(root, moduletree.parents(root), None):
        assert node.bytes == node.own_bytes + sum(child.bytes for child in node.children)


def test_a_tree_as_deep_as_names_go_needs_no_recursion() -> None:
    name = ".".join("a" * 5000)
    root = moduletree.build([ModuleMemory(fqn=name, type="", categories={"parameter": 1})])
    assert len(moduletree.rows(root, moduletree.parents(root), None)) == 5001


@given(st.text(max_size=40), st.integers(0, 30))
def test_shortened_names_fit(name: str, width: int) -> None:
    assert cell_len(shorten(name, width, "…")) <= width


def test_shortened_names_keep_their_end() -> None:
    assert shorten("encoder.layers.11.self_attn", 12, "…") == "enc…elf_attn"
