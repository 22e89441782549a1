"""`fa-advisor run`: an unmodified script, followed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from fa_advisor.cli import params
from fa_advisor.cli.output import check_outputs, say_error, text_options
from fa_advisor.errors import FaAdvisorError, UsageError

if TYPE_CHECKING:
    from fa_advisor.report import Report


@click.command(
    options_metavar="[options]",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@click.option(
    "-m",
    "--module",
    is_flag=True,
    help="SCRIPT is a module's dotted name, as for python -m.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Follow the first N steps, each of them, then let the script go on by itself.",
)
@click.option("--patch", is_flag=True, help="Patch every model before its first forward.")
@click.option(
    "--gpu",
    callback=params.gpu,
    metavar="NAME",
    help="Advise for this GPU, such as a100 or h200; see `fa-advisor gpus`.",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help="Write the report: .json, .csv, .txt or .html. Repeatable.  [default: text on stderr]",
)
@click.option("--ascii", is_flag=True, help="No characters that a plain console lacks.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    module: bool,
    steps: int | None,
    patch: bool,
    gpu: str | None,
    outputs: tuple[str, ...],
    ascii: bool,
    script: str,
    arguments: tuple[str, ...],
) -> Callable[[], None]:
    """Run SCRIPT with its ARGUMENTS as python would, and report on the memory of its steps.

    The script needs no change. Its input, output, exit status and signals are its own; what
    fa-advisor has to say goes to stderr. Reported is the step with the highest peak, a training's
    first step left out.
    """
    from fa_advisor.following.script import Script
    from fa_advisor.following.session import Session, Wish, tell

    check_outputs(outputs)
    outputs = tuple(map(os.path.abspath, outputs))  # the script may change the directory
    target = (Script.of_module if module else Script.of_file)(script, arguments)
    # Of a job of several processes the first speaks for all; the others must patch as it does.
    first = os.environ.get("RANK", "0") == "0"

    def deliver(report: Report) -> None:
        written = [_write(report, path) for path in outputs]
        if not any(written):  # none was asked for, or none can be written any more
            _print(report, ascii)

    session = Session(
        Wish(path=script, gpu=gpu, limit=steps if first else 0, patch=patch), deliver, tell
    )

    def start() -> None:
        session.begin()
        try:
            target.run()
            _wait_for_threads()
        except BaseException as error:
            session.end(_cut_short(error), error)
            raise
        finally:
            session.end()

    return start


def _wait_for_threads() -> None:
    """As Python does next: a script may leave all its work to threads."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _cut_short(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "" if error.code in (None, 0) else f"sys.exit({error.code!r})"
    return type(error).__name__


def _write(report: Report, path: str) -> bool:
    """Whether it was written; what is wrong with one file costs no other."""
    from fa_advisor.following.session import tell
    from fa_advisor.views.formats import write

    try:
        write(report, path)
    except FaAdvisorError as fault:
        say_error(fault)
    except Exception as error:
        say_error(UsageError(f"can't write the report to {path}: {type(error).__name__}: {error}"))
    else:
        tell(f"wrote {path}")
        return True
    return False


def _print(report: Report, ascii: bool) -> None:
    from fa_advisor.following.session import put
    from fa_advisor.views.text import to_text

    stream = sys.__stderr__
    if stream is not None and not stream.closed:
        put(to_text(report, **text_options(ascii, stream)))
