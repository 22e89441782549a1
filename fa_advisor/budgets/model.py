"""What a tile of a bundled kernel takes, and how fast it is, by formula: microseconds, no compiler.

The three kernels have one shape. Rows stay: queries in `forward` and `queries`, keys in `keys`. Two
operands stream past them through a pipeline of `num_stages`. The weights P (or dS) of a tile, rows
by columns, are made in registers and multiplied once more. Everything below follows from which unit
multiplies, and where that unit wants its operands.

Shared memory is derived: who holds what, at the moment when most is held. Registers and spills are
fitted to what Triton 3.7.1 compiled; benchmarks/budget_model.py says how far off each is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fa_advisor.records import DeviceSpec

Kernel = Literal["forward", "keys", "queries"]
Precision = Literal["ieee", "tf32"]
# fma: no tensor cores, as exact fp32 wants. registers: tensor cores fed from registers (mma.sync).
# shared: straight from shared memory (wgmma). tensor: the same, into tensor memory (tcgen05).
Unit = Literal["fma", "registers", "shared", "tensor"]

MAX_REGISTERS = 255
# Stack that doesn't count as spilling: `MOST_STACK_BYTES` of fa_advisor.kernels.tiles.
MOST_STACK_BYTES = 96
TENSOR_COLUMNS = 512  # an SM's tensor memory: of 128 rows of 32 bits
_STREAMED = {"forward": ("K", "V"), "keys": ("Q", "dO"), "queries": ("K", "V")}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the compiler would report of a tile.

    smem_bytes: of a block; `holders` says who has it. registers: of a thread. spills: the compiler
    would keep more than `MOST_STACK_BYTES` of stack. in_registers: bytes of a block, by what is
    held in registers (on 10.x in part in tensor memory). stack_bytes: of a thread, roughly: what
    it wants over the registers there are, where `spills` is said sooner, to miss few.
    tensor_columns: of tensor memory, on 10.x; a tile that wants more than `TENSOR_COLUMNS`
    compiles, to a stub that can't be launched.
    """

    smem_bytes: int
    registers: int
    spills: bool
    holders: dict[str, int]
    in_registers: dict[str, int]
    stack_bytes: int = 0
    tensor_columns: int = 0


def estimate(
    kernel: Kernel,
    *,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    head_dim: int,
    value_head_dim: int,
    element_bytes: int,
    precision: Precision,
    capability: tuple[int, int],
    causal: bool,
) -> Estimate:
    """The budget of a tile on any GPU from 8.0 on."""
    shape = _Shape(
        kernel, block_m, block_n, num_warps, num_stages, _padded(head_dim),
        _padded(value_head_dim), element_bytes, precision == "ieee", capability[0], causal,
    )  # fmt: skip
    holders = {name: size for name, size in shape.holders().items() if size}
    wanted, enough = shape.wanted_registers(), _SPILLING_FROM[kernel, shape.unit]
    return Estimate(
        smem_bytes=sum(holders.values()),
        registers=min(MAX_REGISTERS, round(wanted)),
        spills=wanted > enough,
        holders=holders,
        in_registers=shape.in_registers(),
        stack_bytes=4 * math.ceil(max(0.0, wanted - MAX_REGISTERS)),
        tensor_columns=shape.tensor_columns(),
    )


