"""Recognising drafters by their fields: every packaging, which slots predict, and refusals of everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.models.drafter_config import read_drafter_config
from paceline.models.layouts import ARCHITECTURES, recognise

from .tiny import Draft, Shape, drafter_config

SHAPE = Shape(layers=4)
BASE = {k: v for k, v in drafter_config(SHAPE, Draft(nested=False)).items() if k != "architectures"}
DSPARK = {
    "markov_rank": 4,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3, "is_causal": False}
METHOD = {"proposal_type": "greedy", "verifier_accept_k": 1}


def native(architecture: str, **fields: Any) -> dict[str, Any]:
    return {**BASE, "architectures": [architecture], **fields}


def speculators(kind: str, count: int | None = None, **fields: Any) -> dict[str, Any]:
    decoder = {k: v for k, v in BASE.items() if k not in ("mask_token_id", "target_layer_ids", "block_size")}
    config = {
        "architectures": ["Anything"],
        "speculators_model_type": kind,
        "transformer_layer_config": decoder,
        "block_size": 8,
        "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": SHAPE.vocab,
        **fields,
    }
    if count is not None:
        config["speculators_config"] = {"proposal_methods": [{**METHOD, "speculative_tokens": count}]}
    return config


# (config, family, packaging, anchor first, drafts of a block of 8)
KNOWN: dict[str, tuple[dict[str, Any], str, str, bool, int]] = {
    "z-lab": (native("DFlashDraftModel"), "dflash", "z-lab", False, 7),
    "z-lab, from the anchor": (native("DFlashDraftModel", sample_from_anchor=True), "dflash", "z-lab", True, 8),
    "DFlash 2": (native("DFlash2DraftModel", **DFLASH2), "dflash2", "z-lab", False, 7),
    "DeepSpec": (native("Qwen3DSparkModel", **DSPARK), "dspark", "DeepSpec", True, 8),
    "DeepSpec's dflash": (native("Qwen3DSparkModel", markov_rank=0), "dspark", "DeepSpec", True, 8),
    "SpecForge": (
        native("DSparkDraftModel", dflash_config={"projector_type": "dspark", **DSPARK}),
        "dspark",
        "SpecForge",
        True,
        8,
    ),
    "LiquidAI": (
        native("Lfm2DSparkDraftModel", rope_is_neox_style=False, **DSPARK),
        "dspark",
        "LiquidAI",
        True,
        8,
    ),
    "not from the anchor": (
        native("DSparkDraftModel", **DSPARK, sample_from_anchor=False),
        "dspark",
        "SpecForge",
        False,
        7,
    ),
    "speculators dflash": (speculators("dflash"), "dflash", "speculators", False, 7),
    "speculators dflash, by count": (speculators("dflash", 8), "dflash", "speculators", True, 8),
    "speculators dflash2": (speculators("dflash2", 7, **DFLASH2), "dflash2", "speculators", False, 7),
    "speculators dspark": (speculators("dspark"), "dspark", "speculators", True, 8),
    "speculators dspark, by count": (speculators("dspark", 7), "dspark", "speculators", False, 7),
    "flag before count": (speculators("dspark", 7, sample_from_anchor=True), "dspark", "speculators", True, 8),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_packaging_is_recognised_by_its_fields(name):
    config, family, packaging, anchor_first, drafts = KNOWN[name]
    c = read_drafter_config(config, "x")
    assert (c.family, c.packaging, c.anchor_first, c.max_drafts) == (family, packaging, anchor_first, drafts)
    assert c.evidence and any("architectures" in e or "speculators_model_type" in e for e in c.evidence)
    assert c.decoder.rope.interleaved == (packaging == "LiquidAI")


def test_speculators_count_states_from_the_embedding():
    assert read_drafter_config(speculators("dflash", aux_hidden_state_layer_ids=[0, 4]), "x").target_layer_ids == (
        -1,
        3,
    )


def test_speculators_defaults_are_those_of_the_format():
    c = read_drafter_config(speculators("dspark"), "x")
    assert c.markov is not None and (c.markov.rank, c.markov.kind, c.confidence) == (256, "vanilla", 256)
    bare = speculators("dflash", draft_vocab_size=151936)
    bare["transformer_layer_config"] = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    d = read_drafter_config(bare, "x").decoder  # what equals transformers' own defaults is not written
    assert (d.hidden_size, d.head_dim, d.vocab_size, d.intermediate_size) == (4096, 128, 151936, 22016)


@pytest.mark.parametrize("both_ways", [None, False, True])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_speculators_flag_speaks_of_sliding_layers_alone(kind, both_ways):
    config = speculators(kind, **{k: v for k, v in DFLASH2.items() if kind == "dflash2" and k != "is_causal"})
    config["sliding_window_non_causal"] = both_ways
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    config["transformer_layer_config"] |= layers
    stated = (kind == "dflash2") if both_ways is None else both_ways
    assert read_drafter_config(config, "x").causal == (not stated, False)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["architectures = None", "seen: none of", "DFlashDraftModel", "speculators_model_type"]),
    (native("LlamaForCausalLMEagle3"), ["LlamaForCausalLMEagle3", "seen: architectures"]),
    (native("Gemma4DSparkModel", **DSPARK), ["Gemma4DSparkModel", "markov_rank = 4"]),
    ({**speculators("eagle3")}, ["speculators_model_type = 'eagle3'", "dspark"]),
    (speculators("xpress"), ["xpress"]),
    (speculators("dflash", aux_hidden_state_layer_ids=None), ["aux_hidden_state_layer_ids = None"]),
    (speculators("dflash", aux_hidden_state_layer_ids=[True]), ["aux_hidden_state_layer_ids"]),
    (speculators("dflash", transformer_layer_config=None), ["transformer_layer_config is missing"]),
    (speculators("dflash", transformer_layer_config=[1]), ["transformer_layer_config"]),
    (speculators("dflash", transformer_layer_config={"model_type": "llama"}), ["model_type = 'llama'"]),
    (speculators("dflash", 5), ["speculative_tokens = 5", "sample_from_anchor"]),
    (speculators("dflash", mask_token_id=None), ["mask_token_id"]),
    (speculators("dflash", block_size=None), ["block_size"]),
    (speculators("dflash", markov_rank=3), ["markov_rank", "dspark"]),
    (speculators("dflash", draft_vocab_size=SHAPE.vocab + 1), ["draft_vocab_size"]),
    (speculators("dflash2", **{**DFLASH2, "draft_vocab_size": 50}), ["draft_vocab_size", "whole head"]),
    (speculators("dflash2", **DFLASH2, sample_from_anchor=True), ["sample_from_anchor"]),
    (speculators("dflash2", **{**DFLASH2, "selector_rank": None}), ["selector_rank is missing"]),
    (native("DFlash2DraftModel", **{**DFLASH2, "conv_group_size": 7}), ["conv_group_size = 7", "hidden_size"]),
    (native("DFlash2DraftModel", **{**DFLASH2, "selector_top_k": SHAPE.vocab + 1}), ["selector_top_k"]),
    (native("Qwen3DSparkModel", **{**DSPARK, "markov_head_type": "lstm"}), ["markov_head_type = 'lstm'", "rnn"]),
    (native("Qwen3DSparkModel", **{**DSPARK, "markov_head_type": None}), ["markov_head_type"]),
    (native("Qwen3DSparkModel"), ["markov_rank is missing"]),
    (native("Qwen3DSparkModel", **{**DSPARK, "markov_rank": 0}), ["confidence_head_with_markov", "markov_rank is 0"]),
    (native("Qwen3DSparkModel", **DSPARK, selector_rank=4), ["selector_rank", "dflash2"]),
    (native("Qwen3DSparkModel", **DSPARK, log_snr_conditioning=True), ["log_snr_conditioning"]),
    (native("DSparkDraftModel", **DSPARK, dflash_query_causal=True), ["dflash_query_causal"]),
    (native("DSparkDraftModel", **DSPARK, has_lm_head=True), ["has_lm_head"]),
    (native("DSparkDraftModel", **DSPARK, dflash_config={"projector_type": "domino"}), ["projector_type = 'domino'"]),
    (native("DFlashDraftModel", dflash_config={"projector_type": "dspark"}), ["projector_type = 'dspark'"]),
    (native("DFlashDraftModel", attention_sink_bias=True), ["attention_sink_bias"]),
]


@pytest.mark.parametrize(("config", "parts"), REFUSED)
def test_anything_else_is_refused_by_name(config, parts):
    with pytest.raises(ConfigError) as caught:
        read_drafter_config(config, "config.json")
    for part in parts:
        assert part in str(caught.value)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=4),
    st.dictionaries(st.sampled_from(["rope_theta", "factor", "model_type", "block_size"]), st.integers(), max_size=2),
    st.sampled_from([*ARCHITECTURES, "gated", "sliding_attention", 10**400]),
)
_KEYS = sorted(
    {k for config, *_ in KNOWN.values() for k in config} | {"sample_from_anchor", "is_causal", "is_neox_style"}
)


@given(
    start=st.sampled_from(sorted(KNOWN)),
    changes=st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1, max_size=4),
    inner=st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=2),
)
@settings(max_examples=400, deadline=None)
def test_damaged_configs_are_read_or_refused_clearly(start, changes, inner):
    """Whatever a config says: a configuration whose numbers fit one another, or a ConfigError."""
    config = json.loads(json.dumps(KNOWN[start][0])) | changes
    for name in ("dflash_config", "transformer_layer_config"):
        if isinstance(config.get(name), dict):
            config[name] = config[name] | inner
    try:
        c = read_drafter_config(config, "config.json")
    except ConfigError as error:
        assert str(error).startswith("config.json") and len(str(error)) < 1200
        return
    assert recognise(config, "x").family == c.family
    assert c.max_drafts >= 1 and 0 <= c.mask_token_id < c.decoder.vocab_size
    assert len(c.causal) == c.decoder.num_layers == len(c.decoder.windows)
    assert len(set(c.target_layer_ids)) == len(c.target_layer_ids) > 0
