"""What a user may rely on when a model is patched: each test is a fault that other patchers had.

The issues named in the docstrings are where users met it.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fa_advisor
import zoo
from fa_advisor.errors import UsageError
from fa_advisor.kernels.api import flash_attention
from fa_advisor.patching import PatchFallbackWarning, attend

ARCHITECTURES = {each.name: each for each in zoo.ARCHITECTURES}
WIDTH, HEADS = 32, 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Attention(nn.Module):
    """Attention through SDPA, with projections that can be wrapped."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, self.causal and mask is None
        )
        return self.out(y.transpose(1, 2).flatten(-2))


class HandWritten(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Linear(Attention):
    """Attention without a softmax."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        return self.out(((q @ k.transpose(-2, -1)) @ v).transpose(1, 2).flatten(-2))


class Multihead(nn.Module):
    """nn.MultiheadAttention, and a choice of what to do with the weights."""

    def __init__(self, use: str = "drop", **options: Any) -> None:
        super().__init__()
        self.use = use
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        out, weights = self.attention(x, x, x)
        if self.use == "keep":
            self.kept = weights
        if self.use == "compute":
            out = out * weights.sum(-1, keepdim=True)
        return (out, weights) if self.use == "return" else out


def made(kind: type[nn.Module] = Attention, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(kind(**options), kind(**options)), torch.randn(2, 20, WIDTH)


def patched(model: nn.Module, x: Any, **options: Any) -> fa_advisor.Handle:
    return fa_advisor.patch(model, example=x, **{"verify": False, **options})


def codes(handle: Any) -> list[str | None]:
    return [site.code for site in handle.report.sites]


# Whose behaviour changes, and whose doesn't.


def test_globals_stay() -> None:
    """Liger#242, ComfyUI#7352: a global patch hit other models."""
    before = F.scaled_dot_product_attention, nn.MultiheadAttention.forward
    model, x = made()
    other = copy.deepcopy(model)
    patched(model, x)
    assert (F.scaled_dot_product_attention, nn.MultiheadAttention.forward) == before
    assert [type(each) for each in other] == [Attention] * 2
    assert Attention in type(model[0]).__mro__[1:]


def test_another_thread_is_not_affected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of SDPA in another thread while the patched forward runs is SDPA's."""
    model, x = made()
    patched(model, x)
    seen: list[Tensor] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        q = torch.randn(1, 1, 4, 8)
        thread = threading.Thread(
            target=lambda: seen.append(F.scaled_dot_product_attention(q, q, q))
        )
        monkeypatch.setattr(attend, "flash_attention", flash_attention)
        thread.start()
        thread.join()
        return flash_attention(*args, **kwargs)

    monkeypatch.setattr(attend, "flash_attention", kernel)
    model(x)
    assert len(seen) == 1


def test_it_is_the_same_model() -> None:
    """Liger#279: replaced modules lost their weights."""
    model, x = made()
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].qkv.register_forward_pre_hook(lambda *_: calls.append("qkv"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    text = repr(model)
    patched(model, x)
    calls.clear()  # patch runs the model, and with it the user's hooks
    assert repr(model) == text and isinstance(model[0], Attention)
    assert type(model[0]).__name__ == "Attention"
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == parameters
    model(x).sum().backward()
    assert calls == ["qkv", "forward", "backward"]


def test_unpatch_leaves_no_trace() -> None:
    model, x = made()
    before = [dict(vars(each)) for each in model.modules()]
    expected = model(x)
    state = torch.get_rng_state()
    handle = patched(model, x, verify=True)
    assert torch.equal(torch.get_rng_state(), state)
    handle.unpatch()
    handle.unpatch()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module) == attributes
    assert [type(each) for each in model] == [Attention] * 2
    assert torch.equal(model(x), expected)
    assert not handle.active and "undone" in repr(handle)


def test_context_manager_restores_after_an_exception() -> None:
    model, x = made()
    with pytest.raises(RuntimeError, match="mine"), patched(model, x):
        raise RuntimeError("mine")
    assert type(model[0]) is Attention


def test_twice_is_once() -> None:
    model, x = made()
    handle = patched(model, x)
    classes = [type(each) for each in model]
    assert patched(model, x) is handle
    assert [type(each) for each in model] == classes
    handle.unpatch()
    assert type(model[0]) is Attention
    assert patched(model, x) is not handle


def test_a_part_and_then_the_whole() -> None:
    model, x = made()
    inner = patched(model[0], x)
    outer = patched(model, x)
    assert [(s.fqn, s.status) for s in outer.report.sites] == [("0", "patched"), ("1", "patched")]
    outer.unpatch()
    assert type(model[1]) is Attention and type(model[0]) is not Attention
    inner.unpatch()
    assert type(model[0]) is Attention


def test_training_mode_and_buffers_stay() -> None:
    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(20)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.norm(x))

    model, x = made(Normed)
    model[1].eval()
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    patched(model, x)
    assert model[0].training and not model[1].training and model[0].norm.training
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())


