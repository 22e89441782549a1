"""Sixth screen: the GPU, the run, the environment, and what the run had to say."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from fa_advisor.records import DeviceSpec, TargetSpec
from fa_advisor.report import Report
from fa_advisor.tui.look import Glyphs
from fa_advisor.tui.pane import Pane, Scroller
from fa_advisor.tui.wording import number
from fa_advisor.views.sizes import format_bytes

Fact = tuple[str, str]


class DevicePane(Pane):
    """The facts that the figures rest on."""

    NAME = "device"
    TITLE = "Device"
    ABOUT = "the GPU's limits, the target, versions and notes"

    def compose(self) -> ComposeResult:
        """The page."""
        with Scroller():
            yield Static(facts("GPU", device_facts(self.report.device), self.glyphs))
            yield Static(
                facts("Target", target_facts(self.report.target, self.glyphs), self.glyphs)
            )
            yield Static(facts("Environment", environment_facts(self.report), self.glyphs))
            yield Static(notes(self.report, self.glyphs))


def facts(title: str, pairs: Iterator[Fact], glyphs: Glyphs) -> Table:
    """A heading, and a line for each fact."""
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", min_width=12)
    table.add_column(overflow="fold")
    table.add_row(Text(title, "bold"))
    for name, value in pairs:
        table.add_row(Text(f"  {name}", "dim"), Text(glyphs.name(value)))
    table.add_row("")
    return table


def device_facts(device: DeviceSpec) -> Iterator[Fact]:
    """The GPU's limits in the units of its data sheet."""
    said = {"nvml": "the driver (NVML)", "torch": "torch", "table": "the table of known GPUs"}
    yield "name", device.name
    yield "limits according to", said[device.basis]
    yield "compute capability", device.compute_capability
    yield "memory", format_bytes(device.total_memory_bytes)
    yield "memory bandwidth", f"{device.dram_bytes_per_s / 1e9:,.0f} GB/s"
    yield "L2 cache", format_bytes(device.l2_bytes)
    yield "SMs", number(device.sm_count)
    yield "shared memory a block", f"{format_bytes(device.smem_per_block_optin_bytes)} (opt-in)"
    yield "shared memory an SM", format_bytes(device.smem_per_sm_bytes)
    yield "registers an SM", number(device.registers_per_sm)
    yield "warps, CTAs an SM", f"{device.max_warps_per_sm}, {device.max_ctas_per_sm}"
    for dtype in ("bf16", "fp16", "fp32", "tf32", "fp8"):
        rate: float | None = getattr(device.peak_flops, dtype)
        yield f"peak {dtype}", "-" if rate is None else f"{rate / 1e12:,.4g} TFLOP/s"


def target_facts(target: TargetSpec, glyphs: Glyphs) -> Iterator[Fact]:
    """What was run and with what inputs."""
    yield "name", target.name
    yield "file", target.path or "-"
    yield "mode, dtype", f"{target.mode}, {target.dtype}"
    yield "batch size, length", f"{number(target.batch_size)}, {number(target.seq_len)}"
    yield "parameters", f"{target.parameters:,} ({target.trainable_parameters:,} trainable)"
    for tensor in target.inputs:
        yield f"input {glyphs.name(tensor.name)}", f"{list(tensor.shape)} {tensor.dtype}"


def environment_facts(report: Report) -> Iterator[Fact]:
    """Versions; `-` where a part isn't there."""
    environment = report.environment
    for name in ("fa_advisor", "python", "torch", "triton", "cuda", "driver"):
        yield name.replace("_", "-"), getattr(environment, name) or "-"


def notes(report: Report, glyphs: Glyphs) -> Text:
    """What the run remarked, one line each."""
    text = Text().append("Notes\n", "bold")
    for note in report.notes or ("none",):
        text.append(f"  {glyphs.bullet} {glyphs.name(note)}\n")
    return text
