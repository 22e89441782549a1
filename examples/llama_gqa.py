"""A Llama of transformers with grouped queries: 16 query heads share 4 key/value heads.

Eager attention copies keys and values to every query head and keeps the probabilities of each.
scaled_dot_product_attention does neither where a fused backend takes grouped heads: in bf16 flash
does, in fp32 none does, and torch computes the probabilities after all.

    fa-advisor profile examples/llama_gqa.py:eager --dtype bf16 -o eager.json
    fa-advisor profile examples/llama_gqa.py:sdpa --dtype bf16 -o sdpa.json
    fa-advisor diff eager.json sdpa.json
"""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def _llama(attn_implementation: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        attn_implementation=attn_implementation,
    )
    return LlamaForCausalLM(config)


def eager() -> LlamaForCausalLM:
    return _llama("eager")


def sdpa() -> LlamaForCausalLM:
    return _llama("sdpa")


def build_model() -> LlamaForCausalLM:
    return eager()
