"""Two reports compared: the peak, category by category, site by site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fa_advisor.records import ATTENTION_CATEGORIES, AttentionSite, ReportBody
from fa_advisor.views.groups import Group, group_layers
from fa_advisor.views.layout import (
    ASCII,
    MAX_WIDTH,
    MIN_WIDTH,
    UNICODE,
    Column,
    Page,
    Row,
    heading,
    print_to_text,
    table,
)
from fa_advisor.views.sizes import format_bytes, format_change, format_relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure in bytes in both reports; `None` where a report doesn't have it."""

    name: str
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupChange:
    """Something about the runs, not about the model's memory, that differs."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteChange:
    """An attention site in both reports, or in one of them (`None` in the other)."""

    fqn: str
    before: AttentionSite | None
    after: AttentionSite | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDiff:
    """What changed from the first report to the second."""

    setup: tuple[SetupChange, ...]
    verdict: tuple[str, str]
    peak_allocated: Change
    peak_reserved: Change
    attention: Change
    categories: tuple[Change, ...]
    sites: tuple[SiteChange, ...]


def diff(a: ReportBody, b: ReportBody) -> ReportDiff:
    """Compare `a`, the first, with `b`."""
    before = a.memory.categories | {"unattributed": a.memory.unattributed_bytes}
    after = b.memory.categories | {"unattributed": b.memory.unattributed_bytes}
    return ReportDiff(
        setup=compare_setup(a, b),
        verdict=(a.advice.verdict, b.advice.verdict),
        peak_allocated=Change(
            name="peak allocated",
            before=a.memory.peak_allocated_bytes,
            after=b.memory.peak_allocated_bytes,
        ),
        peak_reserved=Change(
            name="peak reserved",
            before=a.memory.peak_reserved_bytes,
            after=b.memory.peak_reserved_bytes,
        ),
        attention=Change(name="attention N x N", before=_attention(a), after=_attention(b)),
        categories=tuple(
            Change(name=name, before=before.get(name, 0), after=after.get(name, 0))
            for name in dict.fromkeys([*before, *after])
            if before.get(name, 0) or after.get(name, 0)
        ),
        sites=_match(a.sites, b.sites),
    )


def compare_setup(a: ReportBody, b: ReportBody) -> tuple[SetupChange, ...]:
    """What differs about how two reports were made: schema, target, device, basis, versions."""
    pairs: list[tuple[str, object, object]] = [
        ("schema_version", a.schema_version, b.schema_version)
    ]
    for name in ("path", "name", "mode", "dtype", "batch_size", "seq_len", "parameters"):
        pairs.append((f"target {name}", getattr(a.target, name), getattr(b.target, name)))
    pairs += [
        ("device", a.device.name, b.device.name),
        ("basis", a.memory.basis, b.memory.basis),
        ("torch", a.environment.torch, b.environment.torch),
    ]
    return tuple(
        SetupChange(name=name, before=str(before), after=str(after))
        for name, before, after in pairs
        if before != after
    )


def _attention(report: ReportBody) -> int:
    return sum(report.memory.categories.get(name, 0) for name in ATTENTION_CATEGORIES)


def _match(a: Sequence[AttentionSite], b: Sequence[AttentionSite]) -> tuple[SiteChange, ...]:
    """Pair the sites of the same name and line, then those of the same name; the rest stand alone.

    A changed model moves its lines, so a line that differs doesn't make another site.
    """
    pairs: dict[int, AttentionSite] = {}
    left = list(b)
    for same in (_same_line, _same_name):
        for index, site in enumerate(a):
            if index not in pairs:
                found = next((at for at, other in enumerate(left) if same(site, other)), None)
                if found is not None:
                    pairs[index] = left.pop(found)
    matched = [
        SiteChange(fqn=site.fqn, before=site, after=pairs.get(index))
        for index, site in enumerate(a)
    ]
    return (*matched, *(SiteChange(fqn=site.fqn, before=None, after=site) for site in left))


def _same_line(a: AttentionSite, b: AttentionSite) -> bool:
    return a.fqn == b.fqn and a.source == b.source


def _same_name(a: AttentionSite, b: AttentionSite) -> bool:
    return a.fqn == b.fqn


def to_json(change: ReportDiff) -> bytes:
    """The comparison as UTF-8 JSON, indented by two; sizes are integer bytes."""
    return msgspec.json.format(msgspec.json.encode(change), indent=2) + b"\n"


def to_text(change: ReportDiff, width: int = 100, color: bool = False, ascii: bool = False) -> str:
    """The comparison as lines of at most `width` columns."""
    return print_to_text(DiffView(change, width), width=width, color=color, ascii=ascii)


@dataclass(frozen=True, slots=True)
class DiffView:
    """A comparison that prints itself to a rich console, at `width` or the console's."""

    change: ReportDiff
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(self.width or min(options.max_width, MAX_WIDTH), MIN_WIDTH)
        page = Page(console, width, ASCII if options.ascii_only else UNICODE)
        yield from _peak(self.change, page)
        for section in (_setup, _categories, _sites):
            lines = list(section(self.change, page))
            if lines:
                yield Text()
                yield from lines


