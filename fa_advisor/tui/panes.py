"""The screens over a report, in the order of their tabs and number keys. Add one here."""

from __future__ import annotations

from fa_advisor.tui.advice import AdvicePane
from fa_advisor.tui.attention import AttentionPane
from fa_advisor.tui.device import DevicePane
from fa_advisor.tui.memory import MemoryPane
from fa_advisor.tui.overview import OverviewPane
from fa_advisor.tui.pane import Pane
from fa_advisor.tui.tiles import TilesPane

PANES: tuple[type[Pane], ...] = (
    OverviewPane,
    MemoryPane,
    AttentionPane,
    TilesPane,
    AdvicePane,
    DevicePane,
)
