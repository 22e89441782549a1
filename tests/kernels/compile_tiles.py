"""Compile shipped tiles for GPUs that aren't there; print what each needs, a JSON line each.

python compile_tiles.py '[[[80, [64, 128]]], [2]]'     # targets with head dims, element sizes
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_advisor.kernels import backward, forward
from fa_advisor.kernels.tiles import KERNELS, Tile, group_of, tile

FUNCTIONS = {
    "forward": forward.forward_kernel,
    "keys": backward.keys_kernel,
    "queries": backward.queries_kernel,
    "bias": backward.bias_kernel,
}
# What each kernel streams, which a GPU from 9.0 is given as tensor descriptors.
STREAMED = {
    "forward": {"key": "n", "value": "n"},
    "queries": {"key": "n", "value": "n"},
    "keys": {"query": "m", "grad_out": "m"},
    "bias": {},
}
OPERANDS = {
    "query", "key", "value", "out", "grad_out", "grad_key", "grad_value", "grad_query",
    "grad_bias", "bias",
}  # fmt: skip
STATISTICS = {"lse", "base", "row_max", "row_sum", "delta"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel: str, cc: int, t: Tile, dim: int, element_bytes: int, causal: bool) -> Any:
    """The kernel of a plain dense call (the bias's own: of a call with a bias)."""
    function = FUNCTIONS[kernel]
    biased = kernel == "bias"
    kind = {2: "bf16", 4: "fp32"}[element_bytes]
    tma = cc >= 90 and not biased
    constants: dict[str, Any] = {
        **dict.fromkeys(("VARLEN", "SOFTCAP", "ALIBI", "SINKS", "HAS_LEFT"), False),
        **dict.fromkeys(("BOTTOM_RIGHT", "DROPOUT"), False),
        **dict.fromkeys(("BIAS_B", "BIAS_H", "BIAS_M", "BIAS_N"), biased),
        **{"FOLD": True, "BIAS": 0, "HAS_RIGHT": causal, "TMA": tma, "EVEN_K": True},
        **{"PRECISION": "ieee", "DIM": dim, "DIM_V": dim, "BLOCK_D": dim, "BLOCK_DV": dim},
        **{"BLOCK_M": t.block_m, "BLOCK_N": t.block_n},
    }
    absent = {"sinks", "slopes", "cu_q", "cu_k", "seeds"}
    if not biased:
        absent |= {"bias", "row_max", "row_sum"}
    rows = {"m": t.block_m, "n": t.block_n}
    streamed = STREAMED[kernel] if tma else {}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(function.arg_names):
        aligned = True
        if name in constants or name in absent:
            signature[name], values[name] = "constexpr", constants.get(name)
            aligned = False
        elif name in streamed:
            signature[name] = f"tensordesc<{kind}[1,1,{rows[streamed[name]]},{dim}]>"
            aligned = False
        elif name in OPERANDS:
            signature[name] = f"*{kind}"
        elif name in STATISTICS:
            signature[name] = "*fp32"
        elif name in ("scale", "softcap", "keep_scale"):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = "i32", name.startswith("stride_")
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    if t.max_registers is not None:
        options["maxnreg"] = t.max_registers
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)


def usage(kernel: Any) -> tuple[int, int]:
    """Registers a thread, and its stack frame's bytes: what it spills goes there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def main() -> None:
    """Read the targets off the command line and print."""
    targets, sizes = json.loads(sys.argv[1])
    for cc, dims in targets:
        group = group_of(divmod(cc, 10))
        for kernel in KERNELS:
            for size in sizes:
                for dim in dims:
                    t = tile(group, kernel, dim, size)
                    for causal in (False, True):
                        k = compiled(kernel, cc, t, dim, size, causal)
                        registers, stack = usage(k)
                        row = {
                            "cc": cc, "kernel": kernel, "bytes": size, "dim": dim, "tile": t,
                            "causal": causal, "smem": k.metadata.shared,
                            "registers": registers, "stack": stack,
                        }  # fmt: skip
                        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
