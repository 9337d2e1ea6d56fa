"""Tools: definitions that are refused by name, and choices whose output always parses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.harness import Scripted, at_random, open_llm, scripted
from models.tiny import Shape, write_target

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.parsing.chat import make_chat_parser, parse_chat
from paceline.parsing.registry import TOOL_PARSERS
from paceline.parsing.tools import ToolPlan, plan_tools, read_tools

SHAPE = Shape(vocab=300, hidden=48, inner=64, heads=4, kv_heads=2, head_dim=16, context=512, sharp=1.5)


def tool(name: Any = "f", parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Lyon", 'a"b\\c', "é"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F", None]},
            "detailed": {"type": "boolean"},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "unit", "place"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 3}, "sea": {"type": ["boolean", "null"]}},
                "required": ["name", "sea"],
            }
        },
    },
)
NOW = tool("now.utc-1", description="The time")
TOOLS = [WEATHER, NOW]


def check_arguments(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "now.utc-1":
        assert value == {}
        return
    assert name == "get_weather" and {"city", "unit", "place"} <= set(value) <= {
        "city",
        "days",
        "unit",
        "detailed",
        "place",
    }
    assert value["city"] in ("Lyon", 'a"b\\c', "é") and value["unit"] in ("C", "F", None)
    assert value.get("days", 1) in range(1, 15) and isinstance(value.get("detailed", True), bool)
    place = value["place"]
    assert set(place) == {"name", "sea"} and len(place["name"]) <= 3 and place["sea"] in (True, False, None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_target(tmp_path_factory.mktemp("tools"), SHAPE, tokenizer=True)
    return open_llm(folder, Scripted())


def plan(llm: LLM, choice: Any = None, **options: Any) -> ToolPlan:
    return plan_tools(options.pop("tools", TOOLS), choice, tokenizer=llm.tokenizer, **options)


# ---- definitions

BAD: list[tuple[Any, str]] = [
    ("f", r"tools='f'"),
    ([3], r"tools\[0\]=3"),
    ([{"type": "web_search"}], r"tools\[0\].type='web_search'"),
    ([{"type": "function"}], r"tools\[0\].function=null"),
    ([tool("ok"), tool("")], r"tools\[1\].function.name=''"),
    ([tool("a b")], r"tools\[0\].function.name='a b'"),
    ([tool("x" * 65)], r"tools\[0\].function.name="),
    ([tool(), tool()], r"tools\[1\].function.name='f': is there twice"),
    ([tool("f", [])], r"tools\[0\].function.parameters=\[\]"),
    ([tool("f", {"type": "string"})], r"tools\[0\].function.parameters.type='string'"),
    ([tool("f", {"properties": []})], r"tools\[0\].function.parameters.properties="),
    ([tool("f", {"properties": {"a": {1, 2}}})], r"tools\[0\]: only JSON values"),
    ([tool("f", description=3)], r"tools\[0\].function.description=3"),
    ([tool(f"f{i}") for i in range(129)], "at most 128"),
]


@pytest.mark.parametrize(("tools", "message"), BAD, ids=[message for _, message in BAD])
def test_definitions_are_refused_by_name(llm: LLM, tools: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(llm, tools=tools)


def test_definitions():
    first, second = read_tools(TOOLS)
    assert (first.name, second.name, second.description) == ("get_weather", "now.utc-1", "The time")
    assert second.parameters == {"type": "object", "properties": {}}
    assert first.definition == WEATHER and read_tools(None) == []


# ---- choices


def test_auto_and_none(llm: LLM):
    for choice in (None, "auto"):
        got = plan(llm, choice, parser="hermes")
        assert got.template_tools == TOOLS and got.parser == "hermes" and got.structured_outputs is None
        assert got.tool_names == ("get_weather", "now.utc-1") and got.skip_special_tokens
    assert plan(llm, "none") == ToolPlan()
    for choice in (None, "auto", "none"):
        assert plan(llm, choice, tools=None) == ToolPlan()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("any", "tool_choice='any'"),
        (3, "tool_choice=3"),
        ({"type": "function", "function": {"name": "g"}}, "function.name='g': no such tool; there are: get_weather"),
        ({"type": "function"}, "tool_choice.function.name=null"),
        ({"type": "allowed_tools"}, "tool_choice="),
    ],
)  # fmt: skip
def test_choices_are_refused_by_name(llm: LLM, choice: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(llm, choice)
    with pytest.raises(ConfigError, match="no tools"):
        plan(llm, "required", tools=[])
    with pytest.raises(ConfigError, match="parallel_tool_calls=1"):
        plan(llm, "auto", parallel_tool_calls=1)


def test_tools_may_be_called_like_the_choices(llm: LLM):
    tools = [tool("auto"), tool("none")]
    got = plan(llm, {"type": "function", "function": {"name": "none"}}, tools=tools)
    assert got.structured_outputs is not None and "none" in str(got.structured_outputs.grammar)
    assert "auto" not in str(got.structured_outputs.grammar)


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("choice", ["required", "named", "one"])
def test_what_a_choice_forces_always_parses(llm: LLM, parser: str, choice: str):
    """Random documents of the grammar, read by the parser: the tool's own arguments, and nothing besides."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    got = plan(llm, named if choice == "named" else "required", parser=parser, parallel_tool_calls=choice != "one")
    assert got.parser == parser and got.structured_outputs is not None
    params = SamplingParams(
        max_tokens=300, temperature=1.0, structured_outputs=got.structured_outputs, n=8, seed=1, presence_penalty=1.0
    )
    counts = []
    with scripted(llm, at_random(SHAPE.vocab, 5)):
        output = llm.generate([[5, 6]], params, num_speculative_tokens=4)[0]
    for choice_output in output.outputs:
        if choice_output.finish_reason == "length":
            assert choice == "required", "a single call of these tools is short"
            continue
        reader = make_chat_parser("", tools=got.parser, tool_names=got.tool_names)
        message = parse_chat(reader, [choice_output.text])
        assert message.content == "" and message.tool_calls, choice_output.text
        for call in message.tool_calls:
            check_arguments(call.name, call.arguments)
            assert choice != "named" or call.name == "get_weather"
        counts.append(len(message.tool_calls))
        assert choice == "required" or len(message.tool_calls) == 1
    assert counts and (choice != "required" or max(counts) > 1)


