"""A watched step asks for the same memory in the same order as one that nobody watches.

torch's profiler tells of every allocation and free on the CPU, in order, from below the dispatcher.
What it runs here is the GPU's way through the op stream, with stamps that go nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fa_advisor.probes.device import advise_for
from fa_advisor.probes.watch import Watch
from fa_advisor.steps import Step, make_optimizer

# Under a dispatch mode each Python number is wrapped in a tensor of the host's, once more.
SCALAR = 8


def requests(run: Callable[[], object]) -> list[int]:
    """Bytes, negative where they are freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found: list[tuple[int, int]] = []
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found) if abs(size) > SCALAR]


def plain(model: nn.Module, inputs: dict[str, Tensor]) -> list[int]:
    """The second step of a loop as anyone would write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)

    def step() -> None:
        model(**inputs)["loss"].backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    step()
    return requests(step)


def watched(model: nn.Module, inputs: dict[str, Tensor]) -> list[int]:
    """The second step of a profile's."""
    device, _ = advise_for("h200", 0)
    watch = Watch(lambda events: None, device, device_type="cpu", stamp=lambda stamp: None)
    with watch:
        watch.add_model(model)
        watch.add_inputs(inputs)
        optimizer = make_optimizer(model, "adamw", foreach=True, lr=0.0)
        step = Step(model, (), inputs, "train", optimizer, lambda stage: None)
        step.run()
        return requests(step.run)


def hugging_face(name: str, attention: str, **sizes: Any) -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = getattr(hf, f"{name.partition('For')[0].removesuffix('LMHeadModel')}Config")
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    model: nn.Module = getattr(hf, name)(
        config(attn_implementation=attention, vocab_size=211, **special, **sizes)
    )
    return model


def gpt2(attention: str) -> nn.Module:
    return hugging_face("GPT2LMHeadModel", attention, n_layer=2, n_embd=48, n_head=4)


def bert(attention: str) -> nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4}
    return hugging_face("BertForMaskedLM", attention, intermediate_size=96, **sizes)


def llama(attention: str) -> nn.Module:
    return hugging_face(
        "LlamaForCausalLM", attention, num_hidden_layers=2, hidden_size=64, num_attention_heads=8,
        num_key_value_heads=2, intermediate_size=96,
    )  # fmt: skip


def t5(attention: str) -> nn.Module:
    sizes = {"num_layers": 2, "d_model": 48, "num_heads": 4, "d_kv": 12, "d_ff": 96}
    return hugging_face("T5ForConditionalGeneration", attention, decoder_start_token_id=0, **sizes)


def vit(attention: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = hf.ViTConfig(
        num_hidden_layers=2, hidden_size=48, num_attention_heads=4, intermediate_size=96,
        image_size=32, patch_size=8, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = hf.ViTForImageClassification(config)
    return model


def inputs_for(model: nn.Module) -> dict[str, Tensor]:
    if "ViT" in type(model).__name__:
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2).long()}
    ids = torch.randint(0, 200, (2, 32))
    return {"input_ids": ids, "labels": ids}


