"""Is the report's peak the uninstrumented run's, to the byte, and how much of it is explained?

    python benchmarks/ledger.py             # writes benchmarks/results/ledger.json; needs a GPU
    python benchmarks/ledger.py --only gpt2 --workers 4
    python benchmarks/ledger.py --overhead  # only what the profiler costs a step, writes nothing

For each of 24 cases, in a process of its own each: the plain run (its peak, twice, for the
allocator's own spread; its parameters, gradients and optimizer state counted), the profiled run's
report, and the estimate on fake tensors for the same GPU. And the time of a step of GPT-2 small,
plain and recorded.

`requests`: every request and free of the measured step, in order, plain beside profiled. Where
they are the same the observer changed nothing, and peaks that differ all the same do so as two
plain runs' do: which of several free blocks of a size is taken is decided by their addresses.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ledger_models import CASES, build
from provenance import write

KINDS = ("plain", "again", "profiled", "fake")


def plain(case: str, *, requests: bool) -> dict[str, Any]:
    """Two steps without the tool, the second measured, and its requests kept if asked for."""
    import torch

    model, inputs, mode = build(case, "cuda")
    model.train(mode == "train")
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.0)
    gradients = 0
    for step in range(2):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if requests:
                torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
        if mode == "train":
            model(**inputs)["loss"].backward()
            gradients = sum(_nbytes(p.grad) for p in trainable if p.grad is not None)
            optimizer.step()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                model(**inputs)
    torch.cuda.synchronize()
    if requests:
        keep_requests(case, "plain", torch.cuda.memory._snapshot()["device_traces"][0])
    state = [v for s in optimizer.state.values() for v in s.values()]
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "parameter": sum(map(_nbytes, {p.data_ptr(): p for p in model.parameters()}.values())),
        "gradient": gradients,
        "optimizer_state": sum(_nbytes(v) for v in state if torch.is_tensor(v) and v.is_cuda),
    }


def keep_requests(case: str, kind: str, events: list[Any]) -> None:
    """Leave them for the process that compares."""
    signs = {"alloc": 1, "free_requested": -1}
    sizes = [signs[e["action"]] * e["size"] for e in events if e["action"] in signs]
    (Path(os.environ[_FOLDER]) / f"{case}-{kind}.json").write_text(json.dumps(sizes))


def compared_requests(folder: Path, case: str) -> dict[str, Any] | None:
    """How many there are, and the first that isn't the same; `None` where one side is missing."""
    files = [folder / f"{case}-{kind}.json" for kind in ("plain", "profiled")]
    if not all(file.exists() for file in files):
        return None
    one, other = (json.loads(file.read_text()) for file in files)
    pairs = enumerate(zip(one, other, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    same = one == other
    return {
        "same": same,
        "count": len(one),
        "first_difference": None if same else first,
        "around": None if same else [one[max(0, first - 3) : first + 5], other[first : first + 5]],
    }


_FOLDER = "FA_ADVISOR_LEDGER_FOLDER"


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


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

    def reading(cut: Any) -> Any:
        seen["events"] = cut["events"]
        return read(cut)

    measure.assemble, gpu_ledger._trace = keeping, reading
    model, inputs, mode = build(case, "cpu" if fake else "cuda")
    start = time.perf_counter()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "h200"
    report = fa_advisor.profile(model, inputs, mode=mode, gpu=name if fake else None)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    if not fake and "events" in seen:
        keep_requests(case, "profiled", seen["events"])
    memory = report.memory
    return {
        "peak": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "phase": memory.peak_phase,
        "unattributed": memory.unattributed_bytes,
        "categories": memory.categories,
        "gradient_after_backward": gradients_after_backward(seen["step"]),
        "without_op": sum(r.bytes for r in report.ledger if not r.op and r.category not in _OWNED),
        "without_line": sum(r.bytes for r in report.ledger if not r.source),
        "backends": sorted({s.backend for s in report.sites}),
        "allocator": repr(memory.allocator),
        "outside": memory.outside_allocator_bytes,
        "notes": report.notes,
        "seconds": seconds,
    }


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


def overhead(case: str = "gpt2-sdpa-train", steps: int = 12) -> dict[str, Any]:
    """Seconds of a step, plain and in `record`; and the host's memory before and after it."""
    import resource

    import torch

    import fa_advisor

    model, inputs, _ = build(case, "cuda")
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
    parser.add_argument("--overhead", action="store_true", help="only what a step costs")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, case = args.one
        try:
            if kind == "overhead":
                made = overhead()
            elif kind in ("plain", "again"):
                made = plain(case, requests=kind == "again")
            else:
                made = profiled(case, fake=kind == "fake")
        except BaseException:
            made = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(made))
        return
    cost = _process("overhead", "")
    print(json.dumps(cost), flush=True)
    if args.overhead:
        return
    cases = [case for case in CASES if args.only in case]
    kinds = args.kinds.split(",")
    rows: dict[str, dict[str, Any]] = {case: {"case": case} for case in cases}
    folder = Path(tempfile.mkdtemp())
    os.environ[_FOLDER] = str(folder)
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = [(case, kind) for case in cases for kind in kinds]
        for (case, kind), made in zip(
            jobs, pool.map(lambda j: _process(j[1], j[0]), jobs), strict=True
        ):
            rows[case][kind] = made
            if kind == kinds[-1]:
                rows[case]["requests"] = compared_requests(folder, case)
                print(_line(rows[case]), flush=True)
    if not args.only and args.kinds == ",".join(KINDS):
        import transformers

        figures = {"question": __doc__, "transformers": transformers.__version__}
        print(write("ledger", {**figures, "overhead": cost, "rows": list(rows.values())}))


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


def _line(row: dict[str, Any]) -> str:
    p, a, m, f = (row.get(kind) or {} for kind in KINDS)
    text = f"{row['case']:31}"
    if "peak" not in p or "peak" not in m:
        return text + " failed: " + ", ".join(k for k in KINDS if "peak" not in row.get(k, {}))
    spread = abs(a["peak"] - p["peak"]) if "peak" in a else None
    text += (
        f" plain {p['peak']:>11,} spread {spread} report {m['peak'] - p['peak']:+,}"
        f" unattr {m['unattributed'] / m['peak']:.3%} {m['phase'][:3]}"
    )
    categories = m["categories"]
    for name in ("parameter", "optimizer_state"):
        if p[name] and categories.get(name, 0) != p[name]:
            text += f" {name} {categories.get(name, 0) - p[name]:+,}"
    if p["gradient"] and m["gradient_after_backward"] != p["gradient"]:
        text += f" gradient {m['gradient_after_backward'] - p['gradient']:+,}"
    requests = row.get("requests")
    if requests is not None:
        text += f" requests {requests['count']:,} " + (
            "same"
            if requests["same"]
            else f"DIFFER at {requests['first_difference']}: {requests['around']}"
        )
    text += f" no-op {m['without_op']:,} no-line {m['without_line']:,}"
    if "peak" in f:
        text += f" fake {f['peak'] / p['peak'] - 1:+.2%}"
    return text + (f" {m['notes']}" if m["notes"] else "")


if __name__ == "__main__":
    main()
