"""The Hopper kernels beside the best: cuDNN, FlashAttention-4 (CuTe), FlexAttention,
FlashAttention-2.

    python benchmarks/hopper.py             # writes benchmarks/results/hopper.json

Median over rounds, of CUDA-event medians, bf16. In each round all take turns in another order, with
a rest before each: who runs after a kernel that draws less power finds a higher clock; `rounds` is
how many each was timed in. The forwards' results are held against cuDNN's (FlashAttention-2's where
there is none). TFLOP/s count 4 B H N^2 D a forward (half if causal; for packed documents, the sum
over them), 2.5 times that a backward. Each kind of call has a process of its own, so that they
compile side by side and are timed one after the other. Needs a GPU of compute capability 9.0;
FlashAttention-4 is left out where it can't be imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from provenance import write
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import in_turns, milliseconds

import fa_advisor

# name, batch, heads, key heads, length, head dim.
CELLS = (
    ("1k", 16, 16, 16, 1024, 128),
    ("4k", 4, 16, 16, 4096, 128),
    ("16k", 1, 16, 16, 16384, 128),
    ("4k, D 64", 4, 32, 32, 4096, 64),
    ("8k, D 256", 2, 8, 8, 8192, 256),
    ("4k, GQA 32:8", 4, 32, 8, 4096, 128),
)
DOCUMENTS = (4096, 512, 2048, 1024, 3072, 128, 768, 4736)
# Who takes much longer than the fastest in a first, cold round is timed in fewer rounds.
ROUNDS_FAR_BEHIND, FAR_BEHIND = 2, 1.25
# Of a result's norm: bf16 loses a tenth of it.
WRONG = 2e-2
DTYPE = torch.bfloat16
Attention = Callable[..., torch.Tensor]


def kinds() -> list[tuple[str, bool]]:
    """Every call that is timed: a cell's name, and whether it is causal."""
    return [(name, causal) for name, *_ in CELLS for causal in (False, True)] + [
        ("documents", True)
    ]


def dense(name: str, causal: bool) -> tuple[float, list[torch.Tensor], dict[str, Attention]]:
    """FLOP of a forward, q, k, v in [B, H, N, D], and who is timed on them."""
    b, h, g, n, d = next(numbers for cell, *numbers in CELLS if cell == name)
    tensors = [torch.randn(b, heads, n, d, device="cuda", dtype=DTYPE) for heads in (h, g, g)]
    gqa = h != g

    def sdpa(backend: SDPBackend) -> Attention:
        def run(q: Any, k: Any, v: Any) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

        return run

    peers: dict[str, Attention] = {
        "ours": lambda q, k, v: fa_advisor.flash_attention(
            q, k, v, is_causal=causal, enable_gqa=gqa
        ),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
        "flex": _flex(n, causal, gqa),
    }
    if (fa4 := _fa4()) is not None:
        # It takes [B, N, H, D]: views of the same memory.
        def four(q: Any, k: Any, v: Any) -> torch.Tensor:
            out = fa4.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        peers["fa4"] = four
    return 4 * b * h * n * n * d * (0.5 if causal else 1.0), tensors, peers


def documents() -> tuple[float, list[torch.Tensor], dict[str, Attention]]:
    """Packed sequences of mixed length, causal: q, k, v in [total, H, D]."""
    h, d = 16, 128
    total = sum(DOCUMENTS)
    tensors = [torch.randn(total, h, d, device="cuda", dtype=DTYPE) for _ in range(3)]
    lengths = torch.tensor(DOCUMENTS, device="cuda")
    cu = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    n = max(DOCUMENTS)
    flash = torch.ops.aten._flash_attention_forward
    peers: dict[str, Attention] = {
        "ours": lambda q, k, v: fa_advisor.flash_attention(
            q, k, v, is_causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n,
            max_seqlen_k=n,
        ),
        "fa2": lambda q, k, v: flash(q, k, v, cu, cu, n, n, 0.0, True, False)[0],
    }  # fmt: skip
    if (fa4 := _fa4()) is not None:

        def four(q: Any, k: Any, v: Any) -> torch.Tensor:
            out = fa4.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n,
                causal=True,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        peers["fa4"] = four
    return sum(2.0 * h * m * m * d for m in DOCUMENTS), tensors, peers


def _flex(n: int, causal: bool, gqa: bool) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)


def _fa4() -> Any:
    try:
        import flash_attn.cute
    except Exception:
        return None
    return flash_attn.cute


