"""A vision transformer of timm's, with timm's optimizer, schedule, mixup and average of weights."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_path_rate=0.1).to(device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1)
average = ModelEmaV3(model)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
criterion = SoftTargetCrossEntropy()
for epoch in range(2):
    model.train()
    for _ in range(3):
        images = torch.randn(8, 3, 224, 224, device=device)
        images, targets = mixup(images, torch.randint(10, (8,), device=device))
        with torch.autocast(device, torch.bfloat16):
            loss = criterion(model(images), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
    scheduler.step(epoch + 1)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == targets.argmax(-1)).float().mean()
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy.item():.2f}")
