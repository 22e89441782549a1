"""The text view's sections on attention: its sites, why not faster, what to do, tiles."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import groupby

from rich.text import Text

from fa_advisor.records import AttentionSite, Recommendation, ReportBody, TileBudget
from fa_advisor.views.groups import Group, compress, group_layers
from fa_advisor.views.layout import Column, Page, Row, heading, table
from fa_advisor.views.sizes import KIB, format_bytes, format_change
from fa_advisor.views.wording import explain

TOP_SITES = 16


def sites(report: ReportBody, page: Page) -> Iterator[Text]:
    """Each kind of attention call, equal layers in one row."""
    if not report.sites:
        return
    calls = sum(site.calls for site in report.sites)
    yield from heading(
        page,
        "Attention sites",
        f"{_count(len(report.sites), 'site')}, {_count(calls, 'call')} a step",
    )
    groups = group_sites(report)
    shown = groups[:TOP_SITES]
    columns = (
        Column("site"),
        Column("sites", True),
        Column("form"),
        Column("backend"),
        Column("N x N at peak", True),
        Column("saved", True),
    )
    rows = [
        Row(
            (
                page.plain(group.name or "(the model itself)"),
                str(len(group.members)),
                group.members[0].form,
                page.plain(group.members[0].backend),
                format_bytes(sum(site.attention_bytes_at_peak for site in group.members)),
                format_bytes(sum(site.saved_for_backward_bytes for site in group.members)),
            ),
            style="" if _at_peak(group) else "green" if _fused(group.members[0]) else "",
            detail=(_described(page, group),),
        )
        for group in shown
    ]
    yield from table(page, columns, rows)
    rest = groups[TOP_SITES:]
    if rest:
        at_peak = format_bytes(sum(_at_peak(group) for group in rest))
        more = _count(sum(len(group.members) for group in rest), "more site")
        yield from page.wrapped(Text(f"and {more}: {at_peak} at the peak", style="dim"))


def group_sites(report: ReportBody) -> list[Group[AttentionSite]]:
    """Equal layers together; layers that differ only in bytes too, if there are many such."""
    exact = group_layers(report.sites, name=_fqn, equal=lambda site: (*_kind(site), *_bytes(site)))
    loose = group_layers(report.sites, name=_fqn, equal=_kind)
    return exact if len(exact) <= max(2 * len(loose), 4) else loose


def _fqn(site: AttentionSite) -> str:
    return site.fqn


def _kind(site: AttentionSite) -> tuple[Hashable, ...]:
    return (site.source, site.form, site.backend, site.calls, *_shape(site), _why_not(site))


def _shape(site: AttentionSite) -> tuple[Hashable, ...]:
    return (
        site.batch,
        site.num_heads,
        site.num_kv_heads,
        site.seqlen_q,
        site.seqlen_k,
        site.head_dim,
        site.dtype,
        site.is_causal,
        site.has_mask,
        site.dropout_p,
    )


def _why_not(site: AttentionSite) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(sorted((backend, tuple(codes)) for backend, codes in site.why_not.items()))


def _bytes(site: AttentionSite) -> tuple[int, int]:
    return site.attention_bytes_at_peak, site.saved_for_backward_bytes


def _at_peak(group: Group[AttentionSite]) -> int:
    return sum(site.attention_bytes_at_peak for site in group.members)


def _fused(site: AttentionSite) -> bool:
    return site.backend not in ("eager", "math")


def _described(page: Page, group: Group[AttentionSite]) -> str:
    """Shape, kind and source line of a group's sites, and how their bytes differ."""
    site = group.members[0]
    kv = "" if site.num_kv_heads == site.num_heads else f"/{site.num_kv_heads} kv"
    sizes = [member.attention_bytes_at_peak for member in group.members]
    spread = ""
    if min(sizes) != max(sizes):
        spread = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))} each at the peak"
    return page.joined(
        f"B {site.batch}, H {site.num_heads}{kv}, "
        f"N {site.seqlen_q} x {site.seqlen_k}, D {site.head_dim}",
        page.plain(site.dtype),
        ", ".join(
            word
            for word, there in (
                ("causal", site.is_causal),
                ("mask", site.has_mask),
                (f"dropout {site.dropout_p:g}", site.dropout_p > 0),
            )
            if there
        ),
        f"{site.calls} calls each" if site.calls > 1 else "",
        page.plain(site.source or ""),
        spread,
    )


def why_not(report: ReportBody, page: Page) -> Iterator[Text]:
    """Why each site isn't on a faster backend: the codes, each with its sentence."""
    reasons: dict[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], list[str]] = {}
    for site in report.sites:
        if site.why_not:
            reasons.setdefault((site.backend, _why_not(site)), []).append(site.fqn)
    if not reasons:
        return
    yield from heading(page, "Why not a faster backend")
    for (backend, codes_of), names in reasons.items():
        yield from page.wrapped(f"{_names(page, names)} on {page.plain(backend)}:")
        yield from _coded(page, dict(codes_of))


def _coded(page: Page, codes_of: dict[str, tuple[str, ...]]) -> Iterator[Text]:
    """Each code once, with its sentence and the backends that it rules out."""
    backends_of: dict[str, list[str]] = {}
    for backend, codes in codes_of.items():
        for code in codes:
            backends_of.setdefault(code, []).append(backend)
    for code, backends in backends_of.items():
        line = Text().append(f"not {page.plain(', '.join(backends))}: ", style="bold")
        line.append(page.plain(explain(code)))
        if explain(code) != code:
            line.append(f" [{page.plain(code)}]", style="dim")
        yield from page.wrapped(line, 2)


