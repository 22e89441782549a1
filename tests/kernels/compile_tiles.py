"""Compile kernels for GPUs that aren't there, one after another; print what each needs.

Configurations come as JSON lines on stdin, rows go as JSON lines to stdout. The kernels' signatures
are written by hand as a launch would find them; Triton 3.6 to 3.9 take the same ones.

echo '[80, "forward", [128, 64, 8, 2, null], 128, 2, "causal"]' | python compile_tiles.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_advisor.kernels import backward, forward
from fa_advisor.kernels.tiles import Tile


class Config(NamedTuple):
    """A kernel with a tile, for a GPU and a kind of call."""

    cc: int
    kernel: str
    tile: Tile
    dim: int
    element_bytes: int
    call: str


FUNCTIONS = {
    "forward": forward.forward_kernel,
    "keys": backward.keys_kernel,
    "queries": backward.queries_kernel,
    "bias": backward.bias_kernel,
}
# Kinds of call: what is not as in the plain one, dense and with keys that fill their tiles.
# "pointers": what can't be named by tensor descriptors, or is too short for them to pay.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"HAS_RIGHT": True},
    "ragged": {"EVEN_K": False},
    "pointers": {"HAS_RIGHT": True, "TMA": False},
    "packed": {"HAS_RIGHT": True, "VARLEN": True, "EVEN_K": False},
    "window": {"HAS_RIGHT": True, "HAS_LEFT": True},
    "dropout": {"HAS_RIGHT": True, "DROPOUT": True},
    "tf32": {"HAS_RIGHT": True, "PRECISION": "tf32"},
    "mask": {"BIAS": 1},
    "bias": {"BIAS": 2, "FOLD": False},
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
    "grad_bias",
}  # fmt: skip
STATISTICS = {"lse", "base", "row_max", "row_sum", "delta"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(config: Config) -> Any:
    """The kernel. The one for the bias's gradient is that of a call with a bias, whichever call."""
    cc, kernel, t, dim, element_bytes, call = config
    function = FUNCTIONS[kernel]
    kind = {2: "bf16", 4: "fp32"}[element_bytes]
    constants: dict[str, Any] = {
        **dict.fromkeys(("VARLEN", "SOFTCAP", "ALIBI", "SINKS", "HAS_LEFT", "HAS_RIGHT"), False),
        **dict.fromkeys(("BOTTOM_RIGHT", "DROPOUT"), False),
        **{"FOLD": True, "BIAS": 0, "EVEN_K": True, "PRECISION": "ieee"},
        **{"DIM": dim, "DIM_V": dim, "BLOCK_D": dim, "BLOCK_DV": dim},
        **{"BLOCK_M": t.block_m, "BLOCK_N": t.block_n},
        **CALLS[call],
    }
    if kernel == "bias":
        constants["BIAS"] = 2
    # What IEEE's fp32 products read from shared memory as descriptors fill it doesn't stay in
    # registers: thousands of bytes spilled.
    exact = element_bytes == 4 and constants["PRECISION"] == "ieee"
    constants.setdefault("TMA", cc >= 90 and not exact)
    bias: int = constants["BIAS"]
    constants |= dict.fromkeys(("BIAS_B", "BIAS_H", "BIAS_M", "BIAS_N"), bias != 0)
    absent = {"sinks", "slopes"}
    absent |= set() if constants["VARLEN"] else {"cu_q", "cu_k"}
    absent |= set() if constants["DROPOUT"] else {"seeds"}
    absent |= set() if bias else {"bias"}
    absent |= set() if bias == 1 else {"spans"}
    absent |= set() if bias == 2 else {"row_max", "row_sum"}
    rows = {"m": t.block_m, "n": t.block_n}
    streamed = STREAMED[kernel] if constants["TMA"] else {}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(function.arg_names):
        aligned = name.startswith("stride_") and name not in ("stride_um", "stride_un")
        if name in constants or name in absent:
            signature[name], values[name] = "constexpr", constants.get(name)
        elif bias and name in ("stride_bn", "stride_dbn"):
            signature[name], values[name], aligned = "constexpr", 1, False
        elif name in streamed:
            signature[name] = f"tensordesc<{kind}[1,1,{rows[streamed[name]]},{dim}]>"
        elif name in OPERANDS:
            signature[name], aligned = f"*{kind}", True
        elif name in STATISTICS:
            signature[name], aligned = "*fp32", True
        elif name == "bias":
            signature[name], aligned = ("*u8" if bias == 1 else f"*{kind}"), True
        elif name in ("spans", "cu_q", "cu_k"):
            signature[name], aligned = "*i32", True
        elif name == "seeds":
            signature[name], aligned = "*i64", True
        elif name in ("scale", "softcap", "keep_scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
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
    """Read configurations, print rows; what doesn't compile has a row with its error."""
    rows, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        cc, kernel, numbers, *rest = json.loads(line)
        config = Config(cc, kernel, Tile(*numbers), *rest)
        row = {**config._asdict(), "triton": triton.__version__}
        try:
            k = compiled(config)
            row["registers"], row["stack"] = usage(k)
            row["smem"] = k.metadata.shared
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
