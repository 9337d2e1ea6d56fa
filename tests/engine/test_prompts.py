"""What counts as a prompt."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import paceline
from paceline import LLM, SamplingParams, TextPrompt, TokensPrompt
from paceline.cli.hints import OPTIONS
from paceline.errors import ConfigError, PacelineError
from paceline.other_names import LLM_OPTIONS, NEUTRAL

from .conftest import World

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_vllm_mappings_mean_what_they_say(world: World) -> None:
    ids = [5, 6, 7]
    expected = world.plain.generate([ids], GREEDY)[0].outputs[0].token_ids
    for prompt in ({"prompt_token_ids": ids}, {"prompt": "x", "prompt_token_ids": ids}):
        for form in (prompt, [prompt]):
            outputs = world.plain.generate(form, GREEDY)
            assert [o.prompt_token_ids for o in outputs] == [ids]
            assert outputs[0].outputs[0].token_ids == expected
    text = world.plain.generate({"prompt": "abc"}, GREEDY)[0]
    assert text.prompt_token_ids == world.plain.tokenizer.encode("abc")


def test_a_mapping_without_a_prompt_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="'text'"):
        world.plain.generate([{"text": "abc"}], GREEDY)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        1.5,
        b"abc",
        [b"abc"],
        [1.5, 2.0],
        [["1", "2"]],
        [[3, "4"]],
        [[True, False]],
        [{1, 2}],
        [[float("inf")]],
        [[]],
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(world: World, prompt: object) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        world.plain.generate(prompt, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [5, {"temperature": 0}, {}, 0, True, SamplingParams, [None, 3], ""], ids=str)
def test_what_is_no_sampling_params_is_refused(world: World, params: object) -> None:
    with pytest.raises(ConfigError, match="sampling_params"):
        world.plain.generate([[5, 6]], params)  # type: ignore[arg-type]
    if not isinstance(params, list):
        with pytest.raises(ConfigError, match="sampling_params"):
            world.plain.stream([5, 6], params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[5], {"role": "user", "content": "x"}, "x", [], None], ids=str)
def test_what_is_no_conversation_is_refused(world: World, messages: object) -> None:
    with pytest.raises(ConfigError, match="messages"):
        world.plain.chat(messages, GREEDY)  # type: ignore[arg-type]


def test_numpy_ids_are_ids(world: World) -> None:
    import numpy as np

    expected = world.plain.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    for prompt in (np.array([5, 6, 7]), [np.array([5, 6, 7], np.int64)], [[np.int32(5), 6, 7]]):
        assert world.plain.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected  # type: ignore[arg-type]


def test_messages_may_have_text_parts(world: World) -> None:
    """As OpenAI's clients send them; the text is that of one string."""
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    expected = world.plain.chat([{"role": "user", "content": "ab\nc"}], GREEDY)[0]
    told = world.plain.chat([{"role": "user", "content": parts}], GREEDY)[0]
    assert told.prompt_token_ids == expected.prompt_token_ids
    streamed = list(world.plain.stream([{"role": "user", "content": parts}], GREEDY))[-1].output
    assert streamed is not None and streamed.outputs[0].token_ids == told.outputs[0].token_ids


