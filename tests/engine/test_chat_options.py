"""Keyword arguments of `generate`, `chat`, `stream` and of `AsyncLLM`: none is swallowed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from paceline import AsyncLLM, SamplingParams
from paceline.chat_options import CHAT_ARGUMENTS
from paceline.chat_template import ChatTemplateError
from paceline.errors import ArgumentError, ConfigError

from .conftest import World
from .harness import assert_idle
from .test_async_llm import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ASK = [{"role": "user", "content": "ab"}]
MARKED = "{{ messages[0].content }}{{ mark }}{% if add_generation_prompt %}g{% endif %}{{ tools | length if tools }}"

Ids = Callable[..., list[int]]


def _with_engine(world: World, call: Callable[[AsyncLLM], Any]) -> list[int]:
    async def main() -> list[int]:
        engine = AsyncLLM(world.spec)
        try:
            return await call(engine)
        finally:
            await engine.close()

    return run(main())


def _complete(world: World, prompt: Any = ASK, **arguments: Any) -> list[int]:
    async def call(engine: AsyncLLM) -> list[int]:
        return (await engine.complete(prompt, GREEDY, **arguments)).prompt_token_ids

    return _with_engine(world, call)


def _pieces(world: World, prompt: Any = ASK, **arguments: Any) -> list[int]:
    async def call(engine: AsyncLLM) -> list[int]:
        return [piece async for piece in engine.generate(prompt, GREEDY, **arguments)][-1].prompt_token_ids

    return _with_engine(world, call)


def _encoded(world: World, prompt: Any = ASK, **arguments: Any) -> list[int]:
    async def call(engine: AsyncLLM) -> list[int]:
        ids = await engine.encode_chat(prompt, **arguments)
        text = await engine.render_chat(prompt, **arguments)
        assert await engine.encode(text, add_special_tokens=False) == ids
        return ids

    return _with_engine(world, call)


def _chat(world: World, prompt: Any = ASK, **arguments: Any) -> list[int]:
    return world.plain.chat(prompt, GREEDY, **arguments)[0].prompt_token_ids


def _stream(world: World, prompt: Any = ASK, **arguments: Any) -> list[int]:
    return list(world.plain.stream(prompt, GREEDY, **arguments))[-1].prompt_token_ids


def _generate(world: World, **arguments: Any) -> list[int]:
    return world.plain.generate("ab", GREEDY, **arguments)[0].prompt_token_ids


CHATS = [_chat, _stream, _complete, _pieces, _encoded]
chats = pytest.mark.parametrize("ids", CHATS, ids=lambda call: call.__name__[1:])
calls = pytest.mark.parametrize("ids", [*CHATS, _generate], ids=lambda call: call.__name__[1:])


@calls
@pytest.mark.parametrize(
    ("argument", "value", "told"),
    [
        ("max_tokens", 5, r"is a parameter of sampling; put it into SamplingParams\(max_tokens=\.\.\.\)"),
        ("temperature", 0, r"put it into SamplingParams\(temperature="),
        ("seed", 1, r"put it into SamplingParams\(seed="),
        ("max_new_tokens", 5, r"SamplingParams\(\.\.\.\); there: use max_tokens"),
        ("guided_decoding", {"json": {}}, "there: use structured_outputs="),
        ("temprature", 0, r"did you mean SamplingParams\(temperature="),
        ("lora_request", "a LoRA", "is not supported; leave it out: there are no adapters"),
        ("priority", 3, "is not supported; leave it out"),
        ("tokenization_kwargs", {"truncation": True}, "encode the text yourself"),
        ("mm_processor_kwargs", {"a": 1}, "text alone"),
        ("prompt_token_ids", [[1, 2]], r"give the ids as the prompt: \[1, 2, 3\], or \{'prompt_token_ids'"),
        ("stream", True, r"LLM\.stream"),
        ("chat_template_content_format", "openai", "text parts are joined"),
        ("foo", 1, "there is no such argument"),
        ("foo", None, "there is no such argument"),
    ],
)
def test_an_argument_that_there_is_not_is_named(world: World, ids: Ids, argument: str, value: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}=.*: .*{told}") as caught:
        ids(world, **{argument: value})
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ConfigError)
    assert_idle(world.plain)
    assert_idle(world.spec)


@calls
def test_arguments_that_ask_for_nothing_are_taken(world: World, ids: Ids) -> None:
    nothing: dict[str, Any] = {
        **dict.fromkeys(("lora_request", "priority", "tokenization_kwargs", "trace_headers", "prompt_token_ids")),
        "mm_processor_kwargs": {},
        "chat_template_content_format": "auto",
        "stream": False,
    }
    assert ids(world, **nothing) == ids(world)


@chats
def test_variables_of_the_template_come_together(world: World, ids: Ids) -> None:
    plain, marked, none = (
        ids(world, chat_template=MARKED, chat_template_kwargs=kwargs) for kwargs in (None, {"mark": "b"}, {})
    )
    assert plain == none == world.plain.tokenizer.encode("abg")
    assert marked == world.plain.tokenizer.encode("abbg")
    with pytest.raises(ArgumentError, match=r"^mark='b': .*chat_template_kwargs=\{'mark': \.\.\.\}"):
        ids(world, chat_template=MARKED, mark="b")
    with pytest.raises(ArgumentError, match=r"^enable_thinking=False: .*chat_template_kwargs=\{'enable_thinking'"):
        ids(world, enable_thinking=False)
    with pytest.raises(ArgumentError, match=r"did you mean 'chat_template_kwargs'"):
        ids(world, chat_template_kwarg={})


@chats
@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ("x", "^chat_template_kwargs='x': use a mapping"),
        ({"tools": []}, "'tools' is no variable of a template; give it as an argument of its own"),
        ({"messages": []}, "'messages' is no variable of a template; leave it out"),
        ({"a b": 1}, "'a b' is not the name of a variable"),
        ({3: 1}, "3 is not the name of a variable"),
    ],
)
def test_what_is_no_variable(world: World, ids: Ids, kwargs: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ids(world, chat_template_kwargs=kwargs)


def test_a_variable_that_the_template_does_not_read_is_worth_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    template = f"{MARKED}{{# of its own: {world.dtype} #}}"
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(3):
            _chat(world, chat_template=template, chat_template_kwargs={"mark": "a", "enable_thinking": False})
    assert [record.getMessage() for record in caplog.records] == [
        "chat_template_kwargs: the chat template does not read 'enable_thinking'; it changes nothing"
    ]


@chats
def test_tools_and_the_beginning_of_an_answer(world: World, ids: Ids) -> None:
    encode = world.plain.tokenizer.encode
    assert ids(world, chat_template=MARKED, add_generation_prompt=False) == encode("ab")
    assert ids(world, chat_template=MARKED, add_generation_prompt=True, tools=[{"type": "function"}]) == encode("abg1")
    assert ids(world, chat_template=MARKED, tools=None, continue_final_message=False) == encode("abg")
    for name, value, told in (
        ("tools", "x", "tools='x': use a list"),
        ("tools", ["x"], "use a list of mappings"),
        ("chat_template", 5, "chat_template=5: use the source"),
        ("add_generation_prompt", "no", "add_generation_prompt='no': use True or False"),
        ("continue_final_message", 1, "continue_final_message=1: use True or False"),
    ):
        with pytest.raises(ConfigError, match=told):
            ids(world, **{name: value})


# Endings that stand in what the template writes behind a message too, and space at the end.
@pytest.mark.parametrize("begun", ["ha ha", "e", "|", "<|", "end", "a ", "a\n", "", " a"])
@chats
def test_the_last_message_is_continued(world: World, ids: Ids, begun: str) -> None:
    """The prompt ends with the message's text, whatever stands there; the template says what becomes of space."""
    ended = [*ASK, {"role": "assistant", "content": "#"}]
    whole = world.plain.tokenizer.apply_chat_template(ended, add_generation_prompt=False)
    want = world.plain.tokenizer.encode(whole[: whole.rindex("#")] + begun, add_special_tokens=False)
    messages = [*ASK, {"role": "assistant", "content": begun}]
    assert ids(world, prompt=messages, continue_final_message=True) == want
    assert ids(world, prompt=messages, continue_final_message=True, add_generation_prompt=False) == want


