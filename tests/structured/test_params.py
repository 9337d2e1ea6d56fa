"""What may be asked of a grammar, and what is refused by name before anything runs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from paceline import SamplingParams, StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.structured.params import StructuredOutputsError
from paceline.structured.source import closed


def test_exactly_one_kind():
    for fields in ({}, {"json": {}, "regex": "a"}, {"json_object": False}, {"json_object": True, "choice": ["a"]}):
        with pytest.raises(StructuredOutputsError, match="exactly one of json, json_object, regex, choice, grammar"):
            StructuredOutputsParams(**fields)
    assert StructuredOutputsParams(regex="a", json_object=False).kind == "regex"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "json"),
    ({"json": 3}, "json"),
    ({"json": "true"}, "json"),
    ({"json": {"a": float("nan")}}, "json"),
    ({"json": {"a": object()}}, "json"),
    ({"json": "[" * 100_000}, "json"),
    ({"json": {"enum": ["x" * 600_000]}}, "json"),
    ({"json_object": "yes"}, "json_object"),
    ({"regex": 5}, "regex"),
    ({"regex": "a" * 70_000}, "regex"),
    ({"regex": "\ud800"}, "regex"),
    ({"grammar": ""}, "grammar"),
    ({"choice": "ab"}, "choice"),
    ({"choice": []}, "choice"),
    ({"choice": ["a", ""]}, "choice"),
    ({"choice": ["a", 3]}, "choice"),
    ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern"),
    ({"regex": "a", "reasoning_end": " "}, "reasoning_end"),
    ({"regex": "a", "reasoning_end": "x", "reasoning_start": ""}, "reasoning_start"),
    ({"regex": "a", "reasoning_start": "x"}, "reasoning_start"),
    ({"regex": "a", "reasoning_end": "x" * 65}, "reasoning_end"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=[f"{name}-{i}" for i, (_, name) in enumerate(BAD)])
def test_errors_name_the_field(fields: dict[str, Any], name: str):
    with pytest.raises(ConfigError, match=f"structured_outputs.{name}="):
        StructuredOutputsParams(**fields)


def test_sampling_params_take_an_object_or_a_mapping():
    want = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))
    got = SamplingParams(structured_outputs={"json": '{"type": "object"}'})
    assert got == want and hash(got) == hash(want)
    assert pickle.loads(pickle.dumps(got)) == got
    assert got.structured_outputs.json == '{"type": "object"}'
    with pytest.raises(ConfigError, match=r"structured_outputs\.jsn: not a field"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(ConfigError, match="use StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")


def test_order_of_properties_is_part_of_the_schema():
    a = StructuredOutputsParams(json={"properties": {"a": {}, "b": {}}})
    b = StructuredOutputsParams(json={"properties": {"b": {}, "a": {}}})
    assert a != b


def test_closed_schemas():
    schema = {
        "properties": {"a": {"properties": {"b": {}}}, "properties": {"type": "object"}},
        "anyOf": [{"properties": {}, "additionalProperties": True}],
        "enum": [{"properties": 1}],
    }
    assert closed(schema) == {
        "properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": False},
            "properties": {"type": "object"},
        },
        "anyOf": [{"properties": {}, "additionalProperties": True}],
        "enum": [{"properties": 1}],
        "additionalProperties": False,
    }
