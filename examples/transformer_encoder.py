"""torch's own nn.TransformerEncoder, with a causal mask and a padding mask.

nn.MultiheadAttention merges both masks into one float mask, which only some backends take.

    fa-advisor profile examples/transformer_encoder.py --batch-size 8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 512


def build_model() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=2048, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=6)


def get_inputs(batch_size: int = 4, seq_len: int = 1024) -> dict[str, Tensor | bool]:
    blocked = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(diagonal=1)
    padding = torch.zeros(batch_size, seq_len, dtype=torch.bool)
    padding[:, -seq_len // 4 :] = True
    return {
        "src": torch.randn(batch_size, seq_len, WIDTH),
        "mask": blocked,
        "src_key_padding_mask": padding,
        "is_causal": True,
    }
