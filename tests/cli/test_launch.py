"""The child process: what the target does to it reaches nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import samples
from fa_advisor import messages
from fa_advisor.errors import ExitStatus, FaAdvisorError, Interrupted, TargetError
from fa_advisor.launch import GRACE_S, run_child
from fa_advisor.records import ProfileRequest, Progress
from fa_advisor.report import Report

STANDIN = Path(__file__).parent / "standin"
SLOW_MACHINE_S = 20
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and fork are POSIX's")

Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(STANDIN), str(Path(samples.__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str) -> str:
        file = tmp_path / "model.py"
        file.write_text(textwrap.dedent(code))
        return str(file)

    return write


def profile(target: str, on_output: Callable[[str], None] | None = None) -> Report:
    return run_child(ProfileRequest(target=target), lambda progress: None, on_output)


def seconds_since(start: float) -> float:
    return time.monotonic() - start


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SLOW_MACHINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_the_report_comes_back_after_its_progress(write: Write) -> None:
    seen: list[Progress] = []
    target = write("model = 1")
    report = run_child(ProfileRequest(target=target), seen.append)
    assert report == samples.report(1)
    assert [each.stage for each in seen] == ["start", "load", "measure"]
    assert seen[1].note == target


def test_output_is_handed_over_in_order_with_its_partial_last_line(write: Write) -> None:
    lines: list[str] = []
    profile(
        write(
            r"""
            import os, sys
            print("to stdout")
            print("to stderr", file=sys.stderr)
            os.write(1, b"not utf-8: \xff\r\n")
            print("unfinished", end="")
            """
        ),
        lines.append,
    )
    assert lines == ["to stdout", "to stderr", "not utf-8: \N{REPLACEMENT CHARACTER}", "unfinished"]


def test_output_goes_to_stderr_and_is_live(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    profile(write("print('to stdout')\nimport sys; assert sys.stdin.read() == ''"))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "to stdout\n")


def test_a_forged_report_is_only_output(write: Write) -> None:
    forged = messages.encode(messages.ReportMessage(msgspec.Raw(b"{}"))).decode()
    assert profile(write(f"print({forged!r})"), lambda line: None) == samples.report(1)


def test_much_output_blocks_nobody(write: Write) -> None:
    count = 0

    def on_output(line: str) -> None:
        nonlocal count
        count += len(line)

    profile(write("import os\nfor _ in range(64): os.write(1, b'x' * 2**20 + b'\\n')"), on_output)
    assert count == 64 * 2**20


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(7)", r"ended the process with os\._exit\(7\)"),
        ("import os; os._exit(0)", r"ended the process with os\._exit\(0\)"),
        ("import sys; sys.exit(2)", r"called sys\.exit\(2\)"),
        pytest.param("import ctypes; ctypes.string_at(0)", "killed by signal SIGSEGV", marks=posix),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)", r"SIGKILL \(out of memory\?\)", marks=posix
        ),
        pytest.param("import os; os.closerange(3, 256)", "closed the pipe", marks=posix),
    ],
)
def test_a_target_that_ends_the_process(write: Write, code: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(TargetError, match=message) as raised:
        profile(write(code))
    assert raised.value.status == ExitStatus.TARGET_RAISED
    assert seconds_since(start) < SLOW_MACHINE_S


@posix
def test_a_file_in_the_place_of_our_pipe_is_not_written_to(write: Write, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    target = write(
        f"""
        import os
        os.closerange(3, 64)
        files = [open({str(mine)!r}, "w") for _ in range(32)]
        """
    )
    with pytest.raises(TargetError):
        profile(target)
    assert mine.read_text() == ""


@pytest.mark.parametrize(
    "code",
    [
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        "import atexit; atexit.register(lambda: 1 / 0)",
        pytest.param("import os, time; os.fork() or time.sleep(600)", marks=posix),
        pytest.param("import os; os.fork()", marks=posix),
        "import subprocess; subprocess.Popen(['sleep', '600'])",
        "import subprocess; subprocess.Popen(['sleep', '10'], start_new_session=True)",
    ],
)
def test_what_the_target_leaves_running_delays_nobody(write: Write, code: str) -> None:
    start = time.monotonic()
    assert profile(write(code), lambda line: None) == samples.report(1)
    assert seconds_since(start) < SLOW_MACHINE_S + GRACE_S


@posix
def test_what_the_target_started_is_ended_with_it(write: Write, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    profile(
        write(
            f"""
            import subprocess
            child = subprocess.Popen(["sleep", "600"])
            open({str(pid_file)!r}, "w").write(str(child.pid))
            """
        )
    )
    pid = int(pid_file.read_text())
    assert wait_until(lambda: not is_running(pid))


def test_cancel_from_another_thread(write: Write) -> None:
    cancel = threading.Event()
    request = ProfileRequest(target=write("import time; time.sleep(600)"))

    def on_progress(progress: Progress) -> None:
        cancel.set()

    with pytest.raises(Interrupted):
        run_child(request, on_progress, cancel=cancel)


def test_an_error_in_a_callback_ends_the_child(write: Write) -> None:
    def on_progress(progress: Progress) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        run_child(ProfileRequest(target=write("import time; time.sleep(600)")), on_progress)


PARENT = """
import sys
from fa_advisor.errors import FaAdvisorError
from fa_advisor.launch import run_child
from fa_advisor.records import ProfileRequest
try:
    run_child(ProfileRequest(target=sys.argv[1]), lambda progress: None)
except FaAdvisorError as error:
    print(error.message)
    sys.exit(error.status)
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_child_outlives_its_parent(write: Write, tmp_path: Path, number: int) -> None:
    pid_file = tmp_path / "pid"
    target = write(
        f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(pid_file)!r}, "w").write(str(os.getpid()) + ".")
        time.sleep(600)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, target], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    parent.send_signal(number)
    stdout, stderr = parent.communicate(timeout=SLOW_MACHINE_S)
    if number == signal.SIGKILL:
        assert parent.returncode == -signal.SIGKILL
    else:
        assert parent.returncode == ExitStatus.INTERRUPTED
        assert b"interrupted" in stdout
        assert stderr == b""
    pid = int(pid_file.read_text()[:-1])
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_of_ours(write: Write, monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    monkeypatch.setenv("STANDIN_FAILS", "1")
    monkeypatch.setenv("FA_ADVISOR_DEBUG", "1" if debug else "")
    with pytest.raises(FaAdvisorError, match="ZeroDivisionError: a fault of ours") as raised:
        profile(write(""))
    assert raised.value.status == ExitStatus.INTERNAL
    assert ("Traceback" in raised.value.detail) is debug


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FaAdvisorError, match="did not start") as raised:
        profile("model.py", lambda line: None)
    assert raised.value.status == ExitStatus.INTERNAL


def test_the_launcher_loads_no_torch() -> None:
    code = "import sys, fa_advisor.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
