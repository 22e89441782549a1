"""A Llama with grouped keys and values and checkpointed layers, in a plain loop: foreach AdamW,
accumulation, clipping, a validation without gradients after each epoch."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(42)
    config = LlamaConfig(
        vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    ids = torch.randint(160, (16, 48))
    loader = DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    schedule = get_scheduler("linear", optimizer, 0, 4)
    for epoch in range(2):
        model.train()
        for index, (batch,) in enumerate(loader):
            batch = batch.to(device)
            (model(input_ids=batch, labels=batch).loss / 2).backward()
            if index % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=ids[:2].to(device), labels=ids[:2].to(device)).loss
        print(f"epoch {epoch}: {loss.item() > 0}")


if __name__ == "__main__":
    main()
