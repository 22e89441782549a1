"""A report: the records, and how it is saved, loaded, tabulated and printed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fa_advisor.errors import UsageError
from fa_advisor.records import SCHEMA_VERSION, ReportBody

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


# Longer than any name or note that a report can hold; a view would choke on one without an end.
MAX_TEXT = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(ReportBody):
    """Where every byte at the peak goes, which part is attention's, and what to do about it."""

    def to_json(self) -> bytes:
        """The report as UTF-8 JSON (schema: `fa_advisor/report.schema.json`), indented by two."""
        return msgspec.json.format(encoded(self), indent=2) + b"\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to `path`, whole or not at all.

        Raises: UsageError where the file can't be written.
        """
        write_whole(path, self.to_json())

    def frames(self) -> dict[str, pd.DataFrame]:
        """The report's tables: categories, modules, sites, budgets, timeline, ledger."""
        from fa_advisor.views.tables import frames

        return frames(self)

    def __rich__(self) -> RenderableType:
        from fa_advisor.views.text import render

        return render(self)

    def _repr_html_(self) -> str:
        from fa_advisor.views.text import render_html

        return render_html(self)


def encoded(record: Any) -> bytes:
    """A record as JSON. What isn't UTF-8 in names, a file's for example, is escaped."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(record)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_surrogates(item) for item in value]
    return value


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all.

    Raises: UsageError where it can't be written.
    """
    target = Path(path)
    try:
        # A link is followed. A pipe, /dev/stdout, or a file in a closed directory is written to.
        if target.exists() and not (
            target.is_file() and os.access(target.resolve().parent, os.W_OK)
        ):
            target.write_bytes(data)
        else:
            _replace(target.resolve(), data)
    except OSError as error:
        raise UsageError(
            f"can't write {target}: {error.strerror or error}",
            hint="name a file in a directory that exists and that you may write to",
        ) from error


def _replace(target: Path, data: bytes) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report that `save` wrote. Never executes what it reads.

    Raises: UsageError where the file is missing, truncated, foreign or of a newer schema.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"can't read the report {os.fspath(path)}: {error.strerror or error}",
            hint="make one with `fa-advisor profile model.py -o report.json`",
        ) from error
    return parse(raw, os.fspath(path))


def parse(raw: bytes, name: str) -> Report:
    """Decode a report's JSON; `name` is what the messages call it."""
    version = _schema_version(raw, name)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{name} has schema_version {version}; this fa-advisor reads up to {SCHEMA_VERSION}",
            hint="upgrade with `pip install -U fa-advisor`",
        )
    try:
        report = msgspec.json.decode(raw, type=Report)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{name} is not a valid fa-advisor report: {error}") from error
    memory = report.memory
    times = [point.t for point in memory.timeline]
    if times != sorted(times):
        raise UsageError(
            f"{name} is not a valid fa-advisor report: its timeline goes back in time",
            hint="was it edited by hand?",
        )
    parts = (*memory.categories.values(), memory.unattributed_bytes)
    if min(parts) < 0 or sum(parts) != memory.peak_allocated_bytes:
        raise UsageError(
            f"{name} is not a valid fa-advisor report: its categories and unattributed bytes add"
            f" up to {sum(parts):,}, its peak is {memory.peak_allocated_bytes:,}",
            hint="was it edited by hand?",
        )
    return report


def _schema_version(raw: bytes, name: str) -> int:
    """The version a file claims, before anything else of it is believed."""
    try:
        head = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"{name} is not JSON, or is cut off: {error}",
            hint="a report is what `fa-advisor profile model.py -o report.json` writes",
        ) from error
    beyond = _beyond_any_report(head)
    if beyond:
        raise UsageError(
            f"{name} is not a report: it holds {beyond}",
            hint="a report is what `fa-advisor profile model.py -o report.json` writes",
        )
    version = head.get("schema_version") if isinstance(head, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(
            f"{name} is JSON but not an fa-advisor report: it has no schema_version",
            hint="a report is what `fa-advisor profile model.py -o report.json` writes",
        )
    return version


def _beyond_any_report(value: Any) -> str:
    """A text or number that no report holds and that no view could show; empty if there is none."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if len(item) > MAX_TEXT:
                return f"a text of {len(item):,} characters"
        elif isinstance(item, int):
            if item.bit_length() > 63:
                return f"an integer of {item.bit_length():,} bits"
        elif isinstance(item, dict):
            pending += (*item, *item.values())
        elif isinstance(item, list):
            pending += item
    return ""


def json_schema() -> dict[str, Any]:
    """The report's JSON schema (draft 2020-12), generated from the records."""
    schema: dict[str, Any] = msgspec.json.schema(Report)
    return schema


def json_schema_text() -> str:
    """The schema as it is checked in at `fa_advisor/report.schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"
