"""What is known of a model's attention sites, collected while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from fa_advisor.patching.swap import Patched
from fa_advisor.records import Form, PatchedSite

BACKEND = "fa_advisor"


@dataclass(kw_only=True)
class Site:
    """A module with attention of its own. `kind`: the behaviour that it can be given.

    `code`: why it keeps its own; `original`: what computes its attention today.
    """

    fqn: str
    module: nn.Module
    form: Form
    original: str
    kind: type[Patched] | None = None
    code: str | None = None
    detail: str = ""
    max_error: float | None = None

    def refuse(self, code: str, detail: str = "", error: float | None = None) -> None:
        """Keep the original, for this reason; the first reason stands."""
        if self.code is None:
            self.code, self.detail = code, detail
            self.max_error = error if error is not None else self.max_error

    def measured(self, error: float) -> None:
        """One more comparison that was passed."""
        self.max_error = max(self.max_error or 0.0, error)

    def record(self) -> PatchedSite:
        """As it stands in a report."""
        refused = self.code is not None
        return PatchedSite(
            fqn=self.fqn,
            form=self.form,
            backend=self.original if refused else BACKEND,
            status="refused" if refused else "patched",
            code=self.code,
            max_error=self.max_error,
        )


@dataclass(kw_only=True)
class Sites:
    """The sites found so far, in the order in which they were found."""

    names: dict[nn.Module, str]
    found: dict[nn.Module, Site] = field(default_factory=dict)

    def at(
        self, module: nn.Module, form: Form, original: str, kind: type[Patched] | None = None
    ) -> Site:
        """The site of a module, made at its first call."""
        site = self.found.get(module)
        if site is None:
            site = Site(
                fqn=self.names.get(module, ""), module=module, form=form, original=original,
                kind=kind,
            )  # fmt: skip
            self.found[module] = site
        return site

    def __iter__(self) -> Iterator[Site]:
        return iter(self.found.values())