def test_nothing_keeps_the_model() -> None:
    model, x = made()
    handle = patched(model, x)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and handle.model is None
    assert handle.fallbacks == {}
    handle.unpatch()


# Copies. x-transformers#330: unpicklable; a closure over the old forward kept the old weights.


@pytest.mark.parametrize("kind", [Attention, Multihead])
def test_copies_are_patched_and_their_own(kind: type[nn.Module]) -> None:
    model, x = made(kind)
    original = [type(each) for each in model.modules()]
    patched(model, x)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert [type(each) for each in other.modules()] == [type(e) for e in model.modules()]
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not torch.equal(other(x), expected) and torch.equal(model(x), expected)
        handle = fa_advisor.patch(other)
        assert {site.status for site in handle.report.sites} == {"patched"}
        handle.unpatch()
        assert [type(each) for each in other.modules()] == original
        assert [type(each) for each in model.modules()] != original


def test_a_copy_of_a_transformers_model() -> None:
    model = ARCHITECTURES["GptOss"].build("eager").eval()
    inputs = ARCHITECTURES["GptOss"].inputs()
    before = model(**inputs).logits
    handle = patched(model, inputs)
    expected = model(**inputs).logits
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(**inputs).logits, expected)
    assert "fa_advisor" not in str(model.config.to_dict())  # nothing of ours is saved with it
    fa_advisor.patch(other).unpatch()
    assert other.config._attn_implementation == "eager"
    assert torch.equal(other(**inputs).logits, before)
    handle.unpatch()
    assert torch.equal(model(**inputs).logits, before)


# Compilation, checkpointing, autocast, wrappers.


