"""The kernels compiled ahead, for GPUs that aren't there: what a tile takes of one, to the byte.

A launch finds its kernel's signature in its arguments; here it is written by hand, as the launch of
a dense call would find it. Triton 3.6 to 3.9 take the same ones. Compiling needs no GPU and about
two seconds a kernel, and can abort the process: do it in a child.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fa_advisor.kernels import backward, forward
from fa_advisor.kernels.score import UNSPECIALIZED
from fa_advisor.kernels.tiles import Tile

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
_STREAMED = {
    "forward": {"key": "n", "value": "n"},
    "queries": {"key": "n", "value": "n"},
    "keys": {"query": "m", "grad_out": "m"},
    "bias": {},
}
_VALUES = ("value", "grad_out")
_OPERANDS = {
    "query", "key", "value", "out", "grad_out", "grad_key", "grad_value", "grad_query",
    "grad_bias",
}  # fmt: skip
_STATISTICS = {"lse", "base", "row_max", "row_sum", "delta"}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Config(NamedTuple):
    """A kernel with a tile, for a GPU and a kind of call.

    capability: as a number, 90 for 9.0. dtype: bf16, fp16 or fp32.
    """

    capability: int
    kernel: str
    tile: Tile
    dim: int
    dim_v: int
    dtype: str
    call: str


class Usage(NamedTuple):
    """What a compiled kernel takes: registers and stack (spilled registers) of a thread, and the
    shared memory of a block, in bytes; the driver's own kilobyte a block is not in it.

    tensor_columns: of tensor memory, which 10.x alone has, 512 of them an SM. A kernel that wants
    more compiles to one that can't be launched.
    """

    registers: int
    stack_bytes: int
    smem_bytes: int
    tensor_columns: int


def usage_of(config: Config) -> Usage:
    """Compile, and read what it takes. Raises what the compiler does."""
    capability, kernel, tile, dim, dim_v, dtype, call = config
    constants: dict[str, Any] = {
        **dict.fromkeys(("VARLEN", "SOFTCAP", "ALIBI", "SINKS", "HAS_LEFT", "HAS_RIGHT"), False),
        **dict.fromkeys(("BOTTOM_RIGHT", "DROPOUT"), False),
        **{"FOLD": True, "BIAS": 0, "EVEN_K": True, "PRECISION": "ieee"},
        **{"DIM": dim, "DIM_V": dim_v, "BLOCK_D": _padded(dim), "BLOCK_DV": _padded(dim_v)},
        **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n},
        **CALLS[call],
    }
    if kernel == "bias":  # Whatever the call: its gradient is asked for where there is one.
        constants["BIAS"] = 2
    exact = dtype == "fp32" and constants["PRECISION"] == "ieee"
    constants.setdefault("TMA", capability >= 90 and not exact and dim >= 8 and dim_v >= 8)
    bias: int = constants["BIAS"]
    constants |= dict.fromkeys(("BIAS_B", "BIAS_H", "BIAS_M", "BIAS_N"), bias != 0)
    absent = set() if constants["SINKS"] else {"sinks"}
    absent |= set() if constants["ALIBI"] else {"slopes"}
    absent |= set() if constants["VARLEN"] else {"cu_q", "cu_k"}
    absent |= set() if constants["DROPOUT"] else {"seeds"}
    absent |= set() if bias else {"bias"}
    absent |= set() if bias == 1 else {"spans"}
    absent |= set() if bias == 2 else {"row_max", "row_sum"}
    rows = {"m": tile.block_m, "n": tile.block_n}
    streamed = _STREAMED[kernel] if constants["TMA"] else {}
    function = FUNCTIONS[kernel]
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(function.arg_names):
        aligned = name.startswith("stride_") and name not in UNSPECIALIZED
        if name in constants or name in absent:
            signature[name], values[name] = "constexpr", constants.get(name)
        elif bias and name in ("stride_bn", "stride_dbn"):
            signature[name], values[name], aligned = "constexpr", 1, False
        elif name in streamed:
            width = constants["BLOCK_DV" if name in _VALUES else "BLOCK_D"]
            signature[name] = f"tensordesc<{dtype}[1,1,{rows[streamed[name]]},{width}]>"
        elif name in _OPERANDS or name == "sinks":
            signature[name], aligned = f"*{dtype}", True
        elif name in _STATISTICS or name == "slopes":
            signature[name], aligned = "*fp32", True
        elif name == "bias":
            signature[name], aligned = ("*u8" if bias == 1 else f"*{dtype}"), True
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
    return compiled_usage(function, signature, values, attributes, capability, tile)


def compiled_usage(
    function: Any,
    signature: Mapping[str, str],
    values: Mapping[str, Any],
    attributes: Mapping[tuple[int, ...], Any],
    capability: int,
    tile: Tile,
) -> Usage:
    """What any Triton kernel takes, with a tile's warps, stages and limit on registers.

    signature: a type for each argument, "constexpr" for those in `values`.
    """
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(
        fn=function, signature=dict(signature), constexprs=dict(values), attrs=dict(attributes)
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text[:200]}")
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    return Usage(int(found[1]), int(found[2]), int(kernel.metadata.shared), int(columns))


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _meant(value: Any) -> Any:
    """A constant; "tl.float16" is Triton's dtype."""
    if isinstance(value, str) and value.startswith("tl."):
        return getattr(triton.language, value[3:], value)
    return value


def usage_of_file(
    path: str,
    function: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    tile: Tile,
) -> Usage:
    """What a kernel in somebody's file takes.

    signature: a type for each argument that isn't in `constants`: "*fp16", "i32", "fp32", and with
    ":16" behind it where the value is divisible by 16.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    kernel: Any = getattr(module, function, None)
    while not isinstance(kernel, triton.JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn  # Under autotune and heuristics.
    if not isinstance(kernel, triton.JITFunction):
        raise ValueError(f"{path}: {function} isn't a @triton.jit function")
    names = kernel.arg_names
    constants = {
        **{p.name: p.default for p in kernel.params if p.has_default and p.name not in signature},
        **{name: _meant(value) for name, value in constants.items()},
    }
    missing = [name for name in names if name not in signature and name not in constants]
    unknown = [name for name in (*signature, *constants) if name not in names]
    if missing or unknown:
        raise ValueError(
            f"{function} takes {', '.join(names)};"
            + (f" nothing was said of {', '.join(missing)}" if missing else "")
            + (f" it has no {', '.join(unknown)}" if unknown else "")
        )
    types = {
        name: "constexpr" if name in constants else signature[name].removesuffix(":16")
        for name in names
    }
    attributes: dict[tuple[int, ...], Any] = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if signature.get(name, "").endswith(":16")
    }
    return compiled_usage(kernel, types, constants, attributes, capability, tile)
