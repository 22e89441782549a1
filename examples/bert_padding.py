"""BERT on sentences of different lengths: a padding mask, which rules some fused kernels out.

fa-advisor profile examples/bert_padding.py --batch-size 16 --seq-len 512
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

CONFIG = BertConfig(attn_implementation="sdpa")


def build_model() -> BertForMaskedLM:
    return BertForMaskedLM(CONFIG)


def get_inputs(batch_size: int = 8, seq_len: int = 512) -> dict[str, Tensor]:
    # The first sentence fills the batch's length, the last half of it.
    lengths = torch.linspace(seq_len, seq_len / 2, batch_size).long()
    attention_mask = (torch.arange(seq_len) < lengths[:, None]).long()
    input_ids = torch.randint(1, CONFIG.vocab_size, (batch_size, seq_len)) * attention_mask
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
