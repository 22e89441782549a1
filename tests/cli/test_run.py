"""`fa-advisor run` beside plain python: what a script sees, prints and exits with is the same."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fa_advisor.report import load

SCRIPTS = Path(__file__).parent / "scripts"
OURS = (sys.executable, "-m", "fa_advisor", "run")


def python(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return _run(sys.executable, *args, **options)


def followed(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return _run(*OURS, *args, **options)


def _run(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(arg) for arg in args], capture_output=True, text=True, timeout=120, **options
    )


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


TRAINS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


# What the script finds


SEES = """
    import json, os, sys
    main = sys.modules["__main__"]
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[:2], "name": __name__, "file": __file__,
        "package": __package__, "spec": __spec__ and __spec__.name,
        "loader": type(__loader__).__name__,
        "cached": __cached__, "doc": __doc__, "same": main.__dict__ is globals(),
        "builtins": __builtins__ is sys.modules["builtins"], "torch": "torch" in sys.modules,
        "own": sorted(globals()), "stdin": sys.stdin.read(),
    }))
"""  # fmt: skip


@pytest.mark.parametrize(
    "how", ["file", "link", "folder", "archive", "compiled", "module", "package"]
)
def test_main_is_what_python_makes_it(tmp_path: Path, how: str) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/deep/__init__.py", "")
    for place in ("pkg/sees.py", "pkg/deep/__main__.py"):
        write(tmp_path, place, SEES)
    (tmp_path / "link.py").symlink_to(tmp_path / "pkg" / "sees.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "pkg" / "sees.py", "__main__.py")
    py_compile.compile(str(tmp_path / "pkg" / "sees.py"), str(tmp_path / "sees.pyc"))
    words = {
        "file": ["pkg/sees.py"],
        "link": ["link.py"],
        "folder": ["pkg/deep"],
        "archive": ["app.zip"],
        "compiled": ["sees.pyc"],
        "module": ["-m", "pkg.sees"],
        "package": ["-m", "pkg.deep"],
    }[how]
    words += ["--steps", "7", "-o", "x", "--", "y z"]
    plain = python(*words, cwd=tmp_path, input="given")
    ours = followed(*words, cwd=tmp_path, input="given")
    assert plain.returncode == ours.returncode == 0
    one, two = json.loads(plain.stdout), json.loads(ours.stdout)
    assert one == two
    assert "never imported torch" in ours.stderr


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('so it is')", 1),
        ("import os; os._exit(7)", 7),
        ("raise KeyError('x')", 1),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0),
        ("def f(:", 1),
        ("import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_ends_as_python_ends(tmp_path: Path, body: str, status: int) -> None:
    script = write(tmp_path, "s.py", body)
    plain, ours = python(script), followed(script)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.returncode == status
    talk = [line for line in ours.stderr.splitlines() if not line.startswith("fa-advisor: ")]
    assert talk == plain.stderr.splitlines()


def test_a_traceback_without_us() -> None:
    plain, ours = python(SCRIPTS / "fails.py"), followed("--ascii", SCRIPTS / "fails.py")
    assert (ours.returncode, ours.stdout) == (1, plain.stdout)
    assert "Broken: the fourth batch" in plain.stderr
    assert _outline(ours.stderr) == _outline(plain.stderr)
    assert "this is training step" in ours.stderr


def _outline(stderr: str) -> list[str]:
    """A traceback without the lines of torch's own frames: with hooks on modules it goes another
    way through nn.Module.__call__."""
    lines = stderr[stderr.index("Traceback") :].splitlines()
    inside, kept = False, []
    for line in lines:
        if line.startswith("  File "):
            inside = "nn/modules/module.py" in line
        elif not line.startswith("    "):
            inside = False
        if not inside:
            kept.append(line)
    return kept


# Usage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["nothing.py"], "can't open nothing.py: No such file"),
        (["-m", "no.such.module"], "no module named 'no.such.module' that can be run"),
        (["-m", "torch.nn"], "torch.nn is a package without a __main__"),
        (["empty"], "empty is a folder without a __main__.py"),
        (["--steps", "0", "x.py"], "'--steps'"),
        (["-o", "r.xlsx", "x.py"], "can't tell a format"),
        (["-o", "no/r.json", "x.py"], "there is no directory no"),
        (["--gpu", "z80", "x.py"], "z80"),
        (["--unknown", "x.py"], "No such option"),
    ],
)
def test_usage(tmp_path: Path, words: list[str], says: str) -> None:
    write(tmp_path, "x.py", "print('ran')")
    (tmp_path / "empty").mkdir()
    done = followed(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_a_script_without_a_model(tmp_path: Path) -> None:
    script = write(tmp_path, "s.py", "import torch; print(torch.ones(3).sum().item())")
    done = followed("-o", tmp_path / "r.json", script)
    assert (done.returncode, done.stdout) == (0, "3.0\n")
    assert "no report: no model ran" in done.stderr
    assert not (tmp_path / "r.json").exists()


# Steps

LOOP = """
    import sys, time, torch
    from torch import nn
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    def hooks():
        return len(nn.modules.module._global_forward_pre_hooks)

    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(int(sys.argv[1])):
        model(torch.randn(2, 16, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, len(modes()), hooks(), flush=True)
        time.sleep(float(sys.argv[2]))
"""


def test_a_limit_ends_the_following_and_not_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, "s.py", LOOP)
    done = followed("--steps", "3", "-o", tmp_path / "r.json", script, "5", "0")
    assert done.stdout.splitlines() == ["0 1 1", "1 1 1", "2 0 0", "3 0 0", "4 0 0"]
    report = load(tmp_path / "r.json")
    assert "training step 2: the highest peak among all 3" in report.notes[0]
    size = 4 * report.target.parameters
    assert report.memory.categories["parameter"] == size
    assert report.memory.categories["optimizer_state"] == 2 * size


def test_later_steps_are_followed_now_and_then(tmp_path: Path) -> None:
    script = write(tmp_path, "s.py", LOOP)
    done = followed("-o", tmp_path / "r.json", script, "40", "0")
    seen = [int(line.split()[1]) for line in done.stdout.splitlines()]
    # What is printed after a step is whether the next one is followed.
    assert [step + 2 for step, on in enumerate(seen) if on] == [*range(2, 17), 32]
    note = load(tmp_path / "r.json").notes[0]
    assert "among the 17 that were followed of 40" in note


def test_inference_within_and_without_inference_mode(tmp_path: Path) -> None:
    """The end of `inference_mode` puts dispatch keys back: following must outlive it, and what it
    leaves behind when it ends in there must do no harm."""
    script = write(
        tmp_path,
        "s.py",
        """
        import sys, torch
        from torch import nn
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        x = torch.randn(5, 8)

        @torch.inference_mode()
        def inside(n):
            with torch.inference_mode():
                for _ in range(n):
                    model(x)
            return model(x).sum().item()

        inside(1)
        with torch.no_grad():
            model(x), model(x)
        inside(2)
        model(x).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        print(inside(1) == inside(2))
        """,
    )
    for limit, forwards in (("2", 2), ("4", 4), ("100", None)):
        done = followed("--steps", limit, "-o", tmp_path / "r.json", script)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        note = load(tmp_path / "r.json").notes[0]
        if forwards is not None:
            assert f"the highest peak among all {forwards}" in note


def test_a_model_that_is_called_by_its_parts_and_built_anew(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import copy, torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
                self.head = nn.Linear(32, 4)
            def logits(self, x):
                return self.head(self.encoder(x))

        for fold in range(3):
            net = Net()
            ema = copy.deepcopy(net)
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(2):
                net.logits(torch.randn(2, 16, 32)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    )
    done = followed("-o", tmp_path / "r.json", script)
    assert done.returncode == 0, done.stderr
    report = load(tmp_path / "r.json")
    assert report.target.name == "Net"
    size = 4 * report.target.parameters
    assert report.memory.categories["optimizer_state"] == 2 * size
    assert report.memory.categories["parameter"] >= 2 * size  # the average's too
    assert {site.fqn for site in report.sites} <= {"encoder.self_attn", "Net.encoder.self_attn"}
    assert all(module.fqn.count("#") == 0 or "Net#" in module.fqn for module in report.modules)


# Signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_script_and_not_the_report(tmp_path: Path, name: str) -> None:
    script = write(tmp_path, "s.py", LOOP)
    report = tmp_path / "r.json"
    with subprocess.Popen(
        [*OURS, "-o", str(report), str(script), "1000", "0.01"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("3 "):
                process.send_signal(getattr(signal, name))
                break
        _, talk = process.communicate(timeout=60)
    assert process.returncode == -getattr(signal, name)
    assert "training step" in load(report).notes[0]
    assert ("KeyboardInterrupt" in talk) == (name == "SIGINT")
    assert "fa_advisor" not in talk


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ([], "os.kill(os.getpid(), signal.SIGTERM)"),
        ([], "os.kill(os.getpid(), signal.SIGHUP)"),
        (["--steps", "1"], "os._exit(0)"),
        ([], "os._exit(0)"),
        ([], "os.fork() or os._exit(0); os.wait(); os._exit(0)"),
        ([], "os.execvp('true', ['true'])"),
        ([], "sys.exit(os.fork() and os.wait()[1])"),
    ],
)
def test_the_text_comes_once_however_the_script_ends(
    tmp_path: Path, options: list[str], end: str
) -> None:
    script = write(tmp_path, "s.py", f"{TRAINS}\nimport os, signal, sys\n{end}\n")
    done = followed(*options, script)
    assert done.stderr.count("\nNOTES\n") == 1, done.stderr


def test_a_handler_of_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    assert followed(script).returncode == 9


# Other processes


def test_children_are_their_own(tmp_path: Path) -> None:
    done = followed("-o", tmp_path / "r.json", SCRIPTS / "spawn.py")
    assert done.returncode == 0, done.stderr
    expected = {method: (2632, 0, 0, False, 0) for method in ("spawn", "fork")}
    assert done.stdout == f"{expected}\n"
    report = load(tmp_path / "r.json")
    assert report.target.name == "Sequential"
    assert "among all 4" in report.notes[0]


def test_a_fork_that_comes_back_up_the_stack_writes_nothing(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import os, sys, torch
        model = torch.nn.Linear(4, 4)
        model(torch.ones(2, 4))
        child = os.fork()
        model(torch.ones(2, 4))
        if not child:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    done = followed("-o", tmp_path / "r.json", script)
    assert (done.returncode, done.stdout) == (0, "5\n")
    assert done.stderr.count("wrote") == 1


def test_of_a_job_of_several_the_first_reports(tmp_path: Path) -> None:
    script = write(tmp_path, "s.py", LOOP)
    done = followed("-o", tmp_path / "r.json", script, "2", "0", env={**os.environ, "RANK": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 0 0\n1 0 0\n"
    assert not (tmp_path / "r.json").exists()


# Patching


def test_every_model_is_patched_before_its_first_forward(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import torch, torch.nn as nn, torch.nn.functional as F

        class Attention(nn.Module):
            def __init__(self, fused):
                super().__init__()
                self.qkv, self.fused = nn.Linear(32, 96), fused
            def forward(self, x):
                q, k, v = self.qkv(x).view(2, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
                if self.fused:
                    return F.scaled_dot_product_attention(q, k, v)
                return torch.softmax(q @ k.mT / 3, -1).relu() @ v

        fused, own = nn.Sequential(Attention(True)), nn.Sequential(Attention(False))
        for model in (fused, own, fused):
            model(torch.randn(2, 24, 32))
        print([type(model[0]).__mro__[1].__module__.split(".")[0] for model in (fused, own)])
        """,
    )
    for options in ((), ("--steps", "1")):
        done = followed("--patch", *options, "-o", tmp_path / "r.json", script)
        assert (done.returncode, done.stdout) == (0, "['fa_advisor', 'torch']\n"), done.stderr
        assert "patched 1 of 1 attention sites of Sequential" in done.stderr
        assert "patched 0 of 1 attention sites of Sequential; refused 1" in done.stderr
        patch = load(tmp_path / "r.json").patch
        assert patch is not None
        assert [site.status for site in patch.sites] in (["patched"], ["refused"])


