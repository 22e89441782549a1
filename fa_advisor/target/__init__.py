"""The user's model: found and built from a file or a module, with inputs given or synthesised."""

from __future__ import annotations

from fa_advisor.target.faults import target_code
from fa_advisor.target.load import Target, load
from fa_advisor.target.synthesis import synthesise

__all__ = ["Target", "load", "synthesise", "target_code"]
