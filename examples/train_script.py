"""A training script as people write them: argparse, a loop in main(), a __main__ guard.

fa-advisor runs the file up to the guard and takes `build_model`; what follows `--` is the
script's own.

    fa-advisor profile examples/train_script.py -- --layers 8 --width 512
    python examples/train_script.py --steps 10
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 8192


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model on random tokens.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


class LanguageModel(nn.Module):
    """Causal encoder layers over token and position embeddings."""

    def __init__(self, width: int, heads: int, layers: int, max_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(max_len, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        length = idx.size(1)
        x = self.tokens(idx) + self.positions(torch.arange(length, device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=idx.device)
        logits = self.head(self.layers(x, mask=mask, is_causal=True))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model() -> LanguageModel:
    args = arguments()
    return LanguageModel(args.width, args.heads, args.layers, args.seq_len)


def get_inputs(batch_size: int | None = None, seq_len: int | None = None) -> dict[str, Tensor]:
    args = arguments()
    shape = (batch_size or args.batch_size, (seq_len or args.seq_len) + 1)
    tokens = torch.randint(VOCABULARY, shape)
    return {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        batch = {name: tensor.to(device) for name, tensor in get_inputs().items()}
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
