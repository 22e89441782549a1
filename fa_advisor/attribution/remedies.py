"""What would make a step fit that ran out of memory, each remedy with its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fa_advisor.attribution.replay import Above
from fa_advisor.attribution.shortage import Shortage

RemedyKind = Literal[
    "patch", "batch", "length", "allocator", "limit", "other_processes", "checkpointing"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """`saves_bytes`: how much less the step then needs, where that was computed; `enough`: is it
    what was missing; `value`: the largest batch or length that fits."""

    kind: RemedyKind
    text: str
    saves_bytes: int | None
    enough: bool | None
    value: int | None = None


def by_cause(shortage: Shortage, state: Above, *, others: int | None = None) -> list[Remedy]:
    """What the cause itself suggests."""
    if shortage.cause == "fragmentation":
        free = state.fragmented + state.cached
        return [
            Remedy(
                kind="allocator",
                text=(
                    f"{size(free)} of what torch had reserved was free, the largest piece"
                    f" {size(state.largest_free)}: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                    " lets segments grow, so that it stays in one piece"
                ),
                saves_bytes=free,
                enough=free >= shortage.missing,
            )
        ]
    if shortage.cause == "limit":
        return [
            Remedy(
                kind="limit",
                text=(
                    "the device had room for the request: a limit of the process's own"
                    " (torch.cuda.set_per_process_memory_fraction) refused it"
                ),
                saves_bytes=None,
                enough=True,
            )
        ]
    if shortage.cause == "other_processes" and others is not None:
        return [
            Remedy(
                kind="other_processes",
                text=f"other processes hold {size(others)} of the GPU: end them, or use another",
                saves_bytes=others,
                enough=others >= shortage.missing,
            )
        ]
    return []


def without_program(
    shortage: Shortage, attention: int, kinds: Mapping[str, int], state: Above
) -> tuple[Remedy, ...]:
    """Remedies from a snapshot alone: at the moment of failure, not over the whole step."""
    made = by_cause(shortage, state)
    # Where a limit of the process's own refused, what is missing is not known: all of it at most.
    missing = shortage.missing or shortage.needed
    if attention:
        enough = attention >= missing
        made.append(
            Remedy(
                kind="patch",
                text=(
                    f"{size(attention)} were allocated in attention's code, {size(missing)} were"
                    " missing: a fused kernel (fa_advisor.patch, `fa-advisor run --patch`) keeps"
                    " neither S nor P" + ("" if enough else "; by itself that may not be enough")
                ),
                saves_bytes=attention,
                enough=enough,
            )
        )
    grows = sum(kinds.get(kind, 0) for kind in ("forward", "backward", "compiled"))
    grows += shortage.requested
    if grows > missing:
        share = (grows - missing) / grows
        made.append(
            Remedy(
                kind="batch",
                text=(
                    f"{size(grows)} (the request included) grow with the batch: at {share:.0%} of"
                    " this batch the request would have fitted, if nothing later needs more"
                ),
                saves_bytes=missing,
                enough=True,
            )
        )
    return tuple(made)


def size(nbytes: int) -> str:
    """1.50 GiB, 12.3 MiB, 512 B."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= one:
            return f"{nbytes / one:.2f} {unit}"
    return f"{nbytes} B"
