"""All that a report knows about one attention site, as text."""

from __future__ import annotations

from rich.text import Text

from fa_advisor.records import AttentionSite
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.wording import counted
from fa_advisor.views.sizes import format_bytes
from fa_advisor.views.wording import explain


def shape(site: AttentionSite, glyphs: Glyphs) -> str:
    """B x H x N, with both lengths where they differ."""
    lengths = {site.seqlen_q: None, site.seqlen_k: None}
    return glyphs.times.join(map(str, (site.batch, site.num_heads, *lengths)))


def describe(site: AttentionSite, glyphs: Glyphs) -> Text:
    """Name, source line, shapes, bytes, and the reasons against each faster backend."""
    text = Text().append(glyphs.name(site.fqn) or "(the model itself)", "bold")
    where = f" at {glyphs.name(site.source)}" if site.source else ""
    text.append(f"  {site.form}{where}, runs on {glyphs.name(site.backend)}\n")
    query = _dims(site.batch, site.num_heads, site.seqlen_q, site.head_dim)
    key = _dims(site.batch, site.num_kv_heads, site.seqlen_k, site.head_dim)
    scores = _dims(site.batch, site.num_heads, site.seqlen_q, site.seqlen_k)
    _fact(text, "query", f"{query}  key, value {key}")
    _fact(text, "S and P", f"{scores}  {counted(_elements(site), 'element')} each")
    _fact(text, "kind", f" {glyphs.dot} ".join(_kind(site, glyphs)))
    at_peak = format_bytes(site.attention_bytes_at_peak)
    saved = format_bytes(site.saved_for_backward_bytes)
    _fact(text, "bytes", f"{at_peak} of N x N tensors at the peak, {saved} saved for backward")
    for backend, codes in site.why_not.items():
        text.append(f"not {glyphs.name(backend)}, because\n", "bold")
        for code in codes:
            said = explain(code)
            text.append(f"{glyphs.bullet} {glyphs.name(said)}")
            text.append(f" [{glyphs.name(code)}]\n" if said != code else "\n", "dim")
    if not site.why_not:
        text.append("no faster backend was refused\n", "dim")
    return text


def _fact(text: Text, name: str, value: str) -> None:
    text.append(f"{name:<9}", "dim").append(f"{value}\n")


def _dims(*sizes: int) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _elements(site: AttentionSite) -> int:
    return site.batch * site.num_heads * site.seqlen_q * site.seqlen_k


def _kind(site: AttentionSite, glyphs: Glyphs) -> list[str]:
    kind = [glyphs.name(site.dtype), "causal" if site.is_causal else "not causal"]
    kind += ["with a mask"] if site.has_mask else []
    kind += [f"dropout {site.dropout_p:g}"] if site.dropout_p else []
    if site.num_kv_heads != site.num_heads:
        kind.append(f"{counted(site.num_heads, 'head')} on {site.num_kv_heads} of keys and values")
    return [*kind, counted(site.calls, "call") + " a step"]