def test_the_report_is_text_on_stderr_without_a_file() -> None:
    started = time.monotonic()
    done = followed("--ascii", SCRIPTS / "nano_gpt.py", "--max-iters", "2")
    assert time.monotonic() - started < 60
    assert done.stdout.count("iter") == 2
    assert done.stderr.isascii()
    assert "peak allocated" in done.stderr
    assert "h.{0-1}.attn" in done.stderr


def test_what_is_compiled_is_followed_uncompiled_and_compiled_afterwards(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(24):
            compiled(torch.randn(2, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        """,
    )
    for options, before in ((("--steps", "3"), 3), ((), 16)):
        done = followed(*options, "-o", tmp_path / "r.json", script)
        assert [int(line) for line in done.stdout.split()] == [0] * before + [1] * (24 - before)
        assert done.stderr == f"fa-advisor: wrote {tmp_path / 'r.json'}\n"
        report = load(tmp_path / "r.json")
        assert report.target.name == "Sequential"
        assert any("ran uncompiled" in note for note in report.notes)


# Threads


@pytest.mark.parametrize("first", ["checks", "trains"])
def test_the_thread_that_trains_is_followed(tmp_path: Path, first: str) -> None:
    script = write(
        tmp_path,
        "s.py",
        """
        import sys, threading, time, torch
        small, model = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        def checks():
            small(torch.ones(2, 4))
        def trains():
            time.sleep(0.3)  # the script's code is over by then
            for _ in range(3):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
        thread = threading.Thread(target=globals()[sys.argv[1]])
        thread.start()
        if sys.argv[1] == "checks":
            thread.join()
            trains()
        """,
    )
    done = followed("-o", tmp_path / "r.json", script, first)
    report = load(tmp_path / "r.json")
    assert (report.target.name, report.target.mode) == ("Sequential", "train"), done.stderr
    assert "among all 3" in report.notes[0]
    assert any("another thread" in note for note in report.notes) == (first == "checks")


# What is wrong with a file or a class costs no report


def test_files_that_cant_be_written_any_more(tmp_path: Path) -> None:
    """One costs none of the others; if none is left, the text is printed."""
    (tmp_path / "out").mkdir()
    script = write(tmp_path, "s.py", f"{TRAINS}\nimport shutil; shutil.rmtree('out')\n")
    lost, kept = tmp_path / "out" / "r.json", tmp_path / "r.json"
    done = followed("-o", lost, "-o", kept, script, cwd=tmp_path)
    assert "error: can't write" in done.stderr
    assert load(kept).target.name == "Linear"
    assert "peak allocated" not in done.stderr
    (tmp_path / "out").mkdir()
    done = followed("-o", lost, script, cwd=tmp_path)
    assert "error: can't write" in done.stderr
    assert "peak allocated" in done.stderr


def test_a_link_that_leads_nowhere_is_told_of_first(tmp_path: Path) -> None:
    (tmp_path / "r.json").symlink_to(tmp_path / "gone" / "r.json")
    script = write(tmp_path, "s.py", "print('ran')")
    done = followed("-o", tmp_path / "r.json", script)
    assert done.returncode == 2
    assert "there is no directory" in done.stderr
    assert not done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text elsewhere")
def test_a_name_that_isnt_utf_8(tmp_path: Path) -> None:
    script = tmp_path / os.fsdecode(b"caf\xe9.py")
    script.write_text(f"{TRAINS}\ndef build(): return torch.nn.Linear(4, 4)\n")
    outputs = [tmp_path / f"r.{kind}" for kind in ("json", "csv", "txt", "html")]
    done = followed(*(word for path in outputs for word in ("-o", path)), script.name, cwd=tmp_path)
    assert done.stderr.count("wrote") == len(outputs), done.stderr
    assert load(outputs[0]).target.path == "caf\\udce9.py"
    done = _run(sys.executable, "-m", "fa_advisor", "profile", "--no-tui", "--device", "fake",
                "--format", "json", f"{script.name}:build", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"]["path"] == "caf\\udce9.py"


ODD = """
import sys
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Unhashable(nn.Module):
    width: int = 4
    def __post_init__(self):
        super().__init__()
        self.inner = nn.Linear(self.width, self.width)
    def forward(self, x):
        return self.inner(x)

class Raises(Unhashable):
    def __init__(self):
        Unhashable.__init__(self)
    def __getattr__(self, name):
        if name == "inner":
            return super().__getattr__(name)
        raise KeyError(name)
    def nothing(self, *args, **kwargs):
        raise RuntimeError("asked")
    __eq__ = __hash__ = __len__ = __bool__ = nothing
    parameters = named_parameters = named_modules = modules = buffers = nothing

model = globals()[sys.argv[1]]()
optimizer = torch.optim.SGD(model.inner.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("done")
"""


@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("name", ["Unhashable", "Raises"])
def test_modules_that_dont_answer(tmp_path: Path, name: str, patch: bool) -> None:
    options = ["--patch"] if patch else []
    script = write(tmp_path, "s.py", ODD)
    done = followed(*options, "-o", tmp_path / "r.json", script, name)
    assert done.stdout == "done\n", done.stderr
    target = load(tmp_path / "r.json").target
    assert (target.name, target.parameters) == (name, 20)