MODELS = [
    (gpt2, "eager"), (bert, "eager"), (bert, "sdpa"), (llama, "eager"), (llama, "sdpa"),
    (t5, "eager"), (vit, "eager"), (vit, "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "attention"), MODELS)
def test_of_a_model(build: Callable[[str], nn.Module], attention: str, dtype: torch.dtype) -> None:
    made = []
    for run in (plain, watched):
        torch.manual_seed(0)
        model = build(attention).train().to(dtype)
        inputs = inputs_for(model)
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        made.append(run(model, cast))
    assert made[0] == made[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_checkpoints(reentrant: bool) -> None:
    made = []
    for run in (plain, watched):
        torch.manual_seed(0)
        model: Any = gpt2("eager").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        made.append(run(model, inputs_for(model)))
    assert made[0] == made[1]


class Formula(nn.Module):
    """A scale, and then what is asked for."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))
        self.formula = formula

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.formula(x * self.scale).sum()}


_ROWS = torch.tensor([0, 2, 2, 5])
_COLUMNS = torch.randint(0, 24, (16, 24))

# Not here: what looks at values, which no mode can stand in for (products with zeros among their
# factors), and what the CPU alone does in another way unwatched (the largest of all values).
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "residual": lambda x: x + torch.tanh(x + torch.sin(x)),
    "residual, views": lambda x: x + torch.tanh((x + x.sin()).view(4, 4, 24)).view(16, 24),
    "three uses": lambda x: x.sin() * x.cos() + x.exp(),
    "transposed": lambda x: (x.t() @ x).sum() + (x @ x.t()).sum() + x.tanh().sum(),
    "expanded": lambda x: (x.sum(0).expand(4, 24) * x.sum(0)).sum() + x.sin().sum(),
    "chunks": lambda x: torch.cat([each.sin() for each in x.chunk(3, -1)]) ** 2,
    "checkpoint": lambda x: x + checkpoint(lambda y: (y.sin() + y).cos(), x, use_reentrant=False),
    "index": lambda x: x[_ROWS].sin(),
    "index, mask": lambda x: x[x.detach() > 0].sin(),
    "index_select": lambda x: x.index_select(0, _ROWS).sin(),
    "gather": lambda x: x.gather(0, _COLUMNS % 16).sin(),
    "take": lambda x: x.take(_COLUMNS).sin(),
    "max": lambda x: x.max(0).values * x.min(1, keepdim=True).values,
    "amax": lambda x: x.amax(0),
    "topk": lambda x: x.topk(3).values.sin(),
    "sort": lambda x: x.sort(0).values.sin() + x.sort(stable=True, dim=0).values,
    "median": lambda x: x.median(0).values + x.kthvalue(2, 0).values + x.mode(0).values,
    "cummax": lambda x: x.cummax(0).values.sin(),
    "norms": lambda x: F.layer_norm(x, (24,)) + x.norm(dim=-1, keepdim=True) + x.std(0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).relu(),
    "entropy": lambda x: F.cross_entropy(x, _COLUMNS[:, 0], label_smoothing=0.1, reduction="none"),
    "binary entropy": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "smooth": lambda x: F.smooth_l1_loss(x, x.detach() + 1) + F.huber_loss(x, x.detach() - 2),
    "silu": lambda x: F.silu(x) * F.mish(x) + F.gelu(x) + F.softplus(x) + F.logsigmoid(x),
    "glu": lambda x: F.glu(x) + F.leaky_relu(x)[:, :12] + F.elu(x)[:, 12:],
    "sums": lambda x: x.cumsum(0) + x.logsumexp(0),
    "masks": lambda x: x.masked_fill(x.detach() > 0, 0.0) + x.tril() + x.where(x > 0, 0 * x),
    "pad": lambda x: F.pad(x, (1, 1)).roll(1).flip(0),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "in place": lambda x: (x * 2).add_(x).relu_() * 2,
    "embedding": lambda x: F.embedding(_ROWS, x).sin(),
    "convolution": lambda x: F.conv1d(x[None], x.sum().expand(8, 16, 3) + 0, padding=1).relu(),
    "pooling": lambda x: F.max_pool1d(x[None], 2) + F.avg_pool1d(x[None], 2),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0).sin(),
    "distances": lambda x: F.cosine_similarity(x, x.roll(1, 0)) + torch.cdist(x, x + 1)[0],
    "scatter": lambda x: x.scatter(0, _COLUMNS % 16, x.sin()).scatter_add(0, _COLUMNS % 16, x),
    "index_add": lambda x: x.index_add(0, _ROWS, x[:4].sin()).index_fill(0, _ROWS, 1.0),
    "sdpa": lambda x: F.scaled_dot_product_attention(*x.view(3, 1, 2, 8, 8).unbind(0)),
    "sdpa, mask": lambda x: F.scaled_dot_product_attention(
        *x.view(3, 1, 2, 8, 8).unbind(0), attn_mask=torch.randn(8, 8)
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_of_a_formula(name: str) -> None:
    made = []
    for run in (plain, watched):
        torch.manual_seed(0)
        made.append(run(Formula(FORMULAS[name]), {"x": torch.randn(16, 24)}))
    assert made[0] == made[1]
