"""What a tile of a FlashAttention kernel costs on a GPU: shared memory, registers, occupancy.

Modelled, without torch or Triton. The kernel is the plain one of the Triton tutorials: Q stays,
K and V stream through a pipeline of `num_stages`, S, P and O live in registers as fp32, the head
dim is padded to a power of two. The constants come from compiling such kernels with Triton 3.7.1
for sm_70 to sm_120 (142 forward and 90 backward tiles). Shared memory: forward to the byte (32 to
544 bytes of barriers too few on sm_100), backward to the byte in 82 of 90, 15 % off in the worst
candidate. Registers: within 9 a thread on average; unknown on 7.x, where such kernels spill
kilobytes, and on 10.x, where accumulators live in tensor memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fa_advisor.errors import UsageError
from fa_advisor.records import DeviceSpec, TileBudget, TileConfig

Direction = Literal["fwd", "bwd"]
Limiter = Literal["smem", "registers", "warps", "ctas"]

KERNEL = "plain-triton"
MAX_HEAD_DIM = 256
MAX_REGISTERS_PER_THREAD = 255

_ELEMENT_BYTES = {
    "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "fp32": 4, "float32": 4,
}  # fmt: skip
_SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}


def _tiles(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(
        TileConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in rows
    )


# Candidates as (block_m, block_n, num_warps, num_stages); block_m counts queries in both.
_TILES: dict[Direction, tuple[TileConfig, ...]] = {
    "fwd": _tiles(
        (128, 128, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 4, 2),
        (128, 32, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
    ),
    "bwd": _tiles(
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (64, 64, 4, 2),
        (32, 128, 4, 2),
        (32, 64, 4, 2),
        (32, 64, 4, 1),
        (32, 32, 4, 1),
    ),
}


def modelled_budgets(
    head_dim: int,
    dtype: str,
    device: DeviceSpec,
    *,
    value_head_dim: int | None = None,
    directions: Iterable[Direction] = ("fwd", "bwd"),
    tiles: Iterable[TileConfig] | None = None,
) -> tuple[TileBudget, ...]:
    """Budgets of `tiles` (default: a handful of candidates for each direction) on `device`, for
    each direction the one to use first.

    Order: tiles that fit, before those that don't; then by the work in flight on an SM for each
    load of K and V (occupancy x block_m x block_n), less the share of the registers wanted beyond
    the 255 that a thread has (they spill), and halved for a single stage (nothing hides the
    loads); then fewer bytes of shared memory.

    `dtype`: "bf16", "fp16", "fp32" or torch's name for it. Backward is the dK/dV kernel; a dQ
    kernel with the tile turned takes as much within 1 KiB.

    Raises: UsageError for a head dim outside 1 to 256 or another dtype.
    """
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    for name, dim in (("head dim", head_dim), ("value head dim", value_head_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise UsageError(
                f"{name} {dim} is out of range: FlashAttention kernels take 1 to {MAX_HEAD_DIM}",
                hint="the head dim is hidden size / number of heads",
            )
    if dtype not in _ELEMENT_BYTES:
        raise UsageError(
            f"no attention kernel for dtype {dtype!r}: expected bf16, fp16 or fp32",
            hint="give --dtype bf16, fp16 or fp32",
        )
    given = None if tiles is None else tuple(tiles)
    budgets: list[TileBudget] = []
    for direction in directions:
        ranked = [
            _ranked(direction, tile, head_dim, value_head_dim, dtype, device)
            for tile in (_TILES[direction] if given is None else given)
        ]
        budgets += [budget for _, budget in sorted(ranked, key=lambda pair: pair[0])]
    return tuple(budgets)


def best_tile(budgets: Iterable[TileBudget]) -> TileConfig | None:
    """The tile to use: of one direction's budgets in `modelled_budgets`' order, the first that
    fits; `None` where none does."""
    for budget in budgets:
        if budget.fits:
            return TileConfig(
                block_m=budget.block_m,
                block_n=budget.block_n,
                num_warps=budget.num_warps,
                num_stages=budget.num_stages,
            )
    return None


def textbook_smem_bytes(
    tile: TileConfig, head_dim: int, value_head_dim: int, element_bytes: int
) -> int:
    """The textbook's estimate: one block each of Q, K, V, S and O, in the input dtype."""
    q = tile.block_m * head_dim
    k = tile.block_n * head_dim
    v = tile.block_n * value_head_dim
    s = tile.block_m * tile.block_n
    o = tile.block_m * value_head_dim
    return (q + k + v + s + o) * element_bytes


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks resident on an SM, their share of its warps, and what keeps more out."""

    ctas_per_sm: int
    occupancy: float
    limiter: Limiter


def occupancy(
    device: DeviceSpec, *, num_warps: int, smem_bytes: int, registers_per_thread: int | None
) -> Occupancy:
    """Blocks that fit on an SM, by the rules of CUDA's occupancy calculator.

    Registers are given out by 256 a warp and to each quarter of the SM apart, warps by four;
    shared memory by 128 bytes (256 on 7.x), of which the driver keeps 1 KiB a block from 8.0 on.
    `registers_per_thread` `None`: not counted.
    """
    ampere_on = device.capability >= (8, 0)
    unit = 128 if ampere_on else 256
    block_smem = _round_up(smem_bytes + (1024 if ampere_on else 0), unit)
    resident: dict[Limiter, int] = {
        "smem": device.smem_per_sm_bytes // block_smem if block_smem else device.max_ctas_per_sm
    }
    if smem_bytes > device.smem_per_block_optin_bytes:
        resident["smem"] = 0
    if registers_per_thread is not None:
        per_warp = _round_up(32 * registers_per_thread, 256)
        warps = 4 * (device.registers_per_sm // 4 // per_warp)
        resident["registers"] = warps // _round_up(num_warps, 4)
    resident["warps"] = device.max_warps_per_sm // num_warps
    resident["ctas"] = device.max_ctas_per_sm
    limiter = min(resident, key=lambda name: resident[name])
    ctas = resident[limiter]
    return Occupancy(ctas, ctas * num_warps / device.max_warps_per_sm, limiter)


_Rank = tuple[bool, float, int]


def _ranked(
    direction: Direction,
    tile: TileConfig,
    head_dim: int,
    value_head_dim: int,
    dtype: str,
    device: DeviceSpec,
) -> tuple[_Rank, TileBudget]:
    """A tile's budget, and its place in `modelled_budgets`' order (lowest first)."""
    size = _ELEMENT_BYTES[dtype]
    shape = _Shape(tile, _padded(head_dim), _padded(value_head_dim), size, device.capability)
    smem = shape.smem_fwd() if direction == "fwd" else shape.smem_bwd()
    wanted = shape.registers_fwd() if direction == "fwd" else shape.registers_bwd()
    registers = None if wanted is None else min(MAX_REGISTERS_PER_THREAD, round(wanted))
    resident = occupancy(
        device, num_warps=tile.num_warps, smem_bytes=smem, registers_per_thread=registers
    )
    budget = TileBudget(
        head_dim=head_dim,
        dtype=_SHORT_DTYPE.get(dtype, dtype),
        direction=direction,
        kernel=KERNEL,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        smem_bytes=smem,
        smem_textbook_bytes=textbook_smem_bytes(tile, head_dim, value_head_dim, size),
        registers_per_thread=registers,
        spill_bytes=None,
        ctas_per_sm=resident.ctas_per_sm,
        occupancy=resident.occupancy,
        limiter=resident.limiter,
        fits=smem <= device.smem_per_block_optin_bytes,
        basis="modelled",
    )
    work = resident.occupancy * tile.block_m * tile.block_n
    if wanted is not None:
        work *= min(1.0, MAX_REGISTERS_PER_THREAD / wanted)
    if tile.num_stages == 1:
        work /= 2
    return (not budget.fits, -work, smem), budget


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tile with its padded head dims (query/key, value), element size and capability."""

    tile: TileConfig
    d: int
    dv: int
    size: int
    capability: tuple[int, int]

    @property
    def wgmma(self) -> bool:
        """9.0 and 10.x multiply straight from shared memory; the others load registers first."""
        return self.capability[0] in (9, 10)

    def smem_fwd(self) -> int:
        m, n, stages = self.tile.block_m, self.tile.block_n, self.tile.num_stages
        q, k, v = m * self.d * self.size, n * self.d * self.size, n * self.dv * self.size
        if self.capability < (8, 0):  # no pipeline, no tensor core path: operands as fp32
            return 4 * (m * self.d + max(n * max(self.d, self.dv), m * n))
        if stages == 1:
            return q + max(k, v)
        if self.wgmma:
            return q + stages * (k + v)
        # The buffer that a stage is computed from needs no successor in flight, hence one fewer.
        return q + (stages - 1) * (k + v) + self._relayout_of_p()

    def _relayout_of_p(self) -> int:
        """P passes through shared memory where the two products lay their warps out otherwise:
        along the rows if a product is at least as tall as wide, else along the columns."""
        m, n = self.tile.block_m, self.tile.block_n
        if (m >= n) == (m >= self.dv):
            return 0
        row_padding = 16 if self.size == 4 else 0
        return m * (n * self.size + row_padding)

    def smem_bwd(self) -> int:
        m, n, stages = self.tile.block_m, self.tile.block_n, self.tile.num_stages
        kv = n * (self.d + self.dv) * self.size
        q, do = m * self.d * self.size, m * self.dv * self.size
        if self.capability < (8, 0):
            return 4 * (n * (self.d + self.dv) + m * max(self.d, self.dv))
        lse_and_delta = 8 * m * (stages - 1)
        if self.wgmma and self.size == 2:
            # On 10.x P and dS go through shared memory on their way to the tensor core.
            on_blackwell = self.capability[0] == 10 and stages > 1
            p_and_ds = 2 * m * n * self.size if on_blackwell else 0
            return kv + stages * (q + do) + lse_and_delta + p_and_ds
        if self.wgmma:  # TF32 operands can't be read transposed: dO waits in registers
            return kv + do + stages * q + lse_and_delta
        if stages == 1 and n < self.dv:
            return kv + q + do
        exchange = 512 * self.tile.num_warps if self.size == 2 else 0
        return kv + do + (stages - 1) * q + lse_and_delta + exchange

    def registers_fwd(self) -> float | None:
        """Registers that a thread wants, which may be more than it can have."""
        threads = 32 * self.tile.num_warps
        m, n = self.tile.block_m, self.tile.block_n
        o, s, kv = m * self.dv / threads, m * n / threads, n * self.d / threads
        if not self._registers_known:
            return None
        if self.wgmma:
            return 11 + 1.45 * o + 1.75 * s + 0.43 * kv
        return 28 + 2.22 * o + 1.94 * s - 0.61 * kv

    def registers_bwd(self) -> float | None:
        """Registers that a thread wants, which may be more than it can have."""
        threads = 32 * self.tile.num_warps
        m, n = self.tile.block_m, self.tile.block_n
        dk_and_dv, s = n * (self.d + self.dv) / threads, m * n / threads
        if not self._registers_known:
            return None
        if self.wgmma:
            return max(32.0, 1.33 * dk_and_dv + 3.53 * s - 7)
        return 141 + 0.74 * dk_and_dv + 2.71 * s

    @property
    def _registers_known(self) -> bool:
        return self.capability >= (8, 0) and self.capability[0] != 10


def _padded(head_dim: int) -> int:
    """The next power of two, at least the 16 that a tensor core product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
