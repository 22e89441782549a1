"""Two models, two optimizers that step in turn, a loss built anew in every step; then sys.exit(3)
with something registered to run at exit."""

import atexit
import sys

import torch
import torch.nn as nn


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Tanh())


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        return self.out(self.body(x)).mean(1)


def main():
    torch.manual_seed(0)
    atexit.register(print, "bye")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, discriminator = Generator().to(device), Discriminator().to(device)
    ones, zeros = torch.ones(4, 1, device=device), torch.zeros(4, 1, device=device)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=2e-4)
    for _ in range(5):
        real, noise = (torch.randn(4, 24, n, device=device) for n in (64, 16))
        fake = generator(noise)
        optimizer_d.zero_grad()
        loss = nn.BCEWithLogitsLoss()(discriminator(real), ones)
        loss = loss + nn.BCEWithLogitsLoss()(discriminator(fake.detach()), zeros)
        loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        nn.BCEWithLogitsLoss()(discriminator(fake), ones).backward()
        optimizer_g.step()
    print("trained")
    sys.exit(3)


if __name__ == "__main__":
    main()
