"""Causal language modelling with transformers' Trainer and its own command line, from a config."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Blocks(Dataset):
    def __init__(self, count, length, vocabulary):
        self.ids = torch.randint(vocabulary, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4,
        attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model, args=training_args, train_dataset=Blocks(32, 64, 128),
        eval_dataset=Blocks(8, 64, 128),
    )  # fmt: skip
    result = trainer.train()
    print("steps", result.global_step)
    print("eval loss", round(trainer.evaluate()["eval_loss"], 2) > 0)


if __name__ == "__main__":
    main()
