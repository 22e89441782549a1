"""The frozen records that the rooms pass to each other and that a report is made of.

Bytes are integers; times say their unit in their name; each figure's `basis` says whether it was
measured, compiled or modelled. Field order is the JSON's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1

Category = Literal[
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
    "input",
    "attention_score",
    "attention_prob",
    "attention_mask",
    "attention_dropout",
    "attention_grad",
    "kv_cache",
    "activation",
    "temporary",
    "communication",
    "workspace",
    "allocator_slack",
]
CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]
ATTENTION_CATEGORIES: tuple[Category, ...] = (
    "attention_score",
    "attention_prob",
    "attention_mask",
    "attention_dropout",
    "attention_grad",
)

Phase = Literal["build", "forward", "backward", "optimizer"]
Form = Literal["eager", "sdpa", "mha", "flex", "flash_attn"]
Mode = Literal["train", "infer"]
Basis = Literal["measured", "modelled"]
Verdict = Literal["attention-bound", "weights-bound", "activations-bound", "optimizer-bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the report was made with. `None`: not there."""

    python: str
    torch: str | None
    triton: str | None
    cuda: str | None
    driver: str | None
    fa_advisor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFlops:
    """Dense peak rates in FLOP/s by dtype; `None` where the GPU has no such path."""

    bf16: float | None
    fp16: float | None
    fp32: float | None
    tf32: float | None
    fp8: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A GPU's limits. `basis` says who said so: NVML, torch, or the project's table."""

    name: str
    compute_capability: str
    basis: Literal["nvml", "torch", "table"]
    total_memory_bytes: int
    sm_count: int
    smem_per_sm_bytes: int
    smem_per_block_optin_bytes: int
    registers_per_sm: int
    max_warps_per_sm: int
    max_ctas_per_sm: int
    l2_bytes: int
    dram_bytes_per_s: float
    peak_flops: PeakFlops

    @property
    def capability(self) -> tuple[int, int]:
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input of the target."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What was run."""

    path: str | None
    name: str
    mode: Mode
    dtype: str
    batch_size: int | None
    seq_len: int | None
    parameters: int
    trainable_parameters: int
    inputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """Memory in use after the `t`-th allocation or free of the measured step.

    `module` made the latest allocation. sum(categories) is `allocated_bytes`.
    """

    t: int
    phase: Phase
    allocated_bytes: int
    attention_bytes: int
    module: str = ""
    categories: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorState:
    """What the allocator held beyond the allocated bytes at the peak, by its own trace:
    allocated + pending + cached + fragmented == reserved.

    `cached_bytes`: segments that are free; `fragmented_bytes`: free blocks of segments in use;
    `pending_bytes`: freed, but another stream might still use them; `private_pools_bytes`: of
    the reserved, what belongs to CUDA graphs. `other_processes_bytes`: `None` where NVML can't say.
    """

    reserved_bytes: int
    cached_bytes: int
    fragmented_bytes: int
    pending_bytes: int
    private_pools_bytes: int
    other_processes_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The peak and what it is made of: sum(categories) + unattributed == peak_allocated."""

    basis: Basis
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_phase: Phase
    categories: dict[str, int]
    unattributed_bytes: int
    outside_allocator_bytes: int | None
    timeline: tuple[TimelinePoint, ...]
    allocator: AllocatorState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Bytes at the peak that a module itself made (its children's are theirs)."""

    fqn: str
    type: str
    categories: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Blocks alive at the peak that share category, module, op, line, shape and dtype.

    `bytes` is what the tensors hold; the allocator's rounding is the `allocator_slack` category.
    """

    category: Category
    fqn: str
    op: str
    source: str | None
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """A module's attention call, as it ran in the measured step.

    `source` is the line that made S (or called the fused kernel), `calls` how often it ran.
    `saved_for_backward_bytes`: storages of this call (operands, S, P, masks, output, LSE) that
    backward read, over all its calls in the step; 0 in inference.
    """

    fqn: str
    source: str | None
    form: Form
    backend: str
    why_not: dict[str, tuple[str, ...]]
    calls: int
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    is_causal: bool
    has_mask: bool
    dropout_p: float
    attention_bytes_at_peak: int
    saved_for_backward_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBudget:
    """What one tile of an attention kernel costs on one GPU.

    `smem_textbook_bytes` is the article's formula (Q, K, V, S and O in the input dtype),
    `smem_modelled_bytes` our model's, `smem_bytes` the compiler's where the basis is compiled.
    Registers and spills are `None` where only compiling tells. `in_smem` and `in_registers`: who
    holds a block's shared memory and its registers, in bytes, as the model has it. `time_ms`: as
    predicted for `BudgetTable.workload`. `error`: why the compiler gave no figures.
    """

    head_dim: int
    dtype: str
    direction: Literal["fwd", "bwd"]
    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    smem_bytes: int
    smem_textbook_bytes: int
    registers_per_thread: int | None
    spill_bytes: int | None
    ctas_per_sm: int
    occupancy: float
    limiter: Literal["smem", "registers", "warps", "ctas"]
    fits: bool
    basis: Literal["compiled", "modelled"]
    value_head_dim: int | None = None
    is_causal: bool = False
    smem_modelled_bytes: int | None = None
    in_smem: dict[str, int] = field(default_factory=dict)
    in_registers: dict[str, int] = field(default_factory=dict)
    time_ms: float | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says that a kernel takes of a thread (registers, bytes of stack: what it
    spills) and of a block (bytes of shared memory, columns of tensor memory); or in `error` why it
    said nothing."""

    registers: int = 0
    stack_bytes: int = 0
    smem_bytes: int = 0
    tensor_columns: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """The budgets of candidate tiles on one GPU, for each kernel the one to use first.

    `explanations`: why that one, by kernel. `workload`: what `time_ms` is the time of.
    """

    device: DeviceSpec
    head_dim: int
    value_head_dim: int
    dtype: str
    is_causal: bool
    budgets: tuple[TileBudget, ...]
    explanations: dict[str, str]
    workload: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest value that fits the GPU's memory: as the model is, and as advised."""

    now: int | None
    advised: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """`None`: not computed, which is not the same as no change."""

    peak_allocated_bytes: int | None
    time_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """A kernel tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What these sites should use. `backend` "keep" means: change nothing."""

    sites: tuple[str, ...]
    backend: str
    tile: TileConfig | None
    predicted: Predicted
    basis: Basis
    reasons: tuple[str, ...]
    rejections: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The verdict and what to do. `counterfactual_peak_bytes`: the peak of the same step replayed
    without attention's N x N intermediates."""

    verdict: Verdict
    summary: str
    counterfactual_peak_bytes: int | None
    max_seq_len: Limit
    max_batch_size: Limit
    recommendations: tuple[Recommendation, ...]


