"""What Triton's compiler makes of a tile: in child processes, and kept on disk.

The compiler can abort its process or take minutes over one kernel. So each worker is a child that
compiles one request after the other; one that dies or is too slow costs its own request alone.

    python -m fa_advisor.probes.compiler        # a child: requests as JSON lines in, outcomes out
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fa_advisor.kernels import kept
from fa_advisor.records import Compiled

# A kernel takes a second or two; one that takes this long would never be used.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A kernel to compile with a tile for a GPU.

    kernel: of the bundled ones, or with `path` the function's name in that file; then `signature`
    says each argument's type and `constants` the values of its constexpr ones, and the dims, dtype
    and call mean nothing. capability: as a number, 90 for 9.0.
    """

    capability: int
    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    dim: int = 0
    dim_v: int = 0
    dtype: str = ""
    call: str = ""
    path: str | None = None
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


def available() -> str | None:
    """Why nothing can be compiled here; None if something can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton isn't installed: tiles are modelled, not compiled"
    return None


def compile_all(
    requests: Sequence[Request],
    *,
    workers: int | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int], None] | None = None,
    only_kept: bool = False,
) -> list[Compiled | None]:
    """The outcome of each request, in their order: read from disk, or compiled.

    workers: child processes, as many as there are cores by default. progress: is told how many are
    done, from this thread. only_kept: compile nothing; None for what isn't on disk.
    """
    outcomes: list[Compiled | None] = _kept(requests)
    if only_kept or None not in outcomes:
        return outcomes
    # Equal requests, as those for two GPUs of one capability, are compiled once.
    same: dict[str, list[int]] = {}
    for i, outcome in enumerate(outcomes):
        if outcome is None:
            same.setdefault(repr(requests[i]), []).append(i)
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for alike in same.values():
        waiting.put(alike)
    done: queue.SimpleQueue[tuple[list[int], Compiled]] = queue.SimpleQueue()
    finished = len(requests) - sum(map(len, same.values()))
    count = min(workers or len(os.sched_getaffinity(0)), len(same))
    with tempfile.TemporaryDirectory(prefix="fa-advisor-") as folder:
        children = [_Child(timeout_s, Path(folder) / f"{n}.stderr") for n in range(count)]

        def work(child: _Child) -> None:
            while True:
                try:
                    alike = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    outcome = child.outcome_of(requests[alike[0]])
                except Exception as error:  # Whatever it is, somebody waits for the outcome.
                    child.close()
                    outcome = Compiled(error=f"{type(error).__name__}: {error}")
                done.put((alike, outcome))

        threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in children]
        for thread in threads:
            thread.start()
        try:
            for _ in same:
                if progress is not None:
                    progress(finished)
                alike, outcome = done.get()
                finished += len(alike)
                for i in alike:
                    outcomes[i] = outcome
                _keep(requests[alike[0]], outcome)
            if progress is not None:
                progress(finished)
        finally:
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for child in children:
                child.close()
            for thread in threads:
                thread.join(timeout=5.0)
    return outcomes


class _Child:
    """A process that compiles; started anew after a request that it didn't survive.

    It answers on a pipe of its own: what a user's module writes to stdout is no answer. It leads a
    process group, so that what it started ends with it.
    """

    def __init__(self, timeout_s: float, stderr: Path) -> None:
        self._timeout_s = timeout_s
        self._stderr = stderr
        self._process: subprocess.Popen[str] | None = None
        self._answers: TextIO | None = None
        self._lock = threading.Lock()

    def outcome_of(self, request: Request) -> Compiled:
        question = json.dumps(asdict(request)) + "\n"
        process = self._process or self._started()
        late = threading.Event()

        def kill() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(self._timeout_s, kill)
        timer.start()
        try:
            assert process.stdin is not None and self._answers is not None
            process.stdin.write(question)
            process.stdin.flush()
            line = self._answers.readline()
        except (OSError, ValueError):  # ValueError: closed meanwhile.
            line = ""
        finally:
            timer.cancel()
        if line:
            return Compiled(**json.loads(line))
        self.close()
        if late.is_set():
            return Compiled(error=f"not compiled within {self._timeout_s:g} s")
        status = process.returncode
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return Compiled(error=f"the compiler's process ended {ended}{self._last_words()}")

    def _last_words(self) -> str:
        try:
            lines = self._stderr.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:300]}" if last else ""

    def _started(self) -> subprocess.Popen[str]:
        # Neither the folder that we are in nor Triton's own cache has a part in it.
        environment = {
            "TRITON_CACHE_DIR": str(self._stderr.with_suffix(".triton")),
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONSAFEPATH": "1",
        }
        reading, writing = os.pipe()
        with self._stderr.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "fa_advisor.probes.compiler", str(writing)],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                text=True,
                env=environment,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        with self._lock:
            self._process, self._answers = process, os.fdopen(reading)
        return process

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            process, self._process = self._process, None
            answers, self._answers = self._answers, None
        if process is not None:
            _kill(process)
            with contextlib.suppress(OSError):
                process.communicate()
        if answers is not None:
            with contextlib.suppress(OSError):
                answers.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _kept(requests: Iterable[Request]) -> list[Compiled | None]:
    """What is on disk of them. A file that can't be read is as good as none."""
    read: dict[int, dict[str, Any]] = {}
    found: list[Compiled | None] = []
    for request in requests:
        if request.path is not None:  # Triton's own cache knows what such a kernel depends on.
            found.append(None)
            continue
        table = read.get(request.capability)
        if table is None:
            table = read[request.capability] = _table(request.capability)
        entry = table.get(_key(request))
        if not (
            isinstance(entry, list)
            and len(entry) == 4
            and all(type(each) is int and each >= 0 for each in entry)
            and 0 < entry[0] <= 255
        ):
            found.append(None)
            continue
        registers, stack_bytes, smem_bytes, columns = entry
        found.append(
            Compiled(
                registers=registers,
                stack_bytes=stack_bytes,
                smem_bytes=smem_bytes,
                tensor_columns=columns,
            )
        )
    return found


