"""Writes the figures of the README and the docs from the files under benchmarks/results/.

    python benchmarks/readme.py

Each stands between `<!-- figures: NAME -->` and `<!-- end -->`; tests/unit/test_readme.py holds
the pages to them.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa_advisor.budgets.table import LAUNCHED_STACK_BYTES
from fa_advisor.report import load
from fa_advisor.views.text import to_text

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page
    for page in (
        "README.md",
        "docs/flash-attention.md",
        "docs/hopper.md",
        "docs/patching.md",
        "docs/budgets.md",
    )
)
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def demo() -> str:
    """The report of the bundled example, down to its attention sites."""
    text = to_text(load(RESULTS / "demo.json"), width=96)
    shown = text.split("\nWHY NOT")[0].rstrip()
    return f"```\n{shown}\n```\n"


def peaks() -> str:
    """The peaks table: plain run, report, and the estimate without a GPU."""
    result = _read("peaks")
    rows = [
        "| model | plain run's peak | report's peak | explained | estimated without a GPU |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        plain, seen, fake = row["plain"]["peak"], row["profiled"], row["fake"]["peak"]
        explained = 1 - seen["unattributed"] / seen["peak"]
        rows.append(
            f"| {row['case'].replace('-', ', ')} | {plain / 2**20:,.1f} MiB"
            f" | {seen['peak'] / 2**20:,.1f} MiB | {explained:.1%}"
            f" | {fake / 2**20:,.1f} MiB ({fake / plain - 1:+.2%}) |"
        )
    where = result["provenance"]
    rows.append(
        f"\n{where['gpu']}, torch {where['torch']}, transformers {result['transformers']}, bf16,"
        f" batch {result['batch']}, {result['length']:,} tokens, {where['date']}."
    )
    return "\n".join(rows) + "\n"


def engine() -> str:
    """What a profile without a GPU costs."""
    result = _read("engine")
    rows = [
        "| two training steps, 8,192 tokens, AdamW | time | memory | against bare fake tensors |",
        "|---|---|---|---|",
    ]
    for name in ("llama-3-8b", "llama-3-70b"):
        row = result[name]
        rows.append(
            f"| {name} | {row['engine']['steps_s']:.1f} s | {row['engine']['rss_gib']:.2f} GiB"
            f" | {row['ratio']:.2f}x |"
        )
    where = result["provenance"]
    rows.append(f"\n{where['cores']} cores, torch {where['torch']}, {where['date']}.")
    return "\n".join(rows) + "\n"


def attention() -> str:
    """The kernels' speed, plain calls and those with a feature."""
    result = _read("attention")
    peers = ("ours", "flash", "cudnn", "efficient")
    rows = [
        "| TFLOP/s, forward / backward | ours | FlashAttention-2 | cuDNN | efficient |",
        "|---|---|---|---|---|",
    ]
    for row in result["plain"]:
        b, h, n, d = row["shape"]
        speeds = (
            f"{row[peer]['forward_tflops']:.0f} / {row[peer]['backward_tflops']:.0f}"
            for peer in peers
        )
        rows.append(
            f"| {b} x {h} heads x {n:,} x {d}{', causal' if row['causal'] else ''} | "
            + " | ".join(speeds)
            + " |"
        )
    rows += [
        "",
        "| ms, forward / backward; 4 x 16 heads x 4,096 x 128 | ours | best other | which |",
        "|---|---|---|---|",
    ]
    for row in result["features"]:
        others = {
            name: peer
            for name, peer in row.items()
            if name not in ("feature", "ours") and "backward_ms" in peer
        }
        best = [
            min(others, key=lambda name, way=way: others[name][f"{way}_ms"])  # type: ignore[misc]
            for way in _WAYS
        ]
        ours = (f"{row['ours'][f'{way}_ms']:.2f}" for way in _WAYS)
        other = (f"{others[name][f'{way}_ms']:.2f}" for way, name in zip(_WAYS, best, strict=True))
        named = best[0] if best[0] == best[1] else " / ".join(best)
        rows.append(f"| {row['feature']} | {' / '.join(ours)} | {' / '.join(other)} | {named} |")
    where = result["provenance"]
    rows.append(
        f"\n{where['gpu']}, torch {where['torch']}, triton {where['triton']}, bf16,"
        f" {where['date']}, commit {where['commit']}. Host time of a call at length 128:"
        " {ours_forward_us:.0f} us (SDPA {sdpa_forward_us:.0f}), with its backward"
        " {ours_forward_backward_us:.0f} us ({sdpa_forward_backward_us:.0f}).".format(
            **result["host"]
        )
    )
    return "\n".join(rows) + "\n"


