"""Is the report's peak the uninstrumented run's, to the byte, and how much of it is explained?

    python benchmarks/ledger.py             # writes benchmarks/results/ledger.json; needs a GPU
    python benchmarks/ledger.py --only gpt2 --workers 4
    python benchmarks/ledger.py --overhead  # only what the profiler costs a step, writes nothing

For each of 24 cases, in a process of its own each: the plain run (its peak, three times, and six
more where the report's isn't between theirs, for the allocator's own spread; its parameters,
gradients and optimizer state counted), the profiled run's report, and the estimate on fake tensors
for the same GPU. And the time of a step of GPT-2 small, plain and recorded.

`requests`: every request and free of the measured step, plain beside profiled, up to the plain
run's end (the profiled one goes on to the optimizer's end, by frees alone). `history`: the same
from the process's beginning: the model built, both steps. Of frees that no request comes between
the order doesn't count: autocast drops its casts in the order of their addresses, and the free
blocks that result are the same in any. Where the whole history is the same the observer changed
nothing, and peaks that differ all the same do so as plain runs' do: which of several free blocks of
a size is taken is decided by their addresses, which the driver gives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ledger_models import CASES, build
from provenance import RESULTS, provenance, write

PLAIN = ("plain", "again", "third")
KINDS = (*PLAIN, "profiled", "fake")
MORE = 6


def plain(case: str, *, requests: bool) -> dict[str, Any]:
    """Two steps without the tool, the second measured, and its requests kept if asked for."""
    import torch

    built = 0
    if requests:
        record_requests()
    model, inputs, mode = build(case, "cuda")
    model.train(mode == "train")
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.0)
    gradients = 0
    for step in range(2):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            built = len(recorded_requests()) if requests else 0
        if mode == "train":
            model(**inputs)["loss"].backward()
            gradients = held(p.grad for p in trainable if p.grad is not None)
            optimizer.step()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                model(**inputs)
    torch.cuda.synchronize()
    if requests:
        keep_requests(case, "plain", recorded_requests(), built)
    state = [v for s in optimizer.state.values() for v in s.values()]
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "parameter": held(model.parameters()),
        "gradient": gradients,
        "optimizer_state": held(v for v in state if torch.is_tensor(v) and v.is_cuda),
    }


def record_requests() -> None:
    """Record the allocator's events from now on, without stacks."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)


def recorded_requests() -> list[int]:
    """The bytes of every request so far, negative for a free."""
    import torch

    return sizes(torch.cuda.memory._snapshot()["device_traces"][0])


def sizes(events: list[Any]) -> list[int]:
    """The bytes of every request among the events, negative for a free."""
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[e["action"]] * e["size"] for e in events if e["action"] in signs]


def keep_requests(case: str, kind: str, history: list[int], before: int) -> None:
    """Leave them for the process that compares; `before` of them came before the measured step."""
    kept = {"history": history, "before": before}
    (Path(os.environ[_FOLDER]) / f"{case}-{kind}.json").write_text(json.dumps(kept))


def compared_requests(folder: Path, case: str) -> dict[str, Any]:
    """`requests` and `history`, of each how many there are and the first that isn't the same; empty
    where one side is missing."""
    files = [folder / f"{case}-{kind}.json" for kind in ("plain", "profiled")]
    if not all(file.exists() for file in files):
        return {}
    one, other = (json.loads(file.read_text()) for file in files)
    return {
        "requests": _compared(*(r["history"][r["before"] :] for r in (one, other))),
        "history": _compared(one["history"], other["history"]),
    }


