"""Tool calls, structured outputs and reasoning through the `openai` package; nothing about it is adapted to us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from engine.harness import repeat_last, scripted

from .test_features import CALL, FLAT, SAYS, TOOLS
from .thinker import CLOSE, EOS

ASK = [{"role": "user", "content": "ab abc"}]
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"open": True}, "logit_bias": {str(CLOSE): 3.0, str(EOS): -100}, "seed": 2}


class Inner(pydantic.BaseModel):
    flag: bool
    word: Literal["x", "yz"] | None


class Answer(pydantic.BaseModel):
    kind: Literal["a", "ab"]
    inner: Inner
    many: list[Inner] = pydantic.Field(max_length=2)


@pytest.fixture
def client(thinker) -> Iterator[openai.OpenAI]:
    with (
        openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as made,
        scripted(thinker.llm, repeat_last),
    ):
        yield made


def test_parsed_answers(client):
    """pydantic models in, pydantic models out, from chat and from Responses, whole and streamed."""
    fields: dict[str, Any] = {"model": "thinker", "temperature": 1.0}
    extra = {"extra_body": {"seed": 1, **SILENT}}
    found = client.chat.completions.parse(messages=ASK, response_format=Answer, max_tokens=400, **fields, **extra)
    whole = found.choices[0].message.parsed
    assert isinstance(whole, Answer)
    with client.chat.completions.stream(
        messages=ASK, response_format=Answer, max_tokens=400, **fields, **extra
    ) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.parsed == whole
    found = client.responses.parse(input="ab abc", text_format=Answer, max_output_tokens=400, **fields, **extra)
    assert found.output_parsed == whole
    with client.responses.stream(
        input="ab abc", text_format=Answer, max_output_tokens=400, **fields, **extra
    ) as events:
        assert events.get_final_response().output_parsed == whole


def test_a_conversation_with_tools(client):
    fields: dict[str, Any] = {
        "model": "thinker",
        "temperature": 1.0,
        "max_tokens": 300,
        "extra_body": {"seed": 1, **SILENT},
    }
    tool = openai.pydantic_function_tool(Answer)
    found = client.chat.completions.parse(
        messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, **fields
    )
    [call] = found.choices[0].message.tool_calls
    assert call.function.name == "Answer" and isinstance(call.function.parsed_arguments, Answer)
    assert found.choices[0].finish_reason == "tool_calls"
    history = [*ASK, found.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    again = client.chat.completions.create(messages=history, tools=[tool], **{**fields, "max_tokens": 5})
    assert again.choices[0].message.content and again.usage.prompt_tokens > found.usage.prompt_tokens


def test_streamed_calls(client):
    fields: dict[str, Any] = {
        "model": "thinker",
        "messages": ASK,
        "tools": TOOLS,
        "max_tokens": 300,
        "temperature": 1.0,
    }
    fields["extra_body"] = {"seed": 1, "structured_outputs": SAYS, **SILENT}
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == "tool_calls" and final.message.content == "Well. Done."
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [("get", '{"q": [1, 2]}')] * 2


def test_reasoning_is_where_clients_look(client):
    fields: dict[str, Any] = {"model": "thinker", "messages": ASK, "max_tokens": 80, "temperature": 1.0}
    found = client.chat.completions.create(**fields, extra_body=THINKING)
    message = found.choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content
    assert "</think>" not in message.reasoning and message.content
    details = found.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < found.usage.completion_tokens
    chunks = client.chat.completions.create(**fields, extra_body=THINKING, stream=True)
    texts = [getattr(c.choices[0].delta, "reasoning", None) or "" for c in chunks]
    assert "".join(texts) == message.reasoning


def test_an_agent_s_turns_over_responses(client):
    """Reasoning, a call, its result: the items of an answer are the input of the next."""
    fields: dict[str, Any] = {"model": "thinker", "tools": FLAT, "temperature": 1.0, "max_output_tokens": 300}
    extra = {**THINKING, "structured_outputs": SAYS}
    first = client.responses.create(input="ab abc", extra_body=extra, **fields)
    assert [item.type for item in first.output][:3] == ["reasoning", "message", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(c.arguments) for c in calls] == [{"q": [1, 2]}] * 2
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "42"} for c in calls]
    items = [{"role": "user", "content": "ab abc"}, *(item.model_dump() for item in first.output), *results]
    second = client.responses.create(input=items, **{**fields, "max_output_tokens": 5}, extra_body=SILENT)
    assert second.output_text and second.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(input="ab abc", extra_body=extra, **fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == '{"q": [1, 2]}' * 2
    assert [item.type for item in final.output] == [item.type for item in first.output]
    assert final.output_text == first.output_text == "Well. Done." and CALL not in final.output_text


def test_errors_name_their_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="thinker", messages=ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}
        )
    assert caught.value.param == "tool_choice.function.name"
    with pytest.raises(openai.BadRequestError) as caught:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}
        client.chat.completions.create(model="thinker", messages=ASK, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"
