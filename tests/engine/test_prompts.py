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
