"""Ten thousand random shapes through the attention kernels: does one hang, or come out wrong?

    python benchmarks/soak.py               # writes benchmarks/results/soak.json

Random lengths, heads and batches over a fixed set of options, forward and backward, each held
against torch's own computation in float32: relative error at most 1 % of out and of the log-sum-
exp, 2 % of a gradient in bf16. Each process takes some of the sets, so that none is compiled twice.
A watchdog ends a process that makes no progress for two minutes; of one that dies, the result holds
the call that it was at and what it last said. `by_kind` counts the calls that were done of each
set, in KINDS' order; with --add other calls are drawn, and `earlier` holds the runs before. Needs a
GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from provenance import RESULTS, ROOT, write

import fa_advisor
from fa_advisor.kernels import reference

KEPT = RESULTS / "soak.json"
PATIENCE_S = 120
KINDS: tuple[dict[str, Any], ...] = (
    {"dim": 64},
    {"dim": 64, "is_causal": True},
    {"dim": 128},
    {"dim": 128, "is_causal": True},
    {"dim": 128, "is_causal": True, "causal_alignment": "bottom-right"},
    {"dim": 128, "window": (200, 50)},
    {"dim": 96, "is_causal": True},
    {"dim": 256},
    {"dim": 256, "is_causal": True},
    {"dim": 64, "is_causal": True, "packed": True},
    {"dim": 128, "packed": True},
    {"dim": 128, "is_causal": True, "packed": True},
    # What only the portable kernels do.
    {"dim": 33, "short": True},
    {"dim": 64, "short": True, "is_causal": True},
    {"dim": 128, "short": True, "mask": "bool"},
    {"dim": 72, "short": True, "mask": "additive"},
    {"dim": 256, "short": True, "mask": "bool"},
    {"dim": 64, "mask": "bool"},
    {"dim": 128, "mask": "additive"},
    {"dim": 100, "short": True, "packed": True, "softcap": 20.0},
)


def call(
    draw: random.Random, kinds: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
    """A random call of one of the kinds: what it is, q, k, v, and its options."""
    chosen = draw.choice(kinds)
    kind = dict(chosen)
    dim, packed = kind.pop("dim"), kind.pop("packed", False)
    short, mask = kind.pop("short", False), kind.pop("mask", None)
    groups = draw.choice((1, 2))
    heads = groups * draw.choice((1, 1, 4))
    told = {
        "kind": KINDS.index(chosen), "dim": dim, "packed": packed, "mask": mask,
        "heads": heads, "groups": groups, **kind,
    }  # fmt: skip
    options: dict[str, Any] = {**kind, "enable_gqa": True}

    def length() -> int:
        if short:
            return draw.choice((1, draw.randint(2, 300), 64 * draw.randint(1, 5)))
        return draw.choice((draw.randint(513, 1400), 128 * draw.randint(5, 10)))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    if packed:
        lengths = [draw.choice((0, 1, draw.randint(1, 300), length())) for _ in range(3)]
        lengths.append(length())
        draw.shuffle(lengths)
        cu = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        total = sum(lengths)
        tensors = [made(total, h, dim) for h in (heads, groups, groups)]
        return {**told, "lengths": lengths}, tensors, options
    len_q, len_k, batch = length(), length(), draw.choice((1, 2, 3))
    tensors = [
        made(batch, heads, len_q, dim), made(batch, groups, len_k, dim),
        made(batch, groups, len_k, dim),
    ]  # fmt: skip
    if mask is not None:
        shape = [draw.choice((1, size)) for size in (batch, heads, len_q)] + [len_k]
        bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        options["attn_mask"] = bias > -1 if mask == "bool" else bias
        told["mask_shape"] = shape
    return {**told, "len_q": len_q, "len_k": len_k, "batch": batch}, tensors, options


def wrong(tensors: list[torch.Tensor], options: dict[str, Any]) -> dict[str, float]:
    """Relative errors beyond what is allowed, by name.

    A gradient that is nothing but rounding, as with a single key, is held against dO.
    """
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = fa_advisor.flash_attention(*leaves, **options, return_lse=True)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wide = [t.detach().float().requires_grad_() for t in tensors]
    expected = {
        name: value for name, value in options.items() if not name.startswith(("max", "en"))
    }
    true, true_lse = reference.attention(*wide, dtype=torch.float32, **expected)
    truth = [true, *torch.autograd.grad(true, wide, grad.float())]
    beyond = {}
    least = 1e-3 * float(grad.float().norm())
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        size = max(float(other.detach().norm()), least, 1e-6)
        error = float((one.detach().float() - other.detach()).norm()) / size
        if not error <= (1e-2 if name == "out" else 2e-2):
            beyond[name] = error
    lse, true_lse = lse.detach(), true_lse.detach()
    seen = true_lse > float("-inf")
    error = float((lse - true_lse)[seen].norm() / true_lse[seen].norm().clamp(min=1e-6))
    if not error <= 1e-2 or not torch.equal(seen, lse > float("-inf")):
        beyond["lse"] = error
    return beyond


def worker(seed: int, count: int, processes: int, seconds: int, run: int) -> None:
    """`count` calls of this process's kinds, or fewer where the time is over; other ones in each
    run."""
    draw = random.Random(f"{seed} {run}")
    torch.manual_seed(seed + processes * run)
    began, done = time.time(), 0
    while done < count and time.time() < began + seconds:
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        told, tensors, options = call(draw, KINDS[seed::processes])
        print(json.dumps({"at": told}), flush=True)
        done += 1
        print(json.dumps({"wrong": wrong(tensors, options)}), flush=True)
    faulthandler.cancel_dump_traceback_later()


def found(seed: int, process: Any, text: str, said: str) -> dict[str, Any]:
    """What a process did, wherever it ended: calls done, those that came out wrong, its death."""
    lines = [json.loads(line) for line in text.splitlines()]
    calls = [line["at"] for line in lines if "at" in line]
    ends = [line["wrong"] for line in lines if "wrong" in line]
    dead: dict[str, Any] | None = None
    if process.returncode != 0:
        at = calls[len(ends)] if len(calls) > len(ends) else None
        words = said.replace(f"{ROOT}/", "")[-1500:]
        dead = {"seed": seed, "status": process.returncode, "at": at, "said": words}
    return {
        "kinds": [told["kind"] for told, _ in zip(calls, ends, strict=False)],
        "wrong": [
            {"call": told, "errors": errors}
            for told, errors in zip(calls, ends, strict=False)
            if errors
        ],
        "dead": dead,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=len(KINDS), help="at most as many")
    parser.add_argument("--seconds", type=int, default=3600, help="at most; compiling included")
    parser.add_argument(
        "--add", action="store_true", help="other calls, to the results that there are"
    )
    parser.add_argument("--one", type=int, nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        worker(*args.one)
        return
    processes = min(args.processes, len(KINDS))
    kernels = os.environ.get("FA_ADVISOR_KERNELS", "as they come")
    earlier: list[dict[str, Any]] = []
    if args.add:
        if not KEPT.exists():
            sys.exit(f"--add: there is no {KEPT} to add to")
        before = json.loads(KEPT.read_text())
        if before["kernels"] != kernels:
            sys.exit(f"--add: {KEPT} is of other kernels: {before['kernels']}, not {kernels}")
        earlier = [*before.pop("earlier", ()), {**before, "question": ""}]
    began = time.time()
    given = [
        str(n) for n in (-(-args.count // processes), processes, args.seconds, len(earlier))
    ]  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--one", str(seed), *given],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed in range(processes)
    ]  # fmt: skip
    with ThreadPoolExecutor(processes) as pool:
        ends = list(pool.map(lambda process: process.communicate(), running))
    rows = [
        found(seed, process, *end)
        for seed, (process, end) in enumerate(zip(running, ends, strict=True))
    ]
    done = Counter(kind for row in rows for kind in row["kinds"])
    figures = {
        "question": __doc__,
        "kernels": kernels,
        "shapes": done.total(),
        "by_kind": [done[kind] for kind in range(len(KINDS))],
        "died_or_hung": [row["dead"] for row in rows if row["dead"]],
        "wrong": [each for row in rows for each in row["wrong"]],
        "seconds": time.time() - began,
        "earlier": earlier,
    }
    path = write("soak", figures)
    print(path, {**figures, "question": "", "wrong": figures["wrong"][:5], "earlier": ""})
    print("in all", figures["shapes"] + sum(run["shapes"] for run in earlier))


if __name__ == "__main__":
    main()
