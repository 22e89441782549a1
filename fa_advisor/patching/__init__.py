"""`patch(model)`: the kernel behind the attention of one model, verified, and undone at will."""

from __future__ import annotations

from fa_advisor.patching.fallback import PatchFallbackWarning
from fa_advisor.patching.handle import Handle, patch

__all__ = ["Handle", "PatchFallbackWarning", "patch"]
