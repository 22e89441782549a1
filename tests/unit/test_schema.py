"""The JSON schema that ships: that it is the records' own, and that reports keep to it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import samples
from fa_advisor.errors import UsageError
from fa_advisor.report import Report, json_schema_text, parse

SCHEMA = Path(__file__).parents[2] / "fa_advisor" / "report.schema.json"


def test_checked_in_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text() == json_schema_text(), "run `make schema`"


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("layers", [0, 1, 12])
def test_reports_are_valid(layers: int) -> None:
    assert faults(samples.report(layers)) == []


def test_schema_refuses_an_unknown_verdict() -> None:
    document = json.loads(samples.report(1).to_json())
    document["advice"]["verdict"] = "cpu-bound"
    assert not validator().is_valid(document)


def faults(report: Report) -> list[str]:
    return [error.message for error in validator().iter_errors(json.loads(report.to_json()))]


def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("beyond", "message"),
    [("x" * 100_001, "a text of 100,001 characters"), (10**30, "an integer of 100 bits")],
)
def test_what_no_report_holds_is_refused(beyond: object, message: str) -> None:
    document = json.loads(samples.report().to_json())
    document["target"]["name" if isinstance(beyond, str) else "parameters"] = beyond
    with pytest.raises(UsageError, match=message):
        parse(json.dumps(document).encode(), "r.json")
