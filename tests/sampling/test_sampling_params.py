from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.sampling_params import SamplingParams

BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, True, "1"],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None, True],
    "top_p": [0, -0.5, 1.01, float("nan"), "all"],
    "top_k": [-2, 0.5, "5", True],
    "min_p": [-0.01, 1.5, float("nan")],
    "repetition_penalty": [0, -1, float("inf")],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-3, 3],
    "logit_bias": [{-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {5: 101}, {5: float("nan")}, {5: None}, [5], {True: 1.0}],
    "seed": [-1, 2**64, 1.5, True],
    "stop": [[""], [3], "", ["ok", None], [b"x"]],
    "stop_token_ids": [[-1], [1.5], ["1"], [True]],
    "include_stop_str_in_output": [1, None],
    "min_tokens": [-1, 1.5],
    "max_tokens": [0, -5, 1.5, "10"],
    "ignore_eos": [0],
    "logprobs": [-1, True, 2.5],
    "skip_special_tokens": ["yes"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in BAD.items() for v in vs])
def test_errors_name_the_field(field, value):
    with pytest.raises(PacelineError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)


def test_min_tokens_beyond_max_tokens_names_both():
    with pytest.raises(PacelineError, match=r"min_tokens=9: must not exceed max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_values_take_their_normal_form():
    from_json: dict[Any, float] = {"7": -100, 8: 2}
    p = SamplingParams(stop="END", stop_token_ids=[4, 5], logit_bias=from_json, temperature=0, top_k=-1)
    assert p.stop_strings == ("END",)
    assert p.stop_token_ids == (4, 5)
    assert p.logit_bias == {7: -100.0, 8: 2.0}
    assert p.greedy and isinstance(p.temperature, float)
    assert SamplingParams(stop=None, stop_token_ids=None).stop_strings == ()
    assert not SamplingParams().greedy


def test_parameters_cannot_change_afterwards():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="beams"):
        SamplingParams(beams=4)  # type: ignore[call-arg]