def _names(page: Page, names: list[str]) -> str:
    """Sites by name, equal layers once, and no more than a line or two of them."""
    compressed = compress(names)
    shown = ", ".join(page.plain(name or "(the model itself)") for name in compressed[:4])
    return shown if len(compressed) <= 4 else f"{shown} and {len(compressed) - 4} more"


def advice(report: ReportBody, page: Page) -> Iterator[Text]:
    """What to do, site by site, what it would bring, and why."""
    if not report.advice.recommendations:
        return
    yield from heading(page, "What to do")
    numbered = len(report.advice.recommendations) > 1
    for number, recommendation in enumerate(report.advice.recommendations, 1):
        prefix = f"{number}. " if numbered else ""
        yield from _recommended(report, page, recommendation, prefix)


def _recommended(
    report: ReportBody, page: Page, recommendation: Recommendation, prefix: str
) -> Iterator[Text]:
    keep = recommendation.backend == "keep"
    what = "Keep what runs" if keep else f"Use {page.plain(recommendation.backend)}"
    where = f"{_names(page, list(recommendation.sites))}" if recommendation.sites else ""
    count = (
        f" ({_count(len(recommendation.sites), 'site')})" if len(recommendation.sites) > 1 else ""
    )
    line = Text(prefix).append(what, style="bold" if keep else "bold green")
    if where:
        line.append(f" at {where}{count}")
    if recommendation.tile is not None:
        tile = recommendation.tile
        line.append(f", tile {tile.block_m} x {tile.block_n}")
        line.append(f", {tile.num_warps} warps, {tile.num_stages} stages")
    yield from page.wrapped(line)
    predicted = recommendation.predicted
    now = report.memory.peak_allocated_bytes
    if predicted.peak_allocated_bytes is not None and predicted.peak_allocated_bytes != now:
        would_be = format_bytes(predicted.peak_allocated_bytes)
        change = format_change(predicted.peak_allocated_bytes - now)
        text = f"peak allocated would be {would_be} ({change}), {recommendation.basis}"
        yield from page.wrapped(text, 2)
    elif predicted.peak_allocated_bytes is not None and not keep:
        yield from page.wrapped(f"peak allocated would stay, {recommendation.basis}", 2)
    if predicted.time_ms is not None:
        yield from page.wrapped(
            f"attention would take {predicted.time_ms:.3g} ms, {recommendation.basis}", 2
        )
    for reason in recommendation.reasons:
        yield from page.wrapped(f"because {page.plain(reason)}", 2)
    # A code that was explained above isn't explained again.
    explained = {code for site in report.sites for codes in site.why_not.values() for code in codes}
    repeated: dict[str, tuple[str, ...]] = {}
    added: dict[str, tuple[str, ...]] = {}
    for backend, codes in recommendation.rejections.items():
        repeated[backend] = tuple(code for code in codes if code in explained)
        added[backend] = tuple(code for code in codes if code not in explained)
    yield from _coded(page, added)
    for backend, codes in repeated.items():
        if codes:
            yield from page.wrapped(page.plain(f"not {backend}: {', '.join(codes)}"), 2)


def tiles(report: ReportBody, page: Page) -> Iterator[Text]:
    """What attention's tiles cost on this GPU, for the head dims that were profiled."""
    if not report.budgets:
        return
    device = report.device
    yield from heading(
        page,
        "Tiles",
        f"{device.smem_per_block_optin_bytes // KIB} KiB of shared memory a block "
        f"on {page.plain(device.name)}",
    )
    registers = any(tile.registers_per_thread is not None for tile in report.budgets)
    spills = any(tile.spill_bytes is not None for tile in report.budgets)
    columns = [
        Column("tile"),
        Column("warps", True),
        Column("stages", True),
        Column("textbook", True),
        Column("shared", True),
        *([Column("regs", True)] if registers else []),
        *([Column("spill", True)] if spills else []),
        Column("CTAs/SM", True),
        Column("limited by"),
        Column("fits"),
    ]
    for (head_dim, dtype, direction, kernel), run in groupby(report.budgets, key=_kernel):
        what = f"{kernel}, {direction}, head_dim {head_dim}, {dtype}"
        yield from page.wrapped(Text(page.plain(what), style="bold"))
        yield from table(page, columns, [_tile(tile, registers, spills) for tile in run])
    bases = " and ".join(sorted({tile.basis for tile in report.budgets}))
    legend = (
        f"{bases}; textbook: Q, K, V, S and O in the input dtype; shared: what the kernel takes;"
        " regs: ~ modelled, + wants more and spills; in the order of use"
    )
    yield from page.wrapped(Text(legend, style="dim"))


def _kernel(tile: TileBudget) -> tuple[int, str, str, str]:
    return tile.head_dim, tile.dtype, tile.direction, tile.kernel


def _tile(tile: TileBudget, registers: bool, spills: bool) -> Row:
    spilled = "" if tile.spill_bytes is None else f"{tile.spill_bytes} B"
    per_thread = "" if tile.registers_per_thread is None else str(tile.registers_per_thread)
    if per_thread and tile.basis == "modelled":
        over = "+" if any("spill" in warning for warning in tile.warnings) else ""
        per_thread = f"~{per_thread}{over}"
    return Row(
        (
            f"{tile.block_m} x {tile.block_n}",
            str(tile.num_warps),
            str(tile.num_stages),
            f"{tile.smem_textbook_bytes / KIB:.4g} KiB",
            f"{tile.smem_bytes / KIB:.4g} KiB",
            *((per_thread,) if registers else ()),
            *((spilled,) if spills else ()),
            str(tile.ctas_per_sm),
            tile.limiter,
            "yes" if tile.fits else "no",
        ),
        style="" if tile.fits else "red",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