def _compared(plain: list[int], profiled: list[int]) -> dict[str, Any]:
    """Whether the profiled list is the plain one and then frees alone."""
    one, other = in_order(plain), in_order(profiled[: len(plain)])
    pairs = enumerate(zip(one, other, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    rest = profiled[len(plain) :]
    same = one == other and all(size < 0 for size in rest)
    return {
        "same": same,
        "same_in_order": same and plain == profiled[: len(plain)],
        "count": len(plain),
        "frees_after": len(rest),
        "first_difference": None if same else first,
        "around": None if same else [one[max(0, first - 3) : first + 5], other[first : first + 5]],
    }


def in_order(requests: list[int]) -> list[int]:
    """The requests with the frees between two of them sorted."""
    made: list[int] = []
    frees: list[int] = []
    for size in requests:
        if size < 0:
            frees.append(size)
        else:
            made += [*sorted(frees), size]
            frees.clear()
    return made + sorted(frees)


_FOLDER = "FA_ADVISOR_LEDGER_FOLDER"


def held(tensors: Iterable[Any]) -> int:
    """The bytes of the tensors' storages, each once: Inductor pads the product that is the gradient
    of an embedding of 50,257 rows to 50,264, and the gradient is a view of it."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def profiled(case: str, *, fake: bool) -> dict[str, Any]:
    """The tool's report of the case."""
    import torch

    import fa_advisor
    from fa_advisor import gpu_ledger, measure

    seen: dict[str, Any] = {}
    assemble = measure.assemble

    def keeping(**facts: Any) -> Any:
        seen.update(facts)
        return assemble(**facts)

    read = gpu_ledger._trace

    stages: list[list[int]] = []  # the building, the first step, the measured one

    def reading(cut: Any) -> Any:
        stages.append(sizes(cut["events"]))
        return read(cut)

    measure.assemble, gpu_ledger._trace = keeping, reading
    if not fake:
        record_requests()
    model, inputs, mode = build(case, "cpu" if fake else "cuda")
    if not fake:
        stages.append(recorded_requests())
        torch.cuda.memory._record_memory_history(None)
    start = time.perf_counter()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "h200"
    report = fa_advisor.profile(model, inputs, mode=mode, gpu=name if fake else None)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    if len(stages) > 1:
        before = [size for stage in stages[:-1] for size in stage]
        keep_requests(case, "profiled", before + stages[-1], len(before))
    memory = report.memory
    return {
        "peak": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "phase": memory.peak_phase,
        "unattributed": memory.unattributed_bytes,
        "categories": memory.categories,
        "largest": [
            (r.bytes, r.count, r.category, r.fqn, r.op, list(r.shape), r.dtype)
            for r in report.ledger[:LARGEST]
        ],
        "gradient_after_backward": gradients_after_backward(seen["step"]),
        "without_op": sum(r.bytes for r in report.ledger if not r.op and r.category not in _OWNED),
        "without_line": sum(r.bytes for r in report.ledger if not r.source),
        "backends": sorted({s.backend for s in report.sites}),
        "allocator": repr(memory.allocator),
        "outside": memory.outside_allocator_bytes,
        "notes": report.notes,
        "seconds": seconds,
    }


# Of a report's rows, to see what an estimate that is far off doesn't know of.
LARGEST = 12
FAR = 0.03
_OWNED = ("parameter", "buffer", "input", "gradient", "optimizer_state")


def gradients_after_backward(step: Any) -> int:
    """Bytes of gradients alive where the optimizer's step begins."""
    alive = {id(h.storage): h.nbytes for h in step.baseline if h.storage.label == "gradient"}
    for storage, _, nbytes, phase in step.entries:
        if phase.name == "OPTIMIZER":
            break
        if storage.label == "gradient":
            alive[id(storage)] = alive.get(id(storage), 0) + nbytes
    return sum(alive.values())


def overhead(case: str = "gpt2-sdpa-train", steps: int = 12, times: int = 1) -> dict[str, Any]:
    """Seconds of a step, plain and in `record`; and the host's memory before and after it.

    times: how many of the case's batches are one.
    """
    import resource

    import torch

    import fa_advisor

    model, inputs, _ = build(case, "cuda")
    inputs = {name: x.repeat(times, *(1 for _ in x.shape[1:])) for name, x in inputs.items()}
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def timed(count: int) -> list[float]:
        times = []
        for _ in range(count):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(**inputs)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return times

    timed(3)
    bare = timed(steps)
    with fa_advisor.record(model, optimizer) as recording:
        first = timed(2)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        recorded = timed(steps)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    start = time.perf_counter()
    memory = recording.report.memory
    return {
        "case": case,
        "shape": next(list(x.shape) for x in inputs.values()),
        "plain_s": statistics.median(bare),
        "recorded_s": statistics.median(recorded),
        "factor": statistics.median(recorded) / statistics.median(bare),
        "first_recorded_s": first,
        "report_s": time.perf_counter() - start,
        "host_growth_kib": grown,
        "unattributed_share": memory.unattributed_bytes / memory.peak_allocated_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--workers", type=int, default=6, help="processes at a time")
    parser.add_argument(
        "--add", action="store_true", help="to the results that there are, from another machine"
    )
    parser.add_argument("--overhead", action="store_true", help="only what a step costs")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, case = args.one
        try:
            if kind == "overhead":
                made = overhead(times=int(case))
            elif kind in PLAIN:
                made = plain(case, requests=kind == "again")
            else:
                made = profiled(case, fake=kind == "fake")
        except BaseException:
            made = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(made))
        return
    kinds = args.kinds.split(",")
    whole = not args.only and "profiled" in kinds
    cost: list[dict[str, Any]] = []
    if args.overhead or whole:
        for times in ("1", "4"):
            cost.append(_process("overhead", times))
            print(json.dumps(cost[-1]), flush=True)
    if args.overhead:
        return
    cases = [case for case in CASES if args.only in case]
    rows: dict[str, dict[str, Any]] = {case: {"case": case} for case in cases}
    kept = json.loads((RESULTS / "ledger.json").read_text()) if args.add else {}
    for row in kept.get("rows", ()):
        if row["case"] in rows:
            rows[row["case"]] = row
    folder = Path(tempfile.mkdtemp())
    os.environ[_FOLDER] = str(folder)
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = [(case, kind) for case in cases for kind in kinds]
        for (case, kind), made in zip(
            jobs, pool.map(lambda j: _process(j[1], j[0]), jobs), strict=True
        ):
            rows[case][kind] = made
            if kind != kinds[-1]:
                continue
            rows[case] |= compared_requests(folder, case) | placed(rows[case])
            if "profiled" in kinds and not rows[case].get("report_within_plain_runs", True):
                more = pool.map(lambda _, case=case: _process("third", case), range(MORE))
                rows[case]["more_plain_peaks"] = [made.get("peak") for made in more]
                rows[case] |= placed(rows[case])
            print(_line(rows[case]), flush=True)
            figures = {"question": __doc__, "overhead": cost, "rows": list(rows.values())}
            if whole:  # After each, as a long run may be ended.
                write("ledger", figures)
    if args.add:
        kept |= {"rows": list(rows.values()), f"provenance_of_{args.kinds}": provenance()}
        (RESULTS / "ledger.json").write_text(json.dumps(kept, indent=2) + "\n")


def _process(kind: str, case: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, case or "none"], capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    try:
        made: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        made = {"error": done.stderr[-3000:]}
    if "error" in made:
        print(kind, case, made["error"], file=sys.stderr, flush=True)
    return made


def placed(row: dict[str, Any]) -> dict[str, Any]:
    """Where the report's peak stands among the plain runs'."""
    plain = [row[kind]["peak"] for kind in PLAIN if "peak" in row.get(kind, {})]
    plain += [peak for peak in row.get("more_plain_peaks", ()) if peak is not None]
    report = row.get("profiled", {}).get("peak")
    if not plain or report is None:
        return {}
    return {
        "report_less_plain_bytes": report - plain[0],
        "spread_of_plain_runs_bytes": max(plain) - min(plain),
        "report_within_plain_runs": min(plain) <= report <= max(plain),
    }


def _line(row: dict[str, Any]) -> str:
    p, m, f = (row.get(kind) or {} for kind in ("plain", "profiled", "fake"))
    text = f"{row['case']:31}"
    if "peak" in f:
        text += f" fake {f['peak']:>11,}"
    if "peak" not in p or "peak" not in m:
        failed = [k for k in KINDS if k in row and "peak" not in row[k]]
        return text + (f" failed: {', '.join(failed)}" if failed else "")
    if "peak" in f:
        text += f" {f['peak'] / p['peak'] - 1:+.2%}"
    text += (
        f" plain {p['peak']:>11,} spread {row['spread_of_plain_runs_bytes']:,}"
        f" report {row['report_less_plain_bytes']:+,}"
        f" {'within' if row['report_within_plain_runs'] else 'OUTSIDE'}"
        f" unattr {m['unattributed'] / m['peak']:.3%} {m['phase'][:3]}"
    )
    categories = m["categories"]
    for name in ("parameter", "optimizer_state"):
        if p[name] and categories.get(name, 0) != p[name]:
            text += f" {name} {categories.get(name, 0) - p[name]:+,}"
    if p["gradient"] and m["gradient_after_backward"] != p["gradient"]:
        text += f" gradient {m['gradient_after_backward'] - p['gradient']:+,}"
    for name in ("requests", "history"):
        text += _verdict(name, row[name]) if name in row else ""
    text += f" no-op {m['without_op']:,} no-line {m['without_line']:,}"
    if "peak" in f and abs(f["peak"] / p["peak"] - 1) > FAR:
        names = {*categories, *f["categories"]}
        off = {n: f["categories"].get(n, 0) - categories.get(n, 0) for n in sorted(names)}
        text += f"\n    the estimate, in {f['phase']}: { {n: b for n, b in off.items() if b} }"
        text += "".join(f"\n    report {row}" for row in m["largest"])
    return text + (f" {m['notes']}" if m["notes"] else "")


def _verdict(name: str, compared: dict[str, Any]) -> str:
    if not compared["same"]:
        return f" {name} DIFFER at {compared['first_difference']}: {compared['around']}"
    how = "same" if compared["same_in_order"] else "same but for the order of frees"
    return f" {name} {compared['count']:,} {how}"


if __name__ == "__main__":
    main()