def budgets() -> str:
    """The textbook's formula beside the compiler."""
    result = _read("budgets")
    gpus = list(dict.fromkeys(row["gpu"] for row in result["rows"]))
    rows = [
        "| head dim | tile | warps, stages | textbook | " + " | ".join(gpus) + " |",
        "|---|---|---|---" + "|---" * len(gpus) + "|",
    ]
    kinds: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        kind = tuple(
            row[name] for name in ("head_dim", "block_m", "block_n", "num_warps", "num_stages")
        )
        kinds.setdefault(kind, []).append(row)
    for (head_dim, m, n, warps, stages), own in kinds.items():
        taken = (
            f"{row['smem_bytes'] / 1024:.1f}{'' if row['fits'] else ' (too much)'},"
            f" {row['registers_per_thread']} regs"
            + (f", {row['spill_bytes']} B spilled" if row["spill_bytes"] else "")
            for row in own
        )
        rows.append(
            f"| {head_dim} | {m} x {n} | {warps}, {stages}"
            f" | {own[0]['smem_textbook_bytes'] / 1024:.1f} | " + " | ".join(taken) + " |"
        )
    where = result["provenance"]
    rows.append(
        f"\nKiB of shared memory a block, registers a thread; bf16, triton {where['triton']},"
        f" {where['date']}. On {where['cores']} cores `fa-advisor budget --head-dim 128 --gpu h100`"
        " takes {cold:.0f} s with nothing on disk, {warm:.2f} s with all on disk, {modelled:.2f} s"
        " modelled.".format(**result["seconds"])
    )
    return "\n".join(rows) + "\n"


