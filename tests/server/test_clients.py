"""The `openai` package against a live server: nothing about it is adapted to us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from engine.harness import repeat_last, scripted

from paceline import SamplingParams

ASK = [{"role": "user", "content": "ab abc"}]
FIELDS = {"temperature": 1.1, "seed": 3, "max_tokens": 12}
EXTRA = {"ignore_eos": True}


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
        scripted(server.llm, repeat_last),
    ):
        yield made


def test_chat(client, plain):
    want = plain.chat(ASK, SamplingParams(**FIELDS, **EXTRA))[0].outputs[0]
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, logprobs=True, top_logprobs=2, extra_body=EXTRA, **FIELDS
    )
    assert answer.choices[0].message.content == want.text and answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content) == 12 == answer.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}, extra_body=EXTRA, **FIELDS
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want.text
    assert chunks[-1].usage == answer.usage


def test_completions_models_and_responses(client, plain):
    want = plain.generate("ab", SamplingParams(n=2, **FIELDS, **EXTRA))[0]
    answer = client.completions.create(model="tiny", prompt="ab", n=2, logprobs=1, extra_body=EXTRA, **FIELDS)
    assert [c.text for c in answer.choices] == [c.text for c in want.outputs]
    assert [m.id for m in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("tiny").id == "tiny"
    text = plain.chat(ASK, SamplingParams(**FIELDS, **EXTRA))[0].outputs[0].text
    fields = {"temperature": 1.1, "max_output_tokens": 12, "extra_body": {"seed": 3, **EXTRA}}
    assert client.responses.create(model="tiny", input="ab abc", **fields).output_text == text
    with client.responses.stream(model="tiny", input="ab abc", **fields) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(pieces) == text


def test_errors_arrive_as_the_client_s_own(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=ASK)
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]") as caught:
        tool = {"type": "function", "function": {"name": "a b", "parameters": {}}}
        client.chat.completions.create(model="tiny", messages=ASK, tools=[tool])
    assert caught.value.param == "tools[0].function.name"


def test_many_at_once_and_some_that_leave(client, server, plain):
    want = plain.chat(ASK, SamplingParams(**FIELDS, **EXTRA))[0].outputs[0].text

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> None:
                stream = await client.chat.completions.create(
                    model="tiny", messages=ASK, stream=True, extra_body=EXTRA, **FIELDS
                )
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if i % 4 == 0 and text:
                        await stream.close()
                        return
                assert text == want

            await asyncio.gather(*(one(i) for i in range(24)))

    asyncio.run(main())
