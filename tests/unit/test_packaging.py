"""The wheel: what is in it, and that `kernels` and `probes` are in it under our name alone.

A top-level `kernels` in site-packages would overwrite the package that transformers uses
(docs/adr/0001).
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[2]
# What ships, and all that the build reads.
SOURCES = ("fa_advisor", "kernels", "probes", "examples", "pyproject.toml", "README.md", "LICENSE")
# The folders of the tree that are packages of ours, and the names that they are imported by.
ROOMS = {
    "fa_advisor": "fa_advisor",
    "kernels": "fa_advisor.kernels",
    "probes": "fa_advisor.probes",
    "examples": "fa_advisor.examples",
}
JUNK = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", "*.partial", ".*")


def setuptools_table() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table: dict[str, Any] = project["tool"]["setuptools"]
    return table


def packages_of_the_tree() -> dict[str, str]:
    """Import name and folder of everything under the rooms that has a Python file in it."""
    found = {}
    for folder, name in ROOMS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = file.parent.relative_to(ROOT / folder)
            if "__pycache__" not in inner.parts:
                found[".".join((name, *inner.parts))] = PurePosixPath(folder, *inner.parts)
    return {name: str(folder) for name, folder in found.items()}


def test_every_package_is_listed() -> None:
    assert sorted(setuptools_table()["packages"]) == sorted(packages_of_the_tree())


def test_every_package_has_an_init() -> None:
    folders = packages_of_the_tree().values()
    assert [f for f in folders if not (ROOT / f / "__init__.py").is_file()] == []


@pytest.mark.parametrize("folder", ["kernels", "probes", "examples"])
def test_top_level_inits_import_nothing(folder: str) -> None:
    """From the repository's root, `import kernels` finds ours; transformers makes that import."""
    body = ast.parse((ROOT / folder / "__init__.py").read_text()).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports if "__future__" not in ast.unparse(node)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, out of a copy of the tree (a build writes into its tree)."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=JUNK)
        else:
            shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has the wheel, and nothing else."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", str(wheel))
    return python


def test_top_level_of_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fa_advisor", next(t for t in tops if t.endswith(".dist-info"))}


def test_every_file_ships(wheel: Path) -> None:
    """Python files and data alike: what the tree's packages hold, the wheel holds."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for name, folder in packages_of_the_tree().items():
        for file in (ROOT / folder).iterdir():
            hidden = file.name.startswith(".") or file.suffix in (".pyc", ".partial")
            if file.is_file() and not hidden:
                expected.add("/".join((*name.split("."), file.name)))
    assert expected - names == set()
    assert {
        "fa_advisor/report.schema.json",
        "fa_advisor/py.typed",
        "fa_advisor/examples/nanogpt.py",
    } <= names


def test_the_installed_wheel_imports(installed: Path) -> None:
    script = """
import importlib, importlib.util, json, sys, sysconfig
leaked = [name for name in ("kernels", "probes", "examples") if importlib.util.find_spec(name)]
sys.path.append(sys.argv[1])
names = ("fa_advisor", "fa_advisor.examples", "fa_advisor.kernels", "fa_advisor.probes")
files = [importlib.import_module(name).__file__ for name in names]
site = sysconfig.get_path("purelib")
print(json.dumps({"leaked": leaked, "foreign": [f for f in files if not f.startswith(site)]}))
"""
    # The dependencies come from the environment of the tests, as a plain folder: its .pth files,
    # and with them an editable install of ours, are not read.
    dependencies = str(Path(msgspec.__file__).parents[1])
    # -I: neither this folder nor PYTHONPATH may stand in for what the wheel brings.
    out = run(str(installed), "-I", "-c", script, dependencies)
    assert json.loads(out) == {"leaked": [], "foreign": []}


def test_the_wheel_brings_the_command(installed: Path) -> None:
    assert any(installed.parent.glob("fa-advisor*"))


def run(*command: str) -> str:
    """stdout of a command that must succeed; its stderr is the failure's text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
