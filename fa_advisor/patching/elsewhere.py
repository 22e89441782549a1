"""Transformers models whose attention goes to an implementation that `patch` doesn't stand in for.

flash-attn's functions and flex attention are single calls that no structure shows; what shows is
the name in the model's configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from fa_advisor.patching.configs import IMPLEMENTATION
from fa_advisor.patching.interface import KEYS, ORIGINALS
from fa_advisor.patching.sites import Site
from fa_advisor.records import Form

_KNOWN = {*KEYS, *ORIGINALS}


def elsewhere(root: nn.Module, sites: Sequence[Site]) -> Iterator[Site]:
    """A refused site for each outermost model of such an implementation, where none was found."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    seen = {site.module for site in sites}
    told: list[tuple[nn.Module, str]] = []
    for fqn, module in root.named_modules():
        if not isinstance(module, PreTrainedModel) or not module._can_set_attn_implementation():
            continue
        name = getattr(module.config, IMPLEMENTATION, None)
        if name is None or name in _KNOWN or not seen.isdisjoint(module.modules()):
            continue
        if any(name == other and module in set(outer.modules()) for outer, other in told):
            continue
        told.append((module, name))
        site = Site(fqn=fqn, module=module, form=_form(name), original=name)
        site.refuse(
            "OTHER_IMPLEMENTATION",
            f"its attn_implementation is {name!r}; call set_attn_implementation('sdpa') on it, or "
            "'eager' where it has no 'sdpa', and patch again",
        )
        yield site


def _form(name: str) -> Form:
    if "flash" in name:
        return "flash_attn"
    if "flex" in name:
        return "flex"
    return "sdpa" if "sdpa" in name else "eager"
