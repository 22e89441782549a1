"""A word model on nn.TransformerEncoder, trained without an optimizer: the parameters are moved by
hand, as the oldest of PyTorch's examples do it. Evaluates after each epoch, without gradients."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 200


class TransformerModel(nn.Transformer):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers):
        super().__init__(ninp, nhead, num_encoder_layers=nlayers, dim_feedforward=nhid)
        del self.decoder
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.decoder = nn.Linear(ninp, ntoken)
        self.src_mask = None

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = self.generate_square_subsequent_mask(len(src)).to(src.device)
        src = self.input_emb(src) * math.sqrt(self.ninp)
        output = self.encoder(src, mask=self.src_mask)
        return F.log_softmax(self.decoder(output), dim=-1)


def batchify(data, bsz):
    n = data.size(0) // bsz
    return data.narrow(0, 0, n * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i, bptt):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


parser = argparse.ArgumentParser(description="A small word language model")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--bptt", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.5)
args = parser.parse_args()

torch.manual_seed(1111)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_data = batchify(torch.randint(VOCABULARY, (4 * 32 * 4 + 4,)), 4).to(device)
val_data = batchify(torch.randint(VOCABULARY, (2 * 64 + 2,)), 2).to(device)
model = TransformerModel(VOCABULARY, 32, 4, 64, 2).to(device)
criterion = nn.NLLLoss()


def evaluate(source):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i, args.bptt)
            output = model(data).view(-1, VOCABULARY)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train():
    model.train()
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i, args.bptt)
        model.zero_grad()
        output = model(data).view(-1, VOCABULARY)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-args.lr)


for epoch in range(1, args.epochs + 1):
    train()
    print(f"| end of epoch {epoch} | valid loss {evaluate(val_data):5.2f}")
