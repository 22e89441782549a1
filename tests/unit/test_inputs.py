"""Inputs that are made up for a model: they fit, and they make a language model take its loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fa_advisor.errors import UsageError
from fa_advisor.target import synthesise

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 101,
}
VISION = {**SMALL, "image_size": 64, "patch_size": 32}
PAIR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 101,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def made(model: nn.Module, mode: str = "infer", **sizes: int | None) -> dict[str, Any]:
    """The inputs by parameter name, after a forward that took them."""
    sizes = {"batch_size": None, "seq_len": None} | sizes
    args, kwargs = synthesise(model, mode=mode, dtype=torch.float32, **sizes)
    names = list(type(model).forward.__code__.co_varnames[1:])
    model.train(mode == "train")
    with torch.no_grad():
        output = model(*args, **kwargs)
    return dict(zip(names, args, strict=False)) | kwargs | {"output": output}


def shapes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name != "output"
    }


def test_causal_language_model_gets_token_ids_and_its_labels() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=101)
    )
    assert shapes(made(model)) == {"input_ids": (1, 1024)}
    inputs = made(model, "train", batch_size=3, seq_len=16)
    assert shapes(inputs) == {"input_ids": (3, 16), "labels": (3, 16)}
    assert inputs["output"].loss.ndim == 0
    assert inputs["input_ids"].max() < 101


def test_positions_that_count_from_the_padding_index_are_fewer() -> None:
    config = transformers.RobertaConfig(**SMALL, max_position_embeddings=514, pad_token_id=1)
    model = transformers.RobertaForMaskedLM(config)
    assert shapes(made(model)) == {"input_ids": (1, 512)}
    assert not (made(model)["input_ids"] == 1).any()


def test_encoder_decoder() -> None:
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR))
    inputs = made(model, "train", seq_len=20)
    assert shapes(inputs) == dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), (1, 20))
    assert inputs["output"].loss is not None


def test_t5_without_a_start_token_still_takes_its_loss() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    inputs = made(transformers.T5ForConditionalGeneration(config), "train", seq_len=20)
    assert inputs["output"].loss is not None


def test_whisper_takes_a_spectrogram_and_as_many_tokens_as_its_decoder() -> None:
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**PAIR))
    assert shapes(made(model)) == {
        "input_features": (1, 80, 3000),
        "decoder_input_ids": (1, 448),
    }
    with pytest.raises(UsageError, match="448 positions"):
        made(model, seq_len=449)


def test_wave_of_as_many_frames_as_asked_for() -> None:
    config = transformers.Wav2Vec2Config(
        **{**SMALL, "vocab_size": 32},
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    inputs = made(transformers.Wav2Vec2ForCTC(config), seq_len=50)
    assert inputs["output"].logits.shape[1] == 50


def test_image_classifier() -> None:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=7))
    inputs = made(model, "train", batch_size=2)
    assert shapes(inputs) == {"pixel_values": (2, 3, 64, 64), "labels": (2,)}
    with pytest.raises(UsageError, match="takes images"):
        made(model, seq_len=64)


def test_pair_of_text_and_image() -> None:
    config = transformers.CLIPConfig(text_config=SMALL, vision_config=VISION, projection_dim=16)
    inputs = made(transformers.CLIPModel(config), "train", batch_size=2)
    assert shapes(inputs) == {"input_ids": (2, 77), "pixel_values": (2, 3, 64, 64)}
    assert inputs["output"].loss is not None


def test_model_of_an_unknown_kind_says_what_was_looked_for() -> None:
    model = transformers.InformerModel(transformers.InformerConfig(prediction_length=4))
    with pytest.raises(UsageError, match="past_values") as raised:
        made(model)
    assert "get_inputs" in raised.value.detail


class Decoder(nn.Module):
    """A hand-written language model whose length is bounded by its table and its mask."""

    def __init__(self, positions: int = 48) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 8)
        self.pos_emb = nn.Parameter(torch.zeros(1, positions, 8))
        self.register_buffer("tril", torch.ones(positions, positions).tril())
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.tok(x) + self.pos_emb[:, : x.size(1)])
        loss = None if y is None else nn.functional.cross_entropy(logits.mT, y)
        return logits, loss


def test_hand_written_language_model() -> None:
    assert shapes(made(Decoder())) == {"x": (1, 48)}
    inputs = made(Decoder(), "train", batch_size=2, seq_len=10)
    assert shapes(inputs) == {"x": (2, 10), "y": (2, 10)}
    assert inputs["output"][1] is not None


def test_length_beyond_the_positions_names_the_maximum() -> None:
    with pytest.raises(UsageError, match="--seq-len is 49, but Decoder has 48 positions"):
        made(Decoder(), seq_len=49)


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"seq_len": 0}, {"batch_size": -1}])
def test_sizes_below_one(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        made(Decoder(), **sizes)


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 64)
        self.embed = nn.Embedding(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.embed(x))


class Seq2Seq(nn.Module):
    """As in the annotated transformer: two vocabularies and two masks, all required."""

    def __init__(self) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(64, 8)
        self.tgt_embed = nn.Embedding(32, 8)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        memory = self.src_embed(src)
        q = self.tgt_embed(tgt)
        scores = (q @ memory.mT)[:, None].masked_fill(tgt_mask.unsqueeze(1) == 0, -math.inf)
        return scores.softmax(-1) @ memory[:, None]


class PatchTransformer(nn.Module):
    """A ViT without an image size: 36 patches of 8 and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 37, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size = 16
        self.time = nn.Linear(1, 8)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.classes = nn.Embedding(10, 8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        shift = self.time(t[:, None].float()) + self.classes(y)
        return self.conv(x) + shift[:, :, None, None]


class ReferenceLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 8)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        return self.tok_embeddings(tokens)[:, start_pos:]