def _version_of_fa4() -> str | None:
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_due(key: tuple[str, str], turn: int, first: Mapping[tuple[str, str], float]) -> bool:
    fastest = min(took for other, took in first.items() if other[1] == key[1])
    return turn < ROUNDS_FAR_BEHIND or first[key] < FAR_BEHIND * fastest


def worker(name: str, causal: bool) -> None:
    """Compile, say so, wait for a word, time, print a row."""
    torch.manual_seed(0)
    flop, tensors, peers = documents() if name == "documents" else dense(name, causal)
    leaves = [t.requires_grad_() for t in tensors]
    errors: dict[str, str] = {}
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    results: dict[str, torch.Tensor] = {}
    for peer, attention in peers.items():

        def forward(attention: Attention = attention) -> Any:
            with torch.no_grad():
                return attention(*leaves)

        try:
            results[peer] = forward()
            runs[peer, "forward"] = forward
            out = attention(*leaves)
            grad = torch.randn_like(out)

            def backward(out: torch.Tensor = out, grad: torch.Tensor = grad) -> Any:
                return torch.autograd.grad(out, leaves, grad, retain_graph=True)

            backward()
            runs[peer, "backward"] = backward
        except Exception as error:
            errors[peer] = f"{type(error).__name__}: {str(error)[:200]}"
    truth = next(results[peer] for peer in ("cudnn", "fa2", "ours") if peer in results).float()
    for peer, result in results.items():
        off = float((result.float() - truth).norm() / truth.norm())
        if not off < WRONG:
            errors[peer] = f"its result is {off:.2g} of its norm away from the others'"
            runs = {key: run for key, run in runs.items() if key[0] != peer}
    results.clear()
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    times = in_turns(runs, f"{name} {causal}", _is_due)
    row: dict[str, Any] = {"name": name, "causal": causal, "errors": errors}
    for (peer, direction), found in times.items():
        share = 1.0 if direction == "forward" else 2.5
        tflops = [share * flop / each / 1e9 for each in found]
        row.setdefault(peer, {})[direction] = {
            "ms": statistics.median(found),
            "tflops": statistics.median(tflops),
            "range": [min(tflops), max(tflops)],
            "rounds": len(found),
        }
    print(json.dumps(row), flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Our TFLOP/s over the best peer's, by cell; the geometric mean over the ten plain cells."""
    plain = {name for name, _, h, g, _, _ in CELLS if h == g}
    found: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        ratios = {}
        for row in rows:
            others = [
                row[peer][direction]["tflops"]
                for peer in ("cudnn", "fa4", "flex", "fa2")
                if direction in row.get(peer, {})
            ]
            if others and direction in row.get("ours", {}):
                label = f"{row['name']}, {'causal' if row['causal'] else 'full'}"
                ratios[label] = row["ours"][direction]["tflops"] / max(others)
        own = [ratio for label, ratio in ratios.items() if label.rsplit(", ", 1)[0] in plain]
        found[direction] = {
            "over_the_best": ratios,
            "geometric_mean": math.exp(sum(map(math.log, own)) / len(own)) if own else None,
            "worst": min(own, default=None),
        }
    return found


def ceiling() -> float:
    """What a plain product of matrices reaches, TFLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        worker(args.one[0], args.one[1] == "1")
        return 0
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--one", name, str(int(causal))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name, causal in kinds()
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    rows: list[dict[str, Any]] = []
    matmul = ceiling()
    for (name, causal), process in zip(kinds(), running, strict=True):
        text, _ = process.communicate("go\n")
        lines = [line for line in text.splitlines() if line.startswith("{")]
        row = json.loads(lines[-1]) if lines else {"name": name, "causal": causal, "errors": "died"}
        rows.append(row)
        shown = " ".join(
            f"{peer} " + "/".join(f"{found['tflops']:.0f}" for found in row[peer].values())
            for peer in ("ours", "cudnn", "fa4", "flex", "fa2")
            if peer in row
        )
        print(name, "causal" if causal else "full", shown, row["errors"] or "", flush=True)
        write("hopper", {
            "question": __doc__, "rows": rows, "summary": summary(rows),
            "matmul_tflops": matmul,
            "flash_attn_4": _version_of_fa4(),
        })  # fmt: skip
    found = summary(rows)
    print(json.dumps(found, indent=1), f"matmul {matmul:.0f}")
    return int(any(len(each["over_the_best"]) < len(rows) for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
