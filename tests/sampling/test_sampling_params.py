from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.sampling_params import SamplingParams
from paceline.values import shown

BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, True, "1", 1025, 10**5000, None],
    "temperature": [
        -0.1,
        float("nan"),
        float("inf"),
        "hot",
        None,
        True,
        10**400,
        -(10**5000),
        1j,
        [1.0],
        np.float32("nan"),
        np.True_,
    ],
    "top_p": [0, -0.5, 1.01, float("nan"), "all", 10**400],
    "top_k": [-2, 0.5, "5", True, 2**31, 2**70, np.int64(2**40), np.float32(3), np.True_],
    "min_p": [-0.01, 1.5, float("nan")],
    "repetition_penalty": [0, -1, float("inf")],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-3, 3],
    "logit_bias": [
        {-1: 1.0},
        {1.5: 1.0},
        {"a": 1.0},
        {5: 101},
        {5: float("nan")},
        {5: None},
        [5],
        {True: 1.0},
        {"9" * 5000: 1},
        {"9" * 10: 1},
        {2**31: 1},
        {10**5000: 1},
        {5: 10**400},
        {"7": 1, 7: 2},
        {"": 1},
        5,
        "5",
    ],
    "seed": [-1, 2**64, 1.5, True, 10**5000, np.float64(1)],
    "stop": [[""], [3], "", ["ok", None], [b"x"], 5, 1.5, b"x", {"a": 1}, True, ["x", 10**5000]],
    "stop_token_ids": [
        [-1],
        [1.5],
        ["1"],
        [True],
        5,
        "12",
        b"12",
        {1: 2},
        [2**31],
        [10**5000],
        np.array([[1]]),
        np.array([1.0]),
        np.array([True]),
        True,
    ],
    "allowed_token_ids": [[], (), [-1], [1.5], ["1"], [True], 5, "12", {1: 2}, [2**31]],
    "bad_words": [[""], "word", [1], [None], b"word", 5, {"a": 1}],
    "include_stop_str_in_output": [1, None],
    "min_tokens": [-1, 1.5, 2**31, None],
    "max_tokens": [0, -5, 1.5, "10", 2**31, 10**5000],
    "ignore_eos": [0],
    "logprobs": [-2, True, 2.5, 2**31],
    "prompt_logprobs": [-2, True, 2.5, 2**31],
    "skip_special_tokens": ["yes"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in BAD.items() for v in vs], ids=shown)
def test_errors_name_the_field(field, value):
    with pytest.raises(PacelineError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300


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


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.array])
def test_numpy_scalars_and_arrays_are_taken(kind):
    p = SamplingParams(
        seed=kind(7), top_k=kind(5), max_tokens=kind(9), logprobs=kind(2), stop_token_ids=np.array([1, 2]),
        temperature=np.float32(0.5), top_p=np.float64(0.25), min_p=np.float16(0.5),
        logit_bias={np.int64(3): np.float32(1)},
    )  # fmt: skip
    plain = SamplingParams(
        seed=7, top_k=5, max_tokens=9, logprobs=2, stop_token_ids=[1, 2], temperature=0.5, top_p=0.25, min_p=0.5,
        logit_bias={3: 1.0},
    )  # fmt: skip
    assert p == plain and hash(p) == hash(plain)
    assert type(p.seed) is int and type(p.temperature) is float and json.dumps(dataclasses.asdict(p))
    assert SamplingParams(stop_token_ids=np.array([], np.int64), stop=np.array(["a"])).stop_strings == ("a",)
    masked = SamplingParams(allowed_token_ids=np.array([4, 2]), bad_words=["a", " b"])
    assert (masked.allowed_token_ids, masked.bad_words) == ((4, 2), ("a", " b")) and hash(masked)
    assert SamplingParams(bad_words=None).bad_words == ()


def test_bounds_themselves_are_taken():
    most = 2**31 - 1
    p = SamplingParams(n=1024, top_k=most, min_tokens=most, max_tokens=most, seed=2**64 - 1, logit_bias={str(most): 1})
    assert p.logit_bias == {most: 1.0}


def test_parameters_have_a_hash_and_survive_copies():
    p = SamplingParams(logit_bias={7: 1.0, 3: -2.0}, stop=["a"], stop_token_ids=[4])
    same = SamplingParams(logit_bias={"3": -2, "7": 1}, stop="a", stop_token_ids=(4,))  # type: ignore[dict-item]
    assert p == same and hash(p) == hash(same) and len({p, same}) == 1
    assert p != dataclasses.replace(p, logit_bias={7: 1.0})
    for copied in (copy.deepcopy(p), copy.copy(p), pickle.loads(pickle.dumps(p)), dataclasses.replace(p)):
        assert copied == p and hash(copied) == hash(p)


def test_logit_bias_cannot_change():
    source = {7: 1.0}
    bias: Any = SamplingParams(logit_bias=source).logit_bias
    source[8] = 2.0
    changes: list[Callable[[], object]] = [
        lambda: bias.__setitem__(7, 2.0), lambda: bias.__delitem__(7), lambda: bias.__ior__({1: 1.0}), bias.clear,
        lambda: bias.pop(7), bias.popitem, lambda: bias.setdefault(9, 1.0), lambda: bias.update({7: 2.0}),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(TypeError, match="cannot change"):
            change()
    assert bias == {7: 1.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("best_of", "best_of=2: is not supported; ask for n choices and choose yourself"),
        ("max_new_tokens", "max_new_tokens=2: use max_tokens"),
        ("temprature", "temprature=2: there is no such field; did you mean 'temperature'? Fields: n, temperature, "),
        ("zzz", "zzz=2: there is no such field. Fields: n, "),
    ],
)
def test_a_field_that_there_is_not_is_named_with_what_stands_for_it(name: str, told: str) -> None:
    with pytest.raises(PacelineError) as caught:
        SamplingParams(n=1, **{name: 2})
    assert str(caught.value).startswith(told)
    with pytest.raises(PacelineError):
        dataclasses.replace(SamplingParams(), **{name: 2})
