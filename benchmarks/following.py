"""What does following a script cost, does its memory grow, and is its peak the plain run's?

    python benchmarks/following.py          # writes benchmarks/results/following-{cpu,gpu}.json

The script that is followed is this file itself (`--loop`), and those of tests/cli/scripts where
there is a GPU to ask for the plain run's peak.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import ROOT, write

SCRIPTS = ROOT / "tests" / "cli" / "scripts"
CASES: dict[str, list[str]] = {
    "nano_gpt": ["nano_gpt.py", "--batch-size", "16", "--block-size", "256"],
    "nano_gpt, autocast": ["nano_gpt.py", "--batch-size", "16", "--dtype", "bfloat16"],
    "vit_workers": ["vit_workers.py"],
    "word_language_model": ["word_language_model.py"],
    "gan": ["gan.py"],
    "llama": ["llama.py"],
    "generate": ["generate.py", "64"],
    "timm_vit": ["timm_vit.py"],
    "trainer_clm": [
        "trainer_clm.py", "--output_dir", f"{tempfile.gettempdir()}/fa_advisor_trainer",
        "--max_steps", "4", "--per_device_train_batch_size", "8", "--report_to", "none",
    ],
    "llama_accelerate": ["llama_accelerate.py"],
    "train_script": [
        str(ROOT / "examples" / "train_script.py"), "--steps", "6", "--layers", "4",
        "--width", "512", "--seq-len", "512",
    ],
}  # fmt: skip
PEAK = """
import runpy, sys, torch
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
print("PEAK", torch.cuda.max_memory_allocated(), file=sys.stderr)
"""
# Scripts side by side, where only their peaks are asked for.
AT_A_TIME = 4
# Following a training step may take so many times as long; the memory may grow by so much between
# the 100th and the 1,000th step.
MOST_TIMES, MOST_GROWTH = 3.0, 2 << 20


def loop(model_name: str, steps: int) -> None:
    """The script: trains, and says what the process holds and how long the steps took."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so that what else the machine does shows less
    if model_name == "gpt2":
        import transformers as hf

        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config()).to(device, torch.bfloat16)
        ids = torch.randint(50257, (2, 1024), device=device)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    else:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).to(device)
        batch = {"src": torch.randn(4, 32, 64, device=device)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rss: dict[int, int] = {}
    times = []
    for step in range(1, steps + 1):
        began = _now(device)
        out = model(**batch)
        loss = out.loss if model_name == "gpt2" else nn.MSELoss()(out, torch.zeros_like(out))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(device) - began)
        if step in (100, 1000):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            rss[step] = pages * os.sysconf("SC_PAGE_SIZE")
    took = statistics.median(times[steps // 2 :])
    print(json.dumps({"ms_a_step": round(took * 1e3, 3), "rss": rss}))


def _now(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_loop(model: str, steps: int, *options: str, follow: bool) -> dict[str, Any]:
    """The median of the second half of the loop's steps, plain or followed."""
    ours = [sys.executable, "-m", "fa_advisor", "run", "-o", os.devnull + ".json", *options]
    script = [__file__, "--loop", model, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        ours[ours.index("-o") + 1] = f"{folder}/r.json"
        command = [*ours, *script] if follow else [sys.executable, *script]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_of(arguments: list[str], *, follow: bool) -> dict[str, Any]:
    """The peak of a script: the allocator's of a plain run, or the report's."""
    script = arguments if Path(arguments[0]).is_absolute() else [
        str(SCRIPTS / arguments[0]), *arguments[1:]
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "r.json"
        ours = [sys.executable, "-m", "fa_advisor", "run", "-o", str(report)]
        command = [*ours, *script] if follow else [sys.executable, "-c", PEAK, *script]
        done = subprocess.run(
            command, capture_output=True, text=True, input="the quick brown fox\n" * 2, timeout=300
        )
        if not follow:
            lines = [x for x in done.stderr.splitlines() if x.startswith("PEAK")]
            return {"peak": int(lines[-1].split()[1])} if lines else {"error": done.stderr[-2000:]}
        if not report.exists():
            return {"error": done.stderr[-2000:]}
        found = json.loads(report.read_text())
    memory = found["memory"]
    return {
        "peak": memory["peak_allocated_bytes"],
        "unattributed": memory["unattributed_bytes"],
        "model": found["target"]["name"],
        "note": found["notes"][0],
    }


def _peaks(name: str) -> dict[str, Any]:
    """Both peaks of a script, or why there aren't."""
    plain = peak_of(CASES[name], follow=False)
    if "error" in plain:
        return {"does_not_run": plain["error"].splitlines()[-1]}
    return {"plain_peak": plain["peak"], **peak_of(CASES[name], follow=True)}


def _line(name: str, found: dict[str, Any]) -> str:
    if "does_not_run" in found:
        return f"{name}: doesn't run here: {found['does_not_run']}"
    if "error" in found:
        return f"{name}: NO REPORT: {found['error'][-300:]}"
    return (
        f"{name:22} {found['model']:20} plain {found['plain_peak']:>13,} report"
        f" {found['peak']:>13,} ({found['peak'] - found['plain_peak']:+,}) unattributed"
        f" {found['unattributed'] / found['peak']:.2%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=["tiny", "gpt2"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-growth", action="store_true", help="leave the 1,000 steps out")
    parser.add_argument("--no-overhead", action="store_true", help="leave the times of a step out")
    args = parser.parse_args()
    if args.loop:
        loop(args.loop, args.steps)
        return 0

    import torch

    gpu = torch.cuda.is_available()
    figures: dict[str, Any] = {"growth": {}, "overhead": {}, "peaks": {}}
    bad = 0
    if not args.no_growth:
        for name, follow in (("plain", False), ("followed", True)):
            options = ("--steps", "1000") if follow else ()
            found = run_loop("tiny", 1000, *options, follow=follow)
            grown = found["rss"]["1000"] - found["rss"]["100"]
            figures["growth"][name] = {"grown_bytes": grown, **found}
            print(f"{name}: {grown / 2**20:+.2f} MiB from step 100 to 1,000", flush=True)
            bad += follow and grown > MOST_GROWTH
    steps = 40 if gpu else 100
    timed = () if args.no_overhead else ("tiny", "gpt2") if gpu else ("tiny",)
    for model in timed:
        plain = run_loop(model, steps, follow=False)["ms_a_step"]
        every = run_loop(model, steps, "--steps", "10000", follow=True)["ms_a_step"]
        after = run_loop(model, steps, "--steps", "3", follow=True)["ms_a_step"]
        figures["overhead"][model] = {
            "plain_ms": plain, "followed_ms": every, "after_the_limit_ms": after,
            "times": round(every / plain, 2),
        }  # fmt: skip
        print(
            f"{model}: plain {plain:.2f} ms a step, followed {every:.2f} ({every / plain:.2f} x),"
            f" after --steps {after:.2f}",
            flush=True,
        )
        bad += model == "gpt2" and every / plain > MOST_TIMES
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for name, found in zip(CASES, pool.map(_peaks, CASES) if gpu else (), strict=False):
            figures["peaks"][name] = found
            bad += "error" in found
            print(_line(name, found), flush=True)
    print(f"saved to {write('following-gpu' if gpu else 'following-cpu', figures)}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
