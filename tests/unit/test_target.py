"""Finding, running and building the user's model, and what is said where that can't be done."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fa_advisor.errors import FaAdvisorError, TargetError, UsageError
from fa_advisor.records import ProfileRequest
from fa_advisor.target import Target, load, synthesise

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "import torch\nfrom torch import nn\n"

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def as_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    modules, path, argv = dict(sys.modules), list(sys.path), list(sys.argv)
    yield
    for name in set(sys.modules) - set(modules):
        if "transformers" not in name and not name.startswith("torch"):
            del sys.modules[name]
    sys.path[:], sys.argv[:] = path, argv


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str, name: str = "model.py") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD + textwrap.dedent(code))
        return file

    return write


def loaded(target: str | None = "model.py", **request: object) -> Target:
    return load(ProfileRequest(target=target, **request))  # type: ignore[arg-type]


def error(
    kind: type[FaAdvisorError], target: str = "model.py", **request: object
) -> FaAdvisorError:
    with pytest.raises(kind) as raised:
        loaded(target, **request)
    assert raised.type is kind
    return raised.value


NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("model = nn.Linear(2, 2)\ndef build_model(): raise AssertionError", "model"),
        ("def model(): return nn.Linear(2, 2)", "model"),
        ("def build_model(): return nn.Linear(2, 2)", "build_model"),
        ("def get_model(width=2): return nn.Linear(width, width)", "get_model"),
        (NET + "model = None", "Net"),
        (NET + "class Other(nn.Module):\n    def __init__(self, size): pass", "Net"),
        (NET + "def build_model(config): pass", "Net"),
        (NET + "def build_model(): return nn.Linear(2, 2), 'its tokenizer'", "build_model"),
    ],
)
def test_search_order(write: Write, code: str, name: str) -> None:
    write(code)
    target = loaded()
    assert target.name == name
    assert isinstance(target.model, nn.Module)
    assert target.path == "model.py"
    assert not target.inputs_given


@pytest.mark.parametrize("name", ["net", "Net", "make", "holder.net", "small"])
def test_by_name(write: Write, name: str) -> None:
    write(
        NET
        + """