@pytest.mark.parametrize("kind", [Attention, Multihead])
def test_compiles_in_one_graph(kind: type[nn.Module]) -> None:
    """transformers#41803: a graph break."""
    model, x = made(kind)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    patched(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_transformers_model_compiles_in_one_graph() -> None:
    model = ARCHITECTURES["Llama"].build("sdpa").eval()
    inputs = ARCHITECTURES["Llama"].inputs()
    patched(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(**inputs, use_cache=False).logits
    torch.testing.assert_close(out, model(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_can_be_patched() -> None:
    model, x = made()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    handle = patched(compiled, x)
    assert [s.fqn for s in handle.report.sites] == ["_orig_mod.0", "_orig_mod.1"]
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_recomputes_the_same(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    patched(model, x.detach())
    calls = []
    monkeypatch.setattr(
        attend, "flash_attention", lambda *a, **k: (calls.append(1), flash_attention(*a, **k))[1]
    )
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 4  # two sites, forward and recompute
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Attention, Multihead])
def test_autocast(kind: type[nn.Module]) -> None:
    model, x = made(kind)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        handle = patched(model, x, verify=True)
        out = model(x)
    assert codes(handle) == [None, None]
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)


class LoRA(nn.Module):
    """An adapter around a projection, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Wrapper(nn.Module):
    """What DDP and PEFT look like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_wrapped_projections_are_called() -> None:
    """helical#405: LoRA on out_proj never trained; Liger#632: PEFT's wrapper hid the model."""
    model, x = made()
    for block in model:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    model = Wrapper(model)
    expected = model(x)
    handle = patched(model, x, verify=True)
    assert [(s.fqn, s.code) for s in handle.report.sites] == [
        ("module.0", None),
        ("module.1", None),
    ]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    model(x).sum().backward()
    assert model.module[0].qkv.up.weight.grad.abs().sum() > 0


def test_an_adapter_on_out_proj_trains() -> None:
    """helical#405: nn.MultiheadAttention itself reads out_proj's weight and skips the adapter."""
    model, x = Multihead(), torch.randn(2, 20, WIDTH)
    nn.init.zeros_((adapter := LoRA(model.attention.out_proj)).up.weight)
    model.attention.out_proj = adapter
    expected = model(x)
    assert codes(patched(model, x, verify=True)) == [None]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert adapter.up.weight.grad is not None


# Masks, causality, dropout.


def test_masks_are_not_lost() -> None:
    """diffusers#12605, SageAttention: the mask vanished into **kwargs."""
    model, x = Attention(), torch.randn(2, 20, WIDTH)
    masks = (
        torch.rand(20, 20) > 0.4,
        torch.randn(2, 1, 20, 20),
        torch.randn(2, HEADS, 20, 20).masked_fill(torch.rand(20, 20) > 0.8, float("-inf")),
        (torch.arange(20) < torch.tensor([[20], [7]]))[:, None, None, :],
    )
    expected = [model(x, mask) for mask in masks]
    assert codes(fa_advisor.patch(model, example=(x, masks[1]))) == [None]
    for mask, out in zip(masks, expected, strict=True):
        torch.testing.assert_close(model(x, mask), out, rtol=1e-4, atol=1e-5)


def test_a_bias_is_trained() -> None:
    model, x = Attention(), torch.randn(2, 20, WIDTH)
    bias = torch.randn(1, HEADS, 20, 20, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x, bias).square().sum(), bias)
    assert codes(fa_advisor.patch(model, example=(x, bias))) == [None]
    (found,) = torch.autograd.grad(model(x, bias).square().sum(), bias)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_causal_alignment_is_sdpas() -> None:
    """pytorch#108108, #144858: with fewer queries than keys, at the top left."""

    class Short(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.split(x)
            return F.scaled_dot_product_attention(q[:, :, -5:], k, v, is_causal=True)

    model, x = Short(), torch.randn(2, 20, WIDTH)
    expected = model(x)
    assert codes(fa_advisor.patch(model, example=x)) == [None]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_shared_and_single_heads() -> None:
    """diffusers#14518: grouped queries with a mask."""

    class Grouped(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.split(x)
            return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], mask, enable_gqa=True)

    class Single(Attention):
        """Three dims: no heads."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), mask)

    x, mask = torch.randn(2, 20, WIDTH), torch.rand(20, 20) > 0.3
    for model in (Grouped(), Single()):
        expected = model(x, mask)
        assert codes(fa_advisor.patch(model, example=(x, mask))) == [None]
        torch.testing.assert_close(model(x, mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Attention, Multihead])
def test_dropout_in_training_alone(kind: type[nn.Module]) -> None:
    """pytorch#124464, timm#1978, torchtune#1791: dropout was live in eval."""
    model, x = made(kind, dropout=0.5)
    handle = patched(model, x, verify=True)
    assert codes(handle) == [None, None]
    torch.manual_seed(0)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x))


# What is refused.


@pytest.mark.parametrize("use", ["return", "compute", "keep"])
def test_used_weights_are_kept(use: str) -> None:
    """pytorch#100347, transformers#33660."""
    model, x = Multihead(use), torch.randn(2, 20, WIDTH)
    before = model(x)
    handle = patched(model, x)
    assert codes(handle) == ["WEIGHTS_CONSUMED"]
    assert type(model.attention) is nn.MultiheadAttention
    torch.testing.assert_close(model(x), before)


def test_a_hook_on_the_weights() -> None:
    """pytorch#128413, #78109."""
    model, x = Multihead(), torch.randn(2, 20, WIDTH)
    seen: list[Any] = []
    model.attention.register_forward_hook(lambda module, args, out: seen.append(out[1].shape))
    assert codes(patched(model, x)) == ["HOOK_ON_WEIGHTS"]
    model(x)
    assert seen[-1] == (2, 20, 20)


def test_weights_asked_for_later_come_from_the_original() -> None:
    class Asking(Multihead):
        def forward(self, x: Tensor, ask: bool = False) -> Any:
            return self.attention(x, x, x, need_weights=ask)

    model, x = Asking(), torch.randn(2, 20, WIDTH)
    expected = model(x, True)
    handle = patched(model, x)
    assert model(x)[1] is None
    with pytest.warns(PatchFallbackWarning, match="WEIGHTS_CONSUMED"):
        torch.testing.assert_close(model(x, True), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, True)
    assert handle.fallbacks == {"attention": {"WEIGHTS_CONSUMED": 2}}


