"""DistributedDataParallel over gloo in a job of one process, as torchrun would start it."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.net2 = nn.Linear(128, 16)

    def forward(self, x):
        x = torch.relu(self.net1(x))
        return self.net2(self.attention(x, x, x)[0])


def main():
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        torch.manual_seed(0)
        model = DDP(ToyModel(), static_graph="--static" in sys.argv)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            out = model(torch.randn(8, 40, 64))
            nn.functional.mse_loss(out, torch.randn(8, 40, 16)).backward()
            optimizer.step()
            print(f"[{dist.get_rank()}/{dist.get_world_size()}] step {step}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
    print("rank", os.environ.get("RANK", "none"))


if __name__ == "__main__":
    main()
