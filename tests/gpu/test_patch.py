"""`fa_advisor.patch` on a CUDA device in bf16: the loss and gradients of one step, and tokens.

Close to tests/unit/test_patch.py, which says more; there the kernel runs through torch.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fa_advisor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH, LENGTH, VOCAB, WIDTH, HEADS = 2, 320, 512, 512, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(implementation: str) -> nn.Module:
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation)
    return hf.LlamaForCausalLM(config)


def gpt2(implementation: str) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_implementation=implementation
    )
    return hf.GPT2LMHeadModel(config)


def bert(implementation: str) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, attn_implementation=implementation))


def gpt_oss(implementation: str) -> nn.Module:
    config = hf.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=64, sliding_window=128, num_local_experts=4,
        num_experts_per_tok=4,  # All: a router's choice that flips is none of attention's rounding.
        attn_implementation=implementation,
        experts_implementation="eager",
    )  # fmt: skip
    return hf.GptOssForCausalLM(config)


def gemma2(implementation: str) -> nn.Module:
    config = hf.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=128, sliding_window=128,
        attn_implementation=implementation,
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config)


def t5(implementation: str) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=64, d_ff=1024, num_layers=2, num_heads=HEADS,
        decoder_start_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


MODELS = [
    (llama, "sdpa"), (llama, "eager"), (gpt2, "sdpa"), (bert, "sdpa"), (bert, "eager"),
    (gpt_oss, "eager"), (gemma2, "eager"), (t5, "sdpa"),
]  # fmt: skip


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, VOCAB, (BATCH, LENGTH), device="cuda")
    return {"input_ids": ids, "labels": ids.clone()}


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **grads}


def error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Relative, over the loss and all gradients together."""
    squares = sum(float((found[name] - each).square().sum()) for name, each in reference.items())
    return (squares / sum(float(each.square().sum()) for each in reference.values())) ** 0.5


@pytest.mark.parametrize(("build", "implementation"), MODELS)
def test_same_loss_and_gradients(build: Callable[[str], nn.Module], implementation: str) -> None:
    torch.manual_seed(0)
    model, inputs = build(implementation).eval().to("cuda", torch.bfloat16), tokens()
    reference = step(copy.deepcopy(model).float(), inputs)
    original = step(model, inputs)
    handle = fa_advisor.patch(model, example=inputs)
    assert {(s.status, s.code) for s in handle.report.sites} == {("patched", None)}, handle.details
    patched = step(model, inputs)
    assert handle.fallbacks == {}
    assert error(patched, reference) <= 2 * error(original, reference) + 1e-3
    handle.unpatch()
    # Not to the bit: SDPA's and the embeddings' own backward add up in any order.
    assert error(step(model, inputs), original) <= 1e-3


@pytest.mark.parametrize("build", [llama, gpt_oss])
def test_generation_with_a_cache(build: Callable[[str], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build("sdpa" if build is llama else "eager").eval().cuda()  # fp32: no near ties
    ids = tokens()["input_ids"][:, :100]
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False,
    }  # fmt: skip
    expected = model.generate(ids, **options)
    with fa_advisor.patch(model, example=tokens()):
        assert torch.equal(model.generate(ids, **options), expected)


class Block(nn.Module):
    """nanoGPT's attention, as it calls SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_sdpa(dtype: torch.dtype, masked: bool) -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=dtype)
    mask = torch.rand(LENGTH, LENGTH, device="cuda") > 0.3 if masked else None
    reference = copy.deepcopy(model).double()(x.double(), mask)
    original = float((model(x, mask) - reference).norm() / reference.norm())
    (site,) = fa_advisor.patch(model, example=(x, mask)).report.sites
    assert (site.status, site.code) == ("patched", None)
    assert float((model(x, mask) - reference).norm() / reference.norm()) <= 2 * original + 1e-4
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), model(x, mask), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder(padded: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = model.to("cuda", torch.bfloat16)
    inputs: dict[str, Any] = {
        "src": torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    }
    if padded:
        lengths = torch.tensor([[LENGTH], [LENGTH // 2]], device="cuda")
        inputs["src_key_padding_mask"] = torch.arange(LENGTH, device="cuda") >= lengths
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    reference = copy.deepcopy(model).double()(**wide)
    original = float((model(**inputs) - reference).norm() / reference.norm())
    handle = fa_advisor.patch(model, example=inputs)
    assert {s.status for s in handle.report.sites} == {"patched"}, handle.details
    found = float((model(**inputs) - reference).norm() / reference.norm())
    assert found <= 2 * original + 1e-3


def test_an_encoder_in_eval_mode() -> None:
    """torch's fused layer writes the scores where it has a mask; a patched one doesn't."""
    torch.manual_seed(0)
    length = 2048
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = model.to("cuda", torch.bfloat16).eval()
    inputs = {
        "src": torch.randn(1, length, WIDTH, device="cuda", dtype=torch.bfloat16),
        "src_key_padding_mask": torch.arange(length, device="cuda")[None] >= 1500,
    }

    def run() -> tuple[Tensor, int]:
        with torch.no_grad():
            model(**inputs)  # cuBLAS's workspaces are there from here on
            there = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = model(**inputs)
        return out[:, :1500], torch.cuda.max_memory_allocated() - there

    expected, before = run()
    with fa_advisor.patch(model, example=inputs):
        out, after = run()
    assert float((out - expected).norm() / expected.norm()) < 0.02  # bf16, two layers
    assert after < HEADS * length * length * 2 < before


def test_the_scores_are_gone() -> None:
    """Hand-written attention of transformers at a length where S and P are what counts."""
    torch.manual_seed(0)
    model = llama("eager").to("cuda", torch.bfloat16)
    ids = torch.randint(5, VOCAB, (1, 2048), device="cuda")
    inputs = {"input_ids": ids, "labels": ids}

    def peak() -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        step(model, inputs)
        return torch.cuda.max_memory_allocated()

    peak()  # the gradients and cuBLAS's workspaces are there from here on
    before = peak()
    with fa_advisor.patch(model, example=tokens()):
        after = peak()
    # P of two layers in bf16 at least, which autograd keeps.
    assert before - after > 2 * HEADS * 2048 * 2048 * 2
