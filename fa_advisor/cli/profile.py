"""`fa-advisor profile`: run or model a target, and say what became of its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fa_advisor.cli import params
from fa_advisor.cli.output import (
    attempted,
    check_outputs,
    emit,
    has_dashboard_terminal,
    raise_all,
    say,
    text_options,
)
from fa_advisor.errors import TargetError

if TYPE_CHECKING:
    from fa_advisor.records import OutOfMemory, ProfileRequest
    from fa_advisor.report import Report

_FORMATS = ("text", "json", "csv", "html")
_COMPARABLE = (
    "target mode",
    "target dtype",
    "target batch_size",
    "target seq_len",
    "device",
    "basis",
)


class _WithArguments(click.Command):
    """A command whose words after `--` are the target's, and nobody else's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the target's arguments aside before click sees them."""
        if "--" in args:
            at = args.index("--")
            ctx.meta["argv"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """With what click doesn't know of."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


@click.command(cls=_WithArguments, options_metavar="[options]")
@click.argument("target", required=False)
@click.option(
    "--mode",
    type=click.Choice(["train", "infer"]),
    default="train",
    show_default=True,
    help="train: two steps of forward, loss, backward, optimizer; the second is measured.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of the inputs that are made for the target.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of the inputs that are made for the target.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    show_default=True,
    help="Cast the model to it; auto: as it is built.",
)
@click.option(
    "--device",
    callback=params.device,
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="auto, cuda, cuda:1, cpu or fake (no GPU, no memory); auto: cuda, else fake.",
)
@click.option(
    "--gpu",
    callback=params.gpu,
    metavar="NAME",
    help="Advise for this GPU, such as a100 or h200; see `fa-advisor gpus`.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "sgd", "none"]),
    default="adamw",
    show_default=True,
    help="The optimizer of --mode train.",
)
@click.option(
    "--max-peak",
    callback=params.size,
    metavar="SIZE",
    help="Exit with status 4 if peak allocated is above it, such as 24GiB.",
)
@click.option(
    "--baseline",
    metavar="REPORT",
    type=click.Path(),
    help="Compare peak allocated with a saved report's.",
)
@click.option(
    "--fail-on-increase",
    callback=params.percent,
    metavar="PERCENT",
    help="Exit with status 4 if it is above the baseline's by more, such as 2%.",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="Also write the report: .json, .csv, .txt or .html. Repeatable.",
)
@click.option(
    "--snapshot",
    metavar="FILE",
    type=click.Path(),
    callback=params.absolute,
    help="On a GPU: write torch's memory snapshot of the step, for pytorch.org/memory_viz.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(),
    callback=params.absolute,
    help="On a GPU: write the step's allocations as a Chrome trace, for ui.perfetto.dev.",
)
@click.option(
    "--format", "format", type=click.Choice(_FORMATS), help="What stdout gets.  [default: text]"
)
@click.option(
    "--tui/--no-tui",
    default=None,
    help="Open the dashboard, or don't.  [default: on a terminal without -o and --format]",
)
@click.option("--ascii", is_flag=True, help="No characters that a plain console lacks.")
@click.option("--no-progress", is_flag=True, help="Say nothing while it runs.")
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    *,
    target: str | None,
    max_peak: int | None,
    baseline: str | None,
    fail_on_increase: float | None,
    outputs: tuple[str, ...],
    format: str | None,
    tui: bool | None,
    ascii: bool,
    no_progress: bool,
    **asked: Any,
) -> None:
    """Run or model TARGET, attribute its peak memory, and advise.

    TARGET is model.py, model.py:name or package.module:name: a module, a class or a function that
    returns one. Without TARGET: the bundled example. Words after `--` are the target's arguments.

    The report goes to stdout; progress and what the target prints go to stderr.
    """
    if fail_on_increase is not None and baseline is None:
        raise click.UsageError("--fail-on-increase needs a --baseline to increase from")
    dashboard = _wants_dashboard(tui, outputs, format)
    check_outputs(outputs, [asked["snapshot"], asked["trace"]])
    reference = _load(baseline) if baseline is not None else None

    from fa_advisor.records import ProfileRequest

    request = ProfileRequest(target=target, argv=ctx.meta.get("argv", ()), **asked)
    report = _run(request, dashboard=dashboard, kept=bool(outputs), ascii=ascii, silent=no_progress)

    # The files come first, and each on its own: what fails later must not cost the report.
    faults = attempted(_writes(report, outputs))
    if dashboard and outputs:
        faults += attempted([lambda: _show(report, ascii)])
    if not dashboard or format is not None or not sys.stdout.isatty():
        faults += attempted([lambda: _print(report, format or "text", ascii)])
    faults += attempted(_gates(report, max_peak, reference, fail_on_increase))
    if report.out_of_memory is not None:
        faults.append(_ran_out(report.out_of_memory, target))
    raise_all(faults)


def _wants_dashboard(tui: bool | None, outputs: tuple[str, ...], format: str | None) -> bool:
    if tui and not has_dashboard_terminal():
        raise click.UsageError("--tui needs a terminal on stdin and stderr")
    return has_dashboard_terminal() and not outputs and format is None if tui is None else tui


def _load(path: str) -> Report:
    from fa_advisor.report import load

    return load(path)


def _run(
    request: ProfileRequest, *, dashboard: bool, kept: bool, ascii: bool, silent: bool
) -> Report:
    """The report; inside the dashboard, unless it has to be in files before anything is shown."""
    if dashboard and not kept:
        from fa_advisor.tui.app import run_profile

        return run_profile(request, ascii=ascii)
    from fa_advisor.launch import run_child
    from fa_advisor.progress import reporter

    bar = sys.stderr.isatty() and not ascii
    with reporter(silent=silent, bar=bar) as shown:
        return run_child(request, shown.on_progress, shown.on_output)


def _show(report: Report, ascii: bool) -> None:
    from fa_advisor.tui.app import show

    show(report, ascii=ascii)


def _print(report: Report, format: str, ascii: bool) -> None:
    if format == "text":
        from fa_advisor.views.text import to_text

        emit(to_text(report, **text_options(ascii)))
        return
    from fa_advisor.views.formats import encode

    emit(encode(report, format))


def _writes(report: Report, outputs: tuple[str, ...]) -> list[Callable[[], None]]:
    from fa_advisor.views.formats import write

    def one(path: str) -> None:
        write(report, path)
        say(f"wrote {path}")

    return [partial(one, path) for path in outputs]


def _gates(
    report: Report, max_peak: int | None, baseline: Report | None, percent: float | None
) -> list[Callable[[], None]]:
    from fa_advisor.gates import check_increase, check_max_peak

    gates: list[Callable[[], None]] = []
    if max_peak is not None:
        gates.append(lambda: check_max_peak(report, max_peak))
    if baseline is not None:
        _say_change(report, baseline)
        if percent is not None:
            gates.append(lambda: check_increase(report, baseline, percent))
    return gates


def _say_change(report: Report, baseline: Report) -> None:
    """The change since the baseline, and what about the runs makes it say less."""
    from fa_advisor.views.diff import compare_setup
    from fa_advisor.views.sizes import format_bytes, format_relative

    before, after = baseline.memory.peak_allocated_bytes, report.memory.peak_allocated_bytes
    say(
        f"peak allocated {format_bytes(after)}, baseline {format_bytes(before)}: "
        f"{format_relative(before, after)}"
    )
    for change in compare_setup(baseline, report):
        if change.name in _COMPARABLE:
            say(f"warning: {change.name} was {change.before} in the baseline, is {change.after}")


def _ran_out(failed: OutOfMemory, target: str | None) -> TargetError:
    """The report is there, and yet the target raised."""
    return TargetError(
        f"{target or 'the bundled example'} ran out of memory: {failed.message}",
        hint=next((r.text for r in failed.remedies if r.enough), ""),
        detail=failed.traceback,
    )
