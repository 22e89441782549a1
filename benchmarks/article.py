"""Common advice on faults of attention kernels, each piece put to a measurement.

    python benchmarks/article.py

Writes benchmarks/results/article.json, which docs/troubleshooting.md quotes. Needs no GPU: a small
kernel runs in Triton's interpreter, in a child process, and is compiled for a GPU that isn't there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from provenance import write
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ON = {"TRITON_INTERPRET": "1"}


@triton.jit
def attend(
    query, key, value, out, length, scale, first_key,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A textbook forward of one head. MASK: keys past the end get -inf; GUARD: -inf - -inf isn't
    taken; keys before first_key are masked as left padding is."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < length) & (features[None, :] < DIM)
    q = tl.load(query + rows[:, None] * DIM + features[None, :], mask=inside, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = (keys[:, None] < length) & (features[None, :] < DIM)
        k = tl.load(key + keys[:, None] * DIM + features[None, :], mask=there, other=0.0)
        v = tl.load(value + keys[:, None] * DIM + features[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASK:
            s = tl.where(keys[None, :] < length, s, float("-inf"))
        if CAUSAL:
            s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
        s = tl.where(keys[None, :] >= first_key, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if GUARD:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - base[:, None])
        alpha = tl.exp(m - base)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new
    acc = acc / total[:, None]
    tl.store(out + rows[:, None] * DIM + features[None, :], acc.to(q.dtype), mask=inside)


def run(q: Tensor, k: Tensor, v: Tensor, first_key: int = 0, **flags: Any) -> Tensor:
    """The kernel over one head [L, D], in the interpreter."""
    options = {"MASK": True, "GUARD": True, "CAUSAL": False, "PRECISION": "ieee", **flags}
    length, dim = q.shape
    block_d = options.pop("BLOCK_D", triton.next_power_of_2(dim))
    out = torch.zeros_like(q)
    attend[(triton.cdiv(length, 64),)](
        q, k, v, out, length, dim**-0.5, first_key,
        DIM=dim, BLOCK_M=64, BLOCK_N=64, BLOCK_D=block_d, **options,
    )  # fmt: skip
    return out


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same in float64."""
    s = q.double() @ k.double().T * q.shape[1] ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return torch.softmax(s, 1) @ v.double()


def error(out: Tensor, true: Tensor) -> float:
    """||out - true|| / ||true||."""
    return float((out.double() - true).norm() / true.norm())


def heads(length: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(length, dim).to(dtype) for _ in range(3)]


def nan() -> dict[str, Any]:
    q, k, v = heads(128, 64)
    mask = (torch.arange(128) >= 100).expand(128, 128)
    true = exact(q, k, v, mask)
    unguarded, guarded = (run(q, k, v, first_key=100, GUARD=guard) for guard in (False, True))
    big = [q * 1000, k * 1000, v]
    inf = torch.tensor(float("-inf"))
    return {
        "exp(-inf - finite)": float(torch.exp(inf - 3.0)),
        "exp(-inf - -inf) is NaN": bool(torch.exp(inf - inf).isnan()),
        "first tile masked, unguarded: NaN rows of 128": int(unguarded.isnan().any(1).sum()),
        "first tile masked, guarded: error": error(guarded, true),
        "logits up to": float((big[0] @ big[1].T).abs().max() / 8),
        "large logits, NaN rows of 128": int(run(*big).isnan().any(1).sum()),
    }


def head_dim() -> dict[str, Any]:
    """A head dim of 80 in a kernel that takes 64 features, and in one that takes 128."""
    q, k, v = heads(128, 80)
    true = exact(q, k, v)
    narrow, wide = run(q, k, v, BLOCK_D=64), run(q, k, v, BLOCK_D=128)
    return {
        "block 64: NaNs": int(narrow.isnan().sum()),
        "block 64: error": error(narrow, true),
        "block 64: features of 80 never written": int((narrow == 0).all(0).sum()),
        "block 128, masked: error": error(wide, true),
    }


def boundary() -> dict[str, Any]:
    """Keys past the end: zero-filled and let into the softmax, against masked."""
    figures: dict[str, Any] = {"exp(0 - m), m = 3": float(torch.exp(torch.tensor(-3.0)))}
    for length in (100, 127, 1000):
        q, k, v = heads(length, 64)
        true = exact(q, k, v)
        filled = run(q, k, v, MASK=False)
        shrink = float((filled.double() * true).sum() / true.square().sum())
        causal = exact(q, k, v, torch.ones(length, length, dtype=torch.bool).tril())
        figures[f"length {length}"] = {
            "zero-filled keys": -length % 64,
            "error": error(filled, true),
            "output shrinks to": shrink,
            "error with their logits at -inf": error(run(q, k, v), true),
            "error causal, no mask of the end": error(
                run(q, k, v, MASK=False, CAUSAL=True), causal
            ),
        }
    padded = -1025 % 128 + 1025
    figures["padding 1025 to a multiple of 128: logits computed, times"] = (padded / 1025) ** 2
    return figures


def round_to(x: Tensor, bits: int) -> Tensor:
    """float32 with a mantissa of `bits` bits, to nearest even: TF32 has 10, bfloat16 7."""
    drop = 23 - bits
    raw = x.view(torch.int32)
    raw = raw + (1 << (drop - 1)) - 1 + ((raw >> drop) & 1)
    return (raw >> drop << drop).view(torch.float32)


