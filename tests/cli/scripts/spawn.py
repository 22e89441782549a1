"""Starts processes that import this file again, before and while it trains; each trains too."""

import multiprocessing as mp
import sys

import torch
import torch.nn as nn

torch.set_num_threads(1)  # OpenMP does not outlive a fork


def train(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(16, 32)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.numel() for p in model.parameters())


def work(queue, steps):
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    hooks = nn.modules.module._global_forward_pre_hooks
    queue.put((train(steps), len(modes), len(hooks), "fa_advisor" in sys.modules))


def main():
    found = {}
    for method in ("spawn", "fork"):
        context = mp.get_context(method)
        queue = context.Queue()
        train(2)
        child = context.Process(target=work, args=(queue, 3))
        child.start()
        parameters, modes, hooks, ours = queue.get()
        child.join()
        found[method] = (parameters, modes, hooks, ours and method == "spawn", child.exitcode)
    print(found)


if __name__ == "__main__":
    main()
