"""What Gluon calls by different names in the releases of Triton that we support (3.6 to 3.9)."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed the copies by tensor descriptor; the older names are on their way out.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
