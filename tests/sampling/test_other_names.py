"""Fields of other engines' sampling parameters: taken where they ask for nothing, else answered with a remedy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from paceline import BeamSearchParams, SamplingParams
from paceline.other_names import NEUTRAL_SAMPLING, PARAMS_FIELDS
from paceline.sampling_params import SamplingParamsError
from paceline.server.fields import NEUTRAL as HTTP_NEUTRAL
from paceline.server.fields import is_neutral

OWN = {field.name for field in fields(SamplingParams)}
DEFAULTS: list[tuple[str, Any]] = [
    ("best_of", None),
    ("best_of", 1),
    ("logits_processors", None),
    ("truncate_prompt_tokens", None),
    ("truncate_prompt_tokens", -1),
    ("guided_decoding", None),
    ("extra_args", None),
    ("skip_clone", False),
    ("thinking_token_budget", None),
    ("detokenize", True),
    ("spaces_between_special_tokens", True),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("early_stopping", False),
    ("do_sample", None),
]


@pytest.mark.parametrize(("name", "value"), DEFAULTS)
def test_defaults_of_others_are_taken(name: str, value: Any) -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    assert SamplingParams(temperature=0.5, seed=3, **{name: value}) == params
    assert params.clone(**{name: value}) == params
    assert SamplingParams.from_optional(temperature=0.5, seed=3, **{name: value}) == params


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("best_of", 2, "ask for n choices"),
        ("best_of", True, "ask for n choices"),
        ("logits_processors", [print], "logit_bias"),
        ("truncate_prompt_tokens", 5, "shorten the prompt"),
        ("guided_decoding", {"json": {}}, "structured_outputs="),
        ("extra_args", {"a": 1}, "is not supported"),
        ("thinking_token_budget", 5, "max_tokens counts reasoning too"),
        ("detokenize", False, "there is always a text"),
        ("spaces_between_special_tokens", False, "a text has the spaces that its tokens have"),
        ("do_sample", False, "use temperature=0"),
        ("do_sample", True, "use temperature=0 for greedy decoding, a higher one to sample"),
        (
            "length_penalty",
            2.0,
            r"belongs to beam search: LLM\..*, BeamSearchParams\(length_penalty=",
        ),
        ("early_stopping", True, r"LLM\.beam_search"),
        ("num_predict", 5, "use max_tokens$"),
        ("n_predict", 5, "use max_tokens$"),
        ("max_new_tokens", 5, "use max_tokens$"),
    ],
)
def test_what_asks_for_something_is_answered(name: str, value: Any, told: str) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{name}=.*: .*{told}") as caught:
        SamplingParams(**{name: value})
    assert "did you mean" not in str(caught.value)


def test_the_tables_are_of_other_names() -> None:
    assert not OWN & set(PARAMS_FIELDS)
    assert set(NEUTRAL_SAMPLING) <= set(PARAMS_FIELDS)


@pytest.mark.parametrize("name", sorted(set(HTTP_NEUTRAL) & set(PARAMS_FIELDS)))
def test_the_server_takes_the_same_values(name: str) -> None:
    assert NEUTRAL_SAMPLING[name] == HTTP_NEUTRAL[name]
    assert all(is_neutral(name, value) for value in NEUTRAL_SAMPLING[name])


def test_none_is_the_default_of_from_optional() -> None:
    assert SamplingParams.from_optional(n=None, temperature=None, max_tokens=None, stop=None) == SamplingParams()
    assert SamplingParams.from_optional(temperature=0, top_k=3) == SamplingParams(temperature=0, top_k=3)
    with pytest.raises(SamplingParamsError, match="temprature"):
        SamplingParams.from_optional(temprature=1)


def test_beam_search_has_its_own_fields() -> None:
    assert BeamSearchParams(2, 3, length_penalty=0.5, early_stopping=False).length_penalty == 0.5  # type: ignore[call-arg]
    with pytest.raises(SamplingParamsError, match="early_stopping=True"):
        BeamSearchParams(2, 3, early_stopping=True)  # type: ignore[call-arg]