def precision() -> dict[str, Any]:
    """Errors of QK^T and of the whole, by the dtype of the product's inputs and sums."""
    q, k, v = heads(256, 128)
    product = q.double() @ k.double().T
    tf32 = [round_to(x, 10) for x in (q, k)]
    half = [x.half() for x in (q, k)]
    narrow_sum = torch.zeros(256, 256, dtype=torch.half)
    for i in range(128):
        narrow_sum += half[0][:, i : i + 1] * half[1][:, i][None]
    half_product = half[0].double() @ half[1].double().T
    figures: dict[str, Any] = {
        "QK^T of float32 inputs": {
            "IEEE": error(q @ k.T, product),
            "inputs rounded to TF32": error(tf32[0] @ tf32[1].T, product),
            "inputs rounded to float16": error(half[0].float() @ half[1].float().T, product),
            "inputs rounded to bfloat16": error(
                q.bfloat16().float() @ k.bfloat16().float().T, product
            ),
        },
        "QK^T of float16 inputs": {
            "float32 sums (what tl.dot does)": error(
                half[0].float() @ half[1].float().T, half_product
            ),
            "float16 sums": error(narrow_sum, half_product),
        },
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = heads(512, 64, dtype)
        q, k, v = given
        plain = torch.softmax(q @ k.T * 64**-0.5, 1) @ v
        true = exact(*given)
        # The interpreter's tl.dot takes bfloat16 for the integers that its bits are.
        ours = run(*given) if dtype != torch.bfloat16 else None
        name = str(dtype).removeprefix("torch.")
        figures[name] = {"standard computation's error": error(plain, true)}
        if ours is not None:
            apart = (ours.double() - plain.double()).abs() / plain.double().abs()
            figures[name] |= {
                "kernel's error": error(ours, true),
                "difference of the two, ||a - b|| / ||b||": error(ours, plain.double()),
                "largest difference of an element, relative": float(apart.nan_to_num().max()),
            }
    tf = [round_to(x, 10) for x in (q, k)]
    weights = torch.softmax(tf[0] @ tf[1].T * 64**-0.5, 1)
    figures["float32"]["error with TF32 products"] = error(
        round_to(weights, 10) @ round_to(v, 10), exact(q, k, v)
    )
    return figures


def compiled(
    capability: int, dtype: str, dim: int, block: int, warps: int, stages: int, precision: str
) -> dict[str, Any]:
    """What the compiler makes of the kernel: shared memory, registers, spills, instructions."""
    pointers = {name: f"*{dtype}" for name in ("query", "key", "value", "out")}
    constants = {
        "DIM": dim, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": dim, "MASK": True,
        "GUARD": True, "CAUSAL": False, "PRECISION": precision,
    }  # fmt: skip
    scalars = {"length": "i32", "scale": "fp32", "first_key": "i32"}
    signature = pointers | scalars | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    kernel = triton.compile(
        ASTSource(attend, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    ptx = kernel.asm["ptx"]
    usage = resources(kernel.asm["cubin"])
    return {
        "shared_bytes": kernel.metadata.shared,
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "local_bytes": usage["LOCAL"],
        "local_memory_in_ptx": len(re.findall(r"\b(?:ld|st)\.local", ptx)),
        "local_memory_in_sass": len(re.findall(r"\b(?:LDL|STL)\b", sass(kernel.asm["cubin"]))),
        "products": sorted(set(re.findall(r"mma\.sync\S+", ptx))) or ["fma"],
    }


def cuobjdump(option: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def resources(cubin: bytes) -> dict[str, int]:
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", cuobjdump("-res-usage", cubin))
    return {name: int(value) for name, value in found}


def sass(cubin: bytes) -> str:
    try:
        return cuobjdump("-sass", cubin)
    except subprocess.CalledProcessError:  # The wheel may bring no disassembler.
        return ""


def compiler() -> dict[str, Any]:
    by_stages = {
        f"{stages} stages": compiled(80, "fp16", 64, 64, 4, stages, "ieee")["shared_bytes"]
        for stages in (1, 2, 3, 4, 5)
    }
    tiles = {
        f"sm_80 float16 128 x 128, d 128, {warps} warps, {stages} stages": compiled(
            80, "fp16", 128, 128, warps, stages, "ieee"
        )
        for warps, stages in ((8, 3), (8, 4), (4, 2))
    }
    return {
        "sm_80 float16 64 x 64, d 64, shared bytes": by_stages,
        "sm_80 limit of shared bytes a block": 163 * 1024,
        **tiles,
        "sm_80 float32 32 x 32, d 64, tl.dot's default": compiled(80, "fp32", 64, 32, 4, 1, "tf32"),
        "sm_80 float32 32 x 32, d 64, ieee": compiled(80, "fp32", 64, 32, 4, 1, "ieee"),
        "tl.dot's default input_precision": str(default_precision()),
        "torch allows TF32 by default": torch.backends.cuda.matmul.allow_tf32,
    }


def default_precision() -> str:
    """What a compiler for CUDA does where a kernel doesn't say."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return CUDAOptions().default_dot_input_precision


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.manual_seed(0)
        print(json.dumps({f.__name__: f() for f in (nan, head_dim, boundary, precision)}))
        return
    child = subprocess.run(
        [sys.executable, __file__], env=os.environ | ON, capture_output=True, text=True, check=True
    )
    figures = json.loads(child.stdout) | {"compiler": compiler()}
    print(json.dumps(figures, indent=2))
    print(write("article", figures), file=sys.stderr)


if __name__ == "__main__":
    main()