class SequenceFirst(nn.Module):
    """torch's own tutorial: [L, B] all through."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.register_buffer("pe", torch.zeros(100, 1, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, src: Tensor) -> Tensor:
        return self.encoder(self.embedding(src) + self.pe[: len(src)])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (HeadFirst(), {"x": (1, 1024)}),
        (
            Seq2Seq(),
            {
                "src": (1, 1024),
                "tgt": (1, 1024),
                "src_mask": (1, 1024, 1024),
                "tgt_mask": (1, 1024, 1024),
            },
        ),
        (PatchTransformer(), {"x": (1, 1, 48, 48)}),
        (Diffusion(), {"x": (1, 4, 16, 16), "t": (1,), "y": (1,)}),
        (ReferenceLlama(), {"tokens": (1, 1024)}),
        (SequenceFirst(), {"src": (100, 1)}),
        (nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), {"src": (1, 1024, 16)}),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 1), {"src": (1024, 1, 16)}),
        (
            nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 16), 1),
            {"tgt": (1024, 1, 16), "memory": (1024, 1, 16)},
        ),
        (
            nn.Transformer(16, 2, 1, 1, 16, batch_first=True),
            {"src": (1, 1024, 16), "tgt": (1, 1024, 16)},
        ),
        (
            nn.MultiheadAttention(16, 2, batch_first=True),
            dict.fromkeys(("query", "key", "value"), (1, 1024, 16)),
        ),
        (nn.Sequential(nn.Linear(12, 3), nn.ReLU()), {"input": (1, 1024, 12)}),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), {"input": (1, 12)}),
        (nn.Sequential(nn.Conv1d(5, 3, 3), nn.ReLU()), {"input": (1, 5, 1024)}),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), {"input": (1, 3, 224, 224)}),
        (nn.LSTM(6, 4, batch_first=True), {"input": (1, 1024, 6)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_plain_models(model: nn.Module, expected: dict[str, tuple[int, ...]]) -> None:
    # Sequential and LSTM take *args or overloads, whose parameter is called `input`.
    inputs = made(model)
    assert list(shapes(inputs).values())[: len(expected)] == list(expected.values())


def test_batch_norm_trains_on_two() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    args, _ = synthesise(model, batch_size=None, seq_len=None, mode="train", dtype=torch.float32)
    assert args[0].shape == (2, 4)


def test_floats_have_the_dtype_asked_for() -> None:
    args, _ = synthesise(
        nn.Linear(4, 4), batch_size=1, seq_len=2, mode="infer", dtype=torch.bfloat16
    )
    assert args[0].dtype == torch.bfloat16


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class NeedsRotations(ReferenceLlama):
    def forward(self, tokens: Tensor, freqs_cis: Tensor) -> Tensor:
        return self.tok_embeddings(tokens)


@pytest.mark.parametrize(("model", "name"), [(Opaque(), "'x'"), (NeedsRotations(), "freqs_cis")])
def test_what_cannot_be_made_up_is_said_with_the_lines_to_add(model: nn.Module, name: str) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        made(model)
    assert "def get_inputs(batch_size" in raised.value.detail


def test_container_without_a_forward() -> None:
    with pytest.raises(UsageError, match="no forward"):
        made(nn.ModuleList([nn.Linear(2, 2)]))


def test_no_randomness_of_the_targets_is_used() -> None:
    model = Decoder()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    synthesise(model, batch_size=1, seq_len=4, mode="train", dtype=torch.float32)
    assert torch.equal(torch.rand(3), expected)


def test_on_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        args, kwargs = synthesise(
            Decoder(), batch_size=2, seq_len=8, mode="train", dtype=torch.float32
        )
    assert args[0].shape == kwargs["y"].shape == (2, 8)
