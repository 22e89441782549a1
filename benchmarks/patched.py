"""Is a patched model the same model, and what does the patch bring in memory and time?

    python benchmarks/patched.py          # writes benchmarks/results/patched.json

Six transformers models and an nn.TransformerEncoder, built from configurations with dropout off, in
bf16. For each, before and after `fa_advisor.patch`: loss and gradients of a training step against
the same step in float32, peak memory above what was there, and time, of that step and of inference.

The models have a process each. They compile their kernels side by side and measure one after the
other. Needs a GPU; `--tiny --device cpu` runs everything but the peaks without one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from patched_models import DTYPE, MODELS, Size, Tensors, in_dtype, made
from provenance import write
from torch import Tensor, nn

import fa_advisor

# As fa_advisor.patch judges bf16: twice the original's error, and this much relative rounding.
ROUNDING = 1e-3
WARMUP, REPEATS = 3, 7


def step(model: nn.Module, inputs: Tensors) -> Tensor:
    """One training step's forward and backward; the gradients stay on the parameters."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(**inputs).loss
    loss.backward()
    return loss.detach()


def results(model: nn.Module, inputs: Tensors) -> dict[str, list[Tensor]]:
    """The loss, and the gradients of each module's own parameters.

    By module: a key's bias alone has no gradient but rounding.
    """
    found = {"loss": [step(model, inputs)]}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.setdefault(name.rpartition(".")[0] or "model", []).append(parameter.grad)
    model.zero_grad(set_to_none=True)
    return found


def norm(tensors: list[Tensor]) -> float:
    return sum(float(each.double().norm()) ** 2 for each in tensors) ** 0.5


def judged(
    patched: dict[str, list[Tensor]],
    original: dict[str, list[Tensor]],
    reference: dict[str, list[Tensor]],
) -> dict[str, Any]:
    """Relative errors against the reference: of the loss, of all gradients, and of the worst."""

    def off(found: dict[str, list[Tensor]], name: str) -> float:
        return norm([a - b for a, b in zip(found[name], reference[name], strict=True)])

    errors = {
        name: {
            kind: off(found, name) / max(norm(expected), 1e-12)
            for kind, found in (("original", original), ("patched", patched))
        }
        for name, expected in reference.items()
    }
    gradients = [name for name in reference if name != "loss"]
    whole = norm([each for name in gradients for each in reference[name]])
    excess = {
        name: each["patched"] / (2 * each["original"] + ROUNDING) for name, each in errors.items()
    }
    worst = max(excess, key=lambda name: excess[name])
    return {
        "loss": float(reference["loss"][0]),
        "loss_error": errors["loss"],
        "gradient_error": {
            kind: sum(off(found, name) ** 2 for name in gradients) ** 0.5 / whole
            for kind, found in (("original", original), ("patched", patched))
        },
        "worst": {"name": worst, **errors[worst], "of_allowed": excess[worst]},
        "beyond": sorted(name for name, each in excess.items() if not each <= 1),
        "within": all(each <= 1 for each in excess.values()),
    }


def measured(model: nn.Module, inputs: Tensors) -> dict[str, Any]:
    """Peak above what was there, and time, of a training step and of inference."""

    def infer() -> None:
        with torch.no_grad():
            model(**inputs)

    figures = {"train": _measured(model.train(), lambda: step(model, inputs))}
    figures["infer"] = _measured(model.eval(), infer)
    model.train()
    return figures


