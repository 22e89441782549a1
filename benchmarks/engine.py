"""What the engine costs: against bare modes, by model size, and by the number of operators.

    python benchmarks/engine.py          # writes benchmarks/results/engine.json
    python benchmarks/engine.py --quick  # the per-operator part only, writes nothing

CPU tensors: microseconds an operator, plain, under a bare TorchDispatchMode, and under the engine
with its attribution. Fake tensors: the steps of Llama configs (bf16, 8,192 tokens, train, AdamW)
under a bare FakeTensorMode and under the engine, with peak memory; each run in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from provenance import write

LLAMA: dict[str, dict[str, int]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
LAYERS = (4, 8, 16, 32, 64)


def per_operator() -> dict[str, float]:
    """Median CPU microseconds an operator, over interleaved rounds."""
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    import fa_advisor

    class Bare(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

        count = 0

    torch.set_num_threads(1)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True),
        4,
        enable_nested_tensor=False,
    )
    x = torch.randn(1, 8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def steps(n: int) -> None:
        for _ in range(n):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    counter = Bare()
    with counter:
        steps(2)
    with counter:
        counter.count = 0
        steps(1)
    operators = counter.count
    modes: dict[str, Any] = {
        "plain": contextlib.nullcontext,
        "bare": Bare,
        "engine": lambda: fa_advisor.record(model, optimizer),
    }
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(9):
        for name, make in modes.items():
            with make():
                steps(1)
                start = time.process_time()
                steps(20)
                times[name].append((time.process_time() - start) / 20 / operators * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["operators_a_step"] = operators
    medians["time_ratio"] = medians["engine"] / medians["bare"]
    medians["overhead_ratio"] = (medians["engine"] - medians["plain"]) / (
        medians["bare"] - medians["plain"]
    )
    return medians


def steps_of(config: dict[str, int], engine: bool) -> dict[str, float]:
    """Seconds and peak GiB of this process for two training steps on fake tensors."""
    import torch
    import transformers as hf
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fa_advisor.pipeline import profile

    cfg = hf.LlamaConfig(
        **config, num_key_value_heads=8, vocab_size=128256, attn_implementation="eager"
    )
    start = time.perf_counter()
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(cfg).to(torch.bfloat16)
    ids = torch.randint(0, 1000, (1, 8192))
    built, built_cpu = time.perf_counter(), time.process_time()
    out: dict[str, float] = {}
    if engine:
        report = profile(model, {"input_ids": ids, "labels": ids}, gpu="H100")
        out["peak_gib"] = report.memory.peak_allocated_bytes / 2**30
        out["sites"] = len(report.sites)
    else:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(
                            torch.empty(parameter.shape, dtype=parameter.dtype)
                        )
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            ids = torch.randint(0, 1000, (1, 8192))
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    out |= {
        "build_s": built - start,
        "steps_s": time.perf_counter() - built,
        "steps_cpu_s": time.process_time() - built_cpu,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    return out


def in_process(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, "--one", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the per-operator part only")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, name, layers = (*args.one, "", "")[:3]
        if kind == "operator":
            print(json.dumps(per_operator()))
        else:
            config = LLAMA[name] | ({"num_hidden_layers": int(layers)} if layers else {})
            print(json.dumps(steps_of(config, kind == "engine")))
        return
    results: dict[str, Any] = {"operator": in_process("operator")}
    print("CPU, per operator:", json.dumps(results["operator"]), flush=True)
    if not args.quick:
        for name in LLAMA:
            bare, engine = in_process("bare", name), in_process("engine", name)
            ratio = engine["steps_cpu_s"] / bare["steps_cpu_s"]
            results[name] = {"bare": bare, "engine": engine, "ratio": ratio}
            print(name, json.dumps(results[name]), flush=True)
        results["by_layers"] = {n: in_process("engine", "llama-3-8b", str(n)) for n in LAYERS}
        for n, row in results["by_layers"].items():
            seconds = row["steps_cpu_s"]
            print(f"{n} layers: {seconds:.2f} s, {seconds / n * 1e3:.0f} ms a layer")
    if not args.quick:
        print(write("engine", {"question": __doc__, **results}))


if __name__ == "__main__":
    main()
