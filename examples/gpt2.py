"""GPT-2 of transformers, its smallest size, with eager attention.

Without inputs of its own: token ids and labels are made up from the model's configuration.

    fa-advisor profile examples/gpt2.py --batch-size 4
"""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel


def build_model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))
