"""T5 of transformers: self-attention in the encoder, causal and cross-attention in the decoder.

Its relative positions are a bias on the scores: a [heads, seq, seq] tensor that all layers share.

    fa-advisor profile examples/t5.py --batch-size 4 --seq-len 512
"""

from __future__ import annotations

from transformers import T5Config, T5ForConditionalGeneration


def build_model() -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)
