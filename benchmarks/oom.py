"""Five provoked out-of-memory errors, and the diagnosis that each got.

    python benchmarks/oom.py      # writes benchmarks/results/oom.json; needs a GPU

Each in a process of its own: in forward, in backward, in the optimizer's step (all three under a
limit of the process's own, set_per_process_memory_fraction, as the GPU is large), by fragmentation
(the GPU filled by the process itself, every other block freed), and because another process holds
the GPU. `right`: the phase, the cause and the operator are those that were provoked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from typing import Any

from provenance import write

CASES = ("forward", "backward", "optimizer", "fragmentation", "other_process")
EXPECTED = {
    "forward": ("forward", ("limit", "memory")),
    "backward": ("backward", ("limit", "memory")),
    "optimizer": ("optimizer", ("limit", "memory")),
    "fragmentation": ("forward", ("fragmentation",)),
    "other_process": ("forward", ("other_processes", "memory")),
}
MIB = 2**20


def gpt2(layers: int = 4, width: int = 768) -> Any:
    import torch
    import transformers as hf

    config = hf.GPT2Config(n_layer=layers, n_embd=width, attn_implementation="eager")
    return hf.GPT2LMHeadModel(config).to("cuda", torch.bfloat16)


def limited(mib: int) -> None:
    """Torch may have so much more than it has now."""
    import torch

    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * MIB) / total)


def run(case: str) -> dict[str, Any]:
    """Provoke the failure inside `fa_advisor.record`, and give what its report says."""
    import torch

    import fa_advisor

    torch.manual_seed(0)
    holder = None
    kept: list[Any] = []
    if case == "other_process":
        free, _ = torch.cuda.mem_get_info()
        holder = subprocess.Popen(
            [sys.executable, __file__, "--hold", str(free - 3072 * MIB)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdout is not None
        holder.stdout.readline()
    model = gpt2(2 if case == "optimizer" else 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = 1 if case == "optimizer" else 16
    ids = torch.randint(0, 1000, (batch, 64 if case == "optimizer" else 1024), device="cuda")
    if case == "fragmentation":
        free, _ = torch.cuda.mem_get_info()
        segments = (free - 512 * MIB) // (20 * MIB)
        kept = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2 * segments)]
        kept = kept[::2]
    elif case == "forward":
        limited(1500)
    elif case == "optimizer":
        limited(450)
    try:
        with fa_advisor.record(model, optimizer) as recording:
            loss = model(input_ids=ids, labels=ids).loss
            if case == "backward":  # the forward had room; from here on there is none
                torch.cuda.empty_cache()
                limited(200)
            loss.backward()
            optimizer.step()
    except torch.OutOfMemoryError as error:
        text = str(error)[:200]
    else:
        return {"error": "it did not run out of memory"}
    finally:
        if holder is not None:
            holder.kill()
    del kept
    report = recording.report
    failed = report.out_of_memory
    if failed is None:
        return {"error": f"no diagnosis: {report.notes}"}
    phase, causes = EXPECTED[case]
    memory = report.memory
    return {
        "right": failed.phase == phase and failed.cause in causes and bool(failed.op),
        "torch": text,
        "phase": failed.phase,
        "cause": failed.cause,
        "op": failed.op,
        "fqn": failed.fqn,
        "source": failed.source,
        "requested": failed.requested_bytes,
        "missing": failed.missing_bytes,
        "device_free": failed.device_free_bytes,
        "category": failed.category,
        "step_peak": failed.step_peak_bytes,
        "capacity": failed.capacity_bytes,
        "allocated": memory.peak_allocated_bytes,
        "unattributed": memory.unattributed_bytes,
        "categories": memory.categories,
        "allocator": repr(memory.allocator),
        "remedies": [r.text for r in failed.remedies],
    }


def hold(nbytes: int) -> None:
    """Another process: take memory, say so, and keep it until killed."""
    import torch

    held = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    print("held", held.nbytes, flush=True)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold:
        hold(args.hold)
        return
    if args.one:
        try:
            made = run(args.one)
        except BaseException:
            made = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(made))
        return
    rows: dict[str, Any] = {}
    for case in CASES:
        if args.only in case:
            done = subprocess.run(
                [sys.executable, __file__, "--one", case],
                capture_output=True, text=True, env={**os.environ},
            )  # fmt: skip
            lines = done.stdout.strip().splitlines()
            rows[case] = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
            print(case, json.dumps(rows[case], indent=1), flush=True)
    for case, row in rows.items():
        print(f"{case:14} right={row.get('right')} {row.get('phase')} {row.get('cause')}"
              f" {row.get('op')} {row.get('source')} {row.get('error', '')[-300:]}")  # fmt: skip
    if not args.only:
        print(write("oom", {"question": __doc__, "cases": rows}))


if __name__ == "__main__":
    main()
