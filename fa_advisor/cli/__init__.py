"""The command line. Each command brings what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence

from fa_advisor.cli.group import GuardedGroup, cli

__all__ = ["GuardedGroup", "cli", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line (default: this process's) and exit with the contract's status."""
    cli.main(args=None if argv is None else list(argv), prog_name="fa-advisor")
