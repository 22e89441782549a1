"""A vision transformer of transformers: 197 tokens an image, where attention is small beside MLPs.

fa-advisor profile examples/vit.py --batch-size 32
"""

from __future__ import annotations

from transformers import ViTConfig, ViTForImageClassification


def build_model() -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(num_labels=1000, attn_implementation="eager"))
