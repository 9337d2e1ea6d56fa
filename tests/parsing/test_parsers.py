"""What models say is read the same however it arrives (vLLM #41967, #48020, #35421, #38274; sglang #37450)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parsing.chat import ChatParser, make_chat_parser, parse_chat
from paceline.parsing.deltas import ChatMessage
from paceline.parsing.reasoning import ReasoningCounter, ReasoningParser, begins_in_reasoning, reasoning_style
from paceline.parsing.registry import TOOL_PARSERS, choose_reasoning_parser, choose_tool_parser, make_tool_parser
from paceline.parsing.scan import JsonScanner

from .cases import CALLS, REASONING

QUICK = settings(max_examples=150, deadline=None)
NAMES = ("f", "g", "get_weather")


def tool_parser(name: str) -> ChatParser:
    return ChatParser(None, make_tool_parser(name, NAMES))


def summary(message: ChatMessage) -> Any:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS, ids=[f"{c[0]}-{i}" for i, c in enumerate(CALLS)])
def test_calls(name: str, text: str, content: str, calls: list[tuple[str, Any]]):
    message = parse_chat(tool_parser(name), [text])
    assert [call.name for call in message.tool_calls] == [called for called, _ in calls]
    for call, (_, arguments) in zip(message.tool_calls, calls, strict=True):
        assert (call.arguments if isinstance(arguments, str) else json.loads(call.arguments)) == arguments
    assert message.content.split() == content.split()
    if not calls:
        assert message.content == content
    # the whole at once, in two, and character by character
    for pieces in ([text[: len(text) // 2], text[len(text) // 2 :]], list(text)):
        assert summary(parse_chat(tool_parser(name), pieces)) == summary(message)


TAGS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>"]
PARTS = [
    '{"name": "f", ',
    '"arguments": ',
    '"parameters": ',
    '{"a": 1}',
    '{"name":"g","arguments":{"b":"x\\"y"}}',
    "(a=1)",
]
MARKS = ["}", "]", "[", "f", ", ", "; ", "\n", " "]
fragments = st.lists(
    st.one_of(
        st.sampled_from(TAGS + PARTS + MARKS),
        st.text('{}[]":,\\ <>/tool_cf1=(', max_size=6),
        st.sampled_from([text for _, text, _, _ in CALLS]),
    ),
    max_size=8,
).map("".join)


@QUICK
@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    text=fragments,
    places=st.lists(st.integers(0, 400), max_size=12),
    reasoning=st.sampled_from([None, "qwen3", "deepseek_r1"]),
)
def test_any_text_in_any_pieces(name: str, text: str, places: list[int], reasoning: str | None):
    """The same message; ids once per call; arguments only ever grow; nothing is lost but tags and white space."""

    def parse(pieces: list[str]) -> ChatMessage:
        return parse_chat(make_chat_parser("", reasoning=reasoning, tools=name, tool_names=NAMES), pieces)

    whole = parse([text])
    assert summary(parse(cut(text, places))) == summary(whole) == summary(parse(list(text)))
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)
    for call in whole.tool_calls:
        scanner = JsonScanner()
        assert all(map(scanner.push, call.arguments)), "arguments are JSON as far as they go"
    if not whole.tool_calls and reasoning is None:
        left = iter(text)  # a list of no calls may have stood between what is left
        assert all(character in left for character in "".join(whole.content.split()))


numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=3), x, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=3)


@QUICK
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3),
    content=st.text("abc .\n", max_size=10),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    places=st.lists(st.integers(0, 400), max_size=8),
)
def test_calls_come_back_as_they_were_written(calls: Any, content: str, indent: Any, ascii_only: bool, places: Any):
    """Random calls written by Python's own json in each format, against what went in."""

    def dump(value: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    texts = {
        "hermes": content + "\n".join(f"<tool_call>\n{dump(o)}\n</tool_call>" for o in objects),
        "mistral": content + "[TOOL_CALLS] " + dump(objects),
        "llama3_json": "; ".join(dump({"name": n, "parameters": a}) for n, a in calls),
    }
    for name, text in texts.items():
        message = parse_chat(tool_parser(name), cut(text, places))
        assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls, name
        assert message.content == ("" if name == "llama3_json" else content.rstrip())


def test_arguments_stream():
    """They are passed on as they come, not at the end."""
    parser = make_tool_parser("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"city": "Lyon"}}</tool_call>'
    seen = [parser.feed(char) for char in text]
    pieces = [piece for delta in seen for piece in delta.tool_calls]
    assert pieces[0].name == "f" and pieces[0].id and all(p.name is None and p.id is None for p in pieces[1:])
    assert "".join(p.arguments for p in pieces) == '{"city": "Lyon"}' and len(pieces) > 10


def test_ids():
    parser = make_tool_parser("mistral")
    [call] = parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]').tool_calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()
    [call] = make_tool_parser("pythonic").feed("[f()]").tool_calls
    assert call.id is not None and call.id.startswith("call_")


# ---- reasoning

THOUGHTS = ["<think>", "</think>", "<", "think>", "</", "a", "é😀", " ", "\n"]


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "content"), REASONING)
def test_reasoning(style: str, prompt: str, text: str, reasoning: str, content: str):
    for pieces in ([text], [text[: len(text) // 2], text[len(text) // 2 :]], list(text)):
        message = parse_chat(make_chat_parser(prompt, reasoning=style), pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


@QUICK
@given(
    text=st.lists(st.sampled_from(THOUGHTS), max_size=12).map("".join),
    sizes=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    prompt=st.sampled_from(["", "<think>", "</think>"]),
    style=st.sampled_from(["qwen3", "deepseek_r1"]),
    length=st.integers(0, 40),
)
def test_reasoning_tokens_never_exceed_the_tokens(text: str, sizes: list[int], prompt: str, style: str, length: int):
    """Tokens are cuts of the UTF-8 bytes anywhere; the output ends anywhere, as blocks that overshoot a limit do."""
    data, tokens = text.encode(), []
    for size in sizes:
        if data:
            tokens.append(data[:size])
            data = data[size:]
    tokens = tokens[:length]
    chosen = reasoning_style(style)
    counter = ReasoningCounter(chosen, begins_in_reasoning(chosen, prompt), lambda i: tokens[i])
    counts = [counter.feed([i]) for i in range(len(tokens))]
    assert counts == sorted(counts) and counter.count <= len(tokens)
    message = parse_chat(make_chat_parser(prompt, reasoning=style), [b"".join(tokens).decode("utf-8", "ignore")])
    again = ReasoningCounter(chosen, begins_in_reasoning(chosen, prompt), lambda i: tokens[i])
    assert again.feed(range(len(tokens))) == counter.count, "the same for one block as token by token"
    if message.reasoning and len(message.reasoning.encode()) > 20:
        assert counter.count > 0
    if begins_in_reasoning(chosen, prompt) is False:
        assert counter.count == 0 and not message.reasoning


def test_the_tokens_of_reasoning():
    tokens = [b"<think>", b"\n", b"a", b"b", b"</think>", b"\n\n", b"c"]
    counter = ReasoningCounter(reasoning_style("qwen3"), None, lambda i: tokens[i])
    assert [counter.feed([i]) for i in range(len(tokens))] == [0, 1, 2, 3, 3, 3, 3]


def test_reasoning_and_calls():
    text = 'a <tool_call> b</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parse_chat(make_chat_parser("<think>", reasoning="qwen3", tools="hermes"), list(text))
    assert message.reasoning == "a <tool_call> b" and message.content == ""
    assert [call.name for call in message.tool_calls] == ["f"]


def test_long_texts_take_linear_time():
    """Not a clock: the pieces that one call of feed handles are bounded by its text."""
    parser = ReasoningParser(reasoning_style("qwen3"), False)
    assert parser.feed("x" * 100_000).content == "x" * 100_000
    tools = make_tool_parser("hermes")
    argument = "y" * 200_000
    delta = tools.feed(f'<tool_call>{{"name": "f", "arguments": {{"a": "{argument}"}}}}</tool_call>')
    assert json.loads(delta.tool_calls[0].arguments) == {"a": argument}


# ---- registry


@pytest.mark.parametrize(
    ("template", "model_type", "parser", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "qwen2", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}<think>{{ x }}</think>", "qwen3", "hermes", "qwen3"),
        ("{% if tools %}<tool_call>\n<function=name>{% endif %}", "qwen3", None, None),
        ("[TOOL_CALLS]", "mistral", "mistral", None),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama", "llama3_json", None),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "llama", "pythonic", None),
        ("{% if tools %}x{% endif %}", "qwen2", "hermes", None),
        ("{% for m in messages %}{% endfor %}", "qwen2", None, None),
        (None, "llama", None, None),
    ],
)
def test_choice_by_template(template: str | None, model_type: str, parser: str | None, reasoning: str | None):
    assert choose_tool_parser(template, model_type) == parser
    assert choose_reasoning_parser(template) == reasoning


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"tool_call_parser: 'xml' is unknown; use one of hermes"):
        make_chat_parser("", tools="xml")
    with pytest.raises(ConfigError, match=r"reasoning_parser: 'x' is unknown; use one of qwen3"):
        make_chat_parser("", reasoning="x")
