"""The Hopper kernels compiled ahead, as `kernels.ahead` does it for the portable ones."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from fa_advisor.kernels.ahead import Usage, compiled_usage
from fa_advisor.kernels.hopper.forward import forward_kernel
from fa_advisor.kernels.hopper.plan import CAPABILITY, ROWS_OF_A_CONSUMER, tiles_of
from fa_advisor.kernels.tiles import Tile

# What is not as in the plain call, whose keys fill their tiles.
CALLS: dict[str, dict[str, bool]] = {
    "plain": {},
    "causal": {"HAS_RIGHT": True},
    "ragged": {"EVEN_K": False},
    "packed": {"HAS_RIGHT": True, "VARLEN": True, "EVEN_K": False},
    "window": {"HAS_RIGHT": True, "HAS_LEFT": True},
    "padding": {"PADDING": True, "EVEN_K": False},
    "softcap, sinks": {"HAS_RIGHT": True, "SOFTCAP": True, "SINKS": True},
}
_FLAGS = (
    "VARLEN", "SOFTCAP", "SINKS", "PADDING", "HAS_LEFT", "HAS_RIGHT", "BOTTOM_RIGHT"
)  # fmt: skip
_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}


def forward_usage(dim: int, dim_v: int, dtype: str, call: str) -> Usage:
    """What the forward kernel takes with its tiles. Raises what the compiler does."""
    given = CALLS[call]
    uneven = bool(given.get("HAS_RIGHT") or given.get("HAS_LEFT"))
    cut = tiles_of(dim, dim_v, uneven)
    bm, bn = ROWS_OF_A_CONSUMER, cut.block_n
    constants: dict[str, Any] = {
        **dict.fromkeys(_FLAGS, False), "EVEN_K": True, **given,
        "BM": bm, "BN": bn, "PARTS": cut.parts, "BLOCK_DV": cut.block_dv, "STAGES": cut.stages,
        "CONSUMERS": cut.consumers, "SHARED_O": cut.shared_out,
    }  # fmt: skip
    blocks = {
        "query": (bm, cut.part), "key": (bn, cut.part),
        "value": (bn, cut.block_dv), "out": (bm, cut.block_dv),
    }  # fmt: skip
    pointers = {"lse": "*fp32"}
    if constants["VARLEN"]:
        pointers |= {"cu_q": "*i32", "cu_k": "*i32"}
    elif uneven:
        pointers["schedule"] = "*i32"
    if constants["PADDING"]:
        pointers |= {"bias": "*u8", "spans": "*i32"}
    if constants["SINKS"]:
        pointers["sinks"] = f"*{dtype}"
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in forward_kernel.arg_names:
        if name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name in blocks:
            rows, features = blocks[name]
            block = [1, 1, 1, rows, features]
            layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[dtype])
            signature[name] = f"tensordesc<{dtype}[1,1,1,{rows},{features}],{layout!r}>"
        elif name in pointers:
            signature[name] = pointers[name]
        elif name in _POINTERS:
            signature[name], values[name] = "constexpr", None
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    capability = CAPABILITY[0] * 10 + CAPABILITY[1]
    tile = Tile(bm, bn, 4, cut.stages)
    return compiled_usage(forward_kernel, signature, values, {}, capability, tile)


_POINTERS = {
    "lse", "row_max", "row_sum", "bias", "spans", "sinks", "slopes", "cu_q", "cu_k", "seeds",
    "schedule",
}  # fmt: skip
