"""`fa-advisor view`, `export` and `diff`: what reads saved reports. Nothing in them is executed."""

from __future__ import annotations

import sys

import click

from fa_advisor.cli.output import emit, has_dashboard_terminal, say, text_options

_FORMATS = ("text", "json", "csv", "html")
_TABLES = ("categories", "modules", "sites", "budgets", "timeline", "ledger")


@click.command()
@click.argument("report", type=click.Path())
@click.option(
    "--tui/--no-tui",
    default=None,
    help="Open the dashboard, or print the report as text.  [default: the dashboard on a terminal]",
)
@click.option("--ascii", is_flag=True, help="No characters that a plain console lacks.")
def view(report: str, tui: bool | None, ascii: bool) -> None:
    """Open the saved REPORT in the dashboard, or print it."""
    from fa_advisor.report import load

    if tui and not has_dashboard_terminal():
        raise click.UsageError("--tui needs a terminal on stdin and stderr")
    loaded = load(report)
    if tui or (tui is None and has_dashboard_terminal() and sys.stdout.isatty()):
        from fa_advisor.tui.app import show

        show(loaded, ascii=ascii)
        return
    from fa_advisor.views.text import to_text

    emit(to_text(loaded, **text_options(ascii)))


@click.command()
@click.argument("report", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write to FILE: .json, .csv, .txt or .html.  [default: stdout, with --format]",
)
@click.option("--format", "format", type=click.Choice(_FORMATS), help="Override FILE's extension.")
@click.option(
    "--table",
    type=click.Choice(_TABLES),
    default="sites",
    show_default=True,
    help="The table that CSV holds.",
)
def export(report: str, output: str | None, format: str | None, table: str) -> None:
    """Write the saved REPORT in another format: to a file, or to stdout."""
    from fa_advisor.report import load
    from fa_advisor.views.formats import encode, format_of, write

    if output is None and format is None:
        raise click.UsageError("say where to: -o FILE, or --format for stdout")
    chosen = format or format_of(output or "")
    given = click.get_current_context().get_parameter_source("table")
    if chosen != "csv" and given is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--table is for CSV, which holds one table; the others hold them all"
        )
    loaded = load(report)
    if output is None:
        emit(encode(loaded, chosen, table))
        return
    write(loaded, output, chosen, table)
    say(f"wrote {output}" + (f", table {table}" if chosen == "csv" else ""))


@click.command()
@click.argument("before", metavar="A", type=click.Path())
@click.argument("after", metavar="B", type=click.Path())
@click.option(
    "--format", "format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option("--ascii", is_flag=True, help="No characters that a plain console lacks.")
def diff(before: str, after: str, format: str, ascii: bool) -> None:
    """Compare report B with report A: the peak, by category and by attention site."""
    from fa_advisor.report import load
    from fa_advisor.views import diff as views

    change = views.diff(load(before), load(after))
    emit(
        views.to_json(change) if format == "json" else views.to_text(change, **text_options(ascii))
    )
