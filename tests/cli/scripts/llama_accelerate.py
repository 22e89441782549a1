"""A Llama with grouped keys and values, built from its config, in the plain loop that accelerate's
examples have: prepare, accumulate, clip, a schedule, a validation without gradients."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler


def training_function(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(42)
    config = LlamaConfig(
        vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    ids = torch.randint(160, (16, 48))
    loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)
    sample = ids[:2].to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    schedule = get_scheduler("linear", optimizer, 0, 4 * args.epochs)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(args.epochs):
        model.train()
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=sample, labels=sample).loss
        accelerator.print(f"epoch {epoch}: {accelerator.gather(loss).item() > 0}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
