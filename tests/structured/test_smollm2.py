"""SmolLM2 itself under grammars: valid documents, the same bits with every drafter there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
from engine.harness import assert_idle, assert_same, assert_stats

from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.outputs import RequestOutput
from paceline.parsing.chat import make_chat_parser, parse_chat
from paceline.parsing.tools import plan_tools
from paceline.speculation.factory import SHIPPED

pytestmark = pytest.mark.slow


class Address(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    street: str
    city: str | None


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    age: int = pydantic.Field(ge=0, le=120)
    kind: bool | None
    tags: list[str] = pydantic.Field(max_length=3)
    address: Address


QUESTIONS = [
    "Describe Tom, a baker of 41 from Lyon, as a JSON object with name, age, kind, tags and address.",
    'Return {"name": "Eva", "age": 30, "kind": null, "tags": ["x", "y"], "address": {"street": "R", "city": null}}.',
    "Who are you?",
]
KINDS: list[dict[str, Any]] = [
    {"json": Person.model_json_schema()},
    {"json": Person.model_json_schema(), "disable_any_whitespace": True},
    {"json_object": True},
    {"regex": r"(Tom|Eva) is \d{1,2} years old\.( He| She)? lives in [A-Z][a-z]{2,12}\."},
    {"choice": ["yes", "no", "I do not know"]},
    {"grammar": 'start: line+\nline: "- " /[A-Za-z ]{3,30}/ "\\n"'},
    {"json_object": True, "reasoning_end": "</think>"},
]


def methods() -> list[Any]:
    shipped = sorted(SHIPPED.glob("*/config.json")) if SHIPPED.is_dir() else []
    return [{"method": "ngram"}, *({"method": "dflash", "model": str(config.parent)} for config in shipped)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", speculative_config=None)


@pytest.fixture(scope="module")
def wanted(plain: LLM) -> list[tuple[list[int], SamplingParams, RequestOutput]]:
    """Requests of every kind, each decoded alone and plainly."""
    out = []
    for i, asked in enumerate([*KINDS, *KINDS]):
        prompt = plain.tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}])
        temperature = 0.0 if i < len(KINDS) else 0.9
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=64, logprobs=2, structured_outputs=asked)
        out.append((prompt, params, plain.generate([prompt], params)[0]))
    return out


@pytest.mark.parametrize("method", methods(), ids=lambda m: m["method"])
def test_the_same_bits_with_every_drafter(wanted: Any, method: Any):
    llm = LLM("smollm2-135m", speculative_config=method)
    got = llm.generate([prompt for prompt, _, _ in wanted], [params for _, params, _ in wanted])
    for (_, params, alone), mine in zip(wanted, got, strict=True):
        assert_same(mine, alone, params)
        assert_stats(mine)
        choice, asked = mine.outputs[0], params.structured_outputs
        assert isinstance(asked, StructuredOutputsParams)
        if choice.finish_reason == "stop" and asked.json is not None:
            Person.model_validate_json(choice.text)
        if choice.finish_reason == "stop" and asked.json_object:
            assert isinstance(json.loads(choice.text.rpartition("</think>")[2]), dict)
    assert_idle(llm)


@pytest.mark.parametrize("method", methods(), ids=lambda m: m["method"])
def test_thirty_concurrent_json_objects(method: Any):
    """vLLM #15554, #27969, #47025, #11484."""
    llm = LLM("smollm2-135m", speculative_config=method)
    messages = [[{"role": "user", "content": "Say hello world 500 times"}]] * 30
    params = [
        SamplingParams(
            seed=i, temperature=0.8, max_tokens=96, structured_outputs=StructuredOutputsParams(json={"type": "object"})
        )
        for i in range(30)
    ]
    outputs = [o.outputs[0] for o in llm.chat(messages, params, num_speculative_tokens=7)]
    stopped = [choice for choice in outputs if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(choice.text), dict) for choice in stopped) and len(stopped) > 10
    for choice in outputs:
        assert choice.text.startswith("{") and choice.finish_reason in ("stop", "length")
    assert_idle(llm)


def test_a_call_that_is_required(plain: LLM):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    plan = plan_tools(tools, "required", tokenizer=plain.tokenizer, parallel_tool_calls=False)
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=plan.structured_outputs)
    question = [{"role": "user", "content": "How will the weather be in Lyon during the next 3 days?"}]
    output = plain.chat(question, params)[0].outputs[0]
    message = parse_chat(make_chat_parser("", tools=plan.parser, tool_names=plan.tool_names), [output.text])
    [call] = message.tool_calls
    assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city", "days"}
    assert output.finish_reason == "stop" and message.content == ""


def test_reasoning_ends_inside_a_block(plain: LLM):
    """Case 18: a drafter that proposes, in one block, the end of the reasoning and what an unconstrained model says
    behind it. The marker is taken from the model's own free text, so that it does come."""
    from engine.harness import Scripted, open_llm, scripted

    llm = open_llm(plain.model.path, Scripted(), dtype="bfloat16", threads=None)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[0]}])
    free = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    thoughts = llm.tokenizer.decode(free.token_ids[:10])
    marker = thoughts[-12:]
    assert free.text.find(marker) + len(marker) == len(thoughts), "the marker's first end"
    asked = StructuredOutputsParams(json=Person.model_json_schema(), reasoning_end=marker)
    params = SamplingParams(temperature=0, seed=3, max_tokens=120, structured_outputs=asked)
    want = llm.generate([prompt], params, speculation=False)[0]

    def script(sequence: Any, limit: int) -> list[int]:
        return free.token_ids[sequence.num_output_tokens :][:limit]

    with scripted(llm, script):
        got = llm.generate([prompt], params, num_speculative_tokens=7)[0]
    assert_same(got, want, marker)
    choice = got.outputs[0]
    assert choice.token_ids[:10] == free.token_ids[:10] and choice.token_ids[10:14] != free.token_ids[10:14]
    # the first token comes from the prompt's pass; then blocks of 7 drafts and one more would cross the marker
    assert got.metrics.spec_decode.num_accepted_tokens >= 8
    answer = choice.text.removeprefix(thoughts).lstrip("\n")
    assert answer.startswith("{")
    if choice.finish_reason == "stop":
        Person.model_validate_json(answer)


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]):
    """Every block of docs/structured-outputs.md, in order, as one program."""
    page = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(program, "structured-outputs.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "ToolCallDelta(index=0" in printed and "get_weather" in printed and '"name":"' in printed
