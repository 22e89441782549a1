"""Where every byte at the peak of GPU memory goes, and what attention has to do with it.

Importing it loads neither torch nor the terminal interface: each name brings what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_advisor.budgets.api import budget
    from fa_advisor.kernels.api import flash_attention
    from fa_advisor.kernels.module import FlashAttention
    from fa_advisor.patching import patch
    from fa_advisor.pipeline import profile, record
    from fa_advisor.report import Report, load

    __version__: str

__all__ = [
    "FlashAttention",
    "Report",
    "__version__",
    "budget",
    "flash_attention",
    "load",
    "patch",
    "profile",
    "record",
]

_HOMES = {
    "profile": "fa_advisor.pipeline",
    "record": "fa_advisor.pipeline",
    "budget": "fa_advisor.budgets.api",
    "patch": "fa_advisor.patching",
    "load": "fa_advisor.report",
    "Report": "fa_advisor.report",
    "flash_attention": "fa_advisor.kernels.api",
    "FlashAttention": "fa_advisor.kernels.module",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fa-advisor")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
