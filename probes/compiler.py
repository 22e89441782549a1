"""What Triton's compiler makes of a tile: in child processes, and kept on disk.

The compiler can abort its process or take minutes over one kernel. So each worker is a child that
compiles one request after the other; one that dies or is too slow costs its own request alone.

    python -m fa_advisor.probes.compiler        # a child: requests as JSON lines in, outcomes out
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fa_advisor.kernels import kept

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a kernel takes of a thread (registers, bytes of stack: what it spills) and of a block
    (bytes of shared memory, columns of tensor memory); or why there is nothing to tell."""

    registers: int = 0
    stack_bytes: int = 0
    smem_bytes: int = 0
    tensor_columns: int = 0
    error: str | None = None


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
) -> list[Outcome | None]:
    """The outcome of each request, in their order: read from disk, or compiled.

    workers: child processes, as many as there are cores by default. progress: is told how many are
    done, from this thread. only_kept: compile nothing; None for what isn't on disk.
    """
    outcomes: list[Outcome | None] = _kept(requests)
    if only_kept:
        return outcomes
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    missing = [i for i, outcome in enumerate(outcomes) if outcome is None]
    for i in missing:
        waiting.put(i)
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        child = _Child(timeout_s)
        try:
            while not stop.is_set():
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                outcomes[i] = child.outcome_of(requests[i])
                done.put(i)
        finally:
            child.close()

    count = min(workers or len(os.sched_getaffinity(0)), len(missing))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for n in range(len(missing)):
            if progress is not None:
                progress(len(requests) - len(missing) + n)
            done.get()
        if progress is not None:
            progress(len(requests))
    finally:
        stop.set()
        _keep((requests[i], outcomes[i]) for i in missing)
    return outcomes


class _Child:
    """A process that compiles; started anew after a request that it didn't survive."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def outcome_of(self, request: Request) -> Outcome:
        process = self._process or self._started()
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return Outcome(**json.loads(line))
        self.close()
        if late.is_set():
            return Outcome(error=f"not compiled within {self._timeout_s:g} s")
        return Outcome(error=f"the compiler ended its process (status {process.returncode})")

    def _started(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fa_advisor.probes.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        return self._process

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _kept(requests: Iterable[Request]) -> list[Outcome | None]:
    """What is on disk of them. A file that can't be read is as good as none."""
    read: dict[int, dict[str, Any]] = {}
    found: list[Outcome | None] = []
    for request in requests:
        if request.path is not None:  # Triton's own cache knows what such a kernel depends on.
            found.append(None)
            continue
        table = read.get(request.capability)
        if table is None:
            table = read[request.capability] = _table(request.capability)
        try:
            registers, stack_bytes, smem_bytes, columns = map(int, table[_key(request)])
        except (KeyError, TypeError, ValueError):
            found.append(None)
            continue
        found.append(
            Outcome(
                registers=registers,
                stack_bytes=stack_bytes,
                smem_bytes=smem_bytes,
                tensor_columns=columns,
            )
        )
    return found


def _keep(results: Iterable[tuple[Request, Outcome | None]]) -> None:
    """Add what was compiled to what is on disk. Where that can't be written, nothing is lost."""
    fresh: dict[int, dict[str, Any]] = {}
    for request, outcome in results:
        if outcome is not None and outcome.error is None and request.path is None:
            fresh.setdefault(request.capability, {})[_key(request)] = [
                outcome.registers, outcome.stack_bytes, outcome.smem_bytes, outcome.tensor_columns
            ]  # fmt: skip
    for capability, table in fresh.items():
        try:
            path = _file(capability)
            kept.write(path, json.dumps({**_table(capability), **table}))
        except (OSError, RuntimeError):
            return


def _table(capability: int) -> dict[str, Any]:
    try:
        table = json.loads(_file(capability).read_text())
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
    for name in ("ahead", "backward", "forward", "score"):
        digest.update((folder / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def main() -> None:
    """A child: the only place that imports Triton."""
    rows, sys.stdout = sys.stdout, sys.stderr
    from fa_advisor.kernels import ahead
    from fa_advisor.kernels.tiles import Tile

    for line in sys.stdin:
        r = Request(**json.loads(line))
        tile = Tile(r.block_m, r.block_n, r.num_warps, r.num_stages, r.max_registers)
        try:
            if r.path is None:
                usage = ahead.usage_of(
                    ahead.Config(r.capability, r.kernel, tile, r.dim, r.dim_v, r.dtype, r.call)
                )
            else:
                usage = ahead.usage_of_file(
                    r.path, r.kernel, r.signature, r.constants, r.capability, tile
                )
            outcome = Outcome(
                registers=usage.registers,
                stack_bytes=usage.stack_bytes,
                smem_bytes=usage.smem_bytes,
                tensor_columns=usage.tensor_columns,
            )
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}"[:2000])
        print(json.dumps(asdict(outcome)), file=rows, flush=True)


if __name__ == "__main__":
    main()