def _keep(request: Request, outcome: Compiled) -> None:
    """Add what was compiled to what is on disk. Where that can't be written, nothing is lost."""
    if outcome.error is not None or request.path is not None:
        return
    entry = [outcome.registers, outcome.stack_bytes, outcome.smem_bytes, outcome.tensor_columns]
    with contextlib.suppress(OSError, RuntimeError):
        table = {**_table(request.capability), _key(request): entry}
        kept.write(_file(request.capability), json.dumps(table))


def _table(capability: int) -> dict[str, Any]:
    try:
        path = _file(capability)
        table = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, RuntimeError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _key(request: Request) -> str:
    r = request
    return ",".join(
        map(str, (r.kernel, r.block_m, r.block_n, r.num_warps, r.num_stages, r.max_registers,
                  r.dim, r.dim_v, r.dtype, r.call))
    )  # fmt: skip


def _file(capability: int) -> Path:
    """One for each compiler, target and state of the kernels' source."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return kept.directory() / "compiled" / f"triton-{triton}-{_source()}-sm{capability}.json"


def _source() -> str:
    """A hash of all that the kernels and their signatures are written in."""
    spec = importlib.util.find_spec("fa_advisor.kernels")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    digest = hashlib.sha256()
    sources = [folder / f"{name}.py" for name in ("ahead", "backward", "forward", "score")]
    for source in (*sources, *sorted((folder / "hopper").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _die_with_parent() -> None:
    """On Linux: a parent that is killed leaves no compiler behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """A child: the only place that imports Triton. Its word is the descriptor to answer on."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    os.set_inheritable(answers.fileno(), False)
    _die_with_parent()
    from fa_advisor.kernels import ahead
    from fa_advisor.kernels.tiles import Tile

    for line in sys.stdin:
        r = Request(**json.loads(line))
        tile = Tile(r.block_m, r.block_n, r.num_warps, r.num_stages, r.max_registers)
        try:
            if r.kernel.startswith("hopper "):
                from fa_advisor.kernels.hopper.ahead import usage as of_hopper

                usage = of_hopper(r.kernel, r.dim, r.dim_v, r.dtype, r.call)
            elif r.path is None:
                usage = ahead.usage_of(
                    ahead.Config(r.capability, r.kernel, tile, r.dim, r.dim_v, r.dtype, r.call)
                )
            else:
                usage = ahead.usage_of_file(
                    r.path, r.kernel, r.signature, r.constants, r.capability, tile
                )
            outcome = Compiled(
                registers=usage.registers,
                stack_bytes=usage.stack_bytes,
                smem_bytes=usage.smem_bytes,
                tensor_columns=usage.tensor_columns,
            )
        except Exception as error:
            outcome = Compiled(error=f"{type(error).__name__}: {error}"[:2000])
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()
