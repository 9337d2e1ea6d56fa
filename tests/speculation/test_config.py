from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.speculation.config import KNOWN_KEYS, METHODS, SpeculativeConfig
from paceline.values import shown


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"method": "ngram"}, ("ngram", None, 7, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, ("ngram", None, 5, 4, 4)),
        ({"method": "ngram", "prompt_lookup_min": 3}, ("ngram", None, 7, 3, 3)),
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, ("ngram", None, 7, 5, 2)),
        ({"model": "ngram", "num_speculative_tokens": 3}, ("ngram", None, 3, 4, 2)),
        ({"prompt_lookup_max": 3}, ("ngram", None, 7, 3, 3)),
        ({"method": "dflash", "model": "org/some-drafter"}, ("dflash", "org/some-drafter", None, None, None)),
        (
            {"model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15},
            ("dflash", "z-lab/Qwen3-8B-DFlash-b16", 15),
        ),
        ({"method": "dflash"}, ("dflash", None, None, None, None)),
        ({"model": "deepseek-ai/dspark_qwen3_4b_block7"}, ("dspark", "deepseek-ai/dspark_qwen3_4b_block7", None)),
        ({"model": "z-lab/Qwen3.8-27B-DFlash2"}, ("dflash2", "z-lab/Qwen3.8-27B-DFlash2", None)),
        ({"model": "Qwen/Qwen3-0.6B"}, ("draft_model", "Qwen/Qwen3-0.6B", 5)),
        ({"method": "draft_model", "model": "x", "num_speculative_tokens": 3}, ("draft_model", "x", 3, None, None)),
        ({"method": "mtp"}, ("mtp", None, 5, None, None)),
        ({"method": "mtp", "model": "x", "num_speculative_tokens": 2}, ("mtp", "x", 2, None, None)),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, ("mtp", None, 2)),
        ({"method": "qwen3_5_mtp", "prompt_lookup_max": 3}, ("mtp", None, 5, 3, 3)),
        ({"method": "dflash", "model": "x", "prompt_lookup_max": 4}, ("dflash", "x", None, 4, 4)),
        ({"method": "dspark", "model": "x", "prompt_lookup_min": 2}, ("dspark", "x", None, 2, 2)),
    ],
)
def test_vllms_json_is_understood(source, expected):
    config = SpeculativeConfig.parse(source)
    fields = (
        config.method,
        config.model,
        config.num_speculative_tokens,
        config.prompt_lookup_max,
        config.prompt_lookup_min,
    )
    assert fields[: len(expected)] == expected
    assert SpeculativeConfig.parse(json.dumps(source)) == config
    assert SpeculativeConfig.parse(config) is config


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{not json", ["not valid JSON", "method"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"a":' * 100_000, ["not valid JSON"]),
        ('{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}", ["not valid JSON"]),
        ("[1, 2]", ["JSON object"]),
        (10**5000, ["JSON object"]),
        *(
            ({"method": "ngram", key: value}, [key, str(most)])
            for key, most in (("prompt_lookup_max", 64), ("prompt_lookup_min", 64), ("num_speculative_tokens", 128))
            for value in (most + 1, 2**31, 10**400, 10**5000, np.int64(most + 1))
        ),
        ({"method": "ngram", "prompt_lookup_max": np.float64(2)}, ["prompt_lookup_max", "integer"]),
        ({"method": "ngram", "num_speculative_tokens": np.True_}, ["num_speculative_tokens", "integer"]),
        ({"x" * 10_000: 1}, ["unknown key 'xxx"]),
        ({3: 1}, ["unknown key '3'"]),
        ({"method": "y" * 10_000}, ["method='yyy"]),
        ("3", ["JSON object"]),
        ({}, ["method=None", *METHODS]),
        ({"method": "eagle3"}, ["method='eagle3'", *METHODS]),
        ({"method": "deepseek_mtp"}, ["method='deepseek_mtp'", *METHODS]),
        ({"method": ["ngram"]}, ["method=", *METHODS]),
        (
            {"method": "ngram", "num_spec_tokens": 3},
            ["num_spec_tokens", "did you mean 'num_speculative_tokens'", *KNOWN_KEYS],
        ),
        ({"method": "ngram", "zzz": 3}, ["unknown key 'zzz'", *KNOWN_KEYS]),
        ({"method": "dflash", "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size", "one process"]),
        ({"method": "dflash", "draft_sample_method": "probabilistic"}, ["draft_sample_method", "rejection"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1 or more"]),
        ({"method": "ngram", "num_speculative_tokens": True}, ["num_speculative_tokens=True"]),
        ({"method": "ngram", "num_speculative_tokens": 129}, ["num_speculative_tokens=129", "128"]),
        ({"method": "ngram", "prompt_lookup_max": 2.0}, ["prompt_lookup_max=2.0"]),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            ["prompt_lookup_min=4", "prompt_lookup_max=3"],
        ),
        ({"method": "ngram", "model": "org/drafter"}, ["model='org/drafter'", "ngram"]),
        ({"method": "dflash", "model": ""}, ["model=''"]),
        ({"method": "dflash", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, ["prompt_lookup_min=3", "exceed"]),
        ({"method": "draft_model"}, ["draft_model", "needs model"]),
        *(
            ({"method": "dspark", "confidence_threshold": value}, ["confidence_threshold=", "0 to 1"])
            for value in (-0.1, 1.1, "0.5", True, float("nan"), 10**400)
        ),
        ({"method": "dflash", "confidence_threshold": 0.5}, ["confidence_threshold=0.5", "dspark"]),
    ],
    ids=shown,
)
def test_errors_name_key_value_and_remedy(source, parts):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(source)
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value, ValueError)


def test_numpy_integers_are_taken():
    config = SpeculativeConfig.parse(
        {"method": "ngram", "num_speculative_tokens": np.int64(5), "prompt_lookup_max": np.uint8(64)}
    )
    assert config == SpeculativeConfig("ngram", None, 5, 64, 64)
    assert type(config.num_speculative_tokens) is int and type(config.prompt_lookup_max) is int


def test_objects_made_by_hand_are_checked_and_completed():
    assert SpeculativeConfig.parse(SpeculativeConfig("ngram")) == SpeculativeConfig("ngram", None, 7, 4, 2)
    for wrong in (
        SpeculativeConfig("eagle"),
        SpeculativeConfig("ngram", prompt_lookup_max=65),
        SpeculativeConfig("dflash", "x", 10**6),
    ):
        with pytest.raises(ConfigError, match="speculative config"):
            SpeculativeConfig.parse(wrong)


@pytest.mark.parametrize("budget", [1, 16, 255, "auto"])
def test_a_tree_budget_belongs_to_dflash(budget):
    config = SpeculativeConfig.parse({"method": "dflash", "tree_budget": budget})
    assert config.tree_budget == budget and SpeculativeConfig.parse(config) is config
    for method in ("ngram", "dspark", "dflash2", "draft_model", "mtp"):
        with pytest.raises(ConfigError, match=f"tree_budget={budget!r}: belongs to the method dflash, not {method}"):
            SpeculativeConfig.parse(
                {"method": method, "model": None if method == "ngram" else "x", "tree_budget": budget}
            )


@pytest.mark.parametrize("budget", [0, -1, 256, 1.5, True, "all", [3]])
def test_other_tree_budgets_are_refused(budget):
    with pytest.raises(ConfigError, match="tree_budget"):
        SpeculativeConfig.parse({"method": "dflash", "tree_budget": budget})


def test_vllms_fixed_trees_are_answered():
    with pytest.raises(ConfigError, match=r"speculative_token_tree.*tree_budget"):
        SpeculativeConfig.parse({"method": "dflash", "speculative_token_tree": "[(0,)]"})
