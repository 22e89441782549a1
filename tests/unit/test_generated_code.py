"""What is read from Inductor's generated code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fa_advisor.attribution.arena import Given
from fa_advisor.attribution.generated_code import GeneratedCode
from fa_advisor.attribution.join import Joiner
from fa_advisor.probes.events import Phase

FORWARD = """
class Runner:
    def recursively_apply_fns(self, fns):
        new_callables = []

    def call(self, args):
        primals_1, primals_2, primals_3 = args
        args.clear()
        assert_size_stride(primals_2, (192, ), (1, ), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((256, 192), (192, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
            extern_kernels.addmm(primals_2, primals_1, primals_3, alpha=1, beta=1, out=buf0)
            del primals_1
            buf1 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [matmul], Original ATen: [aten.bmm]
            extern_kernels.bmm(reinterpret_tensor(buf0, (8, 128, 16), (6144, 192, 1), 0), buf0, out=buf1)
            buf2 = empty_strided_cuda((2, 4, 128, 1), (512, 128, 1, 1024), torch.float32)
            buf3 = empty_strided_cuda((2, 4, 128, 128), (65536, 16384, 128, 1), torch.bfloat16)
            buf4 = empty_strided_cuda((2, 4, 128, 128), (65536, 16384, 128, 1), torch.bool)
            # Topologically Sorted Source Nodes: [softmax], Original ATen: [aten._softmax]
            stream0 = get_raw_stream(0)
            triton_per_fused__softmax_native_dropout_1.run(buf1, buf2, buf3, buf4, 8, 1024, stream=stream0)
            buf5 = buf3; del buf3  # reuse
            buf6 = empty_strided_cuda((8, 128, 16), (2048, 16, 1), torch.bfloat16)
            extern_kernels.bmm(reinterpret_tensor(buf5, (8, 128, 128), (16384, 128, 1), 0), buf0, out=buf6)
            buf7 = empty_strided_cuda((1024, 128), (128, 1), torch.float32)
            triton_per_fused__log_softmax_2.run(buf6, buf7, 1024, 128, stream=stream0)
            buf8 = empty_strided_cuda((s0, 128, 128), (16384, 128, 1), torch.bfloat16)
            buf9 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(buf8, buf8, buf8)
            buf10 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
            extern_kernels.bmm(buf6, buf6, out=buf10)
            # The score's own memory is used again for what comes of it.
            triton_per_fused__softmax_3.run(buf10, 1024, 128, stream=stream0)
            buf11 = reinterpret_tensor(buf10, (2, 4, 128, 128), (65536, 16384, 128, 1), 0); del buf10  # reuse
            extern_kernels.bmm(reinterpret_tensor(buf11, (8, 128, 128), (16384, 128, 1), 0), buf6, out=buf0)
            # As large as a score, but no softmax reads the one, and dropout makes the other.
            buf12 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
            extern_kernels.bmm(buf6, buf6, out=buf12)
            extern_kernels.bmm(buf12, buf6, out=buf0)
            buf13 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
            triton_poi_fused_native_dropout_view_clone_expand_where_zeros_4.run(buf11, buf13, 131072)
            extern_kernels.bmm(buf13, buf6, out=buf0)
        return (buf6, buf7, )
"""  # noqa: E501
BACKWARD = """
def call(args):
    tangents_1, = args
    buf0 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
    extern_kernels.bmm(tangents_1, tangents_1, out=buf0)
    buf1 = empty_strided_cuda((8, 128, 128), (16384, 128, 1), torch.bfloat16)
    triton_red_fused__softmax_backward_data_0.run(buf0, buf1, 1024, 128, stream=stream0)
    buf2 = empty_strided_cuda((64, 64), (64, 1), torch.bfloat16)
    extern_kernels.mm(tangents_1, tangents_1, out=buf2)
"""
NAME = "c" + "a" * 51 + ".py"


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """The frames of an allocation, by a piece of its line."""

    def frames(text: str, piece: str) -> list[dict[str, Any]]:
        file = tmp_path / NAME
        file.write_text(text)
        (line,) = (at for at, x in enumerate(text.splitlines(), 1) if x.strip().startswith(piece))
        made = {"filename": str(file), "line": line, "name": "call"}
        return [made, {"filename": "/home/me/model.py", "line": 9, "name": "forward"}]

    return frames


@pytest.mark.parametrize(
    ("text", "piece", "op", "role"),
    [
        (FORWARD, "buf0 =", "addmm", None),
        (FORWARD, "buf1 =", "bmm", "attention_score"),
        (FORWARD, "buf2 =", "_softmax_native_dropout", None),
        (FORWARD, "buf3 =", "_softmax_native_dropout", "attention_prob"),
        (FORWARD, "buf4 =", "_softmax_native_dropout", "attention_dropout"),
        (FORWARD, "buf6 =", "bmm", None),
        (FORWARD, "buf7 =", "_log_softmax", None),
        (FORWARD, "buf8 =", "_scaled_dot_product_cudnn_attention", None),
        (FORWARD, "buf10 =", "bmm", "attention_prob"),
        (FORWARD, "buf12 =", "bmm", None),
        (FORWARD, "buf13 =", "native_dropout_view_clone_expand_where_etc", "attention_prob"),
        (BACKWARD, "buf0 =", "bmm", "attention_grad"),
        (BACKWARD, "buf1 =", "_softmax_backward_data", "attention_grad"),
        (BACKWARD, "buf2 =", "mm", None),
    ],
)
def test_what_fills_a_buffer(
    written: Any, text: str, piece: str, op: str, role: str | None
) -> None:
    found = GeneratedCode().buffer(written(text, piece))
    assert found is not None and (found.op, found.role) == (op, role)
    assert (found.shape is None) == (piece == "buf8 =")


def test_what_is_no_allocation_or_isnt_there(written: Any, tmp_path: Path) -> None:
    code = GeneratedCode()
    assert code.buffer(written(FORWARD, "return (buf6")) is None
    assert code.buffer([{"filename": str(tmp_path / "gone" / NAME), "line": 3, "name": ""}]) is None
    assert code.buffer([{"filename": "/home/me/model.py", "line": 3, "name": ""}]) is None
    assert code.buffer([]) is None
    (tmp_path / NAME).write_bytes(b"\xff\x00def call(\n")
    assert (
        GeneratedCode().buffer([{"filename": str(tmp_path / NAME), "line": 1, "name": ""}]) is None
    )


def test_a_block_of_compiled_code_is_attentions(written: Any) -> None:
    nbytes = 2 * 4 * 128 * 128 * 2
    given = Given(0, 1 << 40, nbytes, nbytes, (0, 0, 0))
    storage = Joiner()._outside(given, written(FORWARD, "buf3 ="), Phase.FORWARD)
    assert storage.category() == "attention_prob" and not storage.unseen
    assert (storage.op, storage.shape) == ("compiled _softmax_native_dropout", (2, 4, 128, 128))
    assert storage.dtype == "bfloat16" and storage.source == ("/home/me/model.py", 9)
