"""Architectures of timm, full depth: their sites by (queries, keys) and count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fa_advisor
from fa_advisor.records import ATTENTION_CATEGORIES, Mode

pytestmark = pytest.mark.vision

Sites = dict[tuple[int, int, int, int], int]  # (heads, queries, keys, head_dim): count

SWIN: Sites = {(3, 49, 49, 32): 2, (6, 49, 49, 32): 2, (12, 49, 49, 32): 6, (24, 49, 49, 32): 2}
SWIN_V2: Sites = {(3, 64, 64, 32): 2, (6, 64, 64, 32): 2, (12, 64, 64, 32): 6, (24, 64, 64, 32): 2}
MODELS: dict[str, Sites] = {
    "vit_tiny_patch16_224": {(3, 197, 197, 64): 12},
    "deit_tiny_patch16_224": {(3, 197, 197, 64): 12},
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN_V2,
    # Talking heads: scores and weights are mixed over the heads, before softmax and after.
    "cait_xxs24_224": {(4, 196, 196, 48): 24, (4, 1, 197, 48): 2},
    "beit_base_patch16_224": {(12, 197, 197, 64): 12},
    # Attention over the channels, then two layers of a class token's over all others.
    "xcit_nano_12_p16_224": {(4, 32, 32, 196): 12, (4, 1, 197, 32): 2},
    "eva02_tiny_patch14_224": {(3, 257, 257, 64): 12},
    # Windows stand in a dimension of their own beside the heads.
    "twins_svt_small": {
        (2, 49, 49, 32): 1, (2, 3136, 49, 32): 1, (4, 49, 49, 32): 1, (4, 784, 49, 32): 1,
        (8, 49, 49, 32): 5, (8, 196, 49, 32): 5, (16, 49, 49, 32): 4,
    },
    "maxvit_tiny_tf_224": {
        (2, 49, 49, 32): 4, (4, 49, 49, 32): 4, (8, 49, 49, 32): 10, (16, 49, 49, 32): 4,
    },
    "crossvit_tiny_240": {
        (3, 401, 401, 32): 3, (3, 197, 197, 64): 12, (3, 1, 197, 64): 3, (3, 1, 401, 32): 3,
    },
    "resnet50": {},
    "convnext_tiny": {},
    "mixer_s32_224": {},
    "efficientnet_b0": {},
    "poolformer_s12": {},
    "lambda_resnet26t": {},  # softmax over keys meets no queries: no scores
}  # fmt: skip


@pytest.fixture
def eager() -> Any:
    """timm's hand-written attention."""
    layers = pytest.importorskip("timm.layers")
    layers.set_fused_attn(False)
    yield
    layers.set_fused_attn(True)


def _report(name: str, mode: Mode) -> fa_advisor.Report:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    images = torch.randn(2, *model.default_cfg["input_size"])
    report = fa_advisor.profile(model, images, mode=mode, optimizer="none", gpu="a100")
    memory = report.memory
    assert memory.unattributed_bytes == 0
    assert sum(memory.categories.values()) == memory.peak_allocated_bytes
    return report


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("eager")
def test_every_attention_is_found_and_nothing_else(name: str, mode: Mode) -> None:
    report = _report(name, mode)
    found = Counter((s.num_heads, s.seqlen_q, s.seqlen_k, s.head_dim) for s in report.sites)
    assert found == Counter(MODELS[name])
    kept = set(report.memory.categories) & set(ATTENTION_CATEGORIES)
    assert bool(kept) == bool(MODELS[name]) or (MODELS[name] and mode == "infer")


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_fused_attention_keeps_no_scores(name: str, mode: Mode) -> None:
    report = _report(name, mode)
    assert {s.form for s in report.sites} == {"sdpa"}
    assert len(report.sites) == 12
    assert not set(report.memory.categories) & set(ATTENTION_CATEGORIES)
