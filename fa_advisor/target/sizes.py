"""Batch size and sequence length: what may be asked for, and what is taken where nothing is."""

from __future__ import annotations

from fa_advisor.errors import UsageError

DEFAULT_BATCH_SIZE = 1
DEFAULT_SEQ_LEN = 1024


def check_sizes(batch_size: int | None, seq_len: int | None) -> None:
    """Raises: UsageError for sizes below 1."""
    for option, value in (("--batch-size", batch_size), ("--seq-len", seq_len)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}; it has to be 1 or more")


def fitting_seq_len(seq_len: int | None, maximum: int | None, what: str = "the model") -> int:
    """The length asked for, or the default, cut to the model's maximum.

    Raises: UsageError where more is asked for than the model has positions.
    """
    if seq_len is None:
        return min(DEFAULT_SEQ_LEN, maximum or DEFAULT_SEQ_LEN)
    if maximum is not None and seq_len > maximum:
        raise UsageError(
            f"--seq-len is {seq_len}, but {what} has {maximum} positions",
            hint=f"ask for {maximum} or fewer, or build the model with more positions",
        )
    return seq_len
