"""How the dashboard looks: glyphs, category letters and colours, style sheet.

Every meaning has a glyph or a letter besides its colour, so that nothing is lost without colour.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_advisor.records import CATEGORIES
from fa_advisor.views.layout import plain

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters that the dashboard draws with; `levels` fill a cell from 1/n to n/n."""

    levels: str
    other: str
    peak: str
    rule: str
    phase: str
    yes: str
    no: str
    now: str
    open: str
    closed: str
    up: str
    down: str
    dot: str
    bullet: str
    times: str
    arrow: str
    ellipsis: str
    thumb: str
    track: str

    def name(self, text: str) -> str:
        """A name from a model or a file as plain text that can't move the cursor."""
        shown = plain(text)
        return shown.encode("ascii", "backslashreplace").decode() if self is ASCII else shown


UNICODE = Glyphs(
    levels="▁▂▃▄▅▆▇█",
    other="░",
    peak="▼",
    rule="─",
    phase="├",
    yes="✓",
    no="✗",
    now="▸",
    open="▾",
    closed="▸",
    up="▴",
    down="▾",
    dot="·",
    bullet="•",
    times="×",
    arrow="→",
    ellipsis="…",
    thumb="█",
    track="░",
)
ASCII = Glyphs(
    levels="#",
    other=":",
    peak="v",
    rule="-",
    phase="|",
    yes="+",
    no="x",
    now=">",
    open="-",
    closed="+",
    up="^",
    down="v",
    dot="|",
    bullet="*",
    times="x",
    arrow="->",
    ellipsis="~",
    thumb="#",
    track=".",
)

# A letter each, so that a bar reads without colour. S, P and M are the literature's names.
_LETTERS = "WBGOISPMDgKATCXL"
LETTERS: dict[str, str] = {**dict(zip(CATEGORIES, _LETTERS, strict=True)), UNATTRIBUTED: "?"}

# Mid tones that carry black text and stand out on dark and light grounds; attention is warm.
COLORS: dict[str, str] = {
    "parameter": "#5b9bd5",
    "buffer": "#8fb8de",
    "gradient": "#4db6ac",
    "optimizer_state": "#9a8fd1",
    "input": "#a5b4c0",
    "attention_score": "#f0645a",
    "attention_prob": "#f6a04d",
    "attention_mask": "#f2cf4a",
    "attention_dropout": "#e58ab8",
    "attention_grad": "#d4785a",
    "kv_cache": "#b5cf6b",
    "activation": "#7fc97f",
    "temporary": "#b8ad8c",
    "communication": "#6fc3d8",
    "workspace": "#a0a0a0",
    "allocator_slack": "#c4c4c4",
    UNATTRIBUTED: "#d0d0d0",
}
ATTENTION_COLOR = COLORS["attention_score"]
OTHER_COLOR = COLORS["parameter"]
INK = "#101010"

CSS = """
Screen { layers: base; }
.heading { height: 1; background: $panel; color: $foreground; text-style: bold; padding: 0 1;
    text-wrap: nowrap; text-overflow: ellipsis;
}
TabbedContent { height: 1fr; }
TabbedContent Tabs { height: 1; }
TabbedContent Underline { display: none; }
TabbedContent Tab { padding: 0 1; }
TabbedContent Tab.-active {
    background: $primary; color: $text; text-style: bold;
    &:ansi { text-style: bold reverse; }
}
TabbedContent ContentSwitcher { height: 1fr; }
TabPane { padding: 0; height: 1fr; }

Pane { height: 1fr; padding: 0 1; }
Pane Static { height: auto; }
.subject { text-style: bold; }
.note { color: $text-muted; &:ansi { text-style: dim; } }
ReportTable { height: 1fr; scrollbar-size-horizontal: 1; scrollbar-size-vertical: 1; }
ReportTable:ansi > .datatable--header { background: ansi_default; text-style: bold underline; }
ReportTable:nocolor > .datatable--cursor { text-style: bold; }
ReportTable:nocolor:focus > .datatable--cursor { text-style: bold reverse; }
Scroller { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }

StackedBar { height: 1; }
Legend { height: auto; margin: 1 0 0 0; }
Timeline { height: 1fr; min-height: 5; margin: 1 0 0 0; }

MemoryPane #categories { height: 40%; margin: 0 0 1 0; }
MemoryPane #subject { height: 2; }
.-wide MemoryPane #tables { layout: horizontal; }
.-wide MemoryPane #categories { width: 56; height: 1fr; margin: 0 2 0 0; }
.-short MemoryPane #categories { display: none; height: 1fr; margin: 0; }
.-short MemoryPane.-categories #categories { display: block; }
.-short MemoryPane.-categories #modules { display: none; }
.-short MemoryPane #subject { height: 1; }

.-short TilesPane #about { max-height: 2; }

AttentionPane #filter { display: none; height: 1; border: none; padding: 0 1; }
AttentionPane #filter.-shown { display: block; }
AttentionPane #detail { height: 45%; margin: 1 0 0 0; }
.-wide AttentionPane #split { layout: horizontal; }
.-wide AttentionPane #detail { width: 50%; height: 1fr; margin: 0 0 0 2; }
.-short AttentionPane #detail { display: none; }
AttentionPane.-detail #sites { display: none; }
AttentionPane.-detail #detail { display: block; height: 1fr; width: 1fr; margin: 0; }

RunScreen #stages { height: auto; padding: 1 1 0 1; }
RunScreen #bar { height: 1; padding: 0 1; }
RunScreen #title { height: 1; margin: 1 0 0 0; padding: 0 1; text-style: bold; }
RunScreen Log { height: 1fr; padding: 0 1; scrollbar-size: 1 1; }

HelpScreen, SaveScreen { align: center middle; }
HelpScreen > Scroller {
    width: 72; max-width: 100%; height: auto; max-height: 100%;
    border: round $primary; background: $surface; padding: 0 1;
}
SaveScreen > Vertical {
    width: 64; max-width: 100%; height: auto;
    border: round $primary; background: $surface; padding: 0 1;
}
SaveScreen Input { border: none; height: 1; padding: 0; background: $boost; }
CommandPalette SearchIcon { display: none; }

App.-ascii .heading { text-overflow: clip; }
App.-ascii HelpScreen > Scroller { border: ascii $primary; }
App.-ascii SaveScreen > Vertical { border: ascii $primary; }
App.-ascii FooterKey.-command-palette { border-left: none; }
App.-ascii CommandPalette #--input { border: ascii $primary; }
App.-ascii CommandPalette CommandList { border: none; }
App.-ascii Toast { border-left: ascii $primary; border-right: none; }
"""