def test_attentions_of_a_patched_transformers_model() -> None:
    """transformers#33660: output_attentions."""
    model = ARCHITECTURES["GptOss"].build("eager").eval()
    inputs = ARCHITECTURES["GptOss"].inputs()
    expected = model(**inputs, output_attentions=True).attentions
    handle = patched(model, inputs)
    with pytest.warns(PatchFallbackWarning, match="WEIGHTS_CONSUMED"):
        found = model(**inputs, output_attentions=True).attentions
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [sum(each.values()) for each in handle.fallbacks.values()] == [1, 1]


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_extra_keys(options: dict[str, Any]) -> None:
    model, x = Multihead(**options), torch.randn(2, 20, WIDTH)
    assert codes(patched(model, x)) == ["EXTRA_KEYS"]


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (HandWritten(), "HAND_WRITTEN"),
        (Linear(), "NON_SOFTMAX"),
        (nn.Linear(WIDTH, 8), "NO_ATTENTION"),
    ],
)
def test_other_forms(model: nn.Module, code: str) -> None:
    x = torch.randn(2, 20, WIDTH)
    expected = model(x)
    handle = patched(model, x)
    assert codes(handle) == [code]
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["Bloom", "MptForCausalLM", "DebertaV2ForMaskedLM"])
def test_hand_written_in_transformers(name: str) -> None:
    model, inputs = ARCHITECTURES[name].build("eager"), ARCHITECTURES[name].inputs()
    assert set(codes(patched(model, inputs))) == {"HAND_WRITTEN"}


def test_a_state_space_model_has_none() -> None:
    model = ARCHITECTURES["MambaForCausalLM"].build("eager")
    assert codes(patched(model, ARCHITECTURES["MambaForCausalLM"].inputs())) == ["NO_ATTENTION"]