def _peak(change: ReportDiff, page: Page) -> Iterator[Text]:
    before, after = change.verdict
    verdict = before if before == after else f"{before} {page.glyphs.arrow} {after}"
    yield Text(verdict.upper(), style="bold")
    yield from table(
        page, _COLUMNS, [_row(page, change.peak_allocated), _row(page, change.peak_reserved)]
    )


_COLUMNS = (
    Column(""),
    Column("before", True),
    Column("after", True),
    Column("change", True),
    Column("", True),
)


def _row(page: Page, change: Change) -> Row:
    before, after = (
        "-" if size is None else format_bytes(size) for size in (change.before, change.after)
    )
    from_to = f"{before} {page.glyphs.arrow} {after}"
    if change.before is None or change.after is None:
        return Row((change.name, before, after, "", ""), stacked=from_to)
    grown = change.after - change.before
    relative = format_relative(change.before, change.after) if grown else ""
    return Row(
        (page.plain(change.name), before, after, format_change(grown), relative),
        style=_colour(grown),
        stacked=f"{from_to}: {format_change(grown)}" + (f", {relative}" if grown else ""),
    )


def _colour(grown: int) -> str:
    return "red" if grown > 0 else "green" if grown < 0 else "dim"


def _setup(change: ReportDiff, page: Page) -> Iterator[Text]:
    """Said first: it is why two peaks may differ without the model having changed."""
    if not change.setup:
        return
    yield from heading(page, "The runs differ")
    for entry in change.setup:
        before, after = page.plain(entry.before), page.plain(entry.after)
        yield from page.wrapped(f"{entry.name}: {before} {page.glyphs.arrow} {after}")


def _categories(change: ReportDiff, page: Page) -> Iterator[Text]:
    """What changed most, first; what didn't change, in one line."""
    yield from heading(page, "Category by category")
    changed = sorted(filter(_grown, change.categories), key=lambda entry: -abs(_grown(entry)))
    rows = [_row(page, entry) for entry in changed]
    if _grown(change.attention):
        rows.append(_row(page, replace(change.attention, name="= attention N x N")))
    if rows:
        yield from table(page, _COLUMNS, rows)
    same = [entry.name for entry in change.categories if not _grown(entry)]
    if same:
        yield from page.wrapped(Text(f"unchanged: {page.plain(', '.join(same))}", style="dim"))


def _grown(change: Change) -> int:
    return (change.after or 0) - (change.before or 0)


def _sites(change: ReportDiff, page: Page) -> Iterator[Text]:
    if not change.sites:
        return
    yield from heading(page, "Site by site", "attention's N x N at the peak")
    groups = group_layers(change.sites, name=lambda site: site.fqn, equal=_kind)
    columns = (Column("site"), Column("sites", True), Column("runs on"), *_COLUMNS[1:4])
    rows = [_site_row(page, group) for group in groups]
    yield from table(page, columns, rows)


def _kind(site: SiteChange) -> tuple[object, ...]:
    """What must be the same for layers to share a row; lines may have moved."""
    return tuple(
        None if one is None else (_runs_on(one), one.attention_bytes_at_peak)
        for one in (site.before, site.after)
    )


def _site_row(page: Page, group: Group[SiteChange]) -> Row:
    first = group.members[0]
    befores = [site.before.attention_bytes_at_peak for site in group.members if site.before]
    afters = [site.after.attention_bytes_at_peak for site in group.members if site.after]
    old = page.plain(_runs_on(first.before)) if first.before else "not there"
    new = page.plain(_runs_on(first.after)) if first.after else "not there"
    grown = sum(afters) - sum(befores)
    runs_on = old if old == new else f"{old} {page.glyphs.arrow} {new}"
    before, after = (format_bytes(sum(sizes)) if sizes else "-" for sizes in (befores, afters))
    count = len(group.members)
    return Row(
        (
            page.plain(group.name or "(the model itself)"),
            str(count),
            runs_on,
            before,
            after,
            format_change(grown),
        ),
        style=_colour(grown) if grown or old == new else "",
        stacked=f"{count} {page.glyphs.times} {runs_on}: {before} {page.glyphs.arrow} {after}, "
        + format_change(grown),
    )


def _runs_on(site: AttentionSite) -> str:
    return site.backend if site.backend == site.form else f"{site.form}/{site.backend}"
