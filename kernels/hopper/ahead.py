"""The Hopper kernels compiled ahead, as `kernels.ahead` does it for the portable ones."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from fa_advisor.kernels.ahead import Usage, compiled_usage
from fa_advisor.kernels.hopper.backward import backward_kernel
from fa_advisor.kernels.hopper.forward import forward_kernel
from fa_advisor.kernels.hopper.fp8 import fp8_forward_kernel
from fa_advisor.kernels.hopper.plan import flat_layout, used_features
from fa_advisor.kernels.hopper.tiles import (
    BLOCK_N,
    CAPABILITY,
    ROWS_OF_A_CONSUMER,
    WIDE_QUERIES,
    fp8_tiles_of,
    tiles_of,
    value_stages,
    widths,
)
from fa_advisor.kernels.hopper.wide import wide_keys_kernel, wide_queries_kernel
from fa_advisor.kernels.tiles import Tile

# What is not as in the plain call, whose keys fill their tiles.
CALLS: dict[str, dict[str, bool]] = {
    "plain": {},
    "causal": {"HAS_RIGHT": True},
    "ragged": {"EVEN_K": False},
    "packed": {"HAS_RIGHT": True, "VARLEN": True, "EVEN_K": False},
    "window": {"HAS_RIGHT": True, "HAS_LEFT": True},
    "left, bottom-right": {"HAS_LEFT": True, "BOTTOM_RIGHT": True, "EVEN_K": False},
    "padding": {"PADDING": True, "EVEN_K": False},
    "softcap, sinks": {"HAS_RIGHT": True, "SOFTCAP": True, "SINKS": True},
}
_FLAGS = (
    "VARLEN", "SOFTCAP", "SINKS", "PADDING", "HAS_LEFT", "HAS_RIGHT", "BOTTOM_RIGHT"
)  # fmt: skip
_FP8_FLAGS = ("VARLEN", "SOFTCAP", "SINKS", "HAS_LEFT", "HAS_RIGHT", "BOTTOM_RIGHT")
_BACKWARD_FLAGS = ("VARLEN", "SOFTCAP", "HAS_LEFT", "HAS_RIGHT", "BOTTOM_RIGHT")
_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv}


def usage(kernel: str, dim: int, dim_v: int, dtype: str, call: str) -> Usage:
    """What one of `fa-advisor budget`'s kernels for Hopper takes, by its name there."""
    return _USAGES[kernel](dim, dim_v, dtype, call)


def forward_usage(dim: int, dim_v: int, dtype: str, call: str) -> Usage:
    """What the forward kernel takes with its tiles. Raises what the compiler does."""
    given = CALLS[call]
    cut = tiles_of(dim, dim_v)
    bm, bn = ROWS_OF_A_CONSUMER, cut.block_n
    constants: dict[str, Any] = {
        **dict.fromkeys(_FLAGS, False), "EVEN_K": True, **given,
        "BM": bm, "BN": bn, "PARTS": cut.parts, "BLOCK_DV": cut.block_dv, "STAGES": cut.stages,
        "CONSUMERS": cut.consumers, "SHARED_O": cut.shared_out,
        "ORDERED": given.get("VARLEN", False),
    }  # fmt: skip
    blocks = {
        "query": (bm, cut.part), "key": (bn, cut.part),
        "value": (bn, cut.block_dv), "out": (bm, cut.block_dv),
    }  # fmt: skip
    pointers = {"lse": "*fp32"}
    if constants["VARLEN"]:
        pointers |= {"cu_q": "*i32", "cu_k": "*i32", "schedule": "*i32"}
    elif given.get("HAS_RIGHT") or given.get("HAS_LEFT"):
        pointers["schedule"] = "*i32"
    if constants["PADDING"]:
        pointers |= {"bias": "*u8", "spans": "*i32"}
    if constants["SINKS"]:
        pointers["sinks"] = f"*{dtype}"
    return _usage(forward_kernel, constants, _operands(blocks, dtype), pointers)


def fp8_usage(dim: int, dim_v: int, dtype: str, call: str) -> Usage:
    """What the forward kernel on float8_e4m3fn ("fp8e4nv") takes. Raises what the compiler does."""
    constants: dict[str, Any] = {
        **dict.fromkeys(_FP8_FLAGS, False), "EVEN_K": True, **CALLS[call]
    }  # fmt: skip
    cut = fp8_tiles_of(dim, dim_v)
    bm, bn, width = ROWS_OF_A_CONSUMER, cut.block_n, cut.block_dv
    constants |= {
        "BM": bm, "BN": bn, "BLOCK_DV": width, "STAGES": cut.stages, "CONSUMERS": cut.consumers
    }  # fmt: skip
    eight = {"query": (bm, cut.part), "key": (bn, cut.part), "transposed": (width, bn)}
    descriptors = _operands(eight, dtype) | _operands({"out": (bm, width)}, "bf16")
    pointers = dict.fromkeys(("lse", "q_descale", "k_descale", "v_descale"), "*fp32")
    pointers |= _sequences(constants)
    if not constants["VARLEN"] and (constants["HAS_RIGHT"] or constants["HAS_LEFT"]):
        pointers["schedule"] = "*i32"
    if constants["SINKS"]:
        pointers["sinks"] = "*fp32"
    return _usage(fp8_forward_kernel, constants, descriptors, pointers)


