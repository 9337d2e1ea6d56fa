"""What counts as a prompt."""

from __future__ import annotations

import pytest

from paceline import SamplingParams
from paceline.errors import ConfigError

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
