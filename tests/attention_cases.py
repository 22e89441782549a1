"""Attention calls as data, and the criterion that their results are held to.

A `Case` names a call by its shapes and options; `assert_agrees` makes fresh inputs for it and holds
`flash_attention`, forward and every gradient, against the float64 reference: the error may be twice
that of the standard computation in the same dtype, plus rounding. Both devices share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fa_advisor.kernels import reference
from fa_advisor.kernels.api import flash_attention

# Of a result's own norm: a rounding of the output; in wide dtypes those of a few sums, and of
# exponents around 10, each of which carries as many into its weight (13 were seen on an H200).
ROUNDING = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 16.0, torch.float64: 16.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. `mask` names the dims that it has ("BHQK", "K", "B11K": 1 is a broadcast one)."""

    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    len_q: int = 16
    len_k: int = 16
    head_dim: int = 16
    value_dim: int | None = None
    lengths: tuple[tuple[int, int], ...] = ()  # Of packed sequences: instead of batch and len_*.
    layout: str = "BHLD"  # BLHD: a view; sliced: every other feature; expanded: stride 0 over B.
    mask: str | None = None
    mask_kind: str = "bool"  # band: boolean too; additive: learned; -inf, min: some there.
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    sinks: bool = False
    alibi: str | None = None  # "H" or "BH".
    scale: float | None = None
    magnitude: float = 1.0  # Of query: how large the logits are.
    growth: float = 1.0  # Of key: see `grown`.

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that are no tensors."""
        return {
            "is_causal": self.is_causal,
            "window": self.window,
            "causal_alignment": "bottom-right" if self.bottom_right else "top-left",
            "softcap": self.softcap,
            "scale": self.scale,
        }


def grown(key: Tensor, times: float) -> Tensor:
    """Keys [.., keys, head dim], so many `times` as large from the last 128 to those before, and
    again to the first ones."""
    behind = torch.arange(key.shape[-2] - 1, -1, -1, device=key.device) // 128
    return key * (times ** behind.clamp(max=2))[:, None].to(key.dtype)


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fresh query, key, value and what else the case has, float ones requiring grad."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    kv_heads = case.kv_heads or case.heads
    value_dim = case.value_dim or case.head_dim
    tensors: dict[str, Tensor] = {}
    if case.lengths:
        lens_q, lens_k = zip(*case.lengths, strict=True)
        shapes = {
            "query": (sum(lens_q), case.heads, case.head_dim),
            "key": (sum(lens_k), kv_heads, case.head_dim),
            "value": (sum(lens_k), kv_heads, value_dim),
        }
        for side, lens in (("q", lens_q), ("k", lens_k)):
            offsets = torch.tensor([0, *lens]).cumsum(0)
            tensors[f"cu_seqlens_{side}"] = offsets.to(device, torch.int32)
    else:
        shapes = {
            "query": (case.batch, case.heads, case.len_q, case.head_dim),
            "key": (case.batch, kv_heads, case.len_k, case.head_dim),
            "value": (case.batch, kv_heads, case.len_k, value_dim),
        }
    for name, shape in shapes.items():
        x = _laid_out(shape, case.layout, options)
        tensors[name] = x * case.magnitude if name == "query" else x
    if case.growth != 1.0:
        tensors["key"] = grown(tensors["key"], case.growth)
    if case.layout == "expanded":
        tensors |= {name: tensors[name][:1].expand(shapes[name]) for name in ("key", "value")}
    for name in shapes:
        tensors[name] = tensors[name].detach().requires_grad_()

    if case.mask is not None:
        tensors["attn_mask"] = _mask(case, options)
    if case.sinks:
        tensors["sinks"] = torch.randn(case.heads, device=device).requires_grad_()
    if case.alibi is not None:
        batch = len(case.lengths) or case.batch
        shape = (case.heads,) if case.alibi == "H" else (batch, case.heads)
        tensors["alibi_slopes"] = torch.rand(shape, device=device)
    return tensors


def _laid_out(shape: tuple[int, ...], layout: str, options: dict[str, Any]) -> Tensor:
    if layout == "BLHD" and len(shape) == 4:
        batch, heads, length, dim = shape
        return torch.randn(batch, length, heads, dim, **options).transpose(1, 2)
    if layout == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1], **options)[..., ::2]
    return torch.randn(shape, **options)


def _mask(case: Case, options: dict[str, Any]) -> Tensor:
    assert case.mask is not None
    sizes = {"B": case.batch, "H": case.heads, "Q": case.len_q, "K": case.len_k, "1": 1}
    shape = [sizes[dim] for dim in case.mask]
    if case.mask_kind == "bool":
        return torch.rand(shape, device=options["device"]) < 0.7
    if case.mask_kind == "band":
        return band(shape, options["device"])
    mask = torch.randn(shape, **options)
    if case.mask_kind == "-inf":
        mask = mask.masked_fill(torch.rand(shape, device=mask.device) < 0.3, float("-inf"))
    elif case.mask_kind == "min":
        lowest = torch.finfo(mask.dtype).min
        mask = mask.masked_fill(torch.rand(shape, device=mask.device) < 0.3, lowest)
        if mask.ndim > 1 and mask.numel():
            mask[..., : (mask.shape[-2] + 1) // 2, :] = lowest
    return mask.requires_grad_()


def band(shape: list[int], device: str) -> Tensor:
    """A mask with one stretch of keys a row, as windows, padding and packed documents have it."""
    *lead, rows, cols = [1] * (2 - len(shape)) + shape
    ends = torch.randint(0, cols + 1, (2, *lead, rows, 1), device=device).sort(-2).values
    first, past = ends.amin(0), ends.amax(0)
    at = torch.arange(cols, device=device)
    return ((at >= first) & (at < past)).view(shape)


def assert_agrees(
    case: Case,
    device: str,
    dtype: torch.dtype,
    function: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Hold out, lse and all gradients of the case against the reference."""
    given = inputs(case, device, dtype)

    def run(
        attention: Callable[..., tuple[Tensor, Tensor]], wide: bool, **more: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        tensors = {
            name: x.detach().double().requires_grad_() if wide and x.requires_grad else x
            for name, x in given.items()
        }
        out, lse = attention(**tensors, **case.options, **more)
        return out, lse, {name: x for name, x in tensors.items() if x.requires_grad}

    true_out, true_lse, true_leaves = run(reference.attention, wide=True)
    grad_out = torch.randn_like(true_out).to(dtype).double()
    grad_lse = torch.randn_like(true_lse).float().double()
    true_grads = _gradients(true_out, true_lse, true_leaves, grad_out, grad_lse)
    # Backward takes sum(dO * O) of an output that was rounded. That adds P * noise to dS, which is
    # what a gradient of `noise` on the log-sum-exp does.
    rounding = ROUNDING[dtype] * torch.finfo(dtype).eps
    row_out = true_out.detach() if not case.lengths else true_out.detach().transpose(0, 1)
    row_grad = grad_out if not case.lengths else grad_out.transpose(0, 1)
    noise = rounding * row_out.norm(dim=-1) * row_grad.norm(dim=-1) / row_out.shape[-1] ** 0.5
    noise = noise * torch.randn_like(noise).sign()
    floors = _gradients(true_out, true_lse, true_leaves, torch.zeros_like(true_out), noise)

    plain_out, plain_lse, leaves = run(reference.attention, wide=False, dtype=dtype)
    plain_grads = _gradients(plain_out, plain_lse, leaves, grad_out, grad_lse)

    more: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    if case.lengths:
        more["max_seqlen_q"] = max(q for q, _ in case.lengths)
        more["max_seqlen_k"] = max(k for _, k in case.lengths)
    poison(given, device)
    out, lse, leaves = run(function or flash_attention, wide=False, **more)
    assert out.dtype == dtype and out.shape == true_out.shape, (out.dtype, out.shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert lse.dtype == wide and lse.shape == true_lse.shape, (lse.dtype, lse.shape)
    poison(given, device)
    grads = _gradients(out, lse, leaves, grad_out, grad_lse)

    empty = true_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty), f"{case}: -inf where the lse isn't, or not"
    assert_close(case, "out", out, true_out, plain_out, rounding)
    assert_close(
        case, "lse", *(x.masked_fill(empty, 0.0) for x in (lse, true_lse, plain_lse)), rounding
    )
    for name, grad in grads.items():
        assert grad.dtype == given[name].dtype, f"{case}: gradient of {name} in {grad.dtype}"
        own = ROUNDING[grad.dtype] * torch.finfo(grad.dtype).eps
        assert_close(
            case,
            f"gradient of {name}",
            grad,
            true_grads[name],
            plain_grads[name],
            max(rounding, own),
            floor=float(floors[name].norm()),
        )


def _gradients(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor
) -> dict[str, Tensor]:
    grads = torch.autograd.grad(
        [out, lse],
        list(leaves.values()),
        [grad_out.to(out.dtype), grad_lse.to(lse.dtype)],
        allow_unused=True,
        retain_graph=True,
    )
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def assert_close(
    what: object,
    name: str,
    actual: Tensor,
    true: Tensor,
    plain: Tensor,
    rounding: float,
    floor: float = 0.0,
) -> None:
    """Error at most twice the plain computation's, plus rounding of the result and the floor."""
    actual, true, plain = (x.detach().double() for x in (actual, true, plain))
    error, plain_error = float((actual - true).norm()), float((plain - true).norm())
    if plain_error != plain_error:
        plain_error = 0.0  # The plain computation overflowed; ours has less of an excuse.
    limit = 2 * plain_error + rounding * float(true.norm()) + 2 * floor + 1e-30
    assert error <= limit, (
        f"{name}: error {error:.3g}, at most {limit:.3g} expected (plain computation"
        f" {plain_error:.3g}, norm {float(true.norm()):.3g}); {what}"
    )


def poison(tensors: dict[str, Tensor], device: str) -> None:
    """Leave NaN in the memory that the next outputs of these shapes will be given."""
    if device == "cpu":
        return
    blocks = [torch.full_like(x, float("nan")) for x in tensors.values() if x.requires_grad]
    blocks += [x.double() for x in blocks]
    del blocks


MASKS = (None, None, "BHQK", "1HQK", "B11K", "QK", "K", "B1Q1", "HQ1", "1111", "BHQ1")


@st.composite
def cases(draw: st.DrawFn, longest: int = 40, widest: int = 40) -> Case:
    """Every feature crossed with every other."""
    pick: Callable[..., Any] = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    length = st.integers(0, longest) | st.sampled_from([0, 1, longest // 2, longest])
    kv_heads = pick(1, 2, 3)
    packed = pick(False, False, True)
    mask = None if packed else pick(*MASKS)
    causal = pick(False, True) and mask is None
    side = st.integers(-1, longest // 2)
    return Case(
        batch=pick(1, 2, 3),
        heads=kv_heads * pick(1, 1, 2, 3),
        kv_heads=kv_heads,
        len_q=draw(length),
        len_k=draw(length),
        head_dim=draw(st.integers(1, widest)),
        value_dim=draw(st.none() | st.integers(1, widest)),
        lengths=tuple(draw(st.lists(st.tuples(length, length), min_size=1, max_size=4)))
        if packed
        else (),
        layout=pick("BHLD", "BLHD", "sliced", "expanded") if not packed else "BHLD",
        mask=mask,
        mask_kind=pick("bool", "band", "additive", "-inf", "min"),
        is_causal=causal,
        window=draw(st.none() | st.none() | side | st.tuples(side, side)),
        bottom_right=pick(False, True),
        softcap=pick(0.0, 0.0, 1.5, 30.0),
        sinks=pick(False, False, True),
        alibi=pick(None, None, "H", "BH"),
        scale=pick(None, None, 0.3, -0.2, 0.0),
        magnitude=pick(1.0, 1.0, 4.0),
    )


@st.composite
def hopper_cases(draw: st.DrawFn, shortest: int, longest: int) -> Case:
    """Every feature that the Hopper kernels have, crossed."""
    pick: Callable[..., Any] = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    whole = range(-(-shortest // 128) * 128, longest + 1, 128)
    length = st.integers(shortest, longest) | st.sampled_from([*whole, whole[-1] + 1])
    side, limit = st.integers(0, longest * 2 // 3), st.sampled_from([-1, 0])
    short = st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129])
    kv_heads = pick(1, 2)
    packed = pick(False, False, True)
    padding = pick(False, False, False, True) and not packed
    causal = pick(False, True) and not padding
    dim = pick(40, 64, 64, 72, 96, 128, 128, 128, 160, 192, 256)
    lengths = ()
    if packed:
        lens = draw(st.lists(st.tuples(short, short), min_size=0, max_size=4))
        lengths = (*lens, (draw(length), draw(length)), *lens[:2])
    return Case(
        batch=pick(1, 2),
        heads=kv_heads * pick(1, 1, 3),
        kv_heads=kv_heads,
        len_q=draw(length),
        len_k=draw(length),
        head_dim=dim,
        value_dim=pick(None, None, None, 48, 128),
        lengths=lengths,
        layout=pick("BHLD", "BLHD") if not packed else "BHLD",
        mask="B11K" if padding else None,
        mask_kind=pick("bool", "band"),
        is_causal=causal,
        window=draw(st.none() | st.none() | st.tuples(side | limit, side | limit)),
        bottom_right=pick(False, True),
        softcap=pick(0.0, 0.0, 0.0, 15.0),
        sinks=pick(False, False, True),
        scale=pick(None, None, 0.3),
        magnitude=pick(1.0, 1.0, 4.0),
    )
