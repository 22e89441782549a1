"""What Gluon calls by different names in the releases of Triton that we support (3.6 to 3.9)."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed the copies by tensor descriptor; the older names are on their way out.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def viewed(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory under another type, shape and layout."""
    view = getattr(tile, "reinterpret", None) or tile._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@builtin
def _add_tile(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to global memory: in the compiler, but not yet in Gluon."""
    from triton._C.libtriton import ir

    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, src.handle
    )


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile
