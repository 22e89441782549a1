"""When two attentions are the same: FlashAttention's own criterion, on forward and gradients.

err(patched against a float64 reference) <= k * err(original, in its own dtype) + rounding, with k
of 2 for the output and 3 for gradients, as FlashAttention's tests have it. To a gradient's rounding
counts, twice, what the output's own rounding does to it: every flash backward takes sum(dO * O) of
an output that was rounded, which moves dS by as much of P. Where the softmax is nearly uniform, as
at initialisation, that is all of dQ's error. It is measured, not estimated: the patched code is run
in float64 with that one rounding and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_advisor.patching.attend import exact_but_for_the_output

Attention = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`error`: the patched code's largest relative error over the output and the gradients.

    `within`: whether each is within what the original's own error allows; `where` names the worst.
    """

    error: float
    within: bool
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    patched: float
    allowed: float
    where: str

    @property
    def excess(self) -> float:
        return self.patched / self.allowed


def compare(
    original: Attention,
    patched: Attention,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    *,
    reference: Attention | None = None,
    patched_wide: Attention | None = None,
    visible: Tensor | None = None,
) -> Comparison:
    """Hold `patched` against `original` on the same inputs, which are left as they are.

    Each takes the list of inputs and returns the output; the reference is `original`, or
    `reference` where that can't run in float64, on the inputs in float64; `patched_wide` likewise
    takes the place of `patched` there. Gradients are those of
    the floating-point inputs, named by `names`. `visible` (True where an output row sees a key;
    broadcasts to the output) takes rows out of the comparison whose value means nothing.
    """
    dtype = inputs[0].dtype
    seed = torch.Generator(device="cpu").manual_seed(len(inputs) + inputs[0].numel())
    cotangents: dict[torch.Size, Tensor] = {}

    def results(attention: Attention, to: torch.dtype) -> list[Tensor]:
        leaves = [
            each.detach().to(to).requires_grad_() if each.is_floating_point() else each
            for each in inputs
        ]
        with torch.enable_grad():
            out = attention(leaves)
            if visible is not None:
                out = torch.where(visible, out, 0.0)
            if out.shape not in cotangents:
                drawn = torch.randn(out.shape, generator=seed, dtype=torch.float64)
                cotangents[out.shape] = drawn.to(out.device)
            given = [each for each in leaves if each.requires_grad]
            cotangent = cotangents[out.shape].to(out.dtype)
            grads: Any = torch.autograd.grad(out, given, cotangent, allow_unused=True)
        found = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(given, grads, strict=True)
        ]
        return [each.detach().double() for each in (out, *found)]

    expected = results(reference or original, torch.float64)
    plain = results(original, dtype)
    ours = results(patched, dtype)
    wide = patched_wide or patched
    with exact_but_for_the_output(torch.float64):
        exact = results(wide, torch.float64)
    with exact_but_for_the_output(dtype):
        rounded = results(wide, torch.float64)
    # Not against `expected`: a patch that means something else must gain nothing by it.
    floors = [a - b for a, b in zip(rounded, exact, strict=True)]
    scale = float(cotangents[expected[0].shape].norm())
    labels = ["output"] + [
        f"gradient of {name}"
        for name, each in zip(names, inputs, strict=True)
        if each.is_floating_point()
    ]
    errors = [
        _judge(ours[i], plain[i], expected[i], floors[i], dtype, 0.0 if i == 0 else scale, label)
        for i, label in enumerate(labels)
    ]
    worst = max(errors, key=lambda each: each.excess)
    return Comparison(
        error=max(each.patched for each in errors), within=worst.excess <= 1.0, where=worst.where
    )


def _judge(
    ours: Tensor,
    plain: Tensor,
    expected: Tensor,
    floor: Tensor,
    dtype: torch.dtype,
    scale: float,
    where: str,
) -> _Error:
    """Relative errors in the 2-norm. A gradient that is next to nothing (one key alone has none
    for the query) is measured against the gradient that came in."""
    size = max(float(expected.norm()), 1e-2 * scale, 1e-12)
    eps = torch.finfo(dtype).eps
    times, rounding = (2, eps / 8) if scale == 0.0 else (3, eps)
    allowed = times * float((plain - expected).norm()) / size + max(rounding, 5e-6)
    if scale != 0.0 and torch.isfinite(floor).all():
        allowed += 2 * float(floor.norm()) / size
    patched = float((ours - expected).norm()) / size
    if not torch.isfinite(ours).all():
        patched = float("inf")
    if not torch.isfinite(plain).all():  # the original gives no number to be held against
        allowed = float("inf") if patched < float("inf") else 0.0
    return _Error(patched=patched, allowed=max(allowed, 1e-30), where=where)
