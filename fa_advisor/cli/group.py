"""`fa-advisor`: the group that its commands are in, and where every fault becomes a message."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

import click

from fa_advisor.cli.output import say_error
from fa_advisor.errors import ExitStatus, FaAdvisorError

_COMMANDS = {
    "profile": ("fa_advisor.cli.profile", "Run or model TARGET, attribute its memory, advise."),
    "run": ("fa_advisor.cli.run", "Run an unmodified script and report on its steps."),
    "view": ("fa_advisor.cli.reports", "Open a saved report in the dashboard."),
    "export": ("fa_advisor.cli.reports", "Write a saved report as JSON, CSV, text or HTML."),
    "diff": ("fa_advisor.cli.reports", "Compare two reports, by category and by site."),
    "postmortem": (
        "fa_advisor.cli.postmortem",
        "Explain a memory snapshot of torch, of an error or a peak.",
    ),
    "budget": ("fa_advisor.cli.budget", "SRAM and register budgets of tiles, on any GPU."),
    "gpus": ("fa_advisor.cli.gpus", "List the GPUs it knows, with their limits."),
}


class GuardedGroup(click.Group):
    """A group whose commands are imported when asked for, and whose faults end in one message."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use, not of the alphabet."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module that has the command."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table above: help of the group imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in _COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command line and exit; never with a traceback of ours unless it is asked for.

        A command may return what is to run once click is done: what that raises is not ours.
        """
        kwargs["standalone_mode"] = False
        then: Any = None
        try:
            returned = super().main(*args, **kwargs)
            status = returned if isinstance(returned, int) else ExitStatus.OK
            then = returned if callable(returned) else None
        except FaAdvisorError as error:
            say_error(error)
            status = error.status
        except click.ClickException as error:
            error.show()
            status = ExitStatus.USAGE
        except (click.Abort, KeyboardInterrupt):
            print("error: interrupted", file=sys.stderr)
            status = ExitStatus.INTERRUPTED
        except Exception as error:
            _say_internal(error)
            status = ExitStatus.INTERNAL
        if then is not None:
            then()
        sys.exit(int(status))


def _say_internal(error: Exception) -> None:
    if os.environ.get("FA_ADVISOR_DEBUG") == "1":
        traceback.print_exc()
    message = f"internal error in fa-advisor: {type(error).__name__}: {error}"
    say_error(
        FaAdvisorError(
            message,
            hint="please report it, with what the same command prints under FA_ADVISOR_DEBUG=1",
        )
    )


@click.group(
    cls=GuardedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="fa-advisor", message="fa-advisor %(version)s")
def cli() -> None:
    """Say where every byte at the peak of GPU memory goes, how much of it is attention's N x N
    intermediates, and what to do about it.

    \b
      fa-advisor profile model.py            the report of a model, with or without a GPU
      fa-advisor profile model.py -o r.json  and keep it
      fa-advisor profile                     the bundled example
      fa-advisor run train.py --lr 1e-4      a script as it is, with its own arguments

    Exit status: 0 ok, 1 a fault of fa-advisor, 2 usage or a file that can't be used, 3 the target
    raised, 4 over budget, 5 no such device, 130 interrupted; `run`: the script's own.
    """
