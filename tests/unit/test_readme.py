"""The pages' figures are those of the result files, and the README's commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_figures_come_from_the_result_files() -> None:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in module.PAGES:
        text = page.read_text()
        assert module.rendered(text) == text, f"{page.name}: run `python benchmarks/readme.py`"


def test_its_two_commands_are_targets_of_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"^\$ make ([a-z-]+)", readme, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)


def test_its_links_lead_somewhere() -> None:
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
    ):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if not link.startswith("http"):
                assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"