import functools, types
net = Net()
def make(): return net
holder = types.SimpleNamespace(net=net)
small = functools.partial(Net, width=1)
model = nn.Identity()
"""
    )
    target = loaded(f"model.py:{name}")
    assert type(target.model).__name__ == "Net"
    assert target.name == name


def test_the_file_is_run_once_as_a_module_of_its_name(write: Write, tmp_path: Path) -> None:
    write("value = 3", "beside.py")
    file = write(
        """
        import dataclasses, sys, typing
        import beside
        with open("runs", "a") as runs:
            runs.write("x")
        @dataclasses.dataclass
        class Config:
            width: "typing.ClassVar[int]" = 2
        class Net(nn.Linear):
            def __init__(self):
                super().__init__(Config.width, Config.width)
        model = Net()
        argv, name = list(sys.argv), __name__
        if __name__ == "__main__":
            raise AssertionError
        """
    )
    target = loaded(argv=("--depth", "4"))
    module = sys.modules["model"]
    assert Path("runs").read_text() == "x"
    assert (module.name, module.argv) == ("model", ["model.py", "--depth", "4"])
    assert sys.path[0] == os.path.realpath(tmp_path)
    assert module.__file__ == str(file)
    assert "super().__init__" in inspect.getsource(type(target.model))
    assert type(pickle.loads(pickle.dumps(target.model))) is type(target.model)
    assert not (tmp_path / "__pycache__" / f"model.{sys.implementation.cache_tag}.pyc").exists()


def test_a_file_that_is_called_like_a_module_in_use(write: Write) -> None:
    write("import json\nmodel = nn.Linear(2, 2)\nassert json.loads", "inspect.py")
    assert loaded("inspect.py").name == "model"
    assert sys.modules["inspect"] is inspect


def test_module_and_package(write: Write, tmp_path: Path) -> None:
    write("", "pkg/__init__.py")
    write("class Net(nn.Linear):\n    def __init__(self): super().__init__(2, 2)", "pkg/parts.py")
    write("from .parts import Net\ndef build_model(): return Net()", "pkg/nets.py")
    assert loaded("pkg.nets:build_model").path == os.path.join("pkg", "nets.py")
    assert loaded("pkg.parts").name == "Net"
    assert sys.path[-1] == str(tmp_path)


def test_without_a_target_the_bundled_example() -> None:
    with torch.device("meta"):
        target = loaded(None)
    assert type(target.model).__name__ == "GPT"
    assert target.path is not None and target.path.endswith("nanogpt.py")
    assert target.kwargs is not None and target.kwargs["idx"].shape == (8, 1024)


# Inputs


@pytest.mark.parametrize(
    ("code", "shapes"),
    [
        ("inputs = torch.zeros(3, 2)", ([(3, 2)], {})),
        ("example_inputs = (torch.zeros(3, 2), torch.zeros(1))", ([(3, 2), (1,)], {})),
        ("inputs = [torch.zeros(3, 2)]", ([(3, 2)], {})),
        ("inputs = {'input': torch.zeros(3, 2)}", ([], {"input": (3, 2)})),
        ("inputs = 'a prompt'\ndef get_inputs(): return torch.zeros(3, 2)", ([(3, 2)], {})),
        ("def get_inputs(batch_size): return torch.zeros(batch_size, 2)", ([(1, 2)], {})),
        ("def get_inputs(*, seq_len): return torch.zeros(seq_len, 2)", ([(1024, 2)], {})),
        ("def get_inputs(batch_size=6): return torch.zeros(batch_size, 2)", ([(6, 2)], {})),
    ],
)
def test_given_inputs(
    write: Write, code: str, shapes: tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]
) -> None:
    write(f"model = nn.Linear(2, 2)\n{code}")
    target = loaded()
    assert target.args is not None and target.kwargs is not None
    assert [tuple(each.shape) for each in target.args] == shapes[0]
    assert {name: tuple(each.shape) for name, each in target.kwargs.items()} == shapes[1]


def test_inputs_from_the_factory_come_first(write: Write) -> None:
    write("inputs = 1 / 1\ndef build_model(): return nn.Linear(2, 2), {'input': torch.zeros(5, 2)}")
    assert loaded().kwargs is not None


def test_sizes_reach_get_inputs(write: Write) -> None:
    write(
        "model = nn.Linear(2, 2)\ndef get_inputs(**sizes): return torch.zeros(*sizes.values(), 2)"
    )
    target = loaded(batch_size=3, seq_len=7)
    assert target.args is not None and target.args[0].shape == (3, 7, 2)


@pytest.mark.parametrize(
    ("code", "request_", "message"),
    [
        ("inputs = torch.zeros(1, 2)", {"batch_size": 4}, "--batch-size can't change `inputs`"),
        ("def get_inputs(batch_size=1): ...", {"seq_len": 4}, "--seq-len can't change get_inputs"),
        ("def get_inputs(device): ...", {}, "get_inputs in model.py needs device"),
        ("def get_inputs(): return 'text'", {}, "holds no tensor"),
        ("inputs = torch.zeros(0, 2)", {}, r"empty batch.*\(0, 2\)"),
        ("", {"batch_size": 0}, "--batch-size is 0"),
    ],
)
def test_inputs_that_cannot_be(
    write: Write, code: str, request_: dict[str, int], message: str
) -> None:
    write(f"model = nn.Linear(2, 2)\n{code}")
    with pytest.raises(UsageError, match=message):
        loaded(**request_)


# What can't be used


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("modle.py", "no such file: modle.py"),
        ("modle.py:Net", "no such file: modle.py"),
        ("nowhere/model.py", "no such file: nowhere/model.py"),
        ("meta-llama/Llama-3-8B", "no such file: meta-llama/Llama-3-8B"),
        ("modle", "no module named 'modle'"),
        ("model.parts", "no module named"),
        ("no-module", "no such file: no-module"),
        (".", "is a directory"),
        ("weights.pt", "weights.pt is not a Python file"),
        ("model.py:", "is no target"),
        ("model.py:build-model", "'build-model' after the colon"),
        (":model", "before the colon"),
        ("model.py:nothing", "model.py has no 'nothing'"),
        ("model.py:size", "size in model.py is an int"),
        ("model.py:Plain", "Plain in model.py is the class Plain"),
        ("model.py:Needy", "it needs width, depth"),
        ("model.py:wrong", r"wrong\(\) in model.py returned a list"),
    ],
)
def test_targets_that_cannot_be_used(
    write: Write, tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "weights.pt").write_bytes(b"\0")
    write(
        """
        size = 4
        model = nn.Linear(2, 2)
        class Plain: ...
        class Needy(nn.Module):
            def __init__(self, width, depth): ...
        def wrong(): return [model]
        """
    )
    with pytest.raises(UsageError, match=message):
        loaded(target)


def test_a_missing_file_is_guessed_at(write: Write) -> None:
    write("")
    assert "did you mean model.py?" in error(UsageError, "modle.py").hint


def test_no_model_says_what_was_looked_for_and_what_to_add(write: Write) -> None:
    write("class Net(nn.Module):\n    def __init__(self, config): ...")
    raised = error(UsageError)
    for name in ("`model`", "`build_model`", "`create_model`", "nn.Module class"):
        assert name in raised.message
    assert raised.hint == "Net needs config"
    assert "def build_model():\n        model = Net(...)\n        return model" in raised.detail


def test_a_model_of_another_name_is_pointed_out(write: Write) -> None:
    write("net = nn.Linear(2, 2)")
    assert "did you mean model.py:net?" in error(UsageError).hint


@pytest.mark.parametrize(
    "code",
    [
        "class A(nn.Module): ...\nclass B(nn.Module): ...",
        "def A(): ...\nbuild_model = get_model = A",
    ],
)
def test_two_candidates_are_named(write: Write, code: str) -> None:
    write(code)
    raised = error(UsageError)
    names = ("A", "B") if "class" in code else ("build_model", "get_model")
    assert ", ".join(names) in raised.message
    assert f"model.py:{names[1]}" in raised.hint


# What the user's code raises


def test_syntax_error_keeps_its_caret(write: Write) -> None:
    write("def build_model(:\n    pass")
    raised = error(UsageError)  # it can't be used: nothing of it ran
    assert raised.message.startswith("model.py is not valid Python: ")
    assert "def build_model(:" in raised.detail and "^" in raised.detail
    assert "Traceback" not in raised.detail and "fa_advisor" not in raised.detail


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no\\nsuch thing')", "model.py raised ValueError: no such thing"),
        ("def build_model(): return {}['a']", "model.py raised KeyError: 'a'"),
        ("def build_model(): torch.zeros(2) @ torch.zeros(3)", "model.py raised RuntimeError"),
        ("model = nn.Linear(2, 2)\ndef get_inputs(): 1 / 0", "raised ZeroDivisionError"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "raised model.E: <its"),
        ("class Stop(BaseException): ...\nraise Stop", "model.py raised model.Stop"),
        ("import sys; sys.exit(2)", r"model.py called sys.exit\(2\)"),
        ("import sys; sys.exit()", r"model.py called sys.exit\(\)"),
        ("import sys; sys.exit('why')", r"model.py called sys.exit\('why'\)"),
    ],
)
def test_the_targets_own_traceback_only(write: Write, code: str, message: str) -> None:
    write(code)
    raised = error(TargetError)
    assert re.search(message, raised.message)
    assert "\n" not in raised.message
    assert 'model.py", line' in raised.detail
    ours = ("fa_advisor", "importlib", "runpy", "contextlib")
    assert not any(name in raised.detail for name in ours)


def test_chained_errors_keep_their_chain_and_lose_our_frames(write: Write) -> None:
    write(
        """
        def build_model():
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise RuntimeError("no model") from error
        """
    )
    detail = error(TargetError).detail
    assert "ZeroDivisionError" in detail and "direct cause" in detail
    assert "fa_advisor" not in detail


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("import nothing_like_it", "raised ModuleNotFoundError", "is nothing_like_it installed"),
        ("from torch import nothing", "raised ImportError", sys.executable),
        ("from .parts import Net", "raised ImportError", "package.module:name"),
    ],
)
def test_import_errors(write: Write, code: str, message: str, hint: str) -> None:
    write(code)
    raised = error(TargetError)
    assert message in raised.message and hint in raised.hint


def test_import_error_inside_a_module(write: Write) -> None:
    write("import nothing_like_it", "broken.py")
    assert "nothing_like_it" in error(TargetError, "broken").message


def test_argparse_is_told_where_its_arguments_go(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--data", required=True)
        parser.parse_args()
        """
    )
    raised = error(TargetError)
    assert "called sys.exit(2)" in raised.message and "`--`" in raised.hint
    assert "--data" in capsys.readouterr().err


def test_ctrl_c_passes_through(write: Write) -> None:
    write("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        loaded()


# The examples


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("[!_]*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_examples(example: Path, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    if "transformers" in example.read_text():
        pytest.importorskip("transformers")
    with torch.device("meta"):
        target = loaded(str(example))
        inputs = target.args, target.kwargs
        if not target.inputs_given:
            inputs = synthesise(
                target.model, batch_size=2, seq_len=None, mode=mode, dtype=torch.float32
            )
    inspect.signature(target.model.forward).bind(*(inputs[0] or ()), **(inputs[1] or {}))
    assert f"fa-advisor profile examples/{example.name}" in (
        sys.modules[example.stem].__doc__ or ""
    )
    assert capfd.readouterr().out == ""


def test_the_training_script_takes_its_arguments() -> None:
    with torch.device("meta"):
        target = loaded(str(EXAMPLES / "train_script.py"), argv=("--layers", "2", "--width", "64"))
    assert len(target.model.layers.layers) == 2
    assert target.kwargs is not None and target.kwargs["idx"].shape == (4, 512)
