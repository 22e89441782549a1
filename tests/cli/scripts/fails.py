"""Raises in the middle of its fourth step, three calls deep, from another exception."""

import torch
import torch.nn as nn


class Broken(RuntimeError):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.layer(x)
        if self.calls == 4:
            try:
                x @ torch.randn(7, 7)
            except RuntimeError as error:
                raise Broken("the fourth batch") from error
        return x


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        model(torch.randn(2, 16, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)


train(Net())
