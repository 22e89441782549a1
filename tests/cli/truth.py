"""An independent witness: `python truth.py OUT script.py args` runs the script as it is and writes
the bytes of all CPU storages alive at the peak of each step. It knows nothing of fa_advisor: it
counts every storage that any operator takes or makes, until the storage dies."""

import json
import runpy
import sys
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Witness(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive = {}
        self.total = self.peak = 0
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive:
                    self.add(storage, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.total)
        return out

    def add(self, storage, key, nbytes):
        def died(_):
            del self.alive[key]
            self.total -= nbytes

        self.alive[key] = weakref.ref(storage, died)
        self.total += nbytes

    def step(self, *_):
        self.steps.append(self.peak)
        self.peak = self.total


witness = Witness()
register_optimizer_step_post_hook(witness.step)
out, sys.argv = sys.argv[1], sys.argv[2:]
try:
    with witness:
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    with open(out, "w") as file:
        json.dump({"steps": witness.steps, "last": witness.peak}, file)
