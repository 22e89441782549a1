"""The tables of a report, and the files it is written to."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import samples
from fa_advisor.errors import UsageError
from fa_advisor.report import load
from fa_advisor.views import formats, tables


def test_every_table_is_there_with_its_rows() -> None:
    report = samples.report()
    frames = report.frames()
    assert tuple(frames) == tables.TABLES
    assert frames["categories"]["bytes"].sum() == report.memory.peak_allocated_bytes
    assert frames["categories"]["share_of_peak"].sum() == pytest.approx(1)
    assert len(frames["sites"]) == 12
    assert frames["sites"]["attention_bytes_at_peak"].dtype == "int64"
    assert frames["sites"]["why_not"][0] == "flash: HAND_WRITTEN MASK"
    assert frames["modules"]["attention_bytes"].sum() == 12 * 48 * 2**20
    assert frames["ledger"]["shape"][0] == "2x12x1024x1024"
    assert len(frames["timeline"]) == 101
    assert frames["budgets"]["fits"][0]


def test_empty_tables_keep_their_columns() -> None:
    report = replace(samples.report(), sites=(), budgets=(), ledger=())
    assert "head_dim" in tables.frame(report, "sites").columns
    assert len(tables.frame(report, "ledger")) == 0


def test_unknown_table() -> None:
    with pytest.raises(UsageError, match="no table 'site'"):
        tables.frame(samples.report(), "site")


def test_csv_reads_back_with_names_as_they_are() -> None:
    name = 'a,"b"\n[red]<script>'
    data = formats.encode(samples.renamed(name), "csv")
    assert pd.read_csv(io.BytesIO(data))["fqn"][0] == name


@pytest.mark.parametrize("extension", formats.EXTENSIONS)
def test_each_extension_is_written(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"r{extension.upper()}"
    formats.write(samples.report(), path)
    assert path.read_bytes() == formats.encode(samples.report(), formats.EXTENSIONS[extension])
    assert os.listdir(tmp_path) == [path.name]


def test_json_is_the_report(tmp_path: Path) -> None:
    formats.write(samples.report(), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == samples.report()
    assert json.loads((tmp_path / "r.json").read_bytes())["schema_version"] == 1


def test_html_page_is_escaped() -> None:
    page = formats.encode(samples.renamed("</title><script>"), "html").decode()
    assert "<script" not in page
    assert page.startswith("<!DOCTYPE html>")


def test_unknown_extension_names_the_known_ones() -> None:
    for name in ("r.xlsx", "report"):
        with pytest.raises(UsageError) as caught:
            formats.format_of(name)
        assert ".json, .csv, .txt or .html" in caught.value.hint


def test_links_are_followed_and_pipes_written_to(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    formats.write(samples.report(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "there.json") == samples.report()
    formats.write(samples.report(), os.devnull, "json")
    assert not Path(os.devnull).is_file()


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        formats.check_writable(tmp_path / "no" / "r.json")
    with pytest.raises(UsageError, match="is a directory"):
        formats.check_writable(tmp_path)
    formats.check_writable(tmp_path / "r.json")


def test_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        formats.write(samples.report(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]
