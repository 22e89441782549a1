"""A vision transformer, its batches from two worker processes, its blocks checkpointed, trained for
one epoch with fused AdamW and validated in inference mode."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, length):
        self.length = length
        self.home = os.getpid()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert os.getpid() != self.home
        noise = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=noise)
        return (image - image.mean()) / image.std(), index % 10


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim=48, depth=3, num_heads=4, classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 65, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x)[:, 0])


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = VisionTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    loader = DataLoader(Pictures(32), batch_size=8, num_workers=2, shuffle=True)
    for images, labels in loader:
        loss = criterion(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"train loss {loss.item():.3f}")
    model.eval()
    right = 0
    with torch.inference_mode():
        for images, labels in DataLoader(Pictures(16), batch_size=8, num_workers=1):
            right += (model(images.to(device)).argmax(-1).cpu() == labels).sum().item()
    print(f"right {right} of 16")


if __name__ == "__main__":
    main()
