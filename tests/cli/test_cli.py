"""The command line as its users see it: what it prints where, and what it exits with."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import samples
from fa_advisor import errors, launch
from fa_advisor.cli import cli, profile, reports
from fa_advisor.progress import LINE_EVERY_S, Lines, reporter
from fa_advisor.records import ProfileRequest, Progress
from fa_advisor.report import Report, load
from fa_advisor.views import formats, tables

REPORT = samples.report()
COMMANDS = ["profile", "run", "view", "export", "diff", "postmortem", "budget", "gpus"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ProfileRequest]:
    """Requests that reached the child process, which answers with REPORT at once."""
    requests: list[ProfileRequest] = []

    def run_child(
        request: ProfileRequest,
        on_progress: Callable[[Progress], None],
        on_output: Callable[[str], None] | None = None,
    ) -> Report:
        requests.append(request)
        on_progress(Progress(stage="build", note="[b]GPT"))
        return REPORT

    monkeypatch.setattr(launch, "run_child", run_child)
    return requests


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "r.json"
    REPORT.save(path)
    return str(path)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, args)


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_child(*args: Any) -> Report:
        raise error

    monkeypatch.setattr(launch, "run_child", run_child)


# What it prints where


def test_stdout_is_the_report_and_stderr_the_talk(ran: list[ProfileRequest]) -> None:
    result = invoke("profile", "model.py")
    assert result.exit_code == 0
    assert result.stdout.startswith("fa-advisor  model.py:model")
    assert result.stderr == "fa-advisor: building the model: [b]GPT [0 s]\n"
    assert ran == [ProfileRequest(target="model.py")]


def test_every_option_reaches_the_request(ran: list[ProfileRequest]) -> None:
    result = invoke(
        *("profile", "m.py:net", "--mode", "infer", "--batch-size", "3", "--seq-len", "128"),
        *("--dtype", "bf16", "--device", "cuda:1", "--gpu", "a100", "--optimizer", "sgd"),
        *("--no-progress", "--", "--lr", "1", "--", "-o", "x"),
    )
    assert result.stderr == ""
    assert ran == [
        ProfileRequest(
            target="m.py:net",
            argv=("--lr", "1", "--", "-o", "x"),
            mode="infer",
            batch_size=3,
            seq_len=128,
            dtype="bf16",
            device="cuda:1",
            gpu="a100",
            optimizer="sgd",
        )
    ]


def test_no_target_is_the_bundled_example(ran: list[ProfileRequest]) -> None:
    assert invoke("profile", "--", "--layers").exit_code == 0
    assert ran == [ProfileRequest(argv=("--layers",))]


def test_formats_of_stdout(ran: list[ProfileRequest]) -> None:
    as_json = invoke("profile", "--format", "json")
    assert json.loads(as_json.stdout)["schema_version"] == 1
    assert invoke("profile", "--format", "csv").stdout.startswith("fqn,source,form")
    assert invoke("profile", "--format", "text", "--ascii").stdout.isascii()


def test_files_are_written_and_the_text_still_printed(
    ran: list[ProfileRequest], tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in ("r.json", "r.csv", "r.txt", "r.html")]
    result = invoke("profile", "--no-progress", *(arg for path in paths for arg in ("-o", path)))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [f"wrote {path}" for path in paths]
    assert "ATTENTION-BOUND" in result.stdout
    assert load(paths[0]) == REPORT


def test_one_file_that_fails_costs_no_other(
    ran: list[ProfileRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write = formats.write

    def fails_once(report: Report, path: str) -> None:
        if path == str(bad):
            raise errors.UsageError(f"can't write the report to {path}: disk full")
        write(report, path)

    monkeypatch.setattr(formats, "write", fails_once)
    result = invoke("profile", "-o", str(bad), "-o", str(good), "--format", "json")
    assert result.exit_code == 2
    assert "disk full" in result.stderr
    assert load(good) == REPORT
    assert json.loads(result.stdout)["schema_version"] == 1


@pytest.mark.parametrize("name", ["no/dir/r.json", "r.xlsx", "."])
def test_a_file_that_cannot_be_is_refused_before_the_run(
    ran: list[ProfileRequest], tmp_path: Path, name: str
) -> None:
    result = invoke("profile", "-o", str(tmp_path / name))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: can't ")
    assert ran == []


@pytest.mark.parametrize("option", ["--snapshot", "--trace"])
def test_a_trace_that_cannot_be_written_is_refused_before_the_run(
    ran: list[ProfileRequest], tmp_path: Path, option: str
) -> None:
    for name in ("no/dir/t", "."):
        result = invoke("profile", option, str(tmp_path / name))
        assert result.exit_code == 2 and ran == []
        assert result.stderr.startswith("error: can't write ") and "give -o" not in result.stderr


# Gates


@pytest.mark.parametrize(("limit", "status"), [("24GiB", 0), ("2GiB", 4), ("2GB", 4), ("4096", 4)])
def test_max_peak(ran: list[ProfileRequest], limit: str, status: int) -> None:
    result = invoke("profile", "--no-progress", "--max-peak", limit)
    assert result.exit_code == status
    assert "ATTENTION-BOUND" in result.stdout
    if status:
        assert len(result.stderr.splitlines()) == 1
        assert "peak allocated, got 2.48 GiB" in result.stderr


def test_baseline(ran: list[ProfileRequest], tmp_path: Path) -> None:
    path = str(tmp_path / "base.json")
    less = REPORT.memory.peak_allocated_bytes - 2**31
    sums = REPORT.memory.categories
    memory = replace(
        REPORT.memory,
        peak_allocated_bytes=2**31,
        categories={**sums, "activation": sums["activation"] - less},
    )
    replace(REPORT, memory=memory, target=replace(REPORT.target, batch_size=1)).save(path)
    compared = invoke("profile", "--no-progress", "--baseline", path)
    assert compared.exit_code == 0
    assert compared.stderr.splitlines() == [
        "peak allocated 2.48 GiB, baseline 2.00 GiB: +23.8 %",
        "warning: target batch_size was 1 in the baseline, is 2",
    ]
    over = invoke("profile", "--baseline", path, "--fail-on-increase", "2%")
    assert over.exit_code == 4
    assert "error: expected at most 2 % more peak allocated" in over.stderr
    assert invoke("profile", "--baseline", path, "--fail-on-increase", "25%").exit_code == 0


def test_baseline_is_read_before_the_run(ran: list[ProfileRequest], tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text("{")
    for name in ("cut.json", "absent.json"):
        assert invoke("profile", "--baseline", str(tmp_path / name)).exit_code == 2
    assert ran == []


def test_gates_and_files_survive_a_fault_of_the_views(
    ran: list[ProfileRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(profile, "_print", broken)
    result = invoke("profile", "-o", str(tmp_path / "r.json"), "--max-peak", "1GiB")
    assert result.exit_code == 4
    assert "no terminal" in result.stderr
    assert load(tmp_path / "r.json") == REPORT


# Faults


@pytest.mark.parametrize(
    "args",
    [
        ["--batch-size", "0"],
        ["--batch-size", "-1"],
        ["--seq-len", "0"],
        ["--seq-len", "x"],
        ["--device", "tpu"],
        ["--device", "cuda:"],
        ["--dtype", "int8"],
        ["--max-peak", "24G"],
        ["--max-peak", "0"],
        ["--baseline", "x", "--fail-on-increase", "2"],
        ["--fail-on-increase", "2%"],
        ["--gpu", "abacus"],
        ["--tui"],
        ["--unknown"],
        ["a.py", "b.py"],
    ],
)
def test_bad_values_are_usage(ran: list[ProfileRequest], args: list[str]) -> None:
    result = invoke("profile", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "rror: " in result.stderr
    assert ran == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UsageError("no file m.py", hint="name one"), 2),
        (errors.TargetError("m.py raised ValueError: x", detail="Traceback ...\nValueError: x"), 3),
        (errors.DeviceError("no CUDA device"), 5),
        (errors.Interrupted("interrupted"), 130),
        (errors.FaAdvisorError("the child process broke"), 1),
    ],
)
def test_faults_become_messages(
    monkeypatch: pytest.MonkeyPatch, error: errors.FaAdvisorError, status: int
) -> None:
    fails_with(monkeypatch, error)
    result = invoke("profile", "m.py")
    assert result.exit_code == status
    assert result.stdout == ""
    expected = f"error: {error.message}\n"
    expected += f"{error.detail}\n" if error.detail else ""
    expected += f"hint: {error.hint}\n" if error.hint else ""
    assert result.stderr == expected


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    result = invoke("profile")
    assert result.exit_code == 130
    assert result.stderr.strip() == "error: interrupted"


def test_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, ZeroDivisionError("oops"))
    result = invoke("profile")
    assert result.exit_code == 1
    assert "error: internal error in fa-advisor: ZeroDivisionError: oops" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("FA_ADVISOR_DEBUG", "1")
    assert "Traceback" in invoke("profile").stderr


def test_messages_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, errors.TargetError("m.py raised \x1b[2J", detail="a\tb\n\x07"))
    assert invoke("profile").stderr == "error: m.py raised \\x1b[2J\na\tb\n\\x07\n"


# Saved reports


def test_view_prints(saved: str) -> None:
    result = invoke("view", saved, "--no-tui")
    assert result.exit_code == 0
    assert "ATTENTION-BOUND" in result.stdout
    assert invoke("view", saved, "--ascii").stdout.isascii()


def test_export(saved: str, tmp_path: Path) -> None:
    out = str(tmp_path / "x.csv")
    result = invoke("export", saved, "-o", out)
    assert result.stderr == f"wrote {out}, table sites\n"
    assert result.stdout == ""
    assert Path(out).read_text().startswith("fqn,source")
    invoke("export", saved, "-o", out, "--table", "categories")
    assert Path(out).read_text().startswith("category,bytes")
    invoke("export", saved, "-o", out, "--format", "json")
    assert load(out) == REPORT
    assert json.loads(invoke("export", saved, "--format", "json").stdout)["schema_version"] == 1


@pytest.mark.parametrize(
    "args",
    [[], ["-o", "r.xlsx"], ["-o", "/no/dir/r.csv"], ["-o", "r.json", "--table", "sites"]],
)
def test_export_refuses(saved: str, args: list[str]) -> None:
    result = invoke("export", saved, *args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_diff(saved: str, tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    replace(REPORT, sites=()).save(other)
    result = invoke("diff", saved, str(other))
    assert result.exit_code == 0
    assert "eager → not there" in result.stdout
    as_json = json.loads(invoke("diff", saved, str(other), "--format", "json").stdout)
    assert len(as_json["sites"]) == 12


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema_version": 9}', b"\xff\x00"])
@pytest.mark.parametrize("command", [["view"], ["export", "--format", "json"], ["diff", "{saved}"]])
def test_files_that_are_no_reports(
    saved: str, tmp_path: Path, content: bytes, command: list[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    result = invoke(*(arg.format(saved=saved) for arg in command), str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_gpus() -> None:
    text = invoke("gpus").stdout
    assert "NVIDIA H200" in text
    listed = json.loads(invoke("gpus", "--format", "json").stdout)
    assert len(text.splitlines()) == len(listed) + 1
    for device in listed:
        assert device["name"] in text


# The dashboard


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the dashboard was asked to show, on a terminal that is made up."""
    from fa_advisor.tui import app

    opened: list[str] = []

    def run_profile(request: ProfileRequest, *, ascii: bool = False) -> Report:
        opened.append("run")
        return REPORT

    def show(report: Report, *, ascii: bool = False) -> None:
        opened.append("show")

    monkeypatch.setattr(app, "run_profile", run_profile)
    monkeypatch.setattr(app, "show", show)
    for module in (profile, reports):
        monkeypatch.setattr(module, "has_dashboard_terminal", lambda: True)
    return opened


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["run"]),
        (["--tui"], ["run"]),
        (["--no-tui"], []),
        (["--format", "json"], []),
        (["-o", "{tmp}/r.json"], []),
        (["--tui", "-o", "{tmp}/r.json"], ["show"]),
    ],
)
def test_when_the_dashboard_opens(
    ran: list[ProfileRequest],
    dashboard: list[str],
    tmp_path: Path,
    args: list[str],
    expected: list[str],
) -> None:
    result = invoke("profile", *(arg.format(tmp=tmp_path) for arg in args))
    assert result.exit_code == 0
    assert dashboard == expected
    assert result.stdout  # not a terminal: whoever redirected it gets the report


