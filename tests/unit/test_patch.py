"""`fa_advisor.patch` on real architectures: the same outputs, gradients and tokens, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fa_advisor
import zoo
from fa_advisor.patching import attend

ARCHITECTURES = {each.name: each for each in zoo.ARCHITECTURES}
BERT, T5, VIT = "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification"
GPT2, WHISPER = "GPT2LMHeadModel", "WhisperForConditionalGeneration"
# Name, implementation, sites, kernel calls of one step.
PATCHED = [
    ("Llama", "sdpa", 2),
    ("Llama", "eager", 2),
    ("GptOss", "eager", 2),  # sinks, a sliding window
    ("Gemma2", "eager", 2),  # softcap, a sliding window
    ("Mistral", "sdpa", 2),
    (GPT2, "sdpa", 2),
    (BERT, "sdpa", 2),
    (BERT, "eager", 2),
    (T5, "sdpa", 6),  # a bias with gradients
    (VIT, "eager", 2),
    (WHISPER, "sdpa", 6),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The query's shape of each call of the kernel."""
    shapes: list[tuple[int, ...]] = []
    kernel = attend.flash_attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(query.shape))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(attend, "flash_attention", counted)
    return shapes


def built(name: str, implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build(implementation).eval()
    if name == "GptOss":
        model.set_experts_implementation("eager")  # the others have no float64
    return model


def inputs_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return ARCHITECTURES[name].inputs()


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss, the logits and every parameter's gradient of one step."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }


def assert_as_good(
    patched: dict[str, Tensor], original: dict[str, Tensor], reference: dict[str, Tensor]
) -> None:
    """FlashAttention's criterion, tensor by tensor."""
    assert patched.keys() == original.keys() == reference.keys()
    for name, expected in reference.items():
        size = expected.double().norm().clamp_min(1e-6)
        ours = float((patched[name] - expected).double().norm() / size)
        plain = float((original[name] - expected).double().norm() / size)
        assert ours <= 2 * plain + 1e-5, f"{name}: {ours:.2e}, the original {plain:.2e}"


@pytest.mark.parametrize(("name", "implementation", "count"), PATCHED)
def test_same_loss_and_gradients(
    name: str, implementation: str, count: int, kernel_calls: list[tuple[int, ...]]
) -> None:
    model, inputs = built(name, implementation), inputs_of(name)
    reference = step(copy.deepcopy(model).double(), in_double(inputs))
    original = step(model, inputs)
    handle = fa_advisor.patch(model, example=inputs)
    sites = handle.report.sites
    assert [(s.status, s.backend, s.code) for s in sites] == [
        ("patched", "fa_advisor", None)
    ] * count
    assert {s.form for s in sites} == {implementation}
    assert all(s.max_error is not None and s.max_error < 1e-5 for s in sites)
    kernel_calls.clear()
    patched = step(model, inputs)
    assert len(kernel_calls) == count
    assert_as_good(patched, original, reference)
    assert handle.fallbacks == {}
    handle.unpatch()
    again = step(model, inputs)
    assert all(torch.equal(again[key], value) for key, value in original.items())
    assert len(kernel_calls) == count


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "implementation"), [("Llama", "sdpa"), (BERT, "eager")])
def test_padding(name: str, implementation: str, side: str) -> None:
    """The rows of real tokens, and the gradients that come from them."""
    model, inputs = built(name, implementation), inputs_of(name)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, slice(0, 20) if side == "left" else slice(-20, None)] = 0
    inputs = {
        **inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)
    }  # fmt: skip
    reference, original = step(copy.deepcopy(model).double(), inputs), step(model, inputs)
    fa_advisor.patch(model, example=inputs)
    patched = step(model, inputs)
    for result in (reference, original, patched):
        result["logits"] = result["logits"][mask.bool()]
        # A decoder's row that is all padding and comes before a real one leaves no trace in it,
        # but what it predicts is scored where the labels' shift lets it.
    if side == "left" and name == "Llama":
        patched, original, reference = (
            {"logits": each["logits"]} for each in (patched, original, reference)
        )
    assert_as_good(patched, original, reference)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("Llama", "sdpa"), ("GptOss", "eager"), ("Mistral", "eager"), (GPT2, "sdpa"), (T5, "sdpa")],
)
def test_generation_with_a_cache(
    name: str, implementation: str, kernel_calls: list[tuple[int, ...]]
) -> None:
    """The first step sees a left-padded prompt, the others one query and a longer cache."""
    model = built(name, implementation)
    ids = torch.randint(5, zoo.VOCAB, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False,
    }  # fmt: skip
    expected = model.generate(ids, **options)
    with fa_advisor.patch(model, example=inputs_of(name), verify=False):
        kernel_calls.clear()
        assert torch.equal(model.generate(ids, **options), expected)
        assert {shape[2] for shape in kernel_calls} >= {1}
    assert torch.equal(model.generate(ids, **options), expected)


