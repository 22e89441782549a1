"""The reader of plain pickles: what it admits, and that nothing else gets through."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_advisor.attribution.plain_pickle import NotPlain, loads

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    st.text(max_size=300),
)
KEYS = st.one_of(st.text(max_size=20), st.integers(-(2**70), 2**70))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
    ),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_objects_come_back(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


def test_shared_parts_stay_shared() -> None:
    part: list[Any] = [1, 2]
    one, other = loads(pickle.dumps([part, part]))
    assert one is other


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("echo this must not run > /tmp/fa-advisor-was-here",)


@pytest.mark.parametrize(
    "value",
    [Harmful(), {1, 2}, frozenset("a"), b"bytes", bytearray(b"x"), 1j, os.path.join, int],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused(value: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(NotPlain, match="more than plain containers"):
            loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "doesn't begin"),
        (b"{'segments': []}", "doesn't begin"),
        (b"\x80\x04", "cut off"),
        (b"\x80\x7f]\x94.", "protocol 127"),
        (b"\x80\x04X\xff\xff\xff\x7fabc.", "cut off"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"abc.", "cut off"),
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "integer of 2040 bits"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "LONG4"),
        (b"\x80\x04r\xff\xff\xff\xff.", "cut off"),
        (b"\x80\x04}]K\x01s.", "list for a key"),
        (b"\x80\x04}(K\x01u.", "cut off"),
        (b"\x80\x04K\x01K\x02a.", "cut off"),
        (b"\x80\x04cos\nsystem\n.", "GLOBAL"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x04Pid\n.", "PERSID"),
        (b"\x80\x04h\x07.", "cut off"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "damaged"),
        (b"\x80\x04K\x01K\x02.", "damaged"),
    ],
)
def test_what_is_broken_or_foreign_says_so(data: bytes, says: str) -> None:
    with pytest.raises(NotPlain, match=says):
        loads(data)


def test_nesting_without_an_end_is_no_recursion() -> None:
    depth = 300_000
    lists = loads(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    tuples = loads(b"\x80\x04" + b"]" + b"\x85" * depth + b".")
    for value in (lists, tuples):
        for _ in range(depth - 1):
            value = value[0]


def test_damage_anywhere_is_a_message() -> None:
    whole = pickle.dumps({"segments": [{"address": 1 << 40, "blocks": [{"size": 512}] * 3}] * 9})
    chance = random.Random(0)
    for _ in range(3000):
        data = bytearray(whole[: chance.randrange(len(whole)) if chance.random() < 0.5 else None])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(NotPlain):
            loads(bytes(data))
