"""The bundled examples as the command line runs them, at sizes that a test has time for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import fa_advisor.examples
from fa_advisor.pipeline import profile_target
from fa_advisor.records import Mode, ProfileRequest
from fa_advisor.report import Report

EXAMPLES = Path(fa_advisor.examples.__file__).parent
# Target: (form of its sites, (heads, kv_heads, queries, keys, head_dim): count), at 128 tokens.
SITES: dict[str, tuple[str, dict[tuple[int, int, int, int, int], int]]] = {
    "nanogpt.py": ("eager", {(12, 12, 128, 128, 64): 12}),
    "gpt2.py": ("eager", {(12, 12, 128, 128, 64): 12}),
    "llama_gqa.py:eager": ("eager", {(16, 4, 128, 128, 64): 12}),
    "llama_gqa.py:sdpa": ("sdpa", {(16, 4, 128, 128, 64): 12}),
    "bert_padding.py": ("sdpa", {(12, 12, 128, 128, 64): 12}),
    "t5.py": ("sdpa", {(8, 8, 128, 128, 64): 18}),
    "transformer_encoder.py": ("mha", {(8, 8, 128, 128, 64): 6}),
    "vit.py": ("eager", {(12, 12, 197, 197, 64): 12}),
    "train_script.py": ("mha", {(4, 4, 128, 128, 64): 4}),
}


def _profile(target: str, mode: Mode, seq_len: int | None) -> Report:
    request = ProfileRequest(
        target=str(EXAMPLES / target), mode=mode, device="fake", gpu="a100", batch_size=2,
        seq_len=seq_len, optimizer="none",
    )  # fmt: skip
    return profile_target(request, lambda _: None)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("target", SITES)
def test_example(target: str, mode: Mode) -> None:
    form, expected = SITES[target]
    report = _profile(target, mode, None if target == "vit.py" else 128)
    assert {s.form for s in report.sites} == {form}
    assert expected == Counter(
        (s.num_heads, s.num_kv_heads, s.seqlen_q, s.seqlen_k, s.head_dim) for s in report.sites
    )
    memory = report.memory
    assert memory.unattributed_bytes == 0
    assert sum(memory.categories.values()) == memory.peak_allocated_bytes


def test_every_example_is_here() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")} - {"__init__.py"}
    assert files == {target.partition(":")[0] for target in SITES}
