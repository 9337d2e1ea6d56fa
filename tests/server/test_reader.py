"""Parts of an output, words for templates without tools, conversations of other interfaces: pure functions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.outputs import StreamDelta
from paceline.parsing.chat import ChatParser
from paceline.parsing.deltas import ChatDelta
from paceline.parsing.reasoning import ReasoningParser, begins_behind, reasoning_style
from paceline.parsing.registry import make_tool_parser
from paceline.server import anthropic_input, response_input
from paceline.server.anthropic_blocks import Blocks
from paceline.server.reader import Reader, message_of
from paceline.server.response_items import Items
from paceline.server.tool_prompt import in_words

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
TEXTS = [
    f"<think>hm\n</think>\n\nfirst {CALL} then {CALL}{CALL} last",
    f"{CALL}only behind",
    "<think>cut sho",
    f"a <tool_call>no call</tool_call> {CALL}<tool_call>{{",
    "",
]


def reader(**options: Any) -> Reader:
    parser = ChatParser(ReasoningParser(reasoning_style("qwen3"), None), make_tool_parser("hermes"))
    return Reader(parser, calls=True, **options)


def deltas(text: str, cuts: list[int]) -> list[StreamDelta]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)] or [""]
    return [StreamDelta(0, p, [], [], "stop" if i == len(pieces) - 1 else None) for i, p in enumerate(pieces)]


def runs(parts: list[ChatDelta]) -> list[Any]:
    """Parts with those that follow one another joined, as a list of (kind, text) and (name, arguments)."""
    out: list[list[str]] = []
    for part in parts:
        assert sum(map(bool, (part.reasoning, part.content, part.tool_calls))) == 1
        for piece in part.tool_calls:
            if piece.name is not None:
                out.append([f"call {piece.name}", ""])
            out[-1][1] += piece.arguments
        for kind, text in (("reasoning", part.reasoning), ("content", part.content)):
            if text:
                if not out or out[-1][0] != kind:
                    out.append([kind, ""])
                out[-1][1] += text
    return out


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=12))
def test_parts_and_their_order_do_not_depend_on_the_cut(text, cuts):
    want = runs(reader().whole(text))
    fresh = reader()
    assert runs([part for d in deltas(text, cuts) for part in fresh.read(d)]) == want
    for build in (Items, Blocks):
        whole, pieces, fresh = build(), build(), reader()
        for part in reader().whole(text):
            whole.add(part)
        for d in deltas(text, cuts):
            for part in fresh.read(d):
                pieces.add(part)
        for made in (whole, pieces):
            made.end(False) if isinstance(made, Items) else made.end()
        shape = [_without_ids(x.items if isinstance(x, Items) else x.blocks) for x in (whole, pieces)]
        assert shape[0] == shape[1]


def _without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_the_order_of_what_came():
    kinds = [kind for kind, _ in runs(reader().whole(TEXTS[0]))]
    assert kinds == ["reasoning", "content", "call f", "content", "call f", "call f", "content"]
    assert [k for k, _ in runs(reader(parallel_calls=False).whole(TEXTS[0]))].count("call f") == 1
    assert "reasoning" not in [k for k, _ in runs(reader(show_reasoning=False).whole(TEXTS[0]))]
    message = message_of(reader().whole(TEXTS[0]))
    assert message.reasoning == "hm" and message.content == "first then last" and len(message.tool_calls) == 3
    assert Reader(None).whole("abc")[0].content == "abc" and Reader(None).whole("") == []


def test_where_a_continued_output_stands():
    qwen, r1 = reasoning_style("qwen3"), reasoning_style("deepseek_r1")
    for style, text, want in (
        (qwen, "", None),
        (qwen, "\n <thi", None),
        (qwen, "<think>a", True),
        (qwen, "<think>a</think>", False),
        (qwen, "plain", False),
        (r1, "thoughts", True),
        (r1, "a</think>b", False),
    ):
        assert begins_behind(style, text) is want, (style.name, text)


def test_tools_in_words():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    got = in_words(messages, tools)
    assert [m["role"] for m in got] == ["system", "user", "assistant"] and '{"name": "f", "parameters": {}}' in got[0][
        "content"
    ]
    assert got[2] == {
        "role": "assistant",
        "content": 'so\n<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>',
    }
    assert in_words([{"role": "user", "content": "hi"}], None) == [{"role": "user", "content": "hi"}]
    assert message_of(reader().whole(got[2]["content"])).tool_calls[0].arguments == '{"é": 1}'


def test_one_turn_of_the_assistant_is_one_message():
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    got = response_input.messages_of(items, "be kind")
    assert [m["role"] for m in got] == ["system", "assistant", "tool", "tool", "assistant", "assistant"]
    assert got[1]["reasoning_content"] == "s" and got[1]["content"] == "a"
    assert [c["id"] for c in got[1]["tool_calls"]] == ["1", "2"]


def test_results_come_before_the_text_that_came_with_them():
    content = [{"type": "text", "text": "so"}, {"type": "tool_result", "tool_use_id": "1"}]
    got = anthropic_input.messages_of([{"role": "user", "content": content}])
    assert got == [
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "so"}]},
    ]
    only = anthropic_input.messages_of([{"role": "user", "content": content[1:]}])
    assert [m["role"] for m in only] == ["tool"]
