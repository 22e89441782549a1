"""Models that a profiler trips over, as a user's file would hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_advisor.errors import TargetError, UsageError
from fa_advisor.pipeline import profile_target
from fa_advisor.records import ATTENTION_CATEGORIES, Mode, ProfileRequest
from fa_advisor.report import Report

B, L, H, D = 2, 128, 4, 16
N_BY_N = B * H * L * L  # elements of S

HEAD = """
import math
import torch
import torch.nn.functional as F
from torch import nn

class Attention(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        parts = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1)
        return parts.permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x)
        p = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(x.shape))

def get_inputs(batch_size=2, seq_len=128):
    return torch.randn(batch_size, seq_len, 64)

def build_model():
    return Net()
"""

Run = Callable[..., Report]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def profiled(body: str, mode: Mode = "train", device: str = "fake", **more: Any) -> Report:
        file = tmp_path / "target.py"
        file.write_text(HEAD + body)
        request = ProfileRequest(target=str(file), mode=mode, device=device, gpu="a100", **more)
        report = profile_target(request, lambda _: None)
        memory = report.memory
        assert memory.unattributed_bytes == 0
        assert sum(memory.categories.values()) == memory.peak_allocated_bytes
        return report

    return profiled


CUDA = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention().cuda()
    def forward(self, x):
        x = x.cuda() + torch.zeros(1, device="cuda:0") + torch.ones(1).to(torch.device("cuda"))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.attention(x)
"""


def test_code_written_for_cuda_runs_under_cuda_autocast(run: Run) -> None:
    (site,) = run(CUDA).sites
    assert (site.num_heads, site.dtype) == (H, "bfloat16")
    # Softmax is in float32 on CUDA: S, its scaled copy and P as the last product takes it in bf16.
    report = run(CUDA, "infer", optimizer="none")
    assert report.memory.categories["attention_prob"] == 4 * N_BY_N


ENTROPY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 50_000)
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.head(x).flatten(0, 1)
            return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
"""


def test_cross_entropy_is_cast_by_its_parts_as_on_cuda(run: Run) -> None:
    """CUDA's autocast knows nll_loss alone: log_softmax keeps the logits' dtype."""
    rows = run(ENTROPY).ledger
    assert {r.dtype for r in rows if r.op == "_log_softmax"} == {"bfloat16"}
    assert {r.dtype for r in rows if r.op == "nll_loss_backward"} == {"float32"}


IMAGE = "x.transpose(1, 2).reshape(2, 64, 8, 16)"
RULES = [
    ("F.normalize(x, dim=-1)", "float32"),
    ("F.cosine_similarity(x, x, dim=-1)", "float32"),
    ("torch.pow(2, x)", "float32"),
    ("x.cumprod(-1)", "float32"),
    (f"F.interpolate({IMAGE}, scale_factor=2, mode='bilinear')", "float32"),
    ("torch.zeros(2, 128, 64).scatter_add(1, torch.zeros(2, 128, 64).long(), x)", "float32"),
    ("torch.tensordot(x, torch.zeros(64, 8), 1)", "float32"),
    ("torch.einsum('bnc,cd->bnd', x.float(), torch.zeros(64, 8))", "bfloat16"),
    (f"F.pad({IMAGE}, (1, 1, 1, 1), mode='reflect')", "bfloat16"),
    ("F.avg_pool3d(x.view(2, 64, 8, 4, 4), 2)", "bfloat16"),
    ("torch.cat([x, x])", "bfloat16"),
]


@pytest.mark.parametrize(("form", "dtype"), RULES)
def test_autocast_has_cudas_rules(form: str, dtype: str, run: Run) -> None:
    """As CUDA's autocast answers, seen in torch 2.11 on fake tensors of that device."""
    run(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.attention(x)
            assert ({form}).dtype is torch.{dtype}
            return x
""", "infer")  # fmt: skip


def test_what_cudas_autocast_takes_as_it_is_is_not_copied(run: Run) -> None:
    report = run("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 64)
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return torch.cat([self.out(x), x])
""", "infer")  # fmt: skip
    assert not any(r.op == "_to_copy" and r.dtype == "float32" for r in report.ledger)


def test_autocast_is_left_as_it_was(run: Run) -> None:
    run(CUDA)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(-1).dtype is torch.bfloat16
    mode = torch.amp.autocast_mode
    assert mode.autocast.__init__.__qualname__ == "autocast.__init__"
    assert mode._cast.__qualname__ == "_cast"
    assert torch.is_autocast_enabled.__module__ == torch.get_autocast_dtype.__module__ == "torch"


