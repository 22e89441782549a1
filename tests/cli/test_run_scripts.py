"""Scripts of the kinds that people have, run as they are: the peak is what an independent witness
counts, parameters, gradients and optimizer state are what they must be, to the byte, and the script
prints what it prints without us."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from fa_advisor.report import Report, load

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
TRAINER = (
    "--output_dir OUT --max_steps 5 --report_to none --use_cpu --disable_tqdm 1 --save_strategy no"
)


@dataclass(frozen=True)
class Case:
    """A script and what its report must say.

    `states`: optimizer state a parameter's element, 2 for Adam. `off`: how far the witness may be
    from the peak, where it sees what another run doesn't have.
    """

    script: str
    model: str
    batch: int | None
    length: int | None
    parameters: int
    states: float
    sites: tuple[str, ...]
    form: str = "eager"
    mode: str = "train"
    status: int = 0
    stdin: str = ""
    needs: str = "torch"
    off: float = 0.001


CASES = [
    Case("nano_gpt.py", "GPT", 4, 64, 28416, 2, ("h.0.attn", "h.1.attn")),
    Case(
        "nano_gpt.py --dtype bfloat16 --block-size 128 --accumulate 1",
        "GPT", 4, 128, 30464, 2, ("h.0.attn", "h.1.attn"),
    ),
    Case(
        "word_language_model.py", "TransformerModel", 32, 4, 30152, 0,
        ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"), "mha",
    ),
    # Batches that the workers have ready early are a matter of time.
    Case(
        "vit_workers.py", "VisionTransformer", 8, None, 90922, 2,
        ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn"), "sdpa", off=0.06,
    ),
    Case(
        f"trainer_clm.py {TRAINER}", "GPT2LMHeadModel", 8, 64, 31616, 2,
        ("transformer.h.0.attn", "transformer.h.1.attn"), needs="accelerate",
    ),
    Case(
        "llama_accelerate.py", "LlamaForCausalLM", 4, 48, 55536, 2,
        ("model.layers.0.self_attn", "model.layers.1.self_attn"), "sdpa", needs="accelerate",
    ),
    Case(
        "llama.py", "LlamaForCausalLM", 4, 48, 55536, 2,
        ("model.layers.0.self_attn", "model.layers.1.self_attn"), "sdpa",
    ),
    # Under a dispatch mode, the witness's, autograd sums gradients out of place.
    Case("ddp_single.py", "ToyModel", 8, 40, 76432, 1, ("module.attention",), "mha", off=0.07),
    Case(
        "ddp_single.py --static", "ToyModel", 8, 40, 76432, 1, ("module.attention",), "mha",
        off=0.07,
    ),
    Case(
        "gan.py", "Discriminator", 4, 24, 67009, 2,
        ("Discriminator.body.layers.0.self_attn", "Discriminator.body.layers.1.self_attn"),
        "mha", status=3,
    ),
    Case("fails.py", "Net", 2, 16, 8544, 1, ("layer.self_attn",), "mha", status=1),
    Case(
        "generate.py 12", "GPT2LMHeadModel", 1, 19, 124672, 0,
        ("transformer.h.0.attn", "transformer.h.1.attn"), "sdpa", "infer",
        stdin="the quick brown fox\n",
    ),
]  # fmt: skip


def run(case: Case, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script, *words = case.script.replace("OUT", str(folder / "out")).split()
    return subprocess.run(
        [sys.executable, *command, str(SCRIPTS / script), *words],
        capture_output=True, text=True, input=case.stdin, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script.split(" --out")[0])
def test_a_script_as_it_is(case: Case, tmp_path: Path) -> None:
    if find_spec(case.needs) is None:
        pytest.skip(f"no {case.needs}")
    witness, saved = tmp_path / "witness.json", tmp_path / "r.json"
    plain = run(case, tmp_path, str(HERE / "truth.py"), str(witness))
    done = run(case, tmp_path, "-m", "fa_advisor", "run", "-o", str(saved))
    assert done.returncode == case.status, done.stderr
    assert _without_times(done.stdout) == _without_times(plain.stdout)
    report = load(saved)

    target = report.target
    assert (target.name, target.mode) == (case.model, case.mode)
    assert (target.batch_size, target.seq_len) == (case.batch, case.length)
    assert target.parameters == case.parameters
    assert target.path == str(SCRIPTS / case.script.split()[0])
    assert tuple(site.fqn for site in report.sites) == case.sites
    assert {site.form for site in report.sites} == {case.form}
    _check_weights(case, report)
    _check_timeline(report)
    if case.states:
        _check_peak(case, report, json.loads(witness.read_text()))


def _without_times(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if "runtime" not in line]


def _check_weights(case: Case, report: Report) -> None:
    categories = report.memory.categories
    others = {"gan.py": 4 * (16 * 128 + 128 + 128 * 64 + 64)}.get(case.script, 0)
    assert categories["parameter"] == 4 * case.parameters + others
    assert categories.get("gradient", 0) <= categories["parameter"]
    state = categories.get("optimizer_state", 0)
    exact = 4 * case.parameters * case.states + others  # RMSprop's: one
    # A fused or capturable optimizer's step counts are on the device.
    assert exact <= state <= exact + 4 * 200
    buckets = categories["parameter"] if case.script.startswith("ddp_single.py") else 0
    assert buckets <= categories.get("communication", 0) <= buckets + 200


def _check_timeline(report: Report) -> None:
    memory = report.memory
    assert max(p.allocated_bytes for p in memory.timeline) == memory.peak_allocated_bytes
    assert all(sum(p.categories.values()) == p.allocated_bytes for p in memory.timeline)
    top = max(memory.timeline, key=lambda p: p.allocated_bytes)
    assert top.categories == memory.categories
    assert len(memory.timeline) <= 402


def _check_peak(case: Case, report: Report, witness: dict[str, list[int]]) -> None:
    categories = report.memory.categories
    modelled = categories.get("workspace", 0) + categories.get("allocator_slack", 0)
    peak = report.memory.peak_allocated_bytes - modelled
    highest = max(witness["steps"][1:])
    assert peak == pytest.approx(highest, rel=case.off)