def budget_model() -> str:
    """How far the model is from the compiler."""
    result = _read("budget_model")
    rows = [
        "| | tiles | shared memory exact | fits though it doesn't | doesn't though it fits"
        " | registers off by (mean, most) | spills found | of those said to spill, do |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ("forward", "keys", "queries", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "all"):
        row = result[name]
        recall, precision = row["spill_recall"], row["spill_precision"]
        rows.append(
            f"| {name} | {row['configs']} | {row['smem_exact']:.0%} | {row['fits_false_yes']}"
            f" | {row['fits_false_no']}"
            f" | {row['registers_mean_error']:.0f}, {row['registers_max_error']}"
            f" | {'' if recall is None else f'{recall:.0%}'}"
            f" | {'' if precision is None else f'{precision:.0%}'} |"
        )
    where = result["provenance"]
    rows.append(f"\ntriton {where['triton']}, {where['date']}, seed {result['seed']}.")
    return "\n".join(rows) + "\n"


def patched() -> str:
    """Models before and after `fa_advisor.patch`."""
    result = _read("patched")
    rows = [
        "| model | attention | sites patched | training step: peak, GiB | ms | inference: peak, GiB"
        " | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = []
        for mode in ("train", "infer"):
            before, after = row["before"][mode], row["after"][mode]
            cells += [
                f"{before['peak_bytes'] / 2**30:.2f} -> {after['peak_bytes'] / 2**30:.2f}",
                f"{before['ms']:.1f} -> {after['ms']:.1f}",
            ]
        sites = f"{row['sites']['patched']} of {row['sites']['all']}"
        rows.append(f"| {row['model']} | {row['attention']} | {sites} | {' | '.join(cells)} |")
    within = sum(row["within"] for row in result["rows"])
    worst = max(row["worst"]["of_allowed"] for row in result["rows"])
    restored = sum(row["loss_restored_to_the_bit"] for row in result["rows"])
    where = result["provenance"]
    rows.append(
        f"\nLoss and every module's gradients within the criterion in {within} of"
        f" {len(result['rows'])} (the worst takes {worst:.0%} of what is allowed); after"
        f" `unpatch()` the loss is the same to the bit in {restored}. {where['gpu']},"
        f" torch {where['torch']}, triton {where['triton']}, transformers {result['transformers']},"
        f" bf16, {where['date']}, commit {where['commit']}."
    )
    return "\n".join(rows) + "\n"


def tiles() -> str:
    """How far the budget's first tile is from the fastest, by kernel and head dim."""
    result = _read("tiles")
    behind: dict[tuple[str, int], list[float]] = {}
    rows = result["rows"]
    key = ("kernel", "head_dim", "length", "causal")
    for kind, run in itertools.groupby(rows, key=lambda row: [row[name] for name in key]):
        own = list(run)
        first = next(row for row in own if row["fits"])
        best = min(row["ms"] for row in own if _accepted(row))
        behind.setdefault((kind[0], kind[1]), []).append(first["ms"] / best)
    dims = sorted({dim for _, dim in behind})
    lines = [
        "| first tile's time over the fastest's, mean (worst) | "
        + " | ".join(f"D {dim}" for dim in dims)
        + " | all |",
        "|---|" + "---|" * (len(dims) + 1),
    ]
    for kernel, names in _NAMES:
        kinds = [behind[kernel, dim] for dim in dims]
        every = [ratio for kind in kinds for ratio in kind]
        cells = [f"{_mean(each):.3f} ({max(each):.2f})" for each in (*kinds, every)]
        lines.append(f"| {names} | {' | '.join(cells)} |")
    found, where = result["summary"], result["provenance"]
    modelled = found["modelled_first_over_best"]
    shapes = len({(row["head_dim"], row["length"], row["causal"]) for row in rows})
    smem = sum(row["smem"] == row["loaded"][0] for row in rows if row["launches"])
    lines.append(
        f"\n{shapes} shapes. Of {found['of_compiled']:,} loaded kernels {smem:,} have the shared"
        f" memory of the one compiled ahead, {found['equal']:,} its registers and stack too;"
        f" {found['ctas_equal']:,} have the driver's count of blocks an SM. Said to fit, but didn't"
        f" launch: {found['said_to_fit_but_failed']}; said not to, but did:"
        f" {found['said_not_to_fit_but_ran']} (of {found['tiles']:,})."
        f" {found['spilling_more_than_a_launch_accepts']} spill more than a launch accepts, and"
        " don't count as the fastest. With `--modelled`, mean (worst): "
        + ", ".join(
            f"{names} {modelled[kernel]['geometric mean']:.3f} ({modelled[kernel]['worst']:.2f})"
            + (
                f" but for {modelled[kernel]['refused']} whose first tile a launch refuses"
                if modelled[kernel]["refused"]
                else ""
            )
            for kernel, names in _NAMES
        )
        + f". {where['gpu']}, triton"
        f" {where['triton']}, bf16, {where['date']}, commit {where['commit']}."
    )
    return "\n".join(lines) + "\n"


def tiles_fit() -> str:
    """The same for shapes that the constants weren't fitted to."""
    result = _read("tiles_fit")
    lines = [
        "| left out | " + " | ".join(names for _, names in _NAMES) + " | times off by (rms) |",
        "|---|" + "---|" * (len(_NAMES) + 1),
    ]
    for row in result["rows"]:
        found = row["first_over_best"]
        cells = [
            f"{found[kernel]['geometric mean']:.3f} ({found[kernel]['worst']:.2f})"
            for kernel, _ in _NAMES
        ]
        lines.append(f"| {row['left_out']} | {' | '.join(cells)} | {row['times_off_rms']:.0%} |")
    where = result["provenance"]
    lines.append(
        "\nFirst tile's time over the fastest's, mean (worst); times: of tiles that take up to half"
        f" more than the fastest. {result['rounds']:,} rounds, {where['date']}."
    )
    return "\n".join(lines) + "\n"


def hopper() -> str:
    """The Hopper kernels beside their peers, and how many times as fast as the best of them."""
    result = _read("hopper")
    peers = ("ours", "fa4", "cudnn", "flex", "fa2")
    ratios = result["summary"]
    lines = [
        "| TFLOP/s, forward / backward | ours | FlashAttention-4 | cuDNN | FlexAttention"
        " | FlashAttention-2 | ours over the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        label = f"{row['name']}, {'causal' if row['causal'] else 'full'}"
        cells = [
            " / ".join(f"{row[peer][way]['tflops']:.0f}" for way in _WAYS) if peer in row else ""
            for peer in peers
        ]
        over = " / ".join(f"{ratios[way]['over_the_best'][label]:.2f}" for way in _WAYS)
        lines.append(f"| {label} | {' | '.join(cells)} | {over} |")
    where = result["provenance"]
    means = " / ".join(f"{ratios[way]['geometric_mean']:.2f}" for way in _WAYS)
    worst = " / ".join(f"{ratios[way]['worst']:.2f}" for way in _WAYS)
    lines.append(
        f"\nOver the best peer, geometric mean of the ten plain cells: {means}, worst {worst}."
        f" 1k: batch 16, 16 heads; 4k: 4, 16; 16k: 1, 16; head dim 128; 64: 4, 32 heads; 256: 2, 8."
        f" A plain product of matrices: {result['matmul_tflops']:.0f} TFLOP/s. {where['gpu']},"
        f" torch {where['torch']}, triton {where['triton']}, bf16, {where['date']},"
        f" commit {where['commit']}."
    )
    return "\n".join(lines) + "\n"


def hopper_means() -> str:
    """The same in a sentence."""
    result = _read("hopper")
    where, ratios = result["provenance"], result["summary"]
    forward, backward = (ratios[way] for way in _WAYS)
    return (
        f"On an {where['gpu']} the bundled Triton kernels run at"
        f" {forward['geometric_mean']:.3f} times the speed of the best of FlashAttention-4, cuDNN,"
        f" FlexAttention and FlashAttention-2 forward, at {backward['geometric_mean']:.3f} times"
        f" backward: geometric means of ten shapes in bf16, the worst {forward['worst']:.2f} and"
        f" {backward['worst']:.2f} ([all of them, and what was tried](docs/hopper.md)). torch"
        f" {where['torch']}, triton {where['triton']}, {where['date']}.\n"
    )


def hopper_variants() -> str:
    """Every variant that was timed, a table a run."""
    lines = []
    result = _read("hopper_variants")
    for table in result["tables"]:
        unit = table.get("unit", "tflops")
        names = list(dict.fromkeys(name for row in table["rows"] for name in row[unit]))
        lines += [
            f"{_upper(table['name'])}. {_upper(table['variants'])}."
            f" {'TFLOP/s' if unit == 'tflops' else _upper(unit)}:",
            "",
            "| | " + " | ".join(names) + " |",
            "|" + "---|" * (len(names) + 1),
        ]
        for row in table["rows"]:
            b, h, n, d = row["shape"]
            kind = "causal" if row["causal"] else "full"
            cells = (str(row[unit].get(name, "")) for name in names)
            lines.append(f"| {b} x {h} x {n:,} x {d}, {kind} | {' | '.join(cells)} |")
        lines.append("")
    spans, instructions = result["timeline"], result["pipes"]
    columns = list(spans["fp8"][0])[1:]
    lines += [f"{spans['question']}:", "", f"| | {' | '.join(columns)} |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for dtype in ("fp8", "bf16"):
        for row in spans[dtype]:
            cells = (f"{row[column]:,}" for column in columns)
            lines.append(f"| {dtype}, consumer {row['consumer']} | {' | '.join(cells)} |")
    each = ", ".join(f"{name} {cycles:.1f}" for name, cycles in instructions["cycles"].items())
    lines += ["", f"{instructions['question']}: {each}.", ""]
    return "\n".join(lines)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def fp8() -> str:
    """The forward on fp8: its speed beside bf16's, then its error."""
    result = _read("fp8")
    lines = ["| TFLOP/s | fp8, V's transpose counted | bf16 | |", "|---|---|---|---|"]
    for row in result["rows"]:
        narrow, wide = row["fp8"]["tflops"], row["bf16"]["tflops"]
        kind = "causal" if row["causal"] else "full"
        times = f"{narrow / wide:.2f} times"
        lines.append(f"| {row['name']}, {kind} | {narrow:.0f} | {wide:.0f} | {times} |")
    lines += ["", "| at 16k | error | too short by | P rounded alone |", "|---|---|---|---|"]
    for row in result["accuracy"]:
        lines.append(
            f"| V around {row['mean']:.0f} | {row['error']:.2%} | {max(0.0, -row['slope']):.2%}"
            f" | {row['p_rounded']:.2%} |"
        )
    where = result["provenance"]
    line = (
        f"{where['gpu']}, torch {where['torch']}, triton {where['triton']}, {where['date']},"
        f" commit {where['commit']}. {result.get('note', '')}"
    )
    lines += ["", line.rstrip()]
    return "\n".join(lines) + "\n"


def ledger() -> str:
    """How far the GPU's ledger adds up, and the estimate beside it."""
    result = _read("ledger")
    same, within, beyond, estimates, shares = 0, 0, [], {}, []
    for row in result["rows"]:
        three = [row[kind]["peak"] for kind in ("plain", "again", "third")]
        peak = row["profiled"]["peak"]
        shares.append(row["profiled"]["unattributed"] / peak)
        estimates[row["case"]] = row["fake"]["peak"] / three[0] - 1
        if peak == three[0]:
            same += 1
        elif min(three) <= peak <= max(three):
            within += 1
        else:
            beyond.append(f"{row['case']} ({peak - three[0]:+,} B; {_further(row)})")
    asked = sum(row["history"]["same"] for row in result["rows"])
    far = {case: off for case, off in estimates.items() if abs(off) > 0.03}
    near = max(abs(off) for case, off in estimates.items() if case not in far)
    where, elsewhere = result["provenance"], result["provenance_of_fake"]
    costs = ", ".join(
        f"{cost['factor']:.1f} at {cost['shape'][0]} x {cost['shape'][1]:,} tokens"
        for cost in result["overhead"]
    )
    return (
        f"In {len(estimates)} cases (GPT-2, Llama, BERT, T5, ViT, Whisper, Swin, a hand-written"
        f" nanoGPT; inference, training, checkpointing, autocast, compiled) {max(shares):.3%} of"
        f" the peak was unattributed. The report's peak was the plain run's to the byte in {same},"
        f" between three plain runs' in {within}"
        + "".join(f", and neither in {case}" for case in beyond)
        + f"; {asked} asked the allocator for the same as the plain run, in the same order but for"
        f" frees. The estimate without the GPU was within {near:.2%} of the plain peak in"
        f" {len(estimates) - len(far)}; "
        + ", ".join(f"{case} {off:+.1%}" for case, off in far.items())
        + f". A recorded step of GPT-2 small took so many times a plain one: {costs}.\n\n"
        f"{where['gpu']}, torch {where['torch']}, {where['date']}, commit {where['commit']}; the"
        f" estimates on a CPU with torch {elsewhere['torch']}, commit {elsewhere['commit']}.\n"
    )


def _further(row: dict[str, Any]) -> str:
    """What further plain runs had, where the first three don't tell."""
    more = row.get("more_plain_peaks", ())
    values = {row["plain"]["peak"], *more}
    if row["report_within_plain_runs"]:
        return f"between the {len(values)} values of {3 + len(more)} plain runs"
    return f"outside of what {3 + len(more)} plain runs had"


def _accepted(row: dict[str, Any]) -> bool:
    """Whether a launch takes the tile, rather than one that spills less."""
    return row["launches"] and row["loaded"][2] <= LAUNCHED_STACK_BYTES[row["kernel"]]


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


_WAYS = ("forward", "backward")
_NAMES = (("forward", "forward"), ("keys", "dK, dV"), ("queries", "dQ"))
FIGURES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "peaks": peaks,
    "ledger": ledger,
    "engine": engine,
    "attention": attention,
    "budgets": budgets,
    "budget_model": budget_model,
    "patched": patched,
    "tiles": tiles,
    "tiles_fit": tiles_fit,
    "hopper": hopper,
    "hopper_means": hopper_means,
    "hopper_variants": hopper_variants,
    "fp8": fp8,
}


def rendered(text: str) -> str:
    """A page with every figure written anew."""
    return _BLOCK.sub(lambda m: m[1] + FIGURES[m[2]]() + m[3], text)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
