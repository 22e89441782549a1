"""A report in the format that a file's extension, or the user, asks for.

CSV holds one table, as spreadsheets and `pandas.read_csv` expect. By default that is `sites`, the
table that this tool exists for: one row an attention call, with its bytes and shapes; the others
are a `--table` away, and JSON holds them all.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path

from fa_advisor.errors import UsageError
from fa_advisor.report import Report, write_whole
from fa_advisor.views.layout import plain
from fa_advisor.views.tables import TABLES, TableName, frame
from fa_advisor.views.text import render_html, to_text

FORMATS: tuple[str, ...] = ("text", "json", "csv", "html")
EXTENSIONS: dict[str, str] = {".json": "json", ".csv": "csv", ".txt": "text", ".html": "html"}
DEFAULT_TABLE: TableName = "sites"

__all__ = [
    "DEFAULT_TABLE",
    "EXTENSIONS",
    "FORMATS",
    "TABLES",
    "check_writable",
    "encode",
    "format_of",
    "write",
]


def format_of(path: str | os.PathLike[str]) -> str:
    """The format that `path`'s extension names.

    Raises: UsageError where it names none.
    """
    extension = Path(path).suffix.lower()
    if extension not in EXTENSIONS:
        raise UsageError(
            f"can't tell a format from {plain(os.fspath(path))!r}: "
            + (f"no report is written as {extension}" if extension else "it has no extension"),
            hint=f"name a file that ends in {_either(EXTENSIONS)}",
        )
    return EXTENSIONS[extension]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before a long run whether what it makes can be written to `path`.

    Raises: UsageError where it can't.
    """
    target = Path(path)
    if target.is_symlink() and not target.exists():  # what it leads to is what will be made
        target = Path(os.path.realpath(target))
    problem = ""
    if target.is_dir():
        problem = "it is a directory"
    elif not target.parent.is_dir():
        problem = f"there is no directory {target.parent}"
    elif not os.access(target.parent, os.W_OK | os.X_OK) and not (
        target.exists() and os.access(target, os.W_OK)
    ):
        problem = f"{target.parent} is not writable"
    if problem:
        raise UsageError(
            f"can't write {target}: {problem}",
            hint="name a file in a directory that exists and that you may write to",
        )


def encode(report: Report, format: str, table: str = DEFAULT_TABLE) -> bytes:
    """The report in one of `FORMATS`; `table` is the one that CSV holds."""
    if format == "json":
        return report.to_json()
    if format == "csv":
        return str(frame(report, table).to_csv(index=False)).encode(errors="backslashreplace")
    if format == "html":
        return _page(report).encode(errors="backslashreplace")
    return to_text(report).encode(errors="backslashreplace")


def _page(report: Report) -> str:
    title = html.escape(plain(report.target.name))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>fa-advisor: {title}</title>\n</head>\n<body>\n{render_html(report)}\n"
        "</body>\n</html>\n"
    )


def write(
    report: Report,
    path: str | os.PathLike[str],
    format: str | None = None,
    table: str = DEFAULT_TABLE,
) -> None:
    """Write the report to `path`, whole or not at all; the format is by extension unless given.

    Raises: UsageError where it can't be written or the extension is unknown.
    """
    write_whole(path, encode(report, format or format_of(path), table))


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
