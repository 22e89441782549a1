"""How fast is the bundled attention kernel, beside every path that torch has for the same call?

    python benchmarks/attention.py          # writes benchmarks/results/attention.json

Medians of CUDA-event timings, all in one run. TFLOP/s count 4 B H N^2 D a forward (half if
causal), 2.5 times that a backward. Needs a GPU of compute capability 8.0 or later.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from provenance import write
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_advisor.kernels.arguments import Call
from fa_advisor.kernels.op import attention

# batch, heads, length, head dim.
SHAPES = [
    (b, heads, n, d)
    for d, heads in ((64, 32), (128, 16))
    for b, n in ((16, 1024), (4, 4096), (1, 16384))
]
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FEATURE_SHAPE = (4, 16, 4096, 128)
WINDOW = 512
DTYPE = torch.bfloat16

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **given: Any) -> Any:
    """The kernel on [B, H, N, D], or on [total, H, D] given cu_seqlens and max_seqlen."""
    cu_seqlens, longest = given.pop("cu_seqlens", None), given.pop("max_seqlen", None)
    options: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5,
        "is_causal": False,
        "bottom_right": False,
        "window_left": None,
        "window_right": None,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "varlen": cu_seqlens is not None,
        "max_seqlen_q": longest or q.shape[2],
        "max_seqlen_k": longest or k.shape[2],
        "num_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
    }
    call = Call(**{**options, **given})
    return lambda q, k, v: attention(q, k, v, mask, None, None, cu_seqlens, cu_seqlens, call)[0]


def milliseconds(run: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median"))


def timed(function: Callable[..., torch.Tensor], tensors: Tensors) -> dict[str, float]:
    """Forward without a graph, and backward, in ms."""
    with torch.no_grad():
        forward = milliseconds(lambda: function(*tensors))
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    grad = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    return {"forward_ms": forward, "backward_ms": backward}


def random_tensors(b: int, h: int, n: int, d: int, kv_heads: int | None = None) -> Tensors:
    def one(heads: int) -> torch.Tensor:
        return torch.randn(b, heads, n, d, device="cuda", dtype=DTYPE)

    return one(h), one(kv_heads or h), one(kv_heads or h)


def speed() -> Iterator[dict[str, Any]]:
    """Plain calls, causal and not, beside SDPA's backends."""
    for b, h, n, d in SHAPES:
        for causal in (False, True):
            tensors = random_tensors(b, h, n, d)
            row: dict[str, Any] = {"shape": [b, h, n, d], "causal": causal}
            row["ours"] = timed(ours(*tensors, is_causal=causal), tensors)
            for name, backend in PEERS.items():
                with sdpa_kernel(backend):
                    row[name] = timed(
                        lambda q, k, v, c=causal: F.scaled_dot_product_attention(
                            q, k, v, is_causal=c
                        ),
                        tensors,
                    )
            flops = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
            for name in ("ours", *PEERS):
                row[name]["forward_tflops"] = flops / row[name]["forward_ms"] / 1e9
                row[name]["backward_tflops"] = 2.5 * flops / row[name]["backward_ms"] / 1e9
            yield row


