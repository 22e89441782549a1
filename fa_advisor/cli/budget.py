"""`fa-advisor budget`: SRAM and register budgets of tiles, on GPUs that needn't be there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import click

from fa_advisor.cli.output import emit, say, text_options


def _tiles(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[tuple[int, int], ...] | None:
    """ "64x64,128x64" as pairs."""
    if value is None:
        return None
    found = []
    for part in value.split(","):
        sizes = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", part, re.ASCII)
        if sizes is None:
            raise click.BadParameter(f"{part!r} isn't a tile; write 64x64,128x64")
        found.append((int(sizes[1]), int(sizes[2])))
    return tuple(found)


def _numbers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """ "4,8" as numbers."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} isn't a list of numbers such as 4,8")
    return tuple(map(int, parts))


def _arguments(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for each in value:
        name, equals, given = each.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{each!r}: write NAME=TYPE or NAME=VALUE")
        found[name] = given
    return found


@click.command()
@click.option("--head-dim", type=int, default=0, help="Of query and key, 1 to 256.")
@click.option("--value-head-dim", type=int, help="Of value and output; the head dim's by default.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True
)
@click.option(
    "--gpu", "gpus", multiple=True, metavar="NAME",
    help="A GPU to budget for; repeatable. Default: the one found, else an A100 80 GB.",
)  # fmt: skip
@click.option("--causal", is_flag=True, help="For the kernels of causal calls.")
@click.option(
    "--direction", type=click.Choice(["fwd", "bwd", "both"]), default="both", show_default=True
)
@click.option("--tiles", callback=_tiles, metavar="MxN,...", help="Queries x keys, such as 64x64.")
@click.option("--warps", callback=_numbers, metavar="N,...", help="Warps a block.")
@click.option("--stages", callback=_numbers, metavar="N,...", help="Stages of the pipeline.")
@click.option(
    "--kernel", metavar="FILE:FUNCTION", help="A @triton.jit function of your own instead."
)
@click.option(
    "--arg", "arguments", multiple=True, callback=_arguments, metavar="NAME=TYPE|VALUE",
    help="An argument of --kernel: a type (*fp16, i32; :16 behind it: divisible by 16) or a"
    " constant; {m}, {n}, {d}, {dv} stand for the tile and the head dims. Repeatable.",
)  # fmt: skip
@click.option("--modelled", is_flag=True, help="Compile nothing: the model alone.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds a tile.")
@click.option(
    "--format", "format", type=click.Choice(["text", "json", "csv"]), default="text",
    show_default=True,
)  # fmt: skip
@click.option("--ascii", is_flag=True, help="No character beyond ASCII.")
@click.option("--no-progress", is_flag=True, help="Say nothing while it compiles.")
def budget(
    head_dim: int, value_head_dim: int | None, dtype: str, gpus: tuple[str, ...], causal: bool,
    direction: str, tiles: Any, warps: Any, stages: Any, kernel: str | None,
    arguments: dict[str, str], modelled: bool, timeout: float, format: str, ascii: bool,
    no_progress: bool,
) -> None:  # fmt: skip
    """Which BLOCK_M x BLOCK_N x warps x stages of the bundled attention kernels fit a GPU at a
    head dim, what limits them and which one to use. The GPU needn't be there: the figures are the
    compiler's own."""
    from fa_advisor.budgets.api import Which, tables
    from fa_advisor.errors import UsageError
    from fa_advisor.probes.device import advise_for

    if not head_dim and kernel is None:
        raise click.UsageError("give --head-dim (the hidden size / the number of heads)")
    if arguments and kernel is None:
        raise click.UsageError("--arg goes with --kernel")
    if timeout <= 0:
        raise UsageError(f"--timeout: expected seconds above 0, got {timeout:g}")
    found = [advise_for(gpu) for gpu in gpus or (None,)]
    with _progress(silent=no_progress) as progress:
        made = tables(
            [device for device, _ in found], head_dim, value_head_dim=value_head_dim, dtype=dtype,
            is_causal=causal, direction=cast("Which", direction), tiles=tiles, num_warps=warps,
            num_stages=stages, kernel=kernel, arguments=arguments, modelled=modelled,
            progress=progress, timeout_s=timeout, notes=[note for _, note in found if note],
        )  # fmt: skip
    if format == "json":
        import msgspec

        emit(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    elif format == "csv":
        from fa_advisor.views.tables import budget_frame

        emit(budget_frame(made).to_csv(index=False))
    else:
        from fa_advisor.views.text_budget import to_text

        emit(to_text(tuple(made), **text_options(ascii)))


@contextmanager
def _progress(*, silent: bool) -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line at the start. Nothing where nothing is compiled."""
    if silent:
        yield None
        return
    if not sys.stderr.isatty():
        told = False

        def tell(done: int, of: int) -> None:
            nonlocal told
            if not told and done < of:
                say(f"compiling {of - done} of {of} tiles")
                told = True

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("compiling tiles"), BarColumn(), MofNCompleteColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
