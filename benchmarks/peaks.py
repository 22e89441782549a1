"""Does the report's peak equal the uninstrumented run's, and how much of it is explained?

    python benchmarks/peaks.py          # writes benchmarks/results/peaks.json

For each case, in a process of its own each: the plain run's `torch.cuda.max_memory_allocated`, the
profiled run's report, and the estimate on fake tensors for the same GPU. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from provenance import write

BATCH, LENGTH = 2, 1024
CASES = [
    f"{model}-{attention}-{mode}"
    for model in ("gpt2", "llama")
    for attention in ("eager", "sdpa")
    for mode in ("infer", "train")
]


def build(case: str) -> tuple[Any, Any, str]:
    """The case's model (bf16, on the CPU), its inputs, and the mode."""
    import torch
    import transformers as hf

    name, attention, mode = case.split("-")
    torch.manual_seed(0)
    if name == "gpt2":
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(attn_implementation=attention))
    else:
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=4,
                attn_implementation=attention,
            )
        )
    ids = torch.randint(0, 1000, (BATCH, LENGTH))
    inputs = {"input_ids": ids} | ({"labels": ids} if mode == "train" else {})
    return model.to(torch.bfloat16), inputs, mode


def plain(case: str) -> dict[str, Any]:
    """The same two steps without the tool."""
    import torch

    model, inputs, mode = build(case)
    model = model.cuda().train(mode == "train")
    inputs = {k: v.cuda() for k, v in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(2):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if mode == "train":
            model(**inputs).loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                model(**inputs)
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def profiled(case: str, *, fake: bool) -> dict[str, Any]:
    """The tool's report of the case."""
    import torch

    import fa_advisor

    model, inputs, mode = build(case)
    if not fake:
        model = model.cuda()
        inputs = {k: v.cuda() for k, v in inputs.items()}
    report = fa_advisor.profile(
        model, inputs, mode=mode, gpu=torch.cuda.get_device_name() if fake else None
    )
    memory = report.memory
    return {
        "peak": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "phase": memory.peak_phase,
        "unattributed": memory.unattributed_bytes,
        "categories": memory.categories,
        "backends": sorted({s.backend for s in report.sites}),
        "outside": memory.outside_allocator_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, case = args.one
        result = plain(case) if kind == "plain" else profiled(case, fake=kind == "fake")
        print(json.dumps(result))
        return
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(_row, CASES))
    for row in rows:
        _show(row)
    import transformers

    figures = {
        "question": __doc__,
        "transformers": transformers.__version__,
        "batch": BATCH,
        "length": LENGTH,
        "rows": rows,
    }
    print(write("peaks", figures))


def _row(case: str) -> dict[str, Any]:
    """One case, its three runs in processes of their own (they time nothing, so cases overlap)."""
    row: dict[str, Any] = {"case": case}
    for kind in ("plain", "profiled", "fake"):
        done = subprocess.run(
            [sys.executable, __file__, "--one", kind, case], capture_output=True, text=True
        )
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
        lines = done.stdout.strip().splitlines()
        row[kind] = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    return row


def _show(row: dict[str, Any]) -> None:
    p, m, f = row["plain"], row["profiled"], row["fake"]
    if not (p and m and f):
        print(row["case"], "failed", [k for k in ("plain", "profiled", "fake") if not row[k]])
        return
    print(
        f"{row['case']:20} plain {p['peak'] / 2**20:9.1f}  report {m['peak'] / 2**20:9.1f} MiB"
        f"  unattributed {m['unattributed'] / m['peak']:6.2%}"
        f"  fake {f['peak'] / 2**20:9.1f} ({f['peak'] / p['peak'] - 1:+.2%})  {m['backends']}"
        f" {f['backends']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