def features() -> Iterator[dict[str, Any]]:
    """Calls with a mask, GQA, dropout, a window, packed sequences; each beside what torch has."""
    b, h, n, d = FEATURE_SHAPE
    tensors = random_tensors(b, h, n, d)
    grouped = random_tensors(b, h, n, d, kv_heads=h // 4)
    lengths = torch.tensor([n, n // 2, n * 3 // 4, n // 4], device="cuda")
    at = torch.arange(n, device="cuda")
    padding = (at < lengths[:, None])[:, None, None, :]
    document = at // (n // 4)
    documents = ((document[:, None] == document) & (at[:, None] >= at))[None, None]
    scattered = torch.rand(1, 1, n, n, device="cuda") < 0.5
    bias = torch.randn(1, h, n, n, device="cuda", dtype=DTYPE)
    causal = {"is_causal": True}
    sdpa = F.scaled_dot_product_attention
    masked, dense = ("efficient", "cudnn"), ("flash", "cudnn")
    # What to call it, tensors, options of ours and of SDPA, SDPA's backends, FlexAttention's mask.
    cases: list[tuple[str, Tensors, dict[str, Any], dict[str, Any], tuple[str, ...], Any]] = [
        ("key padding", tensors, {"mask": padding}, {"attn_mask": padding}, masked,
         (lambda b, h, i, j: j < lengths[b], b)),
        ("documents, causal, N x N", tensors, {"mask": documents}, {"attn_mask": documents}, masked,
         (lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None)),
        ("half of N x N at random", tensors, {"mask": scattered}, {"attn_mask": scattered}, masked,
         (lambda b, h, i, j: scattered[0, 0, i, j], None)),
        ("additive bias", tensors, {"mask": bias}, {"attn_mask": bias}, masked, None),
        ("GQA, causal", grouped, causal, {**causal, "enable_gqa": True}, dense,
         (lambda b, h, i, j: i >= j, None)),
        ("dropout 0.1, causal", tensors, {**causal, "dropout_p": 0.1},
         {**causal, "dropout_p": 0.1}, ("flash", "efficient"), None),
        (f"window {WINDOW}, causal", tensors, {**causal, "window_left": WINDOW}, {}, (),
         (lambda b, h, i, j: (i >= j) & (i - j <= WINDOW), None)),
    ]  # fmt: skip
    for name, given, kernel_options, options, backends, visible in cases:
        row: dict[str, Any] = {
            "feature": name,
            "ours": _attempt(ours(*given, **kernel_options), given),
        }
        for backend in backends:
            with sdpa_kernel(PEERS[backend]):
                row[backend] = _attempt(lambda q, k, v, o=options: sdpa(q, k, v, **o), given)
        if visible is not None:
            row["flex"] = _attempt(_flex(n, *visible), given)
        yield row
    yield _packed(lengths)


def _packed(lengths: torch.Tensor) -> dict[str, Any]:
    """Packed sequences, causal: SDPA on nested tensors, FlexAttention, torch's varlen_attn."""
    _, h, n, d = FEATURE_SHAPE
    total = int(lengths.sum())
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    packed: Any = tuple(torch.randn(total, h, d, device="cuda", dtype=DTYPE) for _ in range(3))
    row: dict[str, Any] = {
        "feature": "packed sequences, causal",
        "ours": _attempt(
            ours(*packed, is_causal=True, cu_seqlens=cu_seqlens, max_seqlen=n), packed
        ),
    }

    def nested(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        views = (
            torch.nested.nested_tensor_from_jagged(
                t, cu_seqlens.long(), max_seqlen=n, min_seqlen=n // 4
            ).transpose(1, 2)
            for t in (q, k, v)
        )
        out = F.scaled_dot_product_attention(*views, is_causal=True)
        values: torch.Tensor = out.transpose(1, 2).values()
        return values

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        row["flash, nested"] = _attempt(nested, packed)
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    dense = tuple(t.transpose(0, 1)[None] for t in packed)
    row["flex"] = _attempt(
        _flex(total, lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None), dense
    )
    # Not SDPA nor FlexAttention, but torch's: FlashAttention-2's own packed form.
    flash = torch.ops.aten._flash_attention_forward
    row["flash, packed"] = _attempt(
        lambda q, k, v: flash(q, k, v, cu_seqlens, cu_seqlens, n, n, 0.0, True, False)[0], packed
    )
    return row


def _flex(n: int, visible: Any, batch: int | None) -> Callable[..., Any]:
    """FlexAttention, compiled, its block mask made beforehand: its cost isn't counted."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # It gives up compiling after a few masks.
    block_mask = create_block_mask(visible, batch, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(
        q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]
    )


def _over_the_best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as the best other path, by feature and direction."""
    figures: dict[str, Any] = {}
    for direction in ("forward_ms", "backward_ms"):
        ratios = {}
        for row in rows:
            others = [
                peer[direction]
                for name, peer in row.items()
                if name not in ("feature", "ours") and direction in peer
            ]
            if others and direction in row["ours"]:
                ratios[row["feature"]] = min(others) / row["ours"][direction]
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        figures[direction.removesuffix("_ms")] = {**ratios, "geometric mean": mean}
    return figures


def _attempt(function: Callable[..., Any], tensors: Tensors) -> dict[str, Any]:
    try:
        return timed(function, tensors)
    except Exception as error:  # A backend that can't is a result too.
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def host_cost(calls: int = 500) -> dict[str, float]:
    """Microseconds of host time a call at length 128, forward and forward with backward."""
    from fa_advisor.kernels.api import flash_attention

    tensors = random_tensors(1, 8, 128, 64)
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    grad = torch.randn_like(tensors[0])
    figures = {}
    for name, function in (("ours", flash_attention), ("sdpa", F.scaled_dot_product_attention)):

        def infer(f: Callable[..., Any] = function) -> None:
            with torch.no_grad():
                f(*tensors)

        def train(f: Callable[..., Any] = function) -> None:
            torch.autograd.grad(f(*leaves), leaves, grad)

        for kind, run in (("forward", infer), ("forward_backward", train)):
            for _ in range(50):
                run()
            rounds = []
            for _ in range(9):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(calls // 9):
                    run()
                rounds.append((time.perf_counter() - began) / (calls // 9) * 1e6)
            figures[f"{name}_{kind}_us"] = sorted(rounds)[len(rounds) // 2]
    return figures


def memory() -> Iterator[dict[str, Any]]:
    """The peak over inputs, outputs and gradients of a causal training call at great lengths."""
    for shape in ((1, 8, 65_536, 64), (1, 1, 1_048_576, 64)):
        gc.collect()
        yield _peak(shape)


def _peak(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    b, h, n, _ = shape
    leaves = tuple(t.requires_grad_() for t in random_tensors(*shape))
    grad = torch.randn_like(leaves[0])
    function = ours(*leaves, is_causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, grad)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(t.nbytes for t in (out, *gradients))
    return {
        "shape": list(shape),
        "outputs_and_gradients_bytes": results,
        "peak_over_inputs_bytes": peak,
        "bytes_a_row_beyond": (peak - results) / (b * h * n),
        "finite": all(bool(t.isfinite().all()) for t in gradients),
    }


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over the plain calls, and the worst of them."""

    def over(peer: str, direction: str) -> list[float]:
        return [r["ours"][f"{direction}_tflops"] / r[peer][f"{direction}_tflops"] for r in rows]

    figures = {}
    for peer, direction in (("cudnn", "forward"), ("flash", "forward"), ("flash", "backward")):
        values = over(peer, direction)
        mean = math.exp(sum(map(math.log, values)) / len(values))
        figures[f"{direction}_over_{peer}_mean"] = mean
        figures[f"{direction}_over_{peer}_worst"] = min(values)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    # What runs on every GPU; benchmarks/hopper.py times what an H100 has beyond.
    os.environ.setdefault("FA_ADVISOR_KERNELS", "portable")
    torch.manual_seed(0)
    plain = []
    for row in speed():
        plain.append(row)
        shown = " ".join(
            f"{name} {row[name]['forward_tflops']:.0f}/{row[name]['backward_tflops']:.0f}"
            for name in ("ours", *PEERS)
        )
        print(row["shape"], "causal" if row["causal"] else "full", shown, flush=True)
    ratios = _ratios(plain)
    print(ratios, flush=True)
    host = host_cost()
    print(host, flush=True)
    lengths = []
    for row in memory():
        lengths.append(row)
        print(row, flush=True)
    special = []
    for row in features():
        special.append(row)
        print(row, flush=True)
    over = _over_the_best(special)
    print(over, flush=True)
    figures = {
        "question": __doc__,
        "plain": plain,
        "ratios": ratios,
        "host": host,
        "memory": lengths,
        "features": special,
        "features_over_the_best_other": over,
    }
    print(write("attention", figures))


if __name__ == "__main__":
    main()
