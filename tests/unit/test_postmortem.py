"""Snapshots explained: what is said of a real out-of-memory error, and of files that are none."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
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
    ],
)
def test_a_foreign_pickle_is_a_message(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(UsageError, match="not a memory snapshot"):
        read(path)
    assert invoke(str(path)).exit_code == 2


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
