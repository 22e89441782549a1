"""The forward on float8_e4m3fn beside our own in bf16: how fast, and how far off.

    python benchmarks/fp8.py                # writes benchmarks/results/fp8.json

Speed: TFLOP/s of `flash_attention`, which in fp8 has V turned over first; 4 B H N^2 D a forward,
half if causal. Median over rounds, of CUDA-event medians; in each both take turns, in another order
and with a rest before, as in hopper.py.
Accuracy: without a mask, the norm of the difference from attention in float64 over the numbers
that the inputs stand for, in shares of its own norm, for V of deviation 1 around 0 and around 1;
`slope` is how far the output is too long or too short along the true one. `p_rounded` is that error
where nothing but the weights, at most 2^8, is rounded to e4m3. One of 64 rows is compared.
Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from provenance import write
from turns import in_turns

import fa_advisor

# name, batch, heads, length, head dim.
CELLS = (("16k", 1, 16, 16384, 128), ("4k", 4, 16, 4096, 128))
E4M3 = torch.float8_e4m3fn


def speed(name: str, b: int, h: int, n: int, d: int, causal: bool) -> dict[str, Any]:
    """A cell's TFLOP/s in both."""
    narrow = [torch.randn(b, h, n, d, device="cuda").to(E4M3) for _ in range(3)]
    wide = [x.bfloat16() for x in narrow]
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(h, device="cuda"))
    runs: dict[str, Callable[[], Any]] = {
        "fp8": lambda: fa_advisor.flash_attention(*narrow, is_causal=causal, **scales),
        "bf16": lambda: fa_advisor.flash_attention(*wide, is_causal=causal),
    }
    flop = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
    times = in_turns(runs, f"{name} {causal}")
    row: dict[str, Any] = {"name": name, "causal": causal}
    for key, found in times.items():
        tflops = [flop / each / 1e9 for each in found]
        row[key] = {"tflops": statistics.median(tflops), "range": [min(tflops), max(tflops)]}
    return row


def accuracy(mean: float, n: int = 16384, d: int = 128) -> dict[str, float]:
    """How far off a head's output is, for values around a mean."""
    torch.manual_seed(1)
    q, k = (torch.randn(1, 1, n, d, device="cuda").to(E4M3) for _ in range(2))
    v = (torch.randn(1, 1, n, d, device="cuda") + mean).to(E4M3)
    scale = [torch.rand(1, device="cuda") + 0.5 for _ in range(3)]
    out = fa_advisor.flash_attention(
        q, k, v, q_descale=scale[0], k_descale=scale[1], v_descale=scale[2]
    )[..., ::64, :].double()
    q, k, v = (x.double() * one for x, one in zip((q[..., ::64, :], k, v), scale, strict=True))
    logits = q @ k.mT * d**-0.5
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    true = weights @ v / total
    rounded = (weights * 2**8).float().to(E4M3).double() / 2**8 @ v / total
    return {
        "mean": mean,
        "error": float((out - true).norm() / true.norm()),
        "slope": float((out * true).sum() / true.square().sum()) - 1,
        "p_rounded": float((rounded - true).norm() / true.norm()),
    }


def main() -> None:
    rows = [speed(*cell, causal) for cell in CELLS for causal in (False, True)]
    for row in rows:
        fp8, bf16 = row["fp8"]["tflops"], row["bf16"]["tflops"]
        kind = "causal" if row["causal"] else "full"
        print(f"{row['name']} {kind}: fp8 {fp8:.0f}, bf16 {bf16:.0f}, {fp8 / bf16:.2f} times")
    off = [accuracy(mean) for mean in (0.0, 1.0)]
    print(*off, sep="\n")
    write("fp8", {"question": __doc__, "rows": rows, "accuracy": off})


if __name__ == "__main__":
    main()
