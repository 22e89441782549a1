"""`run --patch`: every model of the script patched before its first forward."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fa_advisor.errors import FaAdvisorError
from fa_advisor.patching import patch
from fa_advisor.probes.by_id import ById
from fa_advisor.records import PatchOutcome

Call = tuple[Any, Any]  # arguments and keyword arguments


class Patches:
    """What was patched, model by model. `tell` gets a sentence a model; nothing here is fatal."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._outcomes: ById[PatchOutcome | None] = ById()
        self.busy = False  # the patcher runs the model, which is no call of the script's

    def knows(self, model: nn.Module) -> bool:
        """Whether the model has been patched, or refused."""
        return model in self._outcomes

    def outcome(self, model: nn.Module) -> PatchOutcome | None:
        """What the patch did, for a report; `None` where it did nothing."""
        return self._outcomes.get(model)

    def apply(self, model: nn.Module, call: Call) -> None:
        """Patch the model, unless that has been tried. `call`: how the script calls it.

        Made-up inputs come first, because they are small; the script's own where those fail.
        """
        if self.busy or self.knows(model):
            return
        name = type(model).__name__
        self._outcomes[model] = None
        self.busy = True
        try:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            try:
                handle = patch(inner)
            except FaAdvisorError:
                handle = patch(inner, example=_as_example(inner, call))
        except FaAdvisorError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self._tell(f"not patched: {name}: {error.message}{hint}")
        except Exception as error:  # the model, on inputs that it didn't expect
            self._tell(f"not patched: {name}: {type(error).__name__}: {error}")
        else:
            self._outcomes[model] = handle.report
            self._tell(f"patched {handle.patched} of {len(handle.report.sites)} attention sites"
                       f" of {name}" + _refusals(handle.report))  # fmt: skip
        finally:
            self.busy = False


def _as_example(model: nn.Module, call: Call) -> Any:
    args, kwargs = call
    if args and kwargs:
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    return kwargs or args


def _refusals(outcome: PatchOutcome) -> str:
    refused = [site for site in outcome.sites if site.status == "refused"]
    counts = Counter(site.code or "" for site in refused)
    first = {site.code or "": site.fqn for site in reversed(refused)}
    return "".join(
        f"; refused {count}: {code}" + (f" (first at {first[code]})" if first[code] else "")
        for code, count in counts.items()
    )
