"""The text view's sections on memory: the peak, its categories, the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from fa_advisor.records import ATTENTION_CATEGORIES, AllocatorState, Limit, ReportBody
from fa_advisor.views.layout import Page, bar, heading, sparkline
from fa_advisor.views.sizes import format_bytes, format_change, format_relative, format_share

GLOSSES = {
    "attention_score": "S = QK^T",
    "attention_prob": "P = softmax(S)",
    "attention_mask": "N x N masks, biases",
    "attention_dropout": "masks of P",
    "attention_grad": "dP, dS",
}
_ATTENTION = "attention N x N"


def attention_bytes(categories: dict[str, int]) -> int:
    """The bytes that FlashAttention removes: S, P, their masks and gradients."""
    return sum(categories.get(name, 0) for name in ATTENTION_CATEGORIES)


def peak(report: ReportBody, page: Page) -> Iterator[Text]:
    """Peak allocated, and apart from it: reserved, the GPU, and the peak without N x N."""
    memory, device, advice = report.memory, report.device, report.advice
    total = memory.peak_allocated_bytes
    fits = total <= device.total_memory_bytes
    facts: list[tuple[str, str, str]] = [
        (
            "peak allocated",
            format_bytes(total),
            f"{memory.basis}, in {_phase(memory.peak_phase)}",
        )
    ]
    if memory.peak_reserved_bytes is not None:
        facts.append(
            ("peak reserved", format_bytes(memory.peak_reserved_bytes), "held by the allocator")
        )
    if memory.allocator is not None:
        facts += _beyond(memory.allocator)
    if memory.outside_allocator_bytes is not None:
        facts.append(
            (
                "outside it",
                format_bytes(memory.outside_allocator_bytes),
                "CUDA context and libraries",
            )
        )
    facts.append(
        (
            "GPU memory",
            format_bytes(device.total_memory_bytes),
            page.joined(
                page.plain(device.name),
                f"sm_{device.compute_capability.replace('.', '')}",
                f"the peak is {format_share(total, device.total_memory_bytes)} of it"
                + ("" if fits else ": it doesn't fit"),
            ),
        )
    )
    if advice.counterfactual_peak_bytes is not None:
        without = advice.counterfactual_peak_bytes
        facts.append(
            (
                "without N x N",
                format_bytes(without),
                f"{format_change(without - total)}, {format_relative(total, without)}: the peak if "
                "attention's intermediates were gone"
                if without != total
                else "attention's intermediates don't set the peak",
            )
        )
    yield from _facts(page, facts)
    yield from _limits(report, page)


def _beyond(state: AllocatorState) -> list[tuple[str, str, str]]:
    """What the allocator held at the peak beyond what was allocated, where it is worth a line."""
    parts = (
        ("cached then", state.cached_bytes, "whole segments free: empty_cache() returns them"),
        ("fragmented then", state.fragmented_bytes, "free, in segments that are in use"),
        ("pending then", state.pending_bytes, "freed, but another stream may still use it"),
        ("private pools", state.private_pools_bytes, "of the reserved: CUDA graphs, MemPools"),
        ("other processes", state.other_processes_bytes or 0, "hold this of the same GPU"),
    )
    return [(name, format_bytes(size), meaning) for name, size, meaning in parts if size]


def _phase(phase: str) -> str:
    return "the optimizer step" if phase == "optimizer" else phase


def _facts(page: Page, facts: Sequence[tuple[str, str, str]]) -> Iterator[Text]:
    """Label, figure, and what it means, the meaning wrapped beside or below the figure."""
    labels = max(len(label) for label, _, _ in facts)
    figures = max(len(figure) for _, figure, _ in facts)
    for index, (label, figure, meaning) in enumerate(facts):
        line = Text(" " * page.margin).append(f"{label:<{labels}}  ", style="dim")
        line.append(f"{figure:>{figures}}", style="bold" if index == 0 else "")
        offset = page.margin + labels + figures + 4
        room = page.width - offset
        if room >= min(cell_len(meaning), 24):
            first, *others = page.filled(meaning, room)
            yield line.append("  ").append_text(first)
            for other in others:
                yield Text(" " * offset).append_text(other)
        else:
            yield line
            yield from page.wrapped(meaning, 2)


def _limits(report: ReportBody, page: Page) -> Iterator[Text]:
    """The longest sequence and the largest batch that fit the GPU, now and as advised."""
    target, advice = report.target, report.advice
    limits: list[tuple[str, Limit, str]] = [
        ("longest sequence", advice.max_seq_len, f"batch {target.batch_size}"),
        ("largest batch", advice.max_batch_size, f"sequence {target.seq_len}"),
    ]
    for label, limit, at in limits:
        if limit.now is None and limit.advised is None:
            continue
        now = "not known" if limit.now is None else f"{limit.now:,}"
        line = Text(f"{label} that fits: {now}")
        if limit.advised is not None and limit.advised != limit.now:
            line.append(f" {page.glyphs.arrow} ").append(
                f"{limit.advised:,} as advised", style="green"
            )
        if "None" not in at:
            line.append(f" ({at})", style="dim")
        yield from page.wrapped(line)


def categories(report: ReportBody, page: Page) -> Iterator[Text]:
    """A bar for each category; attention's summed as what FlashAttention removes."""
    memory = report.memory
    attention = attention_bytes(memory.categories)
    aside = "attention N x N: what FlashAttention removes" if attention else ""
    yield from heading(page, "Where the peak goes", aside)
    sizes = {
        name: size
        for name, size in memory.categories.items()
        if size and name not in ATTENTION_CATEGORIES
    }
    sizes[_ATTENTION] = attention
    if memory.unattributed_bytes or memory.basis == "measured":
        sizes["unattributed"] = memory.unattributed_bytes
    total, largest = memory.peak_allocated_bytes, max(sizes.values())
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if name != _ATTENTION:
            yield _category(page, name, size, total, largest, "blue")
            continue
        yield _category(page, name, size, total, largest, "red")
        parts = {part: memory.categories.get(part, 0) for part in ATTENTION_CATEGORIES}
        for part, part_size in sorted(parts.items(), key=lambda item: -item[1]):
            if part_size:
                yield _category(page, f"  {part}", part_size, total, largest, "red", GLOSSES[part])
    yield _category(page, "peak allocated", total, total, 0, "bold")
    if not attention:
        yield from page.wrapped(Text(_why_no_attention(report), style="dim"))


