"""Inputs for transformers' models, from their configuration: text, images, sound, and pairs.

Shapes: B batch, L sequence, C channels, H height, W width, F frames.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fa_advisor.errors import UsageError
from fa_advisor.target import geometry
from fa_advisor.target.arguments import NEED_INPUTS
from fa_advisor.target.sizes import DEFAULT_SEQ_LEN, fitting_seq_len
from fa_advisor.target.tensors import floats, token_ids

_ENCODER_POSITIONS = (
    "max_encoder_position_embeddings",
    "max_source_positions",
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
_DECODER_POSITIONS = (
    "max_decoder_position_embeddings",
    "max_target_positions",
    *_ENCODER_POSITIONS,
)
_TOKEN_LABELS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForSpeechSeq2Seq",
    "EncoderDecoderModel",
    "MTModel",
)
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
_MAIN = ("input_ids", "pixel_values", "pixel_values_videos", "input_features", "input_values")


def is_transformers(model: nn.Module) -> bool:
    """Whether the model has a configuration of transformers' kind."""
    config = getattr(model, "config", None)
    return hasattr(config, "to_dict") and isinstance(getattr(config, "model_type", None), str)


@dataclass(kw_only=True)
class Inputs:
    """Makes the keyword arguments of one model's forward."""

    model: nn.Module
    batch: int
    seq_len: int | None
    training: bool
    dtype: torch.dtype

    def make(self) -> dict[str, Any]:
        """Raises: UsageError for a model of an unknown kind, and for a length it hasn't."""
        main = getattr(self.model, "main_input_name", "input_ids")
        names = self._parameters
        inputs: dict[str, Any] = {}
        if "input_ids" in names and (main == "input_ids" or self._reads_text_and_image):
            inputs["input_ids"] = self._tokens(self._encoder_length)
        if main.startswith("pixel_values") or self._reads_text_and_image:
            inputs[main if main.startswith("pixel_values") else "pixel_values"] = self._pixels()
        if main in ("input_features", "input_values"):
            inputs[main] = self._sound(main)
        if not inputs:
            raise UsageError(
                f"can't make inputs up for {type(self.model).__name__}: its main input is "
                f"{main!r}, and {', '.join(_MAIN)} are the known ones",
                hint="give the inputs: `inputs`, `example_inputs` or `get_inputs` beside the model",
                detail=NEED_INPUTS,
            )
        if "decoder_input_ids" in names and self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = self._tokens(self._decoder_length)
        images_only = "pixel_values" in inputs and "decoder_input_ids" not in inputs
        if self.seq_len is not None and images_only and "input_ids" not in inputs:
            raise UsageError(
                f"--seq-len can't be set for {type(self.model).__name__}, which takes images",
                hint="its length follows from its configuration's image_size",
            )
        return inputs | (self._labels(inputs) if self.training else {})

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.model.forward).parameters)

    @cached_property
    def _text_config(self) -> Any:
        """The part of the configuration that has the vocabulary; the decoder's, where nested."""
        for name in ("decoder", "text_config", "text_encoder"):
            part = getattr(self.config, name, None)
            if hasattr(part, "vocab_size"):
                return part
        return self.config

    @cached_property
    def _vision_config(self) -> Any:
        for name in ("vision_config", "encoder", "backbone_config"):
            part = getattr(self.config, name, None)
            if hasattr(part, "to_dict"):
                return part
        return self.config

    @cached_property
    def _reads_text_and_image(self) -> bool:
        """CLIP, ViLT and their kin. Models that take images as placeholders in the text don't
        need one: their language part is profiled."""
        placeholders = ("image_token_id", "image_token_index")
        return (
            {"input_ids", "pixel_values"} <= set(self._parameters)
            and not any(isinstance(getattr(self.config, name, None), int) for name in placeholders)
            and hasattr(self._vision_config, "image_size")
        )

    @cached_property
    def _encoder_length(self) -> int:
        maximum = self._positions(_ENCODER_POSITIONS)
        return fitting_seq_len(self.seq_len, maximum, type(self.model).__name__)

    @cached_property
    def _decoder_length(self) -> int:
        """The encoder's length, cut to the decoder's maximum where the two differ."""
        maximum = self._positions(_DECODER_POSITIONS)
        wanted = self.seq_len
        if wanted is not None and "input_ids" in self._parameters and maximum is not None:
            wanted = min(wanted, maximum)
        return fitting_seq_len(wanted, maximum, f"the decoder of {type(self.model).__name__}")

    def _positions(self, names: tuple[str, ...]) -> int | None:
        known = [
            value
            for name in names
            if isinstance(value := getattr(self._text_config, name, None), int) and value > 0
        ][:1]
        for name, module in self.model.named_modules():
            if type(module) is not nn.Embedding or module.padding_idx is None:
                continue
            if geometry.is_positional(name) and module.num_embeddings in known:
                # Positions count from behind the padding index (RoBERTa and its kin).
                return module.num_embeddings - module.padding_idx - 1
        return known[0] if known else None

    def _tokens(self, length: int) -> Tensor:
        special = [
            token
            for config in (self.config, self._text_config)
            for name, value in vars(config).items()
            if name.endswith(("_token_id", "_token_index"))
            for token in (value if isinstance(value, list) else [value])
            if isinstance(token, int)
        ]
        return token_ids((self.batch, length), int(self._text_config.vocab_size), special)

    def _pixels(self) -> Tensor:
        """[B, C, H, W], or [B, F, C, H, W] for video."""
        config = self._vision_config
        size = getattr(config, "image_size", None)
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        height, width = (size, size) if isinstance(size, int) else tuple(size or (224, 224))
        channels = getattr(config, "num_channels", None) or 3
        frames = getattr(config, "num_frames", None)
        leading = (self.batch,) if frames is None else (self.batch, frames)
        return floats((*leading, channels, height, width), self.dtype)

    def _sound(self, name: str) -> Tensor:
        """A spectrogram ([B, mels, F] for Whisper, else [B, F, mels]) or a wave [B, samples]."""
        config = self.config
        mels: Any = getattr(config, "num_mel_bins", None) or getattr(
            config, "input_feat_per_channel", 0
        )
        if name == "input_features" and hasattr(config, "max_source_positions"):
            if config.model_type == "whisper":
                return floats((self.batch, mels, 2 * config.max_source_positions), self.dtype)
            return floats((self.batch, DEFAULT_SEQ_LEN, mels), self.dtype)
        if name == "input_features":
            mels = mels or getattr(config, "feature_projection_input_dim", 80)
            return floats((self.batch, self.seq_len or DEFAULT_SEQ_LEN, mels), self.dtype)
        if mels:
            return floats((self.batch, getattr(config, "max_length", 1024), mels), self.dtype)
        return floats((self.batch, self._samples(self.seq_len or DEFAULT_SEQ_LEN)), self.dtype)

    def _samples(self, frames: int) -> int:
        """The samples from which the feature encoder's convolutions make `frames` frames."""
        kernels = getattr(self.config, "conv_kernel", ())
        strides = getattr(self.config, "conv_stride", ())
        if not kernels:
            return 16000 * math.ceil(frames / 50)
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames

    def _labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Labels of the model's own loss, where they are tokens or classes."""
        kind = type(self.model).__name__
        names = self._parameters
        tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if "return_loss" in names:
            return {"return_loss": True}
        if kind.endswith("ForQuestionAnswering") and "start_positions" in names:
            first = torch.zeros(self.batch, dtype=torch.long)
            return {"start_positions": first, "end_positions": first.clone()}
        if "labels" not in names:
            return {}
        if kind.endswith(_TOKEN_LABELS) and tokens is not None:
            return {"labels": self._tokens(tokens.shape[1])}
        classes = getattr(self.config, "num_labels", 0)
        if kind.endswith(_CLASS_LABELS) and classes > 1:
            return {"labels": token_ids((self.batch,), classes)}
        if kind.endswith("ForTokenClassification") and tokens is not None:
            return {"labels": token_ids(tuple(tokens.shape), classes)}
        return {}