def predicted_ms(
    kernel: Kernel,
    *,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    head_dim: int,
    value_head_dim: int,
    element_bytes: int,
    precision: Precision,
    capability: tuple[int, int],
    causal: bool,
    registers: int,
    stack_bytes: int,
    smem_bytes: int,
    ctas_per_sm: int,
    device: DeviceSpec,
    batch: int,
    heads: int,
    seqlen: int,
) -> float:
    """Milliseconds of a kernel on `device`: good for putting tiles in order.

    A round of a block's loop takes the tensor cores (or the shared memory that they read, if that
    takes longer: `busy`), the other units (`softmax`, spills included), and a time of waiting. One
    block alone takes the sum. Any number of them on an SM takes at least what the busier of the two
    does; what is over that they hide for each other. To a block's rounds come a start and an end,
    and to its work those of all that the SM runs in turn.

    Registers and shared memory count through `ctas_per_sm`. The constants are explained where they
    stand; benchmarks/tiles.py says how far from the fastest tile the first one is.
    """
    shape = _Shape(
        kernel, block_m, block_n, num_warps, num_stages, _padded(head_dim),
        _padded(value_head_dim), element_bytes, precision == "ieee", capability[0], causal,
    )  # fmt: skip
    rows, columns = shape.rows, shape.columns
    peaks = device.peak_flops
    lanes = (peaks.fp32 or peaks.fp16 or 1e12) / 2 / device.sm_count  # fp32 instructions a second
    lanes_a_clock = 64 if capability in ((7, 0), (7, 5), (8, 0)) else 128
    smem = 128 * lanes / lanes_a_clock  # bytes a second: 128 a clock

    weights = shape.makings() * rows * columns
    busy = shape.busy_s(shape.peak_flops(device) / device.sm_count, smem)
    softmax = weights * _WEIGHT[kernel] / lanes
    if kernel == "keys":  # Each thread loads lse and delta of all its columns.
        softmax += columns * 16 * num_warps * _STATISTICS / lanes
    spilled = max(0, stack_bytes - _FREE_STACK) * 32 * num_warps
    softmax += 2 * _SPILL * spilled / smem

    least = max(busy, softmax)
    ctas = max(1, ctas_per_sm)
    a_round = least + (busy + softmax + _WAITING_S - least) / ctas
    a_round *= 1 + _STALLS.get(num_stages, 0.0)

    blocks = batch * heads * -(-seqlen // rows) / (device.sm_count * ctas)
    if causal:  # Half of the tiles, and those on the diagonal; the longest blocks come first.
        rounds = (seqlen + rows) / 2 / columns + max(1.0, rows / columns) / 2
        blocks += 1
    else:
        rounds = seqlen / columns
        blocks = math.ceil(blocks)
    return 1e3 * blocks * (ctas * a_round * rounds + _BLOCK_S)


# Fitted to an H200 in bf16, and rounded: to the times and the order of the tiles that a launch
# accepts, 1,371 times at 38 shapes (benchmarks/results/tiles.json). docs/budgets.md says what comes
# of it where lengths or head dims are left out. Elsewhere they were held against nothing: another
# GPU, fp32.
#
# fp32 instructions that a weight takes as long as, its exponential and, in `forward`, the row's
# maximum and sum included.
_WEIGHT: dict[Kernel, float] = {"forward": 9.0, "keys": 5.0, "queries": 5.0}
# The same, of a thread's load of a column's lse or delta.
_STATISTICS = 16.0
# Seconds that a round waits for results: of products, of barriers.
_WAITING_S = 300e-9
# What a round takes longer where operands come late, as a share of it: by stages.
_STALLS = {1: 0.37, 2: 0.12}
# Seconds for a block to start and to write its results.
_BLOCK_S = 3.4e-6
# Bytes of a thread's stack that cost nothing; of each over it, stores and loads a round.
_FREE_STACK = 40
_SPILL = 3.0
# What mma.sync reaches of the peak that newer units set. 9.0 as others have measured; 10.x a guess.
# Neither is fitted.
_MMA_SYNC_SHARE = {9: 0.62, 10: 0.5}


@dataclass(frozen=True, slots=True)
class _Shape:
    """A kernel's tile, with padded head dims (query and key, value)."""

    kernel: Kernel
    m: int
    n: int
    warps: int
    stages: int
    d: int
    dv: int
    size: int
    ieee: bool
    major: int
    causal: bool

    @property
    def rows(self) -> int:
        return self.n if self.kernel == "keys" else self.m

    @property
    def columns(self) -> int:
        return self.m if self.kernel == "keys" else self.n

    @property
    def unit(self) -> Unit:
        if self.size == 4 and self.ieee:
            return "fma"
        if self.rows < 64 or self.warps % 4:  # The least that wgmma and tcgen05 multiply at a time.
            return "registers"
        if self.major == 10:
            return "tensor" if self.warps <= 8 else "registers"
        return "shared" if self.major == 9 else "registers"

    @property
    def tma(self) -> bool:
        """Whether operands come as tensor descriptors, which signal through barriers."""
        return self.major >= 9 and self.unit != "fma"

    @property
    def tf32(self) -> bool:
        return self.size == 4 and not self.ieee

    @property
    def accumulator_width(self) -> int:
        return {"forward": self.dv, "keys": max(self.d, self.dv), "queries": self.d}[self.kernel]

    @property
    def tall(self) -> bool:
        """Whether mma.sync lays the warps along the rows, so that P is where it's wanted next."""
        return self.warps == 1 or self.rows >= self.accumulator_width

    def holders(self) -> dict[str, int]:
        """Who holds a block's shared memory when most of it is held: in the loop."""
        stay = self.resident()
        if self.stages == 1:
            return stay | self._one_stage()
        (a, a_bytes), (b, b_bytes) = self._streamed()
        a_count, b_count = self._buffers()
        return {
            **stay,
            f"{a} x {a_count}": a_count * a_bytes,
            f"{b} x {b_count}": b_count * b_bytes,
            **self._copies(),
            "lse, delta": 8 * self.m * (self.stages - 1) if self.kernel == "keys" else 0,
            "P" if self.kernel == "forward" else "dS": self._weights(),
            "scratch": self._scratch(),
            "barriers": self._barriers(),
        }

    def resident(self) -> dict[str, int]:
        if self.kernel == "forward":
            return {"Q": self.m * self.d * self.size}
        names = ("K", "V") if self.kernel == "keys" else ("Q", "dO")
        return {
            names[0]: self.rows * self.d * self.size,
            names[1]: self.rows * self.dv * self.size,
        }

    def _streamed(self) -> tuple[tuple[str, int], tuple[str, int]]:
        a, b = _STREAMED[self.kernel]
        return (a, self.columns * self.d * self.size), (b, self.columns * self.dv * self.size)

    def _buffers(self) -> tuple[int, int]:
        """Buffers of each streamed operand.

        A product that reads shared memory while it runs holds its buffer: `stages` of them. One
        that has taken its operand into registers has freed it: one fewer. TF32 multiplies only
        what is laid out along the summed index, so what isn't is read and written once more
        (`_copies`), which frees it too. On 10.x the products of the backward pass run on into the
        next round, which takes one more.
        """
        stages, kernel = self.stages, self.kernel
        if self.unit == "shared" and self.tf32:
            return {
                "forward": (stages, stages - 1),
                "keys": (stages - 1, stages - 1),
                "queries": (stages - 1, stages),
            }[kernel]
        if self.unit == "shared":
            return stages, stages
        if self.unit == "tensor":
            return stages + (kernel != "forward"), stages + (kernel == "keys")
        if self.tf32 and not self.tma and kernel != "forward":
            # Wanted in two layouts, so loaded through registers rather than copied behind them.
            return 1, stages - 1 if kernel == "queries" else 1
        return stages - 1, stages - 1

    def _copies(self) -> dict[str, int]:
        """TF32's operands laid out the other way; on 10.x one being read and one in the making."""
        if not self.tf32 or self.unit not in ("shared", "tensor"):
            return {}
        (a, a_bytes), (b, b_bytes) = self._streamed()
        turned = {
            "forward": {b: b_bytes},
            "keys": {a: a_bytes, b: b_bytes},
            "queries": {a: a_bytes},
        }
        count = 2 if self.unit == "tensor" else 1
        return {f"{name} turned": count * size for name, size in turned[self.kernel].items()}

    def _weights(self) -> int:
        """P (dS) on its way from one product to the next, where it can't stay in registers."""
        if self.unit in ("shared", "tensor") or (self.unit == "registers" and self.tall):
            return 0
        return self.m * self.n * self.size

    def _relayout(self) -> int:
        """Scratch to hand a streamed operand from the threads that loaded it to those that multiply
        it: as many rows as one warp's product takes (or all warps', side by side), or as one
        instruction of all warps loads."""
        width = max(self.d, self.dv)
        lanes = min(32, width * self.size // 16)
        rows = max(8 if self.tall else 8 * self.warps, 32 * self.warps // lanes)
        return min(self.columns, rows) * width * self.size

    def _scratch(self) -> int:
        """What isn't an operand: row sums across warps, or an operand's way to its layout."""
        if self.tf32 and self.unit == "registers" and not self.tma and self.kernel != "forward":
            return max(0, self._relayout() - self._weights())
        if self.kernel != "forward":
            return 0
        if self.unit == "fma":
            warps_a_row = self.n // (32 * self._square(self.n))
            if warps_a_row > 1:
                return 4 * self.m * warps_a_row
            # The factor that rescales O, where warps have other rows of O.
            return 0 if self._rows_a_warp(self.n) == self._rows_a_warp(self.dv) else 4 * self.m
        if self.unit == "tensor":
            if self.warps < 8:
                return 0
            return 1024 if self.behind and self.rows == 64 else 512
        if self.tf32 and self._weights():
            return 4 * self.m * min(self.warps, self.n // 8)
        return 0

    def _square(self, width: int) -> int:
        """The side of the square that a thread has of a product [m, width], off tensor cores."""
        a_thread = self.m * width // (32 * self.warps)
        return 4 if a_thread >= 16 else 2 if a_thread >= 4 else 1

    def _rows_a_warp(self, width: int) -> int:
        """Neighbouring rows of it that a warp has: its lanes lie along the width first."""
        square = self._square(width)
        return square * 32 // min(32, width // square)

    @property
    def behind(self) -> bool:
        """Whether what stays lies behind the barriers of what streams: in the two loops of a causal
        call, if the latter is larger."""
        counts = self._buffers() if self.stages > 1 else (1, 1)
        sizes = [count * size for count, (_, size) in zip(counts, self._streamed(), strict=True)]
        return self.causal and max(sizes) > min(self.resident().values())

    @property
    def alignment(self) -> int:
        """What an operand that tensor cores read from shared memory begins at a multiple of."""
        return 8 * min(128, self.d * self.size)

    def _barriers(self) -> int:
        """8 bytes a buffer, each array of them rounded up to 16; and the gap behind them."""
        if not self.tma:
            return 0
        counts = list(self._buffers())
        if self.unit == "shared" and self.kernel == "queries" and not self.tf32:
            counts = counts[:1]  # K and V are waited for together.
        if self.unit == "tensor":  # Two for each product, by turns.
            counts += [2] * {"forward": 2, "keys": 4, "queries": 3}[self.kernel]
        taken = sum(_round_up(8 * count, 16) for count in counts)
        if self.unit == "tensor" and self.rows == 64 and self._scratch():
            return taken  # Behind the sums of the rows, which end at a multiple themselves.
        if self.behind and self.unit != "registers":
            small = taken + self._scratch()
            small += 8 * self.m * (self.stages - 1) if self.kernel == "keys" else 0
            return taken + _round_up(small, self.alignment) - small
        if not self.behind and not (self.unit == "tensor" and self.kernel != "forward"):
            return taken - 8 * (counts[-1] % 2)  # The last is not rounded up.
        return taken

    def _one_stage(self) -> dict[str, int]:
        """Without a pipeline an operand's memory is free for the next once it is used."""
        (a, a_bytes), (b, b_bytes) = self._streamed()
        weights, unit, kernel = self._weights(), self.unit, self.kernel
        barrier = (16 if self.columns > self.rows else 8) if self.tma else 0
        if unit in ("shared", "tensor"):
            gap = self.alignment if self.behind or (self.tf32 and kernel != "forward") else 8
            if kernel == "forward":
                relayout = unit == "tensor" and (self.m, self.warps, self.size) == (128, 8, 2)
                return {
                    f"{a}, {b}": max(a_bytes, b_bytes),
                    "P": 4096 if relayout else 0,
                    "barriers": gap if self.behind or not relayout else 0,
                }
            turned = max(a_bytes, b_bytes) if self.tf32 else 0
            return {a: a_bytes, b: b_bytes, f"{a} turned": turned, "barriers": gap}
        if kernel == "forward":
            late = weights + (16 if self.tma and self.tf32 and weights else 0)
            if a_bytes + barrier > b_bytes + late:
                return {a: a_bytes, "barriers": barrier}
            return {b: b_bytes, "P": weights, "barriers": late - weights}
        if unit == "fma":
            if kernel == "keys":
                return {a: a_bytes, b: b_bytes, "dS": weights}
            return {a: a_bytes, f"{b}, dS": max(b_bytes, weights)}
        if not self.tma:
            scratch = max(self._relayout(), weights)
            if kernel == "keys":
                return {a: a_bytes, b: b_bytes, "dS, scratch": scratch}
            return {a: a_bytes, "dS, scratch": scratch}
        if kernel == "keys":
            gap = max(0, barrier - weights)
            return {f"{a}, {b}": max(a_bytes, b_bytes), "dS": weights, "barriers": gap}
        return {f"{a}, {b}, dS": max(a_bytes, b_bytes, weights), "barriers": barrier}

    def products(self) -> tuple[int, ...]:
        """The widths of a round's products, each of rows by columns."""
        if self.kernel == "forward":
            return self.d, self.dv
        backward = (self.d, self.dv, self.d)
        return (*backward, self.dv) if self.kernel == "keys" else backward

    def makings(self) -> float:
        """How often a weight is made. The warps lie along the rows of the scores, where wgmma
        multiplies or rows are no fewer than columns, else along the columns: those for which there
        is nothing left make what another makes."""
        if self.unit in ("fma", "tensor"):
            return 1.0
        if self.unit == "shared" or self.rows >= self.columns:
            return max(1.0, 16 * self.warps / self.rows)  # Of 16 rows.
        return max(1.0, 8 * self.warps / self.columns)  # Of 8 columns.

    def busy_s(self, flops: float, smem: float) -> float:
        """Seconds of an SM's tensor cores in a round, at `flops` a second and `smem` bytes a
        second: to the scores, and from the weights on, multiplying or reading, what is longer."""
        widths, scores = self.products(), 1 if self.kernel == "forward" else 2
        seconds = 0.0
        for width, again, read in (
            (sum(widths[:scores]), self.makings(), self._read_for_scores()),
            (sum(widths[scores:]), 1.0, self._read_for_sums()),
        ):
            multiplying = 2 * again * self.rows * self.columns * width / flops
            seconds += max(multiplying, read * width * self.size / smem)
        return seconds

    def _read_for_scores(self) -> float:
        """Values that are read of each feature. wgmma reads the rows once (or as often as they are
        multiplied) and the columns for every 64 rows; of mma.sync's warps each reads its own part
        of one operand and all of the other."""
        rows, columns, warps = self.rows, self.columns, self.warps
        if self.unit != "registers":
            return self.makings() * (rows + -(-rows // 64) * columns)
        if rows >= columns:
            return max(rows, 16 * warps) + warps * columns
        return warps * rows + max(columns, 8 * warps)

    def _read_for_sums(self) -> float:
        """The same of the products with the weights, which are in registers."""
        if self.unit != "registers":
            return -(-self.rows // 64) * self.columns
        return self.columns * (self.warps if self.tall else 1)

    def peak_flops(self, device: DeviceSpec) -> float:
        """Of the unit that multiplies; fp32's, where the device has no other."""
        peaks = device.peak_flops
        if self.size == 2:
            peak = peaks.bf16 or peaks.fp16
        else:
            peak = peaks.fp32 if self.ieee else peaks.tf32
        peak = peak or peaks.fp32 or 1e12
        if self.unit == "registers":
            peak *= _MMA_SYNC_SHARE.get(self.major, 1.0)
        return peak

    def accumulators(self) -> dict[str, int]:
        """Bytes of the sums that a block keeps through its loop, fp32."""
        if self.kernel == "forward":
            return {"O": 4 * self.m * self.dv}
        if self.kernel == "keys":
            return {"dK": 4 * self.n * self.d, "dV": 4 * self.n * self.dv}
        return {"dQ": 4 * self.m * self.d}

    def in_registers(self) -> dict[str, int]:
        """Bytes of a block's accumulators, and of a tile at each step from S to the last product;
        not all of them are there at the same time."""
        tile = 4 * self.m * self.n
        if self.kernel == "forward":
            steps = {"S": tile, "P": tile * self.size // 4, "m, l": 8 * self.m}
        else:
            steps = {"S": tile, "dP": tile, "dS": tile * self.size // 4}
        return self.accumulators() | steps

    def tensor_columns(self) -> int:
        """Columns of tensor memory that a block's accumulators, scores and weights take.

        The pipelined loop of `keys` has P and dS at the same time, the other one after the other.
        Of 64 rows two share a column; in the two loops of a causal call the accumulators alone do,
        at worst.
        """
        if self.unit != "tensor":
            return 0
        scores = 1 if self.kernel == "forward" else 2
        weights = 2 if self.kernel == "keys" and self.stages > 1 else 1
        tile = self.columns * (4 * scores + self.size * weights) // 4
        accumulators = sum(self.accumulators().values()) // (4 * self.rows)
        beside = max(128, self.rows) if self.causal else self.rows
        return (accumulators * self.rows + tile * beside) // 128

    def wanted_registers(self) -> float:
        """Registers that a thread would use if it could have any number: a sum of what it holds."""
        threads = 32 * self.warps
        tile, weight_size = self.rows * self.columns, self.size / 4
        across = max(self.d, self.dv) * self.columns * weight_size
        if self.unit == "registers" and self.tall:  # Every warp has all that streams by.
            across *= self.warps
        held = (
            threads,
            sum(self.accumulators().values()) / 4,
            tile,
            across if self.unit in ("fma", "registers") else 0,
            0 if self.tma else self.columns * (self.d + self.dv) * self.size / 16,
            threads * self.causal,
            tile * self.causal,
            {
                "fma": tile * self.d / 8,
                "registers": tile * weight_size * (1 if self.tall else self.warps),
                "shared": tile * weight_size,
                "tensor": tile * (self.stages > 1),
            }[self.unit],
        )
        factors = _WANTED[self.kernel, self.unit]
        return sum(f * h for f, h in zip(factors, held, strict=True)) / threads


# Registers of a thread for each, by least squares over 854 compiled tiles: a constant; a value of
# the accumulators, of the tile, of a streamed operand's part in registers (four bytes); a pointer
# of a copy behind the products; causality, and for each value of the tile; and by unit 8
# multiplications unrolled, a value of P as an operand, or of the tile where products overlap.
_WANTED: dict[tuple[Kernel, Unit], tuple[float, ...]] = {
    ("forward", "fma"): (15, 2.6, 4.9, 1.6, 0, 16, 1.4, 0),
    ("forward", "registers"): (43, 1.2, 1.2, 0.18, 3.7, 3.5, 0.14, 0),
    ("forward", "shared"): (24, 1.4, 0.17, 0, 0, 5.5, 0, 2.4),
    ("forward", "tensor"): (1.6, 1.5, 0.6, 0, 0, 12, 0.33, 1),
    ("keys", "fma"): (85, 1, 2.8, 1.7, 0, 6.7, 3.7, 0.75),
    ("keys", "registers"): (87, 0.67, 0.92, 1.4, 2.9, 22, 0, 0),
    ("keys", "shared"): (34, 1.1, 1.1, 0, 0, 24, 0, 4.1),
    ("keys", "tensor"): (49, 0.67, 1.9, 0, 0, 63, 0, 0.93),
    ("queries", "fma"): (36, 0.52, 1.3, 0, 0, 0, 2.8, 0.87),
    ("queries", "registers"): (49, 1.2, 0.48, 1.6, 0, 17, 0, 0.38),
    ("queries", "shared"): (37, 1.3, 0, 0, 0, 4.2, 0.29, 3.3),
    ("queries", "tensor"): (8.3, 1.1, 0.85, 0, 0, 0, 1.1, 0.69),
}  # fmt: skip
# Wanted registers over which a tile is said to spill: low, so that few that do are missed.
_SPILLING_FROM: dict[tuple[Kernel, Unit], float] = {
    ("forward", "fma"): 168, ("keys", "fma"): 157, ("queries", "fma"): 182,
    ("forward", "registers"): 272, ("keys", "registers"): 232, ("queries", "registers"): 247,
    ("forward", "shared"): 227, ("keys", "shared"): 190, ("queries", "shared"): 212,
    ("forward", "tensor"): 197, ("keys", "tensor"): 202, ("queries", "tensor"): 212,
}  # fmt: skip


def _padded(head_dim: int) -> int:
    """The next power of two, at least the 16 that a tensor core product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