def backward_usage(dim: int, dim_v: int, dtype: str, call: str, exact: bool = False) -> Usage:
    """What the kernel that makes dK, dV takes (and dQ, up to head dims of 128 and if not `exact`).

    Raises what the compiler does.
    """
    constants, blocks = _backward_call(dim, dim_v, call)
    wide, wide_v, block_m = widths(dim, dim_v)
    flat = {"base": [block_m], "delta": [block_m]}
    if wide == 256:
        kernel = wide_keys_kernel
        constants["BLOCK"] = block_m
        keys = block_m
    else:
        kernel = backward_kernel
        constants |= {"DQ": not exact, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N}
        keys = BLOCK_N
        flat["total"] = [16, 256]
    blocks |= {
        "key": (keys, wide), "value": (keys, wide_v),
        "grad_key": (keys, wide), "grad_value": (keys, wide_v),
    }  # fmt: skip
    descriptors = _operands(blocks, dtype)
    for name, block in flat.items():
        descriptors[name] = f"tensordesc<fp32{block},{flat_layout(len(block))!r}>"
    return _usage(kernel, constants, descriptors, {"taken": "*i32", **_sequences(constants)})


def queries_usage(dim: int, dim_v: int, dtype: str, call: str) -> Usage:
    """What the kernel of dQ takes where a head dim is over 128. Raises what the compiler does."""
    constants, blocks = _backward_call(dim, dim_v, call)
    wide, wide_v, rows = widths(dim, dim_v)
    constants |= {
        "BLOCK_M": WIDE_QUERIES, "BLOCK_N": rows, "PADDED": rows, "V_STAGES": value_stages(wide_v),
    }  # fmt: skip
    blocks |= {"key": (rows, wide), "value": (rows, wide_v), "grad_query": (rows, wide)}
    pointers = {"base": "*fp32", "delta": "*fp32", **_sequences(constants)}
    return _usage(wide_queries_kernel, constants, _operands(blocks, dtype), pointers)


def _backward_call(
    dim: int, dim_v: int, call: str
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The constants that all kernels of a backward take, and the blocks of Q and dO."""
    given = {name: value for name, value in CALLS[call].items() if name in _BACKWARD_FLAGS}
    wide, wide_v, block_m = widths(dim, dim_v)
    constants: dict[str, Any] = {
        **dict.fromkeys(_BACKWARD_FLAGS, False), "EVEN": CALLS[call].get("EVEN_K", True), **given,
        "D": wide, "DV": wide_v,
    }  # fmt: skip
    if wide == 256:
        constants["USED"], constants["USED_V"] = used_features(dim, dim_v)
    return constants, {"query": (block_m, wide), "grad_out": (block_m, wide_v)}


def _sequences(constants: dict[str, Any]) -> dict[str, str]:
    return {"cu_q": "*i32", "cu_k": "*i32"} if constants["VARLEN"] else {}


def _operands(blocks: dict[str, tuple[int, int]], dtype: str) -> dict[str, str]:
    """The types of descriptors with a block of rows and features."""
    found = {}
    for name, (rows, features) in blocks.items():
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, features], _TYPES[dtype])
        found[name] = f"tensordesc<{dtype}[1,1,1,{rows},{features}],{layout!r}>"
    return found


def _usage(
    kernel: Any, constants: dict[str, Any], descriptors: dict[str, str], pointers: dict[str, str]
) -> Usage:
    types = descriptors | pointers
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in constants or (name in _OPTIONAL and name not in types):
            signature[name], values[name] = "constexpr", constants.get(name)
        else:
            number = "fp32" if name in ("scale", "softcap") else "i32"
            signature[name] = types.get(name, number)
    capability = CAPABILITY[0] * 10 + CAPABILITY[1]
    return compiled_usage(kernel, signature, values, {}, capability, Tile(64, 128, 4, 2))


_OPTIONAL = {
    "row_max", "row_sum", "bias", "spans", "sinks", "slopes", "cu_q", "cu_k", "seeds", "schedule",
}  # fmt: skip
_USAGES = {
    "hopper forward": forward_usage,
    "hopper backward": backward_usage,
    "hopper keys": backward_usage,
    "hopper queries": queries_usage,
}
