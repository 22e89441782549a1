"""Inference alone: prompts come on stdin, a model with a cache of keys and values goes on."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2LMHeadModel(config).eval().to(device)
    for line in sys.stdin:
        ids = torch.tensor([list(line.rstrip("\n").encode())], device=device)
        out = model.generate(ids, max_new_tokens=int(sys.argv[1]), do_sample=False)
        print(len(line.rstrip("\n")), "->", out.shape[1])


main()
