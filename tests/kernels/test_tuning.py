"""Tuning without a GPU: the timer is a table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fa_advisor.kernels.tiles import GROUPS, HEAD_DIMS, KERNELS, Tile, tile

tuning = pytest.importorskip("fa_advisor.kernels.tuning", reason="no Triton")

SHIPPED = Tile(128, 64, 4, 2)
FASTER = Tile(128, 64, 8, 2)
KEY = tuning.TuningKey(
    gpu="NVIDIA H200",
    capability=(9, 0),
    triton="3.7.1",
    source="0" * 64,
    dim=128,
    dim_v=128,
    element_bytes=2,
    precision="ieee",
    causal=True,
    window=False,
    bias=0,
    softcap=False,
    dropout=False,
    packed=False,
    descriptors=True,
)


class Bench:
    """A kernel and the clock that times it; `times` in ms, None where a tile doesn't fit."""

    def __init__(self, times: dict[Tile, float | None], otherwise: float | None = 2.0) -> None:
        self.times, self.otherwise = times, otherwise
        self.launched: list[Tile] = []

    def run(self, t: Tile) -> None:
        self.launched.append(t)
        if self.times.get(t, self.otherwise) is None:
            raise RuntimeError("out of resources")

    def timer(self, launch: Callable[[], None]) -> float:
        launch()
        time = self.times.get(self.launched[-1], self.otherwise)
        assert time is not None
        return time

    def tuned(self, key: tuning.TuningKey = KEY) -> Tile:
        return tuning.tuned("forward", key, SHIPPED, self.run, self.timer)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA_ADVISOR_AUTOTUNE", "1")
    monkeypatch.setenv("FA_ADVISOR_CACHE_DIR", str(tmp_path / "cache"))
    # A torch without CUDA can't be asked.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget()
    return tmp_path / "cache" / "tiles"


def forget() -> None:
    """As a new process would start."""
    tuning._tuned.clear()
    tuning._say_once.cache_clear()


def test_off_nothing_is_measured_read_or_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    assert bench.tuned() == FASTER
    monkeypatch.setenv("FA_ADVISOR_AUTOTUNE", "0")
    monkeypatch.setattr(tuning, "_read", lambda *_: pytest.fail("read"))
    bench = Bench({})
    assert bench.tuned() == SHIPPED
    assert not bench.launched


def test_the_fastest_is_kept_in_memory_and_on_disk(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    with caplog.at_level(logging.INFO, "fa_advisor"):
        assert bench.tuned() == FASTER
    (record,) = caplog.records
    assert "tuned forward for head dim 128 on NVIDIA H200" in record.getMessage()
    measured = len(bench.launched)
    assert bench.tuned() == FASTER
    forget()
    assert bench.tuned() == FASTER
    assert len(bench.launched) == measured
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_another_kind_of_kernel_is_another_measurement() -> None:
    assert Bench({SHIPPED: 1.0, FASTER: 0.5}).tuned() == FASTER
    assert Bench({SHIPPED: 1.0}).tuned(KEY._replace(causal=False)) == SHIPPED
    assert Bench({SHIPPED: 1.0}).tuned(KEY._replace(triton="3.9.0")) == SHIPPED
    assert Bench({}).tuned() == FASTER


def test_the_shipped_tile_stays_where_another_saves_next_to_nothing() -> None:
    assert Bench({SHIPPED: 1.0, FASTER: 0.99}).tuned() == SHIPPED


def test_what_does_not_fit_is_passed_over(cache: Path) -> None:
    assert Bench({FASTER: 1.0}, otherwise=None).tuned() == FASTER
    forget()
    # None fits: the launch has its own way down from the shipped tile, and its own error.
    key = KEY._replace(dropout=True)
    assert Bench({}, otherwise=None).tuned(key) == SHIPPED
    assert len(list(cache.iterdir())) == 1


def test_a_short_call_decides_nothing(cache: Path) -> None:
    bench = Bench({SHIPPED: 0.01, FASTER: 0.005})
    assert bench.tuned() == SHIPPED
    assert set(bench.launched) == {SHIPPED}
    assert not cache.exists()
    assert Bench({SHIPPED: 1.0, FASTER: 0.5}).tuned() == FASTER


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    assert bench.tuned() == SHIPPED
    assert not bench.launched


def test_a_captured_call_takes_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Bench({SHIPPED: 1.0, FASTER: 0.5}).tuned() == FASTER
    forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bench = Bench({})
    assert bench.tuned() == FASTER
    assert not bench.launched


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\xff",
        "[1, 2]",
        "{}",
        '{"tile": [128, 64, 4, 2, null]}',
        '{"tile": 3}',
        '{"tile": ["a", 64, 4, 2, null]}',
    ],
)
def test_a_file_that_cannot_be_believed_is_one_line_and_written_anew(
    text: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    assert bench.tuned() == FASTER
    (path,) = cache.iterdir()
    good = path.read_text()
    path.write_text(text, encoding="latin-1")
    forget()
    caplog.clear()
    assert bench.tuned() == FASTER
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert path.read_text() == good


@pytest.mark.parametrize("tile", [[128, 64, 4, 200, None], [2**20, 64, 4, 2, None], [1, 2]])
def test_a_tile_that_nobody_would_keep_is_not_believed(tile: list[int], cache: Path) -> None:
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    assert bench.tuned() == FASTER
    (path,) = cache.iterdir()
    kept = tuning.json.loads(path.read_text())
    path.write_text(tuning.json.dumps({**kept, "tile": tile}))
    forget()
    assert Bench({SHIPPED: 1.0}).tuned() == SHIPPED


def test_where_nothing_can_be_written_the_tile_serves_the_process(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder would be")
    bench = Bench({SHIPPED: 1.0, FASTER: 0.5})
    assert bench.tuned() == FASTER
    # Neither read nor written: a line each.
    assert len(caplog.records) <= 2
    measured = len(bench.launched)
    assert bench.tuned() == FASTER
    assert len(bench.launched) == measured


def test_processes_that_start_together_agree() -> None:
    """What another process wrote while this one measured is taken."""
    first = Bench({SHIPPED: 1.0, FASTER: 0.5})
    second = Bench({SHIPPED: 1.0})

    def timer(launch: Callable[[], None]) -> float:
        if not second.launched:
            tuning._write("forward", KEY, FASTER)
        return second.timer(launch)

    assert tuning.tuned("forward", KEY, SHIPPED, second.run, timer) == FASTER
    forget()
    assert first.tuned() == FASTER


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA_ADVISOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tuning.directory() == Path("/somewhere/fa-advisor")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tuning.directory() == Path("/home/someone/.cache/fa-advisor")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_handful_of_candidates_for_every_entry(kernel: str, size: int, dim: int) -> None:
    key = KEY._replace(dim=dim, dim_v=16, element_bytes=size)
    for group in GROUPS:
        shipped = tile(group, kernel, dim, size)
        found = tuning.candidates(kernel, key, shipped)
        assert found[0] == shipped
        assert len(set(found)) == len(found)
        assert 5 <= len(found) <= 16, found
