"""Sizes, shares and counts as people read and write them: binary units, two decimals.

Standard library only, so that any layer may import it.
"""

from __future__ import annotations

import re
from decimal import Decimal

from fa_advisor.errors import UsageError

KIB, MIB, GIB, TIB, PIB, EIB = 2**10, 2**20, 2**30, 2**40, 2**50, 2**60

_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "pib": PIB,
    "eib": EIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "eb": 10**18,
}
_SCALE = (
    (1, "B"),
    (KIB, "KiB"),
    (MIB, "MiB"),
    (GIB, "GiB"),
    (TIB, "TiB"),
    (PIB, "PiB"),
    (EIB, "EiB"),
)
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", re.ASCII)


def format_bytes(size: int) -> str:
    """`size` bytes as "2.46 GiB", "576.00 MiB", "16.00 KiB" or "-12 B"."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for factor, unit in _SCALE:
        # Rounded before it is compared: 1023.999 MiB is "1.00 GiB", not "1024.00 MiB".
        if unit == "EiB" or round(size / factor, 2) < 1024:
            break
    number = str(size) if unit == "B" else f"{size / factor:.2f}"
    return f"{sign}{number} {unit}"


def format_change(size: int) -> str:
    """A difference in bytes with its sign: "+576.00 MiB", "-12 B", "0 B"."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def format_share(part: float, whole: float) -> str:
    """`part` of `whole` as "22.8 %"; "-" where there is no whole."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %"


def format_relative(before: int, after: int) -> str:
    """The change from `before` to `after` as "+2.0 %"; "new" where there was nothing."""
    if before == after:
        return "0.0 %"
    return f"{100 * (after - before) / before:+.1f} %" if before else "new"


def format_count(count: float) -> str:
    """A large count for people: 124439808 is "124.4 M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:g}"


def parse_size(text: str) -> int:
    """The bytes in "24GiB", "24 GB", "1.5 MiB" or "1024"; decimal units are powers of 1000.

    Raises: UsageError where `text` isn't such a size, or is zero.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    size = Decimal(match[1].replace("_", "")) * factor if match and factor else Decimal(0)
    if size < 1 or (factor == 1 and size != int(size)):
        raise UsageError(
            f"{text!r} is not a size",
            hint="write a number above zero and a unit: 24GiB, 512MiB, 24GB, 800MB, or plain bytes",
        )
    return int(size)


def parse_percent(text: str) -> float:
    """The number in "2%" or "0.5 %".

    Raises: UsageError where `text` isn't a percentage.
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a percentage", hint="write it with its sign: 2% or 0.5%")
    return float(match[1])
