"""Equal layers shown once: exact, complete, in order."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_advisor.views.groups import compress, group_layers


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"h.{i}.attn" for i in range(12)], ["h.{0-11}.attn"]),
        (["h.0.attn"], ["h.0.attn"]),
        (["attn", "h.0.attn", "h.1.attn", "cross"], ["attn", "h.{0-1}.attn", "cross"]),
        ([f"h.{i}.attn" for i in (0, 1, 2, 5, 7, 8)], ["h.{0-2,5,7-8}.attn"]),
        (
            [f"stages.{i}.blocks.{j}.attn" for i, j in product(range(2), range(3))],
            ["stages.{0-1}.blocks.{0-2}.attn"],
        ),
        (
            ["s.0.b.0", "s.0.b.1", "s.1.b.0"],  # not a full product: one name would claim s.1.b.1
            ["s.0.b.{0-1}", "s.1.b.0"],
        ),
        (["", ""], ["", ""]),
        (["layer1.0", "layer2.0"], ["layer1.0", "layer2.0"]),
        (["h.01", "h.1"], ["h.01", "h.1"]),
    ],
)
def test_compress(names: list[str], expected: list[str]) -> None:
    assert compress(names) == expected


def expand(name: str) -> list[str]:
    """What a compressed name stands for."""
    parts = re.split(r"(\{[0-9,-]+\})", name)
    choices = []
    for part in parts:
        if not re.fullmatch(r"\{[0-9,-]+\}", part):
            choices.append([part])
            continue
        runs = [run.split("-") for run in part[1:-1].split(",")]
        choices.append([str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)])
    return ["".join(combination) for combination in product(*choices)]


names = st.builds(
    lambda a, b, c: f"{a}.{b}.attn.{c}", st.sampled_from("xy"), st.integers(0, 4), st.integers(0, 3)
)


@given(st.lists(names, max_size=30))
def test_a_name_stands_for_exactly_its_members(listed: list[str]) -> None:
    shown = [name for compressed in compress(listed) for name in expand(compressed)]
    assert sorted(shown) == sorted(listed)


@given(st.lists(st.tuples(names, st.integers(0, 2)), max_size=30))
def test_members_of_a_group_are_equal_and_none_is_lost(items: list[tuple[str, int]]) -> None:
    groups = group_layers(items, name=lambda item: item[0], equal=lambda item: item[1])
    assert sorted(member for group in groups for member in group.members) == sorted(items)
    for group in groups:
        assert len({value for _, value in group.members}) == 1