# limit: the device had room, the process wasn't allowed to take it; fragmentation: the bytes were
# there, in pieces; other_processes: they would have been there, had others not held them.
Cause = Literal["memory", "fragmentation", "limit", "other_processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would make a step fit that ran out of memory.

    `saves_bytes`: how much less the step then needs, where that was computed; `enough`: does it fit
    then, by itself; `value`: the largest batch or length that fits.
    """

    kind: Literal["patch", "batch", "length", "allocator", "limit", "other_processes"]
    text: str
    saves_bytes: int | None
    enough: bool | None
    value: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The request that found no memory. The report's peak, categories and ledger are of that
    moment.

    `needed_bytes`: what the driver was asked for; `missing_bytes` of it weren't there. `fqn`, `op`,
    `source`: who asked; `shape`, `dtype`: of the tensor that was to be made, empty for memory
    inside an operator; `category`: what of attention's it would have been. `step_peak_bytes`: what
    the whole step needs, modelled on fake tensors, of the `capacity_bytes` that torch could have.
    """

    requested_bytes: int
    needed_bytes: int
    missing_bytes: int
    device_free_bytes: int
    capacity_bytes: int
    cause: Cause
    phase: Phase
    fqn: str
    op: str
    source: str | None
    shape: tuple[int, ...]
    dtype: str
    category: Category | None
    step_peak_bytes: int | None
    remedies: tuple[Remedy, ...]
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedSite:
    """What the patcher did to one site."""

    fqn: str
    form: Form
    backend: str
    status: Literal["patched", "refused"]
    code: str | None
    max_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchOutcome:
    """Measured before and after a patch."""

    sites: tuple[PatchedSite, ...]
    before: Predicted
    after: Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked of one profile run; travels to the child process as JSON."""

    target: str | None = None
    argv: tuple[str, ...] = ()
    mode: Mode = "train"
    batch_size: int | None = None
    seq_len: int | None = None
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    device: str = "auto"
    gpu: str | None = None
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    snapshot: str | None = None  # where to write torch's memory snapshot of the step
    trace: str | None = None  # where to write its Chrome trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step of a running profile. `total` is `None` where it isn't known beforehand."""

    stage: Literal["start", "load", "build", "warmup", "measure", "analyse", "done"]
    note: str = ""
    done: int = 0
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the child process has no report."""

    status: int
    message: str
    hint: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBody:
    """Everything a report holds; `fa_advisor.report.Report` adds saving, tables and printing."""

    schema_version: int = SCHEMA_VERSION
    environment: Environment
    device: DeviceSpec
    target: TargetSpec
    memory: Memory
    modules: tuple[ModuleMemory, ...]
    sites: tuple[AttentionSite, ...]
    budgets: tuple[TileBudget, ...]
    advice: Advice
    patch: PatchOutcome | None = None
    ledger: tuple[LedgerRow, ...] = ()
    out_of_memory: OutOfMemory | None = None
    notes: tuple[str, ...] = field(default=())
