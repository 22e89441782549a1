"""Which kind of operator each torch op is: by schema and tags, by name where those are silent."""

from __future__ import annotations

from typing import Any

import torch

from fa_advisor.probes.events import Kind, Op

_BY_NAME: dict[str, Kind] = {
    name: kind
    for kind, names in {
        Kind.VIEW: "_unsafe_view _reshape_alias detach alias",
        Kind.RANDOM: (
            "rand rand_like randn randn_like bernoulli bernoulli_ uniform_ normal_ randint"
        ),
        Kind.ARANGE: "arange linspace",
        Kind.COMPARE: "le lt ge gt",
        Kind.EXP: "exp exp2 exp_",
        Kind.COPY: "clone _to_copy copy_ copy contiguous",
        Kind.POINTWISE: (
            "masked_fill masked_fill_ where nan_to_num clamp native_dropout_backward threshold"
            " tanh_backward mul_ add_ sub_ div_ isneginf _log_softmax"
        ),
        Kind.RESHAPING: (
            "cat stack constant_pad_nd roll flip repeat slice_backward select_backward"
            " slice_scatter select_scatter as_strided_scatter masked_scatter"
        ),
        Kind.TRIANGULAR: "tril triu tril_ triu_",
        Kind.MATMUL: "mm bmm addmm baddbmm addbmm baddbmm_ addmm_",
        Kind.SOFTMAX: "_softmax _safe_softmax _masked_softmax softmax",
        Kind.SOFTMAX_BACKWARD: (
            "_softmax_backward_data _masked_softmax_backward _log_softmax_backward_data"
        ),
        Kind.DROPOUT: "native_dropout _fused_dropout",
        Kind.REDUCTION: "sum mean amax amin max min",
        Kind.INDEX: "embedding index index_select gather take_along_dim",
    }.items()
    for name in names.split()
}
# Asked of tensors whose class answers for itself (jagged ones), or for a value: nothing is made.
_QUESTIONS = frozenset(
    [
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "size",
        "stride",
        "numel",
        "dim",
        "is_contiguous",
        "is_strides_like_format",
        "is_non_overlapping_and_dense",
        "layout",
        "_local_scalar_dense",
    ]
)
_FUSED: dict[str, str] = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "fused",
    "_flash_attention_forward": "flash",
    "_flash_attention_forward_no_dropout_inplace": "flash",
    "_efficient_attention_forward": "efficient",
    "_cudnn_attention_forward": "cudnn",
    "flex_attention": "flex",
    "_native_multi_head_attention": "native",
    "_transformer_encoder_layer_fwd": "native",
}


def classify(func: Any) -> Op:
    """The `Op` of an OpOverload or a higher-order operator."""
    namespace, _, name = _qualified(func)
    if namespace == "prim" or name in _QUESTIONS:
        return Op(name, Kind.VIEW, False, "")
    if name in _FUSED:
        return Op(name, Kind.FUSED_ATTENTION, False, _FUSED[name])
    if name.endswith("_backward") and name.removesuffix("_backward") in _FUSED:
        return Op(name, Kind.FUSED_ATTENTION_BACKWARD, False, "")
    if "flash_attn" in namespace or "xformers" in namespace:
        backward = "bwd" in name or "backward" in name
        kind = Kind.FUSED_ATTENTION_BACKWARD if backward else Kind.FUSED_ATTENTION
        return Op(f"{namespace}::{name}", kind, False, "flash_attn")
    if "c10d" in namespace:
        return Op(f"{namespace}::{name}", Kind.COMMUNICATION, True, "")
    schema = getattr(func, "_schema", None)
    writes = bool(schema is not None and schema.is_mutable)
    return Op(
        name if namespace == "aten" else f"{namespace}::{name}", _kind(func, name), writes, ""
    )


def _qualified(func: Any) -> tuple[str, str, str]:
    if isinstance(func, torch._ops.OpOverload):
        namespace, _, name = func._schema.name.partition("::")
        return namespace, func._overloadname, name
    return str(getattr(func, "namespace", "higher_order")), "", str(getattr(func, "__name__", func))


def _kind(func: Any, name: str) -> Kind:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if not isinstance(func, torch._ops.OpOverload):
        return Kind.OTHER
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        # lift_fresh hands over a tensor that was made where no mode could see it. `to`, `reshape`
        # and their like may copy: taking them apart, which inference mode leaves to us, tells.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return Kind.OTHER
        return Kind.FACTORY if name.startswith("lift") else Kind.VIEW
    if torch.Tag.pointwise in func.tags:
        return Kind.POINTWISE
    if not any("Tensor" in str(a.type) for a in func._schema.arguments):
        return Kind.FACTORY
    return Kind.OTHER
