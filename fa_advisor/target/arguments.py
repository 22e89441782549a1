"""Values for the parameters of a forward, from their names and the model's first layer.

Shapes: B batch, L sequence, D width, C channels, H height, W width of an image, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fa_advisor.errors import UsageError
from fa_advisor.target import geometry
from fa_advisor.target.sizes import fitting_seq_len
from fa_advisor.target.tensors import causal_mask, floats, token_ids

TOKENS = {"input_ids", "idx", "ids", "tokens", "token_ids", "input_tokens", "text", "src_tokens"}
IMAGES = {"pixel_values", "image", "images", "img", "imgs", "pixels"}
SECOND_TOKENS = {"tgt", "trg", "target", "tgt_tokens", "decoder_input_ids", "prev_output_tokens"}
SECOND_HIDDEN = {"memory", "context", "encoder_hidden_states", "cond", "tgt", "key", "value"}
TARGETS = ("labels", "targets", "target", "label", "y")
STEPS = {"t", "timestep", "timesteps", "time", "sigma", "noise_level"}
POSITIONS = {"position_ids", "positions", "pos", "input_pos"}
ZEROS_BL = {"token_type_ids", "segment_ids", "segments"}
MASKS = {"mask", "attn_mask", "src_mask", "tgt_mask", "causal_mask"}
CLASSES = {"y", "labels", "label", "class_labels", "targets", "target"}

NEED_INPUTS = """\
Add these lines to the target's file:

    def get_inputs(batch_size=1, seq_len=1024):
        tokens = torch.randint(0, 50257, (batch_size, seq_len))
        return {"input_ids": tokens}
