"""In words: which step a report of a followed script is of."""

from __future__ import annotations

from fa_advisor.following.schedule import Kind

_STEP = {"train": "training step", "infer": "forward"}


def which_step(
    kind: str, number: int, done: dict[Kind, int], followed: dict[Kind, int], cut_short: str
) -> str:
    """One sentence: which step, of how many, and why this one."""
    if kind not in ("train", "infer"):
        ended = f"{cut_short} ended the script in it" if cut_short else "the script ended in it"
        complete = sum(followed.values())
        return "this is the step that was running last: " + (
            f"{ended}, and none of the {complete} before had a higher peak" if complete else ended
        )
    sort: Kind = "train" if kind == "train" else "infer"
    name, total, seen = _STEP[kind], done[sort], followed[sort]
    if total == 1:
        first = ": its peak may be below the next's, which finds optimizer state there already"
        return f"this is the only {name} there was" + (first if kind == "train" else "")
    among = f"all {total:,}" if seen == total else f"the {seen:,} that were followed of {total:,}"
    if kind == "train":
        return (
            f"this is {name} {number:,}: the highest peak among {among}, the first left out"
            " (optimizers make their state in it)"
        )
    return f"this is {name} {number:,}: the highest peak among {among}"
