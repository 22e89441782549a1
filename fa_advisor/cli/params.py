"""Checks of option values, as click callbacks: they run before anything else does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

import click

from fa_advisor.errors import UsageError

T = TypeVar("T")


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as "24GiB" as bytes."""
    from fa_advisor.views.sizes import parse_size

    return _parsed(parse_size, value)


def percent(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A percentage such as "2%" as a number."""
    from fa_advisor.views.sizes import parse_percent

    return _parsed(parse_percent, value)


def _parsed(parse: Callable[[str], T], value: str | None) -> T | None:
    """What `parse` makes of a value, its fault told as click tells of others."""
    try:
        return None if value is None else parse(value)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from error


def device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Where to run: auto, cuda, cuda:1, cpu or fake."""
    if not re.fullmatch(r"auto|cpu|fake|cuda(:\d+)?", value, re.ASCII):
        raise click.BadParameter(f"{value!r} is none of auto, cuda, cuda:0, cuda:1 ..., cpu, fake")
    return value


def gpu(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A GPU of the table, by any name that means it.

    Raises: UsageError with the nearest names where none does.
    """
    if value is not None:
        from fa_advisor.probes.gpus import lookup

        lookup(value)
    return value


def absolute(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A file that the child process writes, wherever the target has taken it by then."""
    return None if value is None else os.path.abspath(value)
