"""Every key, written from the bindings themselves so that it can't fall behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from fa_advisor.tui.pane import Scroller

Section = tuple[str, Sequence[BindingType]]

PALETTE = Binding(
    "ctrl+p", "command_palette", "Palette", id="app.palette", tooltip="Find a command by its name"
)
"""The key that Textual itself binds, for the list."""


class HelpScreen(ModalScreen[None]):
    """The keys by where they work. Anything that closes a page closes it."""

    BINDINGS = [
        Binding(
            "escape,question_mark,q,enter",
            "dismiss(None)",
            "Close",
            id="help.close",
            tooltip="Close this page",
        )
    ]

    def __init__(self, sections: Iterable[Section]) -> None:
        super().__init__()
        self._sections = list(sections)

    def compose(self) -> ComposeResult:
        """One page, scrolled where it doesn't fit."""
        with Scroller():
            yield Static(keys_table(self._sections, self.app))


def keys_table(sections: Iterable[Section], app: App[object]) -> Table:
    """Headings, keys and what they do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, bindings in sections:
        table.add_row(Text(title, "bold"))
        for binding in bindings:
            if isinstance(binding, Binding):
                each = Binding.make_bindings([binding])
                keys = ", ".join(app.get_key_display(single) for single in each)
                table.add_row(Text(f"  {keys}"), Text(binding.tooltip or binding.description))
        table.add_row("")
    return table
