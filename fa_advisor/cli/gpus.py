"""`fa-advisor gpus`: the GPUs of the table."""

from __future__ import annotations

import click

from fa_advisor.cli.output import emit


@click.command()
@click.option(
    "--format", "format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def gpus(format: str) -> None:
    """List the GPUs it knows, with their limits. `--gpu` takes the short name, or any part of a
    name that means one GPU."""
    from fa_advisor.probes.gpus import KNOWN_GPUS, SHORT_NAMES

    if format == "json":
        import msgspec

        emit(msgspec.json.format(msgspec.json.encode(KNOWN_GPUS), indent=2) + b"\n")
        return
    from fa_advisor.views.devices import to_text

    emit(to_text(KNOWN_GPUS, SHORT_NAMES))