def _measured(model: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    for _ in range(WARMUP):
        run()
    milliseconds = statistics.median(_timed(run) for _ in range(REPEATS))
    peak = None
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_initialized():
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return {"peak_bytes": peak, "ms": milliseconds}


def _timed(run: Callable[[], Any]) -> float:
    if not torch.cuda.is_initialized():
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def patched(model: nn.Module, inputs: Tensors, size: Size) -> tuple[Any, float]:
    """The handle, and the seconds that it took to patch."""
    start = time.perf_counter()
    example = {key: each[:, : size.example].contiguous() for key, each in inputs.items()}
    handle = fa_advisor.patch(model, example=example)
    return handle, time.perf_counter() - start


def compared(name: str, attention: str, size: Size, device: str) -> dict[str, Any]:
    """What one row says beside its name."""
    model, inputs = made(name, attention, size, device)
    reference = results(copy.deepcopy(model).float(), in_dtype(inputs, torch.float32))
    original = results(model, inputs)
    before = measured(model, inputs)
    handle, seconds = patched(model, inputs, size)
    errors = judged(results(model, inputs), original, reference)
    after = measured(model, inputs)
    fallbacks = handle.fallbacks
    handle.unpatch()
    restored = torch.equal(step(model, inputs), original["loss"][0])
    sites = handle.report.sites
    return {
        "size": asdict(size),
        "parameters": sum(each.numel() for each in model.parameters()),
        "sites": {"patched": handle.patched, "all": len(sites)},
        "refused": {
            site.fqn: [site.code, handle.details.get(site.fqn, "")] for site in sites if site.code
        },
        "max_error_of_a_site": max((site.max_error or 0.0 for site in sites), default=None),
        "fallbacks": fallbacks,
        "reference": "float32 throughout, at the same size",
        **errors,
        "before": before,
        "after": after,
        "patch_s": seconds,
        "loss_restored_to_the_bit": restored,
    }


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` gives, or what it raised; the GPU's memory is free again after it."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def worker(name: str, device: str, tiny: bool) -> None:
    """Compile what one model needs, say so, wait for the end of stdin, and print a row a line."""
    chosen = MODELS[name]
    size = chosen.size.tiny() if tiny else chosen.size

    def compiled(attention: str) -> dict[str, Any]:
        model, inputs = made(name, attention, size, device)
        _, seconds = patched(model, inputs, size)
        step(model, inputs)
        return {"patch_first_s": seconds}

    first = {each: tried(lambda each=each: compiled(each)) for each in chosen.attentions}
    print("ready", flush=True)
    sys.stdin.read()
    for attention in chosen.attentions:
        row = tried(lambda attention=attention: compared(name, attention, size, device))
        told = {"patch_first_s": first[attention].get("patch_first_s")}
        print(json.dumps({"model": name, "attention": attention, **row, **told}), flush=True)


def rows(names: list[str], device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """A row for each model and attention, as they come."""
    options = ["--device", device, *(["--tiny"] if tiny else [])]

    def started(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, *options, "--one", name]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    running = {name: started(name) for name in names if device == "cuda"}
    for process in running.values():
        process.stdout.readline()
    for name in names:
        process = running.get(name) or started(name)
        process.stdin.close()
        missing = list(MODELS[name].attentions)
        for line in process.stdout:
            if line.startswith("{"):
                missing.pop(0)
                yield json.loads(line)
        status = process.wait()
        for attention in missing:
            error = f"the process ended with exit status {status}"
            yield {"model": name, "attention": attention, "error": error}


def table(found: list[dict[str, Any]]) -> str:
    """Peaks in GiB and times in ms, before and after; errors against float32."""
    head = ("model", "sites", "same", "gradients' error", "train GiB", "train ms", "infer GiB",
            "infer ms", "patch s")  # fmt: skip
    lines = [head]
    for row in found:
        name = f"{row['model']}, {row['attention']}"
        if "error" in row:
            lines.append((name, row["error"].splitlines()[0][:80]))
            continue
        lines.append(
            (
                name,
                f"{row['sites']['patched']}/{row['sites']['all']}",
                "yes" if row["within"] else f"{len(row['beyond'])} beyond",
                " -> ".join(f"{row['gradient_error'][k]:.2e}" for k in ("original", "patched")),
                *(
                    " -> ".join(_shown(row[when][mode][what], what) for when in ("before", "after"))
                    for mode in ("train", "infer")
                    for what in ("peak_bytes", "ms")
                ),
                f"{row['patch_s']:.1f}",
            )
        )
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(9)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        for line in lines
    )


def _shown(value: float | None, what: str) -> str:
    if value is None:
        return "-"
    return f"{value / 2**30:.2f}" if what == "peak_bytes" else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="writes patched-tiny.json")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        worker(args.one, args.device, args.tiny)
        return
    found: list[dict[str, Any]] = []
    for row in rows(args.models, args.device, args.tiny):
        found.append(row)
        print(f"{row['model']}, {row['attention']}: {row.get('error', 'done')}", file=sys.stderr)
        figures = {
            "question": __doc__,
            "transformers": version("transformers"),
            "dtype": str(DTYPE),
            "criterion": f"patched error <= 2 * original error + {ROUNDING}, module by module",
            "rows": found,
        }
        path = write("patched-tiny" if args.tiny else "patched", figures)
    print(table(found))
    print(path)


if __name__ == "__main__":
    main()
