"""`fa-advisor postmortem`: explain a memory snapshot of torch, without the program it is of."""

from __future__ import annotations

import click

from fa_advisor.cli.output import attempted, emit, raise_all, say, text_options
from fa_advisor.errors import UsageError


@click.command()
@click.argument("snapshot", type=click.Path())
@click.option(
    "--device",
    type=click.IntRange(min=0),
    metavar="N",
    help="The CUDA device to explain.  [default: the one that failed, else the fullest]",
)
@click.option("--format", "format", type=click.Choice(["text", "json"]), help="What stdout gets.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write to FILE instead: .json or .txt.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(),
    help="Also write the history as a Chrome trace, for ui.perfetto.dev.",
)
@click.option("--ascii", is_flag=True, help="No characters that a plain console lacks.")
def postmortem(
    snapshot: str,
    device: int | None,
    format: str | None,
    output: str | None,
    trace: str | None,
    ascii: bool,
) -> None:
    """Explain SNAPSHOT, a file of torch.cuda.memory._dump_snapshot: what was alive at the last
    out-of-memory error (else at the peak), by source line; the request that failed; what of it is
    attention's; what is fragmented; and what would have fitted.

    Needs neither a GPU nor torch. Nothing in the file is executed.
    """
    from fa_advisor.attribution.postmortem import explain, to_json
    from fa_advisor.attribution.snapshots import read
    from fa_advisor.report import write_whole
    from fa_advisor.views.text_postmortem import to_text

    chosen = format or _format_of(output)
    found = read(snapshot)
    number = found.pick(device)
    told = explain(found.traces[number], snapshot=snapshot, device=number)

    def explanation() -> None:
        if output is None:
            emit(to_json(told) if chosen == "json" else to_text(told, **text_options(ascii)))
            return
        data = to_json(told) if chosen == "json" else to_text(told, ascii=ascii).encode()
        write_whole(output, data)
        say(f"wrote {output}")

    def history() -> None:
        if trace is not None:
            from fa_advisor.attribution.chrome_trace import encode

            write_whole(trace, encode(found.traces[number], number))
            say(f"wrote {trace}")

    # Each on its own: where one can't be written the other still is.
    raise_all(attempted((explanation, history)))


def _format_of(output: str | None) -> str:
    if output is None or output.lower().endswith(".txt"):
        return "text"
    if output.lower().endswith(".json"):
        return "json"
    raise UsageError(
        f"{output}: a postmortem is written as .json or .txt",
        hint="--format says which, whatever the file is called",
    )