def test_inputs_are_made_up() -> None:
    model = built("Llama")
    assert [s.status for s in fa_advisor.patch(model).report.sites] == ["patched"] * 2


class Block(nn.Module):
    """nanoGPT's attention, as it calls SDPA."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.dropout = heads, 0.0
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        dropout_p = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def test_sdpa_in_a_module_of_ones_own(kernel_calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 50, 32)
    expected = model(x)
    handle = fa_advisor.patch(model, example=x)
    assert [(s.fqn, s.form, s.status) for s in handle.report.sites] == [
        ("0", "sdpa", "patched"),
        ("1", "sdpa", "patched"),
    ]
    kernel_calls.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert len(kernel_calls) == 2
    handle.unpatch()
    assert torch.equal(model(x), expected) and len(kernel_calls) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype)
    x = torch.randn(2, 50, 32, dtype=dtype)
    reference = copy.deepcopy(model).double()(x.double())
    original = (model(x) - reference).norm()
    (site,) = fa_advisor.patch(model, example=x).report.sites
    assert site.status == "patched"
    assert (model(x) - reference).norm() <= 2 * original + 1e-4


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_encoder(
    batch_first: bool, padded: bool, causal: bool, kernel_calls: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    x = torch.randn(2, 40, 32) if batch_first else torch.randn(40, 2, 32)
    inputs: dict[str, Any] = {"src": x}
    if causal:
        inputs["mask"] = torch.ones(40, 40, dtype=torch.bool).triu(1)
    if padded:
        inputs["src_key_padding_mask"] = torch.arange(40) >= torch.tensor([[40], [25]])
    expected = {True: model.train()(**inputs), False: model.eval()(**inputs)}
    handle = fa_advisor.patch(model, example=inputs, verify=padded and causal)
    assert [s.status for s in handle.report.sites] == ["patched"] * 2
    kernel_calls.clear()
    for training in (True, False):
        out = model.train(training)(**inputs)
        torch.testing.assert_close(out, expected[training], rtol=1e-4, atol=1e-5)
        assert out.stride() == expected[training].stride() or batch_first
    assert len(kernel_calls) == 4
    with torch.no_grad():  # nested tensors, of a padded batch, stay with torch's fused layer
        rows = ~inputs["src_key_padding_mask"] if padded else torch.ones(2, 40, dtype=torch.bool)
        rows = rows if batch_first else rows.T
        out = model(**inputs)
        torch.testing.assert_close(out[rows], expected[False][rows], rtol=1e-4, atol=1e-5)
    nested = batch_first and padded and not causal
    assert len(kernel_calls) == (4 if nested else 6)
    handle.unpatch()
    assert {type(each) for each in model.layers} == {nn.TransformerEncoderLayer}


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_in_eval_mode(norm_first: bool, kernel_calls: list[tuple[int, ...]]) -> None:
    """torch's fused layer would ask no attention module, nor would a copy or a compiled one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    inputs = {
        "src": torch.randn(2, 40, 32),
        "src_key_padding_mask": torch.arange(40) >= torch.tensor([[40], [25]]),
    }
    graphs: list[str] = []

    def read(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    with torch.no_grad():
        expected = model(**inputs)
        handle = fa_advisor.patch(model, example=inputs)
        names = [site.fqn for site in handle.report.sites]
        assert names == ["layers.0.self_attn", "layers.1.self_attn"]
        copied = copy.deepcopy(model)
        for each in (model, copied):
            kernel_calls.clear()
            torch.testing.assert_close(each(**inputs), expected, rtol=1e-4, atol=1e-5)
            assert len(kernel_calls) == 2
        torch.compile(model, fullgraph=True, backend=read)(**inputs)
        assert len(graphs) == 1 and "_transformer_encoder_layer_fwd" not in graphs[0]
        adopted = fa_advisor.patch(copied)
        assert [site.fqn for site in adopted.report.sites] == names
        adopted.unpatch()
        handle.unpatch()
        for each in (model, copied):
            assert {type(layer) for layer in each.layers} == {nn.TransformerEncoderLayer}
            assert torch.equal(each(**inputs), expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_decoder(batch_first: bool) -> None:
    """Self-attention and attention to a memory of another length, with float masks."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerDecoder(layer, 2)
    inputs = {
        "tgt": torch.randn(*((2, 20) if batch_first else (20, 2)), 32),
        "memory": torch.randn(*((2, 33) if batch_first else (33, 2)), 32),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(20),
        "memory_key_padding_mask": torch.arange(33) >= torch.tensor([[33], [9]]),
    }
    expected = model(**inputs)
    handle = fa_advisor.patch(model, example=inputs)
    assert [s.status for s in handle.report.sites] == ["patched"] * 4
    torch.testing.assert_close(model(**inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 24, "vdim": 40}])
@pytest.mark.parametrize("make_mask", ["none", "per_head", "float"])
def test_multihead_attention_alone(options: dict[str, Any], make_mask: str) -> None:
    torch.manual_seed(0)
    model = MultiheadUser(nn.MultiheadAttention(32, 4, batch_first=True, **options))
    q = torch.randn(2, 10, 32, requires_grad=True)
    k = torch.randn(2, 12, options.get("kdim", 32))
    v = torch.randn(2, 12, options.get("vdim", 32))
    mask = {
        "none": None,
        "per_head": (torch.rand(8, 10, 12) > 0.7) & (torch.arange(12) > 0),
        "float": torch.randn(10, 12),
    }[make_mask]
    expected = model(q, k, v, mask)
    (gradient,) = torch.autograd.grad(expected.sum(), q)
    handle = fa_advisor.patch(model, example=(q, k, v, mask), verify=not options)
    assert handle.report.sites[0].status == "patched"
    out = model(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], gradient, rtol=1e-3, atol=1e-5)
    single = (q[0], k[0], v[0], None)
    with handle:
        unbatched = model(*single)
    torch.testing.assert_close(unbatched, model(*single), rtol=1e-4, atol=1e-5)


class MultiheadUser(nn.Module):
    """Asks for the weights, which is the default, and throws them away."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attention(q, k, v, attn_mask=mask)[0]
        return out


def test_one_instance_alone() -> None:
    """Another instance from the same configuration, and the class, are what they were."""
    config = ARCHITECTURES["Llama"].build("sdpa").config
    make: Callable[[], nn.Module] = lambda: zoo.hf.LlamaForCausalLM(config)  # noqa: E731
    patched, other = make(), make()
    inputs = inputs_of("Llama")
    expected = other(**inputs).logits
    with fa_advisor.patch(patched, example=inputs, verify=False):
        assert patched.config is not config
        assert config._attn_implementation == other.config._attn_implementation == "sdpa"
        assert torch.equal(other(**inputs).logits, expected)
        patched.config.use_cache = False
    assert patched.config is config
    assert config.use_cache is False  # what was set meanwhile stays
    assert config._attn_implementation == "sdpa"
