"""Which backend torch's scaled_dot_product_attention takes on a CUDA GPU, and why not a faster one.

Pure rules, no torch: they are torch's own (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
and ../sdp_utils_cpp.h, releases 2.11 to 2.14), restated so that a call can be judged for a GPU
that isn't in this machine. Dense (not nested) tensors, torch's default switches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fa_advisor.records import DeviceSpec

Backend = Literal["cudnn", "flash", "efficient", "math"]
FASTEST_FIRST: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")

REASONS: dict[str, str] = {
    "ALIGNMENT": "query, key or value doesn't start at a multiple of 16 bytes in its storage",
    "BATCH_HEADS": "it takes at most 65,535 batches and 65,535 heads",
    "CAUSAL_LQ_NE_LK": "is_causal with different query and key lengths: it aligns the causal mask"
    " to the bottom right, SDPA to the top left",
    "CUDNN_VERSION": "the cuDNN loaded is 9.15.0 or older, which torch doesn't prefer",
    "DETERMINISTIC": "torch.use_deterministic_algorithms is on and this backend isn't",
    "DISABLED": "it is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda)",
    "DROPOUT": "this dropout probability isn't supported (cuDNN: multiples of 1/16 only, and none"
    " with cuDNN 9.11 to 9.13)",
    "DTYPE": "the dtype isn't supported on this GPU",
    "GQA": "enable_gqa with fewer key/value heads than query heads",
    "GRAD_HEAD_DIM": "no backward kernel for this head dimension on this GPU",
    "HEADS": "the numbers of query and key/value heads don't fit together",
    "HEAD_DIM": "the head dimension is too large or not a multiple of what the kernel loads",
    "HEAD_DIM_MISMATCH": "query and value have different head dimensions",
    "MASK": "it takes no attn_mask",
    "MASK_GRAD": "the attn_mask requires grad",
    "MASK_RANK": "it takes attn_masks of two or four dimensions only",
    "NOT_PREFERRED": "torch doesn't try it before the others on this GPU",
    "RANK": "query, key and value aren't four-dimensional",
    "SEQLEN_ONE": "a key length of 1, or a query length of 1 with dropout",
    "SM": "the GPU's compute capability isn't supported",
    "STRIDE": "the last dimension of query, key, value or attn_mask isn't contiguous (stride 1)",
    "ZERO_LENGTH": "a sequence length is zero",
}
"""What each code in `Choice.why_not` means, in one sentence."""

_DTYPES = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32",
    "float": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip
_HALF = ("float16", "bfloat16")

# The cuDNN that torch's CUDA 13 wheels of a release bring along (older CUDA: older cuDNN).
_WHEEL_CUDNN: dict[tuple[int, int], tuple[int, int, int]] = {
    (2, 11): (9, 19, 0),
    (2, 12): (9, 20, 0),
    (2, 13): (9, 20, 0),
    (2, 14): (9, 24, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What decides the backend of one SDPA call. Shapes are [batch, heads, seqlen, head_dim].

    `dtype`: torch's name ("bfloat16") or its short form ("bf16"). `requires_grad`: query, key or
    value requires grad and grad mode is on. `ndim`: of query, key and value. `last_stride_one`:
    all three are contiguous in the last dimension; `mask_last_stride_one` says it of the mask.
    `aligned`: the storage offsets of all three are multiples of 16 bytes. `deterministic`:
    torch.use_deterministic_algorithms(True) without warn_only.
    """

    dtype: str
    head_dim_q: int
    head_dim_v: int
    num_heads: int
    num_kv_heads: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
    mask: Literal["bool", "additive"] | None = None
    mask_ndim: int | None = None
    mask_requires_grad: bool = False
    mask_last_stride_one: bool = True
    dropout_p: float = 0.0
    requires_grad: bool = False
    enable_gqa: bool = False
    ndim: int = 4
    last_stride_one: bool = True
    aligned: bool = True
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The backend taken, and for each faster one the codes (see `REASONS`) against it."""

    backend: Backend
    why_not: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Case:
    """A call on a GPU under a torch and a cuDNN release."""

    call: AttentionCall
    sm: tuple[int, int]
    torch: tuple[int, int]
    cudnn: tuple[int, int, int]

    @property
    def dtype(self) -> str:
        return _DTYPES.get(self.call.dtype, self.call.dtype)

    @property
    def hopper_or_blackwell(self) -> bool:
        """The data-centre parts (sm_90, sm_10x), where cuDNN has its own kernels."""
        return self.sm == (9, 0) or self.sm[0] == 10


def choose(
    call: AttentionCall,
    device: DeviceSpec,
    torch_version: tuple[int, int],
    cudnn_version: tuple[int, ...] | None = None,
    *,
    cudnn_deprioritized: bool = False,
    disabled: frozenset[str] = frozenset(),
) -> Choice:
    """The backend that torch's SDPA takes for `call` on `device`.

    `cudnn_version`: as loaded, (9, 19, 0); `None`: the one in torch's CUDA 13 wheels.
    `cudnn_deprioritized`: TORCH_CUDNN_SDPA_DEPRIORITIZED=1 is set. `disabled`: backends switched
    off, by torch.nn.attention.sdpa_kernel or torch.backends.cuda.
    """
    case = _Case(call, device.capability, torch_version[:2], _cudnn(torch_version, cudnn_version))
    against: dict[Backend, tuple[str, ...]] = {
        "cudnn": (
            *_against_cudnn(case),
            *_cudnn_comes_last(case, deprioritized=cudnn_deprioritized),
        ),
        "flash": tuple(_against_flash(case)),
        "efficient": tuple(_against_efficient(case)),
        "math": (),
    }
    for name in FASTEST_FIRST[:-1]:
        if name in disabled:
            against[name] = ("DISABLED", *against[name])
    backend = next(name for name in FASTEST_FIRST if not against[name])
    faster = FASTEST_FIRST[: FASTEST_FIRST.index(backend)]
    return Choice(backend=backend, why_not={name: against[name] for name in faster})


def _cudnn(torch_version: tuple[int, int], loaded: tuple[int, ...] | None) -> tuple[int, int, int]:
    if loaded is None:
        return _WHEEL_CUDNN[min(max(torch_version[:2], min(_WHEEL_CUDNN)), max(_WHEEL_CUDNN))]
    major, minor, patch = (*loaded, 0, 0, 0)[:3]
    return major, minor, patch


def _cudnn_comes_last(case: _Case, *, deprioritized: bool) -> Iterator[str]:
    """Where torch tries math before cuDNN, so that cuDNN is never reached."""
    if case.sm < (8, 0):
        return  # SM says it already
    if deprioritized or not case.hopper_or_blackwell:
        yield "NOT_PREFERRED"
    elif case.cudnn <= (9, 15, 0):
        yield "CUDNN_VERSION"


def _against_cudnn(case: _Case) -> Iterator[str]:
    call = case.call
    yield from _rank(case)
    if call.deterministic:
        yield "DETERMINISTIC"
    if case.dtype not in _HALF:
        yield "DTYPE"
    if call.mask is not None:
        if call.mask_requires_grad:
            yield "MASK_GRAD"
        # From 2.14 on, the mask of an unbatched call is given its missing dimensions first.
        if call.mask_ndim not in (2, 4, None) and not (call.ndim == 3 and case.torch >= (2, 14)):
            yield "MASK_RANK"
    if not (8, 0) <= case.sm <= (12, 1):
        yield "SM"
    coarse = call.dropout_p * 16 != int(call.dropout_p * 16)
    broken = call.dropout_p > 0 and (9, 11, 0) < case.cudnn < (9, 14, 0)
    if (coarse and case.torch >= (2, 12)) or broken:
        yield "DROPOUT"
    yield from _zero_length(case)
    yield from _stride(case, one_wide_is_fine=True)
    yield from _heads(case, gqa=True)
    if case.torch >= (2, 13) and max(call.batch, call.num_heads) > 65535:
        yield "BATCH_HEADS"
    yield from _cudnn_head_dim(case)
    if call.seqlen_k == 1 or (call.seqlen_q == 1 and call.dropout_p > 0):
        yield "SEQLEN_ONE"


def _cudnn_head_dim(case: _Case) -> Iterator[str]:
    dims = (case.call.head_dim_q, case.call.head_dim_v)
    newer = case.torch >= (2, 14)
    to_256 = newer and case.hopper_or_blackwell and case.cudnn > (9, 22, 0)
    if to_256 or (not newer and case.sm == (9, 0) and case.cudnn >= (9, 10, 0)):
        limit = 256
    elif (
        dims == (192, 128)
        and case.cudnn >= (9, 11, 0)
        and (case.hopper_or_blackwell if newer else case.sm[0] == 10)
    ):
        limit = 192
    else:
        limit = 128
    if max(dims) > limit or dims[0] % 8 or dims[1] % 8:
        yield "HEAD_DIM"
    elif to_256 and case.call.requires_grad:
        trainable = max(dims) <= 128 or dims in ((192, 128), (256, 256))
        if not trainable:
            yield "GRAD_HEAD_DIM"


def _against_flash(case: _Case) -> Iterator[str]:
    call = case.call
    yield from _rank(case)
    if call.mask is not None:
        yield "MASK"
    if call.head_dim_q != call.head_dim_v:
        yield "HEAD_DIM_MISMATCH"
    if max(call.head_dim_q, call.head_dim_v) > 256:
        yield "HEAD_DIM"
    if not (8, 0) <= case.sm <= (12, 1):
        yield "SM"
    small_smem = (8, 6) <= case.sm <= (8, 9) or (12, 0) <= case.sm <= (12, 1)
    if call.requires_grad and small_smem:
        with_dropout = call.dropout_p > 0
        if not (call.head_dim_q <= 192 or (call.head_dim_q > 224 and not with_dropout)):
            yield "GRAD_HEAD_DIM"
    if call.is_causal and call.seqlen_q != call.seqlen_k:
        yield "CAUSAL_LQ_NE_LK"
    if case.dtype not in _HALF:
        yield "DTYPE"
    yield from _heads(case, gqa=True)
    yield from _zero_length(case)
    yield from _stride(case, one_wide_is_fine=True)


def _against_efficient(case: _Case) -> Iterator[str]:
    call = case.call
    if not (5, 0) <= case.sm <= (12, 1):
        yield "SM"
    yield from _rank(case)
    multiple = 8 if case.dtype in _HALF else 4
    if case.sm[0] < 7 or (case.sm[0] == 7 and multiple == 4):
        multiple = 1  # no tensor core path for this dtype, so no vector loads
    if any(d <= 0 or d % multiple for d in (call.head_dim_q, call.head_dim_v)):
        yield "HEAD_DIM"
    if case.torch >= (2, 13) and case.sm[0] >= 8 and not call.aligned:
        yield "ALIGNMENT"
    yield from _zero_length(case)
    yield from _stride(case, one_wide_is_fine=False)
    yield from _heads(case, gqa=case.torch >= (2, 14))
    if case.dtype not in ("float16", "float32", *(("bfloat16",) if case.sm[0] >= 8 else ())):
        yield "DTYPE"


def _rank(case: _Case) -> Iterator[str]:
    # From 2.14 on, unbatched [heads, seqlen, head_dim] calls are given a batch dimension first.
    if case.call.ndim != 4 and not (case.call.ndim == 3 and case.torch >= (2, 14)):
        yield "RANK"


def _zero_length(case: _Case) -> Iterator[str]:
    if case.call.seqlen_q == 0 or case.call.seqlen_k == 0:
        yield "ZERO_LENGTH"


def _stride(case: _Case, *, one_wide_is_fine: bool) -> Iterator[str]:
    call = case.call
    inputs = call.last_stride_one or (one_wide_is_fine and call.head_dim_q == 1)
    if not inputs or (call.mask is not None and not call.mask_last_stride_one):
        yield "STRIDE"


def _heads(case: _Case, *, gqa: bool) -> Iterator[str]:
    call = case.call
    if call.num_heads == call.num_kv_heads:
        return
    if call.enable_gqa and not gqa:
        yield "GQA"
    elif call.enable_gqa:
        if call.num_kv_heads == 0 or call.num_heads % call.num_kv_heads:
            yield "HEADS"
    elif call.num_kv_heads != 1 or case.torch < (2, 14):
        yield "HEADS"  # one key/value head broadcasts, on the fused kernels from 2.14 on