@pytest.mark.parametrize(
    ("implementation", "form"),
    [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn"), ("mine", "eager")],
)
def test_another_implementation_of_transformers(
    implementation: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operator that no structure shows, as flash-attn's are; their packages aren't here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def opaque(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        key, value = (each.repeat_interleave(HEADS // 2, 1) for each in (key, value))
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        return out.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, implementation, opaque)
    model, inputs = ARCHITECTURES["Llama"].build("sdpa"), ARCHITECTURES["Llama"].inputs()
    model.config._attn_implementation = implementation
    wrapper = Wrapper(model)
    handle = patched(wrapper, inputs)
    (site,) = handle.report.sites
    assert (site.fqn, site.form, site.backend) == ("module", form, implementation)
    assert (site.status, site.code) == ("refused", "OTHER_IMPLEMENTATION")
    assert implementation in handle.details["module"]
    model.set_attn_implementation("sdpa")  # as the reason says
    again = patched(wrapper, inputs)
    handle.unpatch()
    assert codes(again) == [None] * 2 and patched(wrapper, inputs) is again


def test_flex_attention_of_transformers() -> None:
    model = ARCHITECTURES["Llama"].build("flex_attention").eval()
    with torch.compiler.set_stance("force_eager"):  # Or C++ is compiled for half a minute.
        (site,) = patched(model, ARCHITECTURES["Llama"].inputs()).report.sites
    assert (site.form, site.backend) == ("flex", "flex_attention")
    assert site.code == "OTHER_IMPLEMENTATION"


def test_head_dim_and_dtype() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    assert codes(patched(Wide(), torch.randn(1, 1, 4, 257))) == ["HEAD_DIM"]
    assert codes(patched(Wide(), torch.randn(1, 1, 4, 16).double())) == ["DTYPE"]


def test_a_forward_of_its_own() -> None:
    """What accelerate's hooks do to an instance."""
    model, x = Attention(), torch.randn(2, 20, WIDTH)
    model.forward = model.forward  # type: ignore[method-assign]
    assert codes(patched(model, x)) == ["FORWARD_REPLACED"]


@pytest.mark.parametrize("fault", ["value", "gradient", "random", "causal", "dropout", "nan"])
def test_a_wrong_kernel_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask, dropout_p, is_causal, scale = args
        if fault == "causal":
            is_causal = False
        if fault == "dropout":
            dropout_p = dropout_p / 2
        out = flash_attention(q, k, v, mask, dropout_p, is_causal, scale, **kwargs)
        if fault == "value":
            out = out * 1.001
        if fault == "gradient":
            out = out + 1e-3 * (q - q.detach())
        if fault == "random":
            out = out + 1e-7 * torch.randn_like(out)
        if fault == "nan" and q.shape[-2] == 192:  # cuDNN's: lengths that are 64 modulo 128
            out = out * float("nan")
        return out

    monkeypatch.setattr(attend, "flash_attention", kernel)
    model, x = made()
    handle = fa_advisor.patch(model, example=x)
    assert codes(handle) == ["NUMERIC_FAIL"] * 2
    assert type(model[0]) is Attention
    assert all(site.max_error for site in handle.report.sites)
    assert handle.details.keys() == {"0", "1"}


def test_another_dtype_at_run_time() -> None:
    """peft#790: the original runs, and says so once."""
    model, x = made()
    handle = patched(model, x)
    model.double()
    with pytest.warns(PatchFallbackWarning, match="DTYPE") as caught:
        out = model(x.double())
        model(x.double())
    assert len(caught) == 2  # one for each of the two modules
    assert handle.fallbacks == {"0": {"DTYPE": 2}, "1": {"DTYPE": 2}}
    handle.unpatch()
    assert torch.equal(model(x.double()), out)


# What the user gets wrong.


def test_no_module() -> None:
    with pytest.raises(UsageError, match=r"expected an nn\.Module, got type"):
        fa_advisor.patch(Attention)  # type: ignore[arg-type]


def test_an_example_that_does_not_fit() -> None:
    model, _ = made()
    with pytest.raises(UsageError, match="Sequential's forward raised RuntimeError"):
        fa_advisor.patch(model, example=torch.randn(2, 3, 4))
    assert type(model[0]) is Attention and not model[0]._forward_hooks


def test_inputs_that_cannot_be_made_up() -> None:
    class Odd(nn.Module):
        def forward(self, a: Any, b: Any, c: Any, d: Any) -> Any:
            return a

    with pytest.raises(UsageError) as caught:
        fa_advisor.patch(Odd())
    assert "example=" in caught.value.hint


# What a tester found.


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 32)

    def attend(self, x: Tensor) -> Tensor:
        q = self.qkv(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class CheckpointsInside(Attends):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=self.use_reentrant)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_checkpointed_inside_a_forward_stays_as_it_was(use_reentrant: bool) -> None:
    """Its recompute runs when the forward, and the redirection with it, is over."""
    torch.manual_seed(0)
    model, x = CheckpointsInside(use_reentrant), torch.randn(3, 20, 32)

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    before = gradient()
    handle = fa_advisor.patch(model, example=x)
    assert handle.patched == 1
    assert torch.equal(gradient(), before)
    assert handle.fallbacks[""] == {"CHECKPOINT_INSIDE": 1}


def test_a_class_that_refuses_to_be_derived_from_is_a_refusal() -> None:
    class Final(Attends):
        def __init_subclass__(cls, **_: object) -> None:
            raise TypeError("final!")

    model = nn.Sequential()
    model.a, model.b = Attends(), Final()
    model.forward = lambda x: (model.a(x), model.b(x))
    handle = fa_advisor.patch(model, example=torch.randn(2, 9, 32))
    codes = {site.fqn: site.code for site in handle.report.sites}
    assert codes == {"a": None, "b": "CLASS_FIXED"}
    assert "final!" in handle.details["b"]


def test_a_class_put_on_in_between_stays_after_unpatch() -> None:
    model, x = Attends(), torch.randn(2, 9, 32)
    before = model(x)
    handle = fa_advisor.patch(model, example=x)

    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    model.extra = nn.Parameter(torch.ones(3))
    torch.nn.utils.parametrize.register_parametrization(model, "extra", Doubled())
    handle.unpatch()
    assert torch.equal(model.extra, torch.full((3,), 2.0))
    assert torch.equal(model(x), before)
    assert not any("patched_kind" in vars(each) for each in type(model).__mro__)


def test_scripted_modules_are_left_out() -> None:
    model = nn.Sequential(torch.jit.script(nn.GELU()), Attends())
    assert fa_advisor.patch(model, example=torch.randn(2, 9, 32)).patched == 1
    with pytest.raises(UsageError, match="expected a module in Python"):
        fa_advisor.patch(torch.jit.script(nn.Linear(3, 3)))


def test_a_parametrized_attention_is_refused_alone() -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 9, 32)
    torch.nn.utils.parametrizations.spectral_norm(model.out_proj)
    example = {"query": x, "key": x, "value": x, "need_weights": False}
    (site,) = fa_advisor.patch(model, example=example).report.sites
    assert site.code == "PARAMETRIZED"