def _category(
    page: Page, name: str, size: int, total: int, largest: int, style: str, gloss: str = ""
) -> Text:
    """Name, bytes, share, a bar as long as `size` is of `largest`, and what the name means."""
    line = Text(" " * page.margin).append(
        f"{page.plain(name):<19} {format_bytes(size):>11} {format_share(size, total):>7}",
        style="" if style == "blue" else style,
    )
    room = page.width - len(line) - 2
    if room < 8 or not largest:
        return line
    columns = min(room, 28) if room >= 50 else min(room, 16)
    drawn = bar(page, size / largest, columns)
    line.append("  ").append(drawn, style=style)
    if gloss and room - columns - 2 >= len(gloss):
        line.append(" " * (columns - len(drawn) + 2)).append(gloss, style="dim")
    return line


def _why_no_attention(report: ReportBody) -> str:
    """Why attention has no bytes at the peak: fused, elsewhere, or not there at all."""
    sites = report.sites
    if not sites:
        return "No attention call was seen in this model."
    unfused = [
        site for site in sites if site.form in ("eager", "mha") or site.backend in ("eager", "math")
    ]
    backends = ", ".join(sorted({site.backend for site in sites}))
    if not unfused:
        return (
            f"All {len(sites)} attention sites run fused ({backends}): "
            "no N x N intermediates are kept, so none are left to remove."
        )
    return (
        f"{len(unfused)} of {len(sites)} attention sites make N x N intermediates, "
        "but none of them is alive at the peak."
    )


def timeline(report: ReportBody, page: Page) -> Iterator[Text]:
    """Memory over the measured step, and under it the phases."""
    points = report.memory.timeline
    if len(points) < 2:
        return
    yield from heading(
        page, "Memory over the step", "each column's highest; attention's N x N below"
    )
    first, last = points[0].t, points[-1].t
    columns = min(page.width - page.margin, 76, len(points))
    allocated, attention, phases = [0] * columns, [0] * columns, [""] * columns
    for point in points:
        at = min(columns - 1, (point.t - first) * columns // max(1, last - first + 1))
        phases[at] = phases[at] or point.phase
        allocated[at] = max(allocated[at], point.allocated_bytes)
        attention[at] = max(attention[at], point.attention_bytes)
    for at in range(1, columns):
        if not phases[at]:  # no event fell here: memory stayed as it was
            phases[at] = phases[at - 1]
            allocated[at], attention[at] = allocated[at - 1], attention[at - 1]
    top = max(allocated)
    margin = " " * page.margin
    yield Text(margin).append(sparkline(page, allocated, top), style="blue")
    if any(attention):
        yield Text(margin).append(sparkline(page, attention, top), style="red")
    labels = ""
    for phase, run in groupby(phases):
        width = len(list(run))
        label = f"|{phase}" if len(phase) < width else f"|{_SHORT.get(phase, '')}"
        labels += label[:width].ljust(width)
    yield Text(margin).append(labels.rstrip(), style="dim")
    highest = max(points, key=lambda point: point.allocated_bytes)
    if highest.module:
        where = f"the peak: in {highest.phase}, in {page.plain(highest.module)}"
        yield from page.wrapped(Text(where, style="dim"))


_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