def test_an_assistant_that_only_called_tools_needs_no_content(world: World) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]
    empty = [said[0], {"role": "assistant", "content": "", "tool_calls": []}]
    ids = [world.plain.chat(messages, GREEDY)[0].prompt_token_ids for messages in (said, empty)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user"}, r"messages\[0\]: a message of the role 'user' needs 'content'"),
        ({"content": "x"}, r"messages\[0\]: role None"),
        ({"role": "user", "content": 5}, r"messages\[0\]: content int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "kind 'image_url'"),
        ({"role": "user", "content": [5]}, "kind 'int'"),
    ],
)
def test_a_wrong_message_is_named(world: World, message: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        world.plain.chat([message], GREEDY)
    with pytest.raises(ConfigError, match=told):
        world.plain.stream([message], GREEDY)  # type: ignore[list-item]


def test_messages_in_place_of_a_prompt_are_told_where_to_go(world: World) -> None:
    with pytest.raises(ConfigError, match=r"LLM\.chat"):
        world.plain.generate([{"role": "user", "content": "x"}], GREEDY)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("gpu_memory_utilization", "kv_cache_space"),
        ("tensor_parallel_size", "threads"),
        ("max_num_seq", "did you mean 'max_num_seqs'"),
        ("n_gpu_layers", "models run on the processor"),
        ("revision", "a folder that holds it"),
        ("task", "generate text, nothing else"),
        ("runner", "generate text, nothing else"),
        ("chat_template", r"llm\.chat\(messages, chat_template="),
        ("block_size", "16 tokens"),
        ("served_model_name", "--served-model-name"),
        ("guided_decoding_backend", "llguidance"),
        ("hf_overrides", r"config\.json"),
        ("limit_mm_per_prompt", "text alone"),
        ("skip_tokenizer_init", "without a tokenizer"),
        ("logits_processors", "logit_bias"),
        ("generation_config", r"SamplingParams\(\.\.\.\)"),
        ("override_generation_config", r"SamplingParams\(\.\.\.\)"),
        ("no_idea", r"no_idea: there is no such option; Options: model, dtype, .*allow_longer_drafts$"),
    ],
)
def test_an_unknown_option_is_refused_with_what_stands_for_it(option: str, told: str) -> None:
    """Before a model is looked for."""
    with pytest.raises(ConfigError, match=f"{option}: .*{told}" if "no_idea" not in told else told):
        LLM("no-such-model", **{option: 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", sorted(NEUTRAL))
def test_an_option_that_asks_for_what_is_the_case_does_nothing(option: str) -> None:
    """It gets as far as looking for the model; any other value is refused."""
    assert option in LLM_OPTIONS
    for value in NEUTRAL[option]:
        with pytest.raises(PacelineError, match="no-such-model"):
            LLM("no-such-model", **{option: value})  # type: ignore[arg-type]
    for value in (2, "other", 1.5):
        with pytest.raises(ConfigError, match=f"{option}: there is no such option; "):
            LLM("no-such-model", **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", sorted(LLM_OPTIONS))
def test_every_option_of_others_may_be_none(option: str) -> None:
    with pytest.raises(PacelineError, match="no-such-model"):
        LLM("no-such-model", **{option: None})  # type: ignore[arg-type]


def test_no_option_of_others_is_one_of_ours() -> None:
    assert not set(LLM_OPTIONS) & set(inspect.signature(LLM).parameters)


def test_the_command_line_says_the_same_of_layers_on_a_graphics_card() -> None:
    assert OPTIONS["--n-gpu-layers"][1] == OPTIONS["-ngl"][1] == LLM_OPTIONS["n_gpu_layers"] == LLM_OPTIONS["device"]


@pytest.mark.parametrize(
    ("prompt", "remedy"),
    [
        (None, "give a text or a list of token ids"),
        (5, r"in a list: \[5\]"),
        (b"abc", "decode bytes first"),
        (bytearray(b"abc"), "decode bytes first"),
        ((text for text in ("a", "b")), r"make a list of it: list\("),
        ({"a", "b"}, r"make a list of it: list\("),
        (1.5, "give a text or a list of token ids"),
    ],
    ids=["None", "int", "bytes", "bytearray", "generator", "set", "float"],
)
def test_what_is_no_prompt_is_told_what_would_be(world: World, prompt: Any, remedy: str) -> None:
    for call in (world.plain.generate, world.plain.stream):
        with pytest.raises(ConfigError, match=f"^prompts?: .* is neither text, token ids nor .*{remedy}") as caught:
            call(prompt, GREEDY)
        assert ("decode" in str(caught.value)) == isinstance(prompt, bytes | bytearray)


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "prompts", [["a", "b"], ["a"], [[1, 2], [3]], [MESSAGES, MESSAGES], [{"prompt": "a"}], (MESSAGES,)], ids=str
)
def test_a_stream_has_one_prompt(world: World, prompts: Any) -> None:
    said = rf"prompt: a list of prompts \({len(prompts)}\) given where there is one; .*LLM\.generate"
    with pytest.raises(ConfigError, match=said):
        world.plain.stream(prompts, GREEDY)


def test_a_tuple_of_messages_is_a_conversation(world: World) -> None:
    want = world.plain.chat(MESSAGES, GREEDY)[0].outputs[0].token_ids
    last = list(world.plain.stream(tuple(MESSAGES), GREEDY))[-1]  # type: ignore[arg-type]
    assert last.outputs[0].token_ids == want


def test_mappings_as_vllm_makes_them(world: World) -> None:
    ids = world.plain.tokenizer.encode("abc")
    for prompt in (
        TextPrompt(prompt="abc"),
        TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt="x"),
    ):
        assert world.plain.generate(prompt, GREEDY)[0].prompt_token_ids == ids


def test_names_that_were_not_used_yet_are_listed() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))