"""


@dataclass(kw_only=True)
class Arguments:
    """Makes arguments for one model; all that it makes agree in batch and length."""

    model: nn.Module
    batch: int
    seq_len: int | None
    dtype: torch.dtype

    @cached_property
    def length(self) -> int:
        """L. Raises: UsageError where more is asked for than the model has positions."""
        return fitting_seq_len(
            self.seq_len, geometry.max_positions(self.model), type(self.model).__name__
        )

    @cached_property
    def embeddings(self) -> list[nn.Module]:
        return geometry.token_embeddings(self.model)

    @cached_property
    def has_images(self) -> bool:
        """Whether the first argument is an image: an image has no sequence to set the length of."""
        return isinstance(self._first_layer(), nn.Conv2d)

    def is_main(self, name: str) -> bool:
        """Whether a parameter of this name is an input, whatever its default."""
        return name in IMAGES or (name in TOKENS and bool(self.embeddings))

    def first(self, name: str) -> Tensor:
        """The forward's first argument."""
        if name in IMAGES:
            return self._image()
        if name in TOKENS and self.embeddings:
            return self._tokens(0)
        layer = self._first_layer()
        match layer:
            case nn.Conv3d():
                return self._video(layer)
            case nn.Conv2d():
                return self._image()
            case nn.Conv1d():
                return floats((self.batch, layer.in_channels, self.length), self.dtype)
            case nn.RNNBase():
                return self._hidden(layer.input_size, sequence_first=not layer.batch_first)
            case nn.MultiheadAttention():
                return self._hidden(layer.embed_dim, sequence_first=not layer.batch_first)
            case nn.Linear():
                return self._features(layer)
            case nn.Module():
                return self._tokens(0)
        width = geometry.width(self.model)
        if width is None or name in ("batch", "data"):
            raise self._unknown(name)
        return self._hidden(width)

    def further(self, name: str) -> Any:
        """An argument after the first."""
        last = name.lower()
        if last in IMAGES:
            return self._image()
        if self.has_images and last in CLASSES:
            return torch.zeros(self.batch, dtype=torch.long)
        if self.embeddings and not self.has_images:
            if last in SECOND_TOKENS:
                return self._tokens(1)
            if last in CLASSES | TOKENS:
                return self._tokens(0)
        if last in STEPS:
            return torch.full((self.batch,), 500)
        if last in POSITIONS:
            return torch.arange(self.length).repeat(self.batch, 1)
        if last in ZEROS_BL:
            return torch.zeros((self.batch, self.length), dtype=torch.long)
        if last == "attention_mask":
            return torch.ones((self.batch, self.length), dtype=torch.long)
        if last in MASKS:
            own = not any(isinstance(m, nn.MultiheadAttention) for m in self.model.modules())
            return causal_mask(self.length, leading=(1,) if own else ())
        if last == "start_pos":
            return 0
        if last in SECOND_HIDDEN:
            return self._second_hidden()
        raise self._unknown(name)

    def targets(self, optional: list[str]) -> dict[str, Tensor]:
        """Token ids for the parameter that makes a language model compute its loss, if any."""
        name = next((each for each in TARGETS if each in optional), None)
        if name is None or self.has_images or not self.embeddings:
            return {}
        if not geometry.has_language_head(self.model, self._vocabulary(0)):
            return {}
        return {name: self._tokens(0)}

    def _first_layer(self) -> nn.Module | None:
        """The layer that reads the first argument, as far as the order of registration tells."""
        known = (
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.RNNBase,
            nn.MultiheadAttention,
            nn.Linear,
        )
        tokens = {id(each) for each in self.embeddings}
        layers: list[nn.Module] = [
            m for m in self.model.modules() if isinstance(m, known) or id(m) in tokens
        ]
        parameters = set(self._parameter_names())
        if parameters & STEPS:
            # Diffusion: what embeds the time step may come first, what reads the image counts.
            layers = [m for m in layers if isinstance(m, nn.Conv2d)] or layers
        elif self.embeddings and layers and isinstance(layers[0], nn.Linear):
            # A language model may register its head before its embedding.
            single = len(parameters - {"self"}) == 1
            layers = [self.embeddings[0]] if single else layers
        return layers[0] if layers else None

    def _parameter_names(self) -> list[str]:
        code = getattr(type(self.model).forward, "__code__", None)
        return list(code.co_varnames[: code.co_argcount]) if code else []

    def _vocabulary(self, index: int) -> int:
        embedding = self.embeddings[min(index, len(self.embeddings) - 1)]
        return int(embedding.num_embeddings)  # type: ignore[arg-type]

    def _tokens(self, index: int) -> Tensor:
        shape = (self.batch, self.length)
        if geometry.takes_sequence_first(self.model) and geometry.has_sequence_first_positions(
            self.model
        ):
            shape = (self.length, self.batch)
        embedding = self.embeddings[min(index, len(self.embeddings) - 1)]
        padding = getattr(embedding, "padding_idx", None)
        return token_ids(shape, self._vocabulary(index), () if padding is None else (padding,))

    def _image(self) -> Tensor:
        self._refuse_seq_len()
        return floats((self.batch, *geometry.image_shape(self.model)), self.dtype)

    def _video(self, layer: nn.Conv3d) -> Tensor:
        self._refuse_seq_len()
        _, height, width = geometry.image_shape(self.model)
        frames = geometry.whole(self.model, ("num_frames", "frames", "n_frames")) or 16
        return floats((self.batch, layer.in_channels, frames, height, width), self.dtype)

    def _refuse_seq_len(self) -> None:
        if self.seq_len is not None and not self.embeddings:
            raise UsageError(
                f"--seq-len can't be set for {type(self.model).__name__}, which takes images",
                hint="its length follows from the size of the image; give inputs of another size",
            )

    def _hidden(self, width: int, *, sequence_first: bool = False) -> Tensor:
        shape = (self.length, self.batch) if sequence_first else (self.batch, self.length)
        return floats((*shape, width), self.dtype)

    def _features(self, layer: nn.Linear) -> Tensor:
        """[B, L, D], or [B, D] for what flattens its input or normalises it over the batch."""
        flat = (nn.Flatten, nn.BatchNorm1d)
        if self.seq_len is None and any(isinstance(m, flat) for m in self.model.modules()):
            return floats((self.batch, layer.in_features), self.dtype)
        return self._hidden(layer.in_features)

    def _second_hidden(self) -> Tensor:
        cross = geometry.whole(self.model, ("context_dim", "cross_attention_dim"))
        layer = self._first_layer()
        width = cross or getattr(layer, "embed_dim", None) or geometry.width(self.model)
        if width is None and isinstance(layer, nn.Linear):
            width = layer.in_features
        if not isinstance(width, int):
            raise self._unknown("memory")
        return self._hidden(width, sequence_first=geometry.takes_sequence_first(self.model))

    def _unknown(self, name: str) -> UsageError:
        what = f"the argument {name!r} of " if name else ""
        return UsageError(
            f"can't make inputs up for {what}{type(self.model).__name__}'s forward: looked for "
            "an embedding (token ids), a convolution (images), a linear or attention layer or a "
            "d_model (hidden states), and a parameter name that says what it takes",
            hint="give the inputs: `inputs`, `example_inputs` or `get_inputs` beside the model",
            detail=NEED_INPUTS,
        )
