"""Which tile a launch settles on where the table's doesn't fit or spills."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

if find_spec("triton") is not None:
    from triton.runtime.errors import OutOfResources

    from fa_advisor.kernels.launcher import Launch
    from fa_advisor.kernels.tiles import Tile

    LIMITED = Tile(64, 128, 4, 2, 168)
    FREE = LIMITED._replace(max_registers=None)
    SMALLER = FREE._replace(block_m=32)


def settled(name: str, first: Any, outcomes: dict[Any, int | None]) -> tuple[Any, list[Any]]:
    """The tile taken, and those tried. outcomes: bytes of stack, or None: it doesn't fit."""
    tried: list[Any] = []

    class Stubbed(Launch):
        def _prepare(self, t: Any, pointers: tuple[Any, ...]) -> Any:
            tried.append(t)
            if (stack := outcomes[t]) is None:
                raise OutOfResources(1, 0, "shared memory")
            return SimpleNamespace(stack_bytes=stack, tile=t)

    ready: Any = Stubbed(name, None, lambda _: (1, ()), first)._fitting(())
    return ready.tile, tried


def test_the_tables_tile_is_taken_where_it_fits() -> None:
    assert settled("forward", LIMITED, {LIMITED: 0}) == (LIMITED, [LIMITED])
    assert settled("forward", FREE, {FREE: 128}) == (FREE, [FREE])
    assert settled("keys", FREE, {FREE: 256}) == (FREE, [FREE])


def test_a_limit_on_registers_must_not_be_what_spills() -> None:
    assert settled("forward", LIMITED, {LIMITED: 8, FREE: 0})[0] == FREE
    assert settled("forward", LIMITED, {LIMITED: 112, FREE: 96})[0] == FREE


def test_what_spills_gives_way_to_a_lighter_one() -> None:
    found = settled("forward", LIMITED, {LIMITED: 920, FREE: 176, SMALLER: 96})
    assert found == (SMALLER, [LIMITED, FREE, SMALLER])


def test_the_least_spilling_is_taken_where_all_do() -> None:
    outcomes = {FREE: 900, SMALLER: 300, SMALLER._replace(block_m=16): 700}
    outcomes[SMALLER._replace(block_m=16, block_n=64)] = 400
    assert settled("forward", FREE, outcomes)[0] == SMALLER


def test_what_does_not_fit_gives_way_to_a_smaller_one() -> None:
    fewer = FREE._replace(num_stages=1)
    assert settled("forward", FREE, {FREE: None, fewer: 0})[0] == fewer
    with pytest.raises(OutOfResources):
        settled("forward", Tile(16, 16, 4, 1), {Tile(16, 16, 4, 1): None})
