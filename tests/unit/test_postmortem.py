"""Snapshots explained: what is said of a real out-of-memory error, and of files that are none."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from fa_advisor.attribution.chrome_trace import encode
from fa_advisor.attribution.postmortem import Postmortem, explain, json_schema_text
from fa_advisor.attribution.snapshots import checked, read
from fa_advisor.cli import cli
from fa_advisor.errors import UsageError
from fa_advisor.views.text_postmortem import to_text

SNAPSHOTS = Path(__file__).parent / "snapshots"
SCHEMA = Path(__file__).parents[2] / "fa_advisor" / "postmortem.schema.json"
MIB = 2**20


def loaded(name: str) -> dict[str, Any]:
    packed = (SNAPSHOTS / f"{name}.pickle.gz").read_bytes()
    value: dict[str, Any] = pickle.loads(gzip.decompress(packed))
    return value


def explained(name: str) -> Postmortem:
    return explain(checked(loaded(name)).traces[0], snapshot=f"{name}.pickle", device=0)


@pytest.fixture
def oom(tmp_path: Path) -> Path:
    path = tmp_path / "oom.pickle"
    path.write_bytes(gzip.decompress((SNAPSHOTS / "oom.pickle.gz").read_bytes()))
    return path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["postmortem", *args])


@pytest.mark.parametrize("name", ["train", "expand", "oom", "compile"])
def test_everything_adds_up(name: str) -> None:
    found = explained(name)
    assert sum(found.kinds.values()) + found.slack_bytes == found.allocated_bytes
    assert sum(line.bytes for line in found.lines) == sum(found.kinds.values())
    above = found.pending_bytes + found.cached_bytes + found.fragmented_bytes
    assert found.allocated_bytes + above == found.reserved_bytes
    assert 0 <= found.slack_bytes < found.allocated_bytes // 50
    assert found.kinds.get("unknown", 0) <= 8192  # one block that is older than the history
    assert max(allocated for _, allocated in found.timeline) >= found.allocated_bytes


def test_the_error_that_was_provoked_is_explained() -> None:
    """A training that doubles its batch until a limit of 400 MiB refuses the loss's gradient."""
    found = explained("oom")
    request = found.request
    assert found.moment == "out_of_memory" and request is not None
    # [8 x 512, 2000] logits in fp32: what backward of the loss makes first.
    assert request.bytes == 8 * 512 * 2000 * 4
    assert request.cause == "limit" and request.device_free_bytes > 100 * 2**30
    assert found.kinds["optimizer"] == 2 * 4_708_352 == 2 * found.kinds["weights"]
    # Two layers' P in bf16, its dropout mask and dropped copy, [8, 4, 512, 512] each.
    probabilities = 8 * 4 * 512 * 512 * 2
    lines = {line.source: line for line in found.lines if line.in_attention}
    assert lines["modeling_gpt2.py:63"].bytes == 2 * probabilities
    assert lines["modeling_gpt2.py:67"].bytes == 2 * (probabilities + probabilities // 2)
    kinds = [remedy.kind for remedy in found.remedies]
    assert kinds == ["limit", "patch", "batch"] and found.remedies[1].enough


def test_a_history_without_a_failure_is_explained_at_its_peak() -> None:
    found = explained("train")
    assert found.moment == "peak" and found.request is None and not found.remedies
    assert found.allocated_bytes == loaded("train")["stats"]["allocated_bytes.all.peak"]


def test_inductors_code_is_traced_back_to_the_model() -> None:
    sources = {line.source for line in explained("compile").lines if line.kind == "compiled"}
    assert "modeling_gpt2.py:67" in sources
    assert not any(source and source.startswith("c") and len(source) > 50 for source in sources)


def test_fragmentation_is_recognised() -> None:
    """Ten segments of 20 MiB, every other 10 MiB freed: 100 MiB are free, and 30 find no place."""
    segments, events = [], []
    for index in range(10):
        base = (index + 1) << 32
        blocks = [
            {"address": base, "size": 10 * MIB, "requested_size": 10 * MIB,
             "state": "active_allocated", "frames": []},
            {"address": base + 10 * MIB, "size": 10 * MIB, "requested_size": 0,
             "state": "inactive", "frames": []},
        ]  # fmt: skip
        segments.append({"device": 0, "address": base, "total_size": 20 * MIB, "blocks": blocks})
    events.append({"action": "oom", "size": 30 * MIB, "device_free": 4 * MIB, "frames": []})
    trace = checked({"segments": segments, "device_traces": [events]}).traces[0]
    found = explain(trace, snapshot="f", device=0)
    assert found.request is not None and found.request.cause == "fragmentation"
    assert found.request.missing_bytes == 26 * MIB and found.largest_free_bytes == 10 * MIB
    assert "expandable_segments" in found.remedies[0].text


# -- files ----------------------------------------------------------------------------------


def test_text_json_and_perfetto(oom: Path, tmp_path: Path) -> None:
    text = invoke(str(oom))
    assert text.exit_code == 0, text.output
    assert "OUT OF MEMORY" in text.stdout and "eager_attention_forward" in text.stdout
    trace, out = tmp_path / "t.json", tmp_path / "p.json"
    done = invoke(str(oom), "-o", str(out), "--trace", str(trace))
    assert done.exit_code == 0 and done.stdout == ""
    as_json = invoke(str(oom), "--format", "json")
    assert json.loads(as_json.stdout) == json.loads(out.read_text())
    jsonschema.validate(json.loads(out.read_text()), json.loads(SCHEMA.read_text()))
    events = json.loads(trace.read_text())["traceEvents"]
    begun = {e["id"] for e in events if e["ph"] == "b"}
    assert begun and begun == {e["id"] for e in events if e["ph"] == "e"}
    heights = [e["args"]["bytes"] for e in events if e.get("name") == "allocated"]
    assert max(heights) == loaded("oom")["stats"]["allocated_bytes.all.peak"]
    reserved = [e["args"]["bytes"] for e in events if e.get("name") == "reserved"]
    assert reserved[-1] == loaded("oom")["stats"]["reserved_bytes.all.current"]
    assert any(e["ph"] == "i" for e in events)


def test_the_schema_is_the_records() -> None:
    assert json_schema_text() == SCHEMA.read_text()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_and_has_an_ascii_form(width: int) -> None:
    found = explained("oom")
    assert all(len(line) <= width for line in to_text(found, width).splitlines())
    assert to_text(found, width, ascii=True).isascii()


def test_names_are_text() -> None:
    value = loaded("train")
    for event in value["device_traces"][0]:
        for frame in event["frames"]:
            frame["filename"] = "/tmp/[red]\x1b[31m\u202eevil.py"
            frame["name"] = "[bold]\x07f"
    text = to_text(explain(checked(value).traces[0], snapshot="\x1b]0;x\x07", device=0))
    assert "\x1b" not in text and "\x07" not in text and "[red]" in text
    json.loads(encode(checked(value).traces[0], 0))


def test_neither_torch_nor_a_gpu_is_needed(oom: Path) -> None:
    code = (
        "import sys; from fa_advisor.cli import cli\n"
        f"cli.main(['postmortem', {str(oom)!r}], standalone_mode=False)\n"
    )
    # The group always exits; what it has imported by then is asked for on the way out.
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n" + code
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.strip().endswith("False"), done.stderr


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    path, touched = tmp_path / "s.pickle", tmp_path / "touched"
    path.write_bytes(pickle.dumps({"segments": [Harmful(touched)], "device_traces": []}))
    result = invoke(str(path))
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2
    assert "more than plain containers" in result.stderr and not touched.exists()


def laughs() -> list[Any]:
    """A thousand billion words, in forty lists."""
    value: list[Any] = ["lol"]
    for _ in range(40):
        value = [value, value]
    return value


LAUGHS = laughs()
SEGMENT = {"device": 0, "address": 0, "total_size": 512, "blocks": [{"size": 512, "state": "x"}]}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"segments": {}, "device_traces": []},
        {"segments": [], "device_traces": []},
        {"segments": [3], "device_traces": []},
        {"segments": [SEGMENT], "device_traces": []},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "1"}]]},
        {"segments": [], "device_traces": [[{"action": 7, "addr": 1, "size": 1}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "frames": [1]}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "frames": [{"name": "f"}]}]]},
        {"segments": [], "device_traces": [7]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 2**90, "size": 1}]]},
        {"segments": [{**SEGMENT, "blocks": [{"size": 512, "state": ["x"]}]}]},
        {"segments": [{**SEGMENT, "blocks": [{"size": 512, "state": {}}]}]},
        {"segments": [{**SEGMENT, "device": LAUGHS}]},
        {"segments": [{**SEGMENT, "blocks": [{"size": 512, "state": LAUGHS}]}]},
    ],
    ids=range(17),  # pytest would write the values out
)
def test_a_foreign_pickle_is_a_message(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(UsageError, match="not a memory snapshot"):
        read(path)
    assert invoke(str(path)).exit_code == 2


def oom_of(**segment: Any) -> dict[str, Any]:
    """A block of one MiB in a segment of two, and a request that found no memory."""
    blocks = [
        {"size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": []},
        {"size": MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    made = {"device": 0, "address": 1 << 30, "total_size": 2 * MIB, "blocks": blocks, **segment}
    events = [{"action": "oom", "size": 2**40, "device_free": 5, "frames": []}]
    return {"segments": [made], "device_traces": [events]}


def explained_of(value: dict[str, Any]) -> Postmortem:
    return explain(checked(value).traces[0], snapshot="s", device=0)


def test_values_that_nobody_needs_are_never_written_out() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (LAUGHS, deep):
        with pytest.raises(Exception, match=r"`device` isn't a number.*: a list"):
            checked(oom_of(device=value))
        harmless = oom_of()
        harmless["device_traces"][0][0]["user_metadata"] = value
        assert explained_of(harmless).failures == 1


def test_a_wrong_size_is_shown() -> None:
    with pytest.raises(Exception, match="'2097152'"):
        checked(oom_of(total_size="2097152"))
    with pytest.raises(Exception, match="add up to 2,097,152 bytes, its size is 7"):
        checked(oom_of(total_size=7))
    with pytest.raises(Exception, match="an integer of 4,001 bits"):
        checked(oom_of(total_size=1 << 4000))


def test_names_that_are_no_utf8_are_shown_escaped(tmp_path: Path) -> None:
    value = oom_of()
    frame = {"filename": "/a/\ud800t.py", "line": 3, "name": "f\udcff"}
    value["segments"][0]["blocks"][0]["frames"] = [frame]
    value["device_traces"][0][0].update(frames=[frame], user_metadata="1 op\ud800")
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.pickle"))
    path.write_bytes(pickle.dumps(value))
    trace = path.with_suffix(".json")
    shown = invoke(str(path), "--format", "json", "--trace", str(trace))
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["lines"][0]["source"] == "?t.py:3"
    assert found["request"]["function"] == "f\\udcff" and "caf\\udce9" in found["snapshot"]
    assert json.loads(trace.read_bytes()) and frame["name"] == "f\udcff"
    for out in ("o.json", "o.txt"):
        assert invoke(str(path), "-o", str(tmp_path / out)).exit_code == 0


def test_a_contradiction_is_said() -> None:
    unmapped = oom_of()
    event = {"action": "segment_unmap", "addr": 1 << 30, "size": 1000, "frames": []}
    unmapped["device_traces"][0].insert(0, event)
    twice = oom_of()
    twice["segments"] *= 2
    doubled = loaded("oom")
    doubled["device_traces"][0] *= 2
    for value in (unmapped, twice, doubled):
        found = explained_of(value)
        assert any("contradicts itself" in note for note in found.notes)
        assert to_text(found)
    assert not explained_of(oom_of()).notes[1:]


def test_no_share_of_a_batch_is_advised_where_none_fits() -> None:
    value = oom_of()
    assert not [r for r in explained_of(value).remedies if r.kind == "batch"]
    value["device_traces"][0][0]["device_free"] = 2**39
    (batch,) = [r for r in explained_of(value).remedies if r.kind == "batch"]
    assert "at 50% of this batch" in batch.text and "1.00 TiB" in batch.text


def test_many_segments_take_no_square_of_their_number() -> None:
    """Mapped piece by piece, and unmapped in the middle: minutes if each looked at all others."""
    page, count = 2 * MIB, 20_000
    blocks = [
        {"size": page, "requested_size": page, "state": "active_allocated", "frames": []}
    ] * count
    stride = 2 * page
    segments = [
        {"device": 0, "address": (index + 1) * stride, "total_size": page, "blocks": [block]}
        for index, block in enumerate(blocks)
    ]
    events: list[dict[str, Any]] = []
    for segment in segments:
        at = {"addr": segment["address"], "frames": []}
        events.append({"action": "segment_map", "size": page, **at})
        events.append({"action": "alloc", "size": page, **at})
    far = (count + 2) * stride
    events.append({"action": "segment_map", "addr": far, "size": count * page, "frames": []})
    for index in range(1, count, 2):
        address = far + index * page
        events.append({"action": "segment_unmap", "addr": address, "size": page, "frames": []})
    for index in range(0, count, 2):
        blocks = [{"size": page, "state": "inactive"}]
        address = far + index * page
        segments.append({"device": 0, "address": address, "total_size": page, "blocks": blocks})
    settings = {"expandable_segments": True}
    value = {"segments": segments, "device_traces": [events], "allocator_settings": settings}
    began = time.monotonic()
    found = explained_of(value)
    assert time.monotonic() - began < 20
    assert found.allocated_bytes == count * page and not found.notes


def test_each_output_is_written_on_its_own(oom: Path, tmp_path: Path) -> None:
    out, nowhere = tmp_path / "good.json", str(tmp_path / "nowhere" / "t.json")
    result = invoke(str(oom), "--trace", nowhere, "-o", str(out))
    assert result.exit_code == 2 and json.loads(out.read_text())["failures"]
    assert f"can't write {nowhere}" in result.stderr and "give -o" not in result.stderr
    trace = tmp_path / "t.json"
    assert invoke(str(oom), "--trace", str(trace), "-o", nowhere).exit_code == 2
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x04", b"{}", b"\x80\x04]."])
def test_other_files_are_messages(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    result = invoke(str(path))
    assert result.exit_code == 2 and "hint:" in result.stderr


def test_a_missing_file_a_wrong_device_and_a_wrong_suffix(oom: Path) -> None:
    for args in (["nowhere.pickle"], [str(oom), "--device", "3"], [str(oom), "-o", "x.csv"]):
        result = invoke(*args)
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_history_that_contradicts_itself_is_still_explained() -> None:
    value = loaded("train")
    del value["device_traces"][0][100:300]
    found = explain(checked(value).traces[0], snapshot="s", device=0)
    assert sum(found.kinds.values()) + found.slack_bytes == found.allocated_bytes
    assert to_text(found)


def test_a_snapshot_without_history_shows_what_is_alive() -> None:
    value = loaded("train")
    value["device_traces"] = [[]]
    found = explain(checked(value).traces[0], snapshot="s", device=0)
    assert found.allocated_bytes == value["stats"]["allocated_bytes.all.current"]
    assert "no history" in found.notes[0]