OF_ITS_OWN = """
class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype is torch.float32
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, x):
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.bfloat16
            with torch.autocast("cuda"):
                return Doubled.apply(self.attention(x))
"""


def test_code_that_asks_for_cudas_autocast_is_told_of_it(run: Run) -> None:
    run(OF_ITS_OWN)


LOSSES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 1000)
    def forward(self, x):
        p = self.head(x).sigmoid()
        return F.binary_cross_entropy(p, torch.zeros_like(p), reduction=REDUCTION)
"""


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_cross_entropy_keeps_the_storage_of_all_losses(reduction: str, run: Run) -> None:
    report = run(LOSSES.replace("REDUCTION", repr(reduction)))
    (loss,) = [r for r in report.ledger if r.op == "binary_cross_entropy"]
    assert loss.bytes == 2 * 128 * 1000 * 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("device", ["fake", "cpu"])
def test_a_checkpointed_layer_holds_one_p_at_the_peak(
    run: Run, reentrant: bool, device: str
) -> None:
    report = run(
        f"""
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant={reentrant})
        return x
""",
        device=device,
    )
    assert [site.calls for site in report.sites] == [1, 1, 1]
    assert report.memory.categories["attention_prob"] == 4 * N_BY_N


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # torch's, about hooks like ours
@pytest.mark.parametrize("wrap", ["torch.compile({})", "nn.DataParallel({})"])
def test_wrapped_models(run: Run, wrap: str) -> None:
    report = run(
        f"def build_model(): return {wrap.format('nn.Sequential(Attention(), Attention())')}"
    )
    assert len(report.sites) == 2


FLEX = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, x):
        q, k, v = self.attention.split(x)
        n = x.size(1)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=x.device)
        return torch.compile(flex_attention)(q, k, v, block_mask=mask)
"""


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_compiled_flex_attention_is_one_operator_without_scores(run: Run, mode: Mode) -> None:
    report = run(FLEX, mode)
    (site,) = report.sites
    assert (site.form, site.num_heads, site.seqlen_q, site.head_dim) == ("flex", H, L, D)
    assert not set(report.memory.categories) & set(ATTENTION_CATEGORIES)


def test_composite_operators_are_seen_in_inference_mode(run: Run) -> None:
    body = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, x):
        with torch.inference_mode():
            return self.attention(x.to(torch.float64).to(torch.float32).reshape(x.shape))
"""
    fake, real = (run(body, "infer", device) for device in ("fake", "cpu"))
    assert fake.memory.categories == real.memory.categories
    assert len(fake.sites) == 1
    assert fake.memory.categories["input"] == B * L * H * D * 4


VALUE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
    def forward(self, x):
        y = self.attention(x)
        {line}
        return y
"""


@pytest.mark.parametrize(
    "line",
    [
        "if y.mean().item() > 1e9: return x",
        "y.detach().cpu().numpy()",
        "y[y > 0].sum()",
    ],
)
def test_code_that_needs_values_is_sent_to_the_cpu(run: Run, line: str) -> None:
    body = VALUE.format(line=line)
    with pytest.raises(TargetError, match=r"needs a tensor's value .* at .*target\.py") as raised:
        run(body)
    assert "--device cpu" in raised.value.hint
    assert len(run(body, device="cpu").sites) == 1


@pytest.mark.parametrize(
    "line",
    [
        "assert not torch.isnan(y).any()",
        "print(f'{y.sum():.3f}', y.mean())",
        "mask = torch.rand(y.shape[:2]) > 0.5; y = y.index_put((mask,), torch.zeros(())) ",
        "mask = torch.ones(y.shape, dtype=torch.bool); y.masked_select(mask).sum()",
        "for expert in y.topk(2)[1].flatten().bincount(minlength=64).nonzero(): int(expert)",
        "torch.bincount(y.argmax(-1).flatten()).tolist()",
    ],
)
def test_code_that_only_seems_to_need_values_runs_without(run: Run, line: str) -> None:
    assert len(run(VALUE.format(line=line)).sites) == 1


def test_parametrized_weights_and_sparse_gradients(run: Run) -> None:
    body = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 64, sparse=True)
        self.attention = Attention()
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    def forward(self, ids):
        return self.out(self.attention(self.table(ids)))
def get_inputs(batch_size=2, seq_len=128):
    return torch.randint(1000, (batch_size, seq_len))
"""
    for device in ("fake", "cpu"):
        assert len(run(body, device=device, optimizer="none").sites) == 1


def test_a_torchscript_module_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="TorchScript"):
        run("def build_model(): return torch.jit.script(nn.Linear(64, 64))")
