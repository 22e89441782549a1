"""The command line. Each command brings what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fa_advisor.cli.group import GuardedGroup, cli

__all__ = ["GuardedGroup", "cli", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line (default: this process's) and exit with the contract's status."""
    _open_standard_streams()
    cli.main(args=None if argv is None else list(argv), prog_name="fa-advisor")


def _open_standard_streams() -> None:
    """A closed stdin, stdout or stderr would lend its number to the next pipe or file."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
