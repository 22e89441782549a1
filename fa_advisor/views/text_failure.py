"""The text view's section on a step that ran out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.text import Text

from fa_advisor.records import OutOfMemory, Remedy, ReportBody
from fa_advisor.views.layout import Page, heading
from fa_advisor.views.sizes import format_bytes

CAUSES = {
    "memory": "the device has no room for what the step needs",
    "fragmentation": "enough was free, but not in one piece: fragmentation",
    "limit": "the device had room: a limit of the process's own refused it",
    "other_processes": "other processes hold what was missing",
}


def failure(report: ReportBody, page: Page) -> Iterator[Text]:
    """What was asked for and why it wasn't there."""
    failed = report.out_of_memory
    if failed is None:
        return
    verdict = Text("OUT OF MEMORY", style="bold red")
    verdict.append(f"  {CAUSES[failed.cause]}", style="not bold default")
    yield from page.filled(verdict, page.width)
    place = page.joined(page.plain(failed.fqn), page.plain(failed.source or ""))
    yield from page.wrapped(Text(request(failed, page.plain, place)))
    if failed.step_peak_bytes is not None:
        yield from page.wrapped(
            f"The whole step needs {format_bytes(failed.step_peak_bytes)} (modelled); torch could"
            f" have {format_bytes(failed.capacity_bytes)}. What follows is the moment of failure."
        )
    lines = list(remedies(failed.remedies, page))
    if lines:
        yield Text()
        yield from lines


def request(failed: OutOfMemory, plain: Callable[[str], str], place: str) -> str:
    """What was asked for, where, and what there was of it. plain: what makes a name showable."""
    text = f"{format_bytes(failed.requested_bytes)} in {failed.phase}"
    if failed.op:
        text += f" for {plain(failed.op)}"
    if failed.shape:
        text += f" [{', '.join(map(str, failed.shape))}] {plain(failed.dtype)}"
    if failed.category is not None:
        text += f", {failed.category}"
    text += f" ({place})" if place else ""
    text += (
        f". The driver was asked for {format_bytes(failed.needed_bytes)} and had"
        f" {format_bytes(failed.device_free_bytes)} free"
    )
    if failed.missing_bytes:
        text += f": {format_bytes(failed.missing_bytes)} were missing"
    return text + "."


def remedies(found: tuple[Remedy, ...], page: Page) -> Iterator[Text]:
    """What would make it fit; green what would by itself."""
    if not found:
        return
    yield from heading(page, "What would make it fit")
    for remedy in found:
        style = "green" if remedy.enough else ""
        for index, line in enumerate(page.wrapped(Text(page.plain(remedy.text), style=style), 2)):
            if index == 0:
                line = Text(" " * page.margin).append("- ").append_text(line[page.margin + 2 :])
            yield line
