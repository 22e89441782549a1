"""Layers that are equal but for their number, shown once: `blocks.{0-11}.attn`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_INDEX = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])", re.ASCII)
"""A part of a dotted name that is a number, in the one way that a number is written."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group(Generic[T]):
    """Equal members, and one name that stands for exactly theirs."""

    name: str
    members: tuple[T, ...]


def group_layers(
    items: Iterable[T], *, name: Callable[[T], str], equal: Callable[[T], Hashable]
) -> list[Group[T]]:
    """Group the items whose `equal` is the same and whose names differ in layer numbers only.

    Groups come in the order of their first members; a name is never wider than its members.
    """
    families: dict[tuple[str, int, Hashable], dict[tuple[int, ...], T]] = {}
    seen: dict[tuple[str, Hashable], int] = {}
    for item in items:
        full = name(item)
        key = equal(item)
        # The n-th item of one name goes to the n-th family: repeats are counted, not merged.
        repeat = seen[full, key] = seen.get((full, key), -1) + 1
        indices = tuple(map(int, _INDEX.findall(full)))
        families.setdefault((_INDEX.sub("{}", full), repeat, key), {})[indices] = item
    groups: list[Group[T]] = []
    for (template, _, _), members in families.items():
        groups += [
            Group(_fill(template, block), tuple(members[indices] for indices in block))
            for block in _boxes(list(members))
        ]
    return groups


def compress(names: Sequence[str]) -> list[str]:
    """Names with equal layers written once, e.g. ["h.0.attn", "h.1.attn"] as ["h.{0-1}.attn"]."""
    return [group.name for group in group_layers(names, name=str, equal=lambda _: None)]


def _boxes(indices: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Split index tuples into sets that are full products, so that one name can stand for each."""
    spans = [sorted(set(column)) for column in zip(*indices, strict=True)]
    size = 1
    for span in spans:
        size *= len(span)
    if size == len(indices):
        return [indices]
    axis = next(axis for axis, span in enumerate(spans) if len(span) > 1)
    return [
        box
        for value in spans[axis]
        for box in _boxes([entry for entry in indices if entry[axis] == value])
    ]


def _fill(template: str, indices: list[tuple[int, ...]]) -> str:
    """The template with each number, or the set of them, in its place."""
    parts = template.split("{}")
    spans = [_span(sorted(set(column))) for column in zip(*indices, strict=True)]
    if len(spans) != len(parts) - 1:  # a name that held "{}" itself
        return template
    return parts[0] + "".join(span + part for span, part in zip(spans, parts[1:], strict=True))


def _span(values: list[int]) -> str:
    """[3] as "3", [0, 1, 2, 5] as "{0-2,5}"."""
    if len(values) == 1:
        return str(values[0])
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return "{" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) + "}"