@pytest.mark.parametrize("template", ["[TOOL_CALLS]", "[TOOL_CALLS]name[ARGS]"])
def test_tags_that_are_special_tokens(llm: LLM, template: str):
    """Mistral's tags: named by id in the grammar, shown in the text for the parser."""

    class Tokenizer:
        chat_template = template
        special_ids = frozenset({297, 298})

        class backend:
            @staticmethod
            def token_to_id(text: str) -> int | None:
                return {"[TOOL_CALLS]": 297, "[ARGS]": 298}.get(text)

    tokenizer: Any = Tokenizer()
    got = plan_tools(TOOLS, "required", tokenizer=tokenizer, parser="mistral")
    assert not got.skip_special_tokens and got.structured_outputs is not None
    rng = np.random.default_rng(1)
    grammar = llm.grammars.constraint(SamplingParams(structured_outputs=got.structured_outputs), [5])
    assert grammar is not None
    text, tags = "", {297: "[TOOL_CALLS]", 298: "[ARGS]"}
    for _ in range(400):
        mask = grammar.masks([])[0]
        token = int(rng.choice([i for i in range(SHAPE.vocab) if mask[i // 32] >> i % 32 & 1]))
        if grammar.commit(token) == "eos":
            break
        text += tags.get(token) or llm.tokenizer.token_bytes(token).decode("utf-8", "surrogateescape")
    message = parse_chat(make_chat_parser("", tools="mistral", tool_names=got.tool_names), list(text))
    assert text.startswith("[TOOL_CALLS]") and ("[ARGS]" in text) == ("[ARGS]" in template)
    assert message.tool_calls and message.content == ""


def test_calls_behind_reasoning(llm: LLM):
    got = plan(llm, "required", reasoning_end="</think>", parallel_tool_calls=False)
    assert got.structured_outputs is not None and got.structured_outputs.reasoning_end == "</think>"


def test_schemas_that_do_not_compile_name_themselves(llm: LLM):
    bad = plan(llm, "required", tools=[tool("f", {"properties": {"a": {"type": "strin"}}})])
    with pytest.raises(ConfigError, match=r"cannot be compiled.*strin"):
        llm.generate([[5]], SamplingParams(structured_outputs=bad.structured_outputs))
    with pytest.raises(ConfigError, match="'a-b' of 'f' is no Python name"):
        plan(llm, "required", parser="pythonic", tools=[tool("f", {"properties": {"a-b": {}}})])


def test_all_of_is_left_open(llm: LLM):
    """Closing each part would exclude the other's properties."""
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]
    got = plan(llm, "required", tools=[tool("f", {"allOf": parts})], parallel_tool_calls=False)
    params = SamplingParams(max_tokens=200, temperature=0, structured_outputs=got.structured_outputs)
    text = llm.generate([[5]], params)[0].outputs[0].text
    assert '"a": 1' in text and '"b": 1' in text
