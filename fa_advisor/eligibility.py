"""What stands between a site that ran and a faster backend: SDPA's own rules, applied to it."""

from __future__ import annotations

from fa_advisor.attribution.peak import kv_heads_of
from fa_advisor.attribution.storage import Call
from fa_advisor.probes.sdpa import AttentionCall, Choice, choose
from fa_advisor.records import AttentionSite, DeviceSpec, Form, Mode


class Eligibility:
    """Judges sites for one GPU and torch release."""

    def __init__(self, device: DeviceSpec, torch_version: tuple[int, int], mode: Mode) -> None:
        self._device = device
        self._torch_version = torch_version
        self._training = mode == "train"

    def why_not(self, call: Call, form: Form) -> dict[str, tuple[str, ...]]:
        """`why_not` of a report's site: codes by backend. A call that SDPA made was judged then."""
        if call.sdpa is not None:
            return call.sdpa.why_not
        if call.fused:
            return {}
        against = self._choose(
            call.dtype, call.head_dim, call.batch, call.heads, kv_heads_of(call), call.m, call.n,
            call.causal, call.has_mask, call.dropout_p,
        ).why_not  # fmt: skip
        first = "WEIGHTS_REQUESTED" if form == "mha" else "HAND_WRITTEN"
        if not call.expressible:
            first = "NOT_EXPRESSIBLE"
        return {name: (first, *against.get(name, ())) for name in ("cudnn", "flash", "efficient")}

    def best(self, site: AttentionSite) -> tuple[str, dict[str, tuple[str, ...]]]:
        """The backend SDPA would take for the site's call, and the codes against faster ones.

        A causal mask over equal lengths is taken for `is_causal=True`.
        """
        choice = self._choose(
            site.dtype, site.head_dim, site.batch, site.num_heads, site.num_kv_heads,
            site.seqlen_q, site.seqlen_k, site.is_causal, site.has_mask, site.dropout_p,
        )  # fmt: skip
        return choice.backend, choice.why_not

    def _choose(
        self, dtype: str, head_dim: int, batch: int, heads: int, kv_heads: int,
        seqlen_q: int, seqlen_k: int, causal: bool, has_mask: bool, dropout_p: float,
    ) -> Choice:  # fmt: skip
        as_flag = causal and seqlen_q == seqlen_k
        return choose(
            AttentionCall(
                dtype=dtype,
                head_dim_q=head_dim,
                head_dim_v=head_dim,
                num_heads=heads,
                num_kv_heads=kv_heads,
                batch=batch,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                is_causal=as_flag,
                mask="additive" if has_mask and not as_flag else None,
                mask_ndim=4 if has_mask and not as_flag else None,
                dropout_p=dropout_p if self._training else 0.0,
                requires_grad=self._training,
                enable_gqa=kv_heads != heads,
            ),
            self._device,
            self._torch_version,
        )
