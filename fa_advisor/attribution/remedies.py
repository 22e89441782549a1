"""What would make a step fit that ran out of memory, each remedy with its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fa_advisor.attribution.replay import Above
from fa_advisor.attribution.shortage import Shortage
from fa_advisor.records import Advice, Limit, Remedy


def by_cause(shortage: Shortage, state: Above, *, others: int | None = None) -> list[Remedy]:
    """What the cause itself suggests."""
    free = state.fragmented + state.cached
    in_pieces = Remedy(
        kind="allocator",
        text=(
            f"{size(free)} of what torch had reserved was free, the largest piece"
            f" {size(state.largest_free)}: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            " lets segments grow, so that it stays in one piece"
        ),
        saves_bytes=free,
        enough=free >= shortage.missing,
    )
    if shortage.cause == "fragmentation":
        return [in_pieces]
    if shortage.cause == "limit":
        limit = Remedy(
            kind="limit",
            text=(
                "the device had room for the request: a limit of the process's own"
                " (torch.cuda.set_per_process_memory_fraction) refused it"
            ),
            saves_bytes=None,
            enough=True,
        )
        return [limit, in_pieces] if free >= (shortage.missing or shortage.needed) else [limit]
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


def from_model(
    peak_bytes: int, advice: Advice, capacity: int, batch_size: int | None, seq_len: int | None
) -> list[Remedy]:
    """What the whole step's model says: without attention's N x N memory, with a smaller batch,
    with a shorter sequence. Its limits must have been computed for `capacity` bytes."""
    made = []
    without = advice.counterfactual_peak_bytes
    fits_patched = without is not None and without <= capacity
    if without is not None and without < peak_bytes:
        made.append(
            Remedy(
                kind="patch",
                text=(
                    f"without attention's N x N memory the step needs {size(without)} instead of"
                    f" {size(peak_bytes)} (modelled), and there are {size(capacity)}: "
                    + ("fa_advisor.patch(model) makes it fit" if fits_patched else "not enough")
                ),
                saves_bytes=peak_bytes - without,
                enough=fits_patched,
            )
        )
    if batch_size and batch_size > 1:
        made += _smaller("batch", "batch", batch_size, advice.max_batch_size)
    if seq_len:
        made += _smaller("length", "sequence", seq_len, advice.max_seq_len)
    return made


def _smaller(kind: Literal["batch", "length"], what: str, asked: int, limit: Limit) -> list[Remedy]:
    now, advised = limit.now, limit.advised
    if not now or now >= asked:
        return []
    text = f"the largest {what} that fits is {now:,} (asked for: {asked:,})"
    if advised is not None and advised > now:
        text += f", and {advised:,} with attention as advised"
    return [Remedy(kind=kind, text=text, saves_bytes=None, enough=True, value=now)]


def without_program(
    shortage: Shortage,
    attention: int,
    kinds: Mapping[str, int],
    state: Above,
    *,
    others: int | None = None,
) -> tuple[Remedy, ...]:
    """Remedies from the moment of failure alone, without a model of the whole step."""
    made = by_cause(shortage, state, others=others)
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
    # Rounded down: at a percent more it wouldn't fit. Below one no batch does.
    percent = 100 * (grows - missing) // grows if grows > missing else 0
    if percent:
        made.append(
            Remedy(
                kind="batch",
                text=(
                    f"{size(grows)} (the request included) grow with the batch: at {percent}% of"
                    " this batch the request would have fitted, if nothing later needs more"
                ),
                saves_bytes=missing,
                enough=True,
            )
        )
    return tuple(made)


def size(nbytes: int) -> str:
    """1.50 GiB, 12.30 MiB, 512 B."""
    for unit, power in (("EiB", 6), ("PiB", 5), ("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        one = 1024**power
        if nbytes >= one:
            return f"{nbytes / one:.2f} {unit}"
    return f"{nbytes} B"