@chats
def test_a_template_that_trims_messages_leaves_no_space_to_go_on_behind(world: World, ids: Ids) -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [*ASK, {"role": "assistant", "content": " a b \n"}]
    want = world.plain.tokenizer.encode("[ab][a b", add_special_tokens=False)
    assert ids(world, prompt=messages, chat_template=template, continue_final_message=True) == want


@chats
def test_what_cannot_be_continued(world: World, ids: Ids) -> None:
    messages = [*ASK, {"role": "assistant", "content": "a"}]
    with pytest.raises(ConfigError, match=r"^continue_final_message=True: contradicts add_generation_prompt"):
        ids(world, prompt=messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ChatTemplateError, match=r"is not in what the template wrote"):
        ids(world, prompt=messages, chat_template="{{ messages[0].content }}", continue_final_message=True)


def test_each_of_several_conversations_is_continued(world: World) -> None:
    two = [[*ASK, {"role": "assistant", "content": text}] for text in ("a", "ha ha")]
    outputs = world.plain.chat(two, GREEDY, continue_final_message=True)
    assert [o.prompt_token_ids for o in outputs] == [_chat(world, prompt=m, continue_final_message=True) for m in two]


@pytest.mark.parametrize("ids", [_stream, _complete, _pieces], ids=lambda call: call.__name__[1:])
def test_arguments_of_conversations_need_one(world: World, ids: Ids) -> None:
    asked: dict[str, Any] = {
        "tools": [{"type": "function"}],
        "chat_template": "x",
        "add_generation_prompt": True,
        "continue_final_message": True,
        "chat_template_kwargs": {"a": 1},
    }
    assert set(asked) == set(CHAT_ARGUMENTS)
    for name, value in asked.items():
        with pytest.raises(ConfigError, match=f"^{name}: belongs to a chat template; give messages"):
            ids(world, prompt="ab", **{name: value})
        assert ids(world, prompt="ab", **{name: None}) == world.plain.tokenizer.encode("ab")
        with pytest.raises(ArgumentError, match=rf"^{name}=.*belongs to conversations; use LLM\.chat"):
            _generate(world, **{name: value})