def test_gates_hold_in_the_dashboard(dashboard: list[str]) -> None:
    assert invoke("profile", "--max-peak", "1GiB").exit_code == 4


def test_view_opens_it(dashboard: list[str], saved: str) -> None:
    assert invoke("view", saved, "--tui").stdout == ""
    assert dashboard == ["show"]


# Progress


def test_lines_are_rare() -> None:
    now = [0.0]
    file = io.StringIO()
    lines = Lines(file, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        lines.on_progress(Progress(stage="measure", done=second, total=100))
    lines.on_progress(Progress(stage="done"))
    assert file.getvalue().splitlines() == [
        "fa-advisor: measuring a step (0 of 100) [0 s]",
        f"fa-advisor: measuring a step (10 of 100) [{LINE_EVERY_S:.0f} s]",
        "fa-advisor: measuring a step (20 of 100) [20 s]",
        "fa-advisor: done [24 s]",
    ]


def test_bar_shows_foreign_names_as_text_and_output_above_it() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    with reporter(silent=False, bar=True, stream=file) as shown:
        shown.on_progress(Progress(stage="measure", note="[red]x[/red]", done=1, total=4))
        assert shown.on_output is not None
        shown.on_output("[bold]printed[/bold] by the target")
    assert "[bold]printed[/bold] by the target" in file.getvalue()


def test_silence(ran: list[ProfileRequest]) -> None:
    assert invoke("profile", "--no-progress").stderr == ""


# The process


def run(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fa_advisor", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def test_help_lists_what_works_and_only_that() -> None:
    result = run("--help")
    assert result.returncode == 0
    listed = result.stdout.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == COMMANDS
    for command in COMMANDS:
        assert run(command, "--help").returncode == 0


def test_version() -> None:
    import fa_advisor

    assert run("--version").stdout == f"fa-advisor {fa_advisor.__version__}\n"


def test_choices_are_the_views(saved: str) -> None:
    """The commands spell them out so that their help loads no view."""
    assert profile._FORMATS == reports._FORMATS == formats.FORMATS
    assert reports._TABLES == tables.TABLES


@pytest.mark.parametrize(
    "code",
    [
        "import fa_advisor; fa_advisor.__version__, fa_advisor.load, dir(fa_advisor)",
        "from fa_advisor.cli import cli; cli.main(['--help'], standalone_mode=False)",
        "from fa_advisor.cli import main; main(['view', '--no-tui', {saved!r}])",
        "from fa_advisor.cli import main; main(['export', '--format', 'json', {saved!r}])",
        "from fa_advisor.cli import main; main(['gpus'])",
    ],
)
def test_neither_torch_nor_textual_is_loaded(saved: str, code: str) -> None:
    program = (
        "import atexit, sys\n"
        "heavy = {'torch', 'textual', 'transformers', 'triton'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        + code.format(saved=saved)
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stderr == "[]\n"


def test_unknown_name_of_the_package() -> None:
    import fa_advisor

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fa_advisor.nothing


def test_help_is_quick() -> None:
    """At most four times a bare Python; the best of several, as the machine is shared."""

    def best(*command: str) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    script = Path(sys.executable).with_name("fa-advisor")
    assert best(str(script), "--help") <= 4 * best(sys.executable, "-c", "pass")


def test_a_reader_that_leaves_is_no_fault(saved: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fa_advisor", "view", saved]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_disk_is_said(saved: str) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "fa_advisor", "view", saved]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert process.returncode == 2
    assert process.stderr == b"error: can't write to stdout: No space left on device\n"


def test_a_terminal_without_unicode_gets_ascii(saved: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = run("view", saved, env=environment)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert "####" in result.stdout


def test_reference_has_every_option_and_field() -> None:
    import click

    from fa_advisor.report import json_schema

    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert f"### `fa-advisor {name} " in reference
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert parameter.param_type_name == "argument" or f"`{option}" in reference, option
    for definition in json_schema()["$defs"].values():
        for field in definition.get("properties", {}):
            if definition["title"] not in ("PatchedSite", "TileConfig", "PeakFlops", "Predicted"):
                assert f"`{field}`" in reference, field
