"""Configs of families beyond Llama's: what is recognised, what is refused by name, what is told by `paceline info`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.cli.models import describe
from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_model, read_config
from paceline.models.drafter_export import convert_drafter
from paceline.models.fields import OTHERS
from paceline.models.target import MODULES
from paceline.models.views import decoder_view
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.quantised_writer import quantise_model
from paceline.weights.safetensors_file import SafetensorsFile

from .families import ASSISTANT, CONFIGS, WINDOW, tensors, text, write_assistant, write_family
from .tiny import Shape, config_of, write

IDS = np.random.default_rng(4).integers(0, 88, 70).tolist()


def config_at(folder: Path, c: dict[str, Any], **change: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(changed(c, **change)))
    with open_checkpoint(folder) as checkpoint:
        return read_config(checkpoint)


def changed(c: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {**c, "text_config": {**c["text_config"], **change}} if "text_config" in c else {**c, **change}


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma2", "query_pre_attn_scalar", {"query_pre_attn_scalar": -1}),
    ("gemma2", "attn_logit_softcapping", {"attn_logit_softcapping": "50"}),
    ("gemma2", "final_logit_softcapping", {"final_logit_softcapping": 0}),
    ("gemma2", "hidden_act", {"hidden_act": "silu"}),
    ("gemma2", "layer_types", {"layer_types": ["full_attention"]}),
    ("gemma2", "rope_local_base_freq", {"rope_local_base_freq": 1e4}),
    ("gemma3", "query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ("gemma3", "attn_logit_softcapping", {"attn_logit_softcapping": -1}),
    ("gemma3", "final_logit_softcapping", {"final_logit_softcapping": "x"}),
    ("gemma3", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    ("gemma3", "hidden_activation", {"hidden_activation": "silu"}),
    ("gemma3", "rope_parameters", {"rope_parameters": {"rope_theta": 1e4}}),
    ("gemma3", "rope_local_base_freq", {"rope_local_base_freq": -1}),
    ("gemma3", "rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("gemma3", "num_experts", {"num_experts": 4}),
    ("gemma3", "num_kv_shared_layers", {"num_kv_shared_layers": 10}),
    ("mistral", "layer_types", {"layer_types": ["full_attention"] * 4}),
    ("mistral", "sliding_window", {"sliding_window": "24"}),
    ("mistral", "no_rope_layers", {"no_rope_layers": [1, 0, 1, 0]}),
    ("phi3", "layer_types", {"layer_types": ["full_attention"] * 4}),
    ("phi4", "short_factor", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}}),
    ("phi4", "long_factor", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": "x"}}),
    ("phi4", "long_factor", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [0.0] * 4}}),
    ("phi4", "original_max_position_embeddings", {"original_max_position_embeddings": 1}),
    ("smollm3", "no_rope_layers", {"no_rope_layers": [1, 0]}),
    ("smollm3", "no_rope_layers", {"no_rope_layers": [2] * 5}),
    ("smollm3", "no_rope_layer_interval", {"no_rope_layer_interval": 0}),
    ("smollm3", "use_sliding_window", {"layer_types": ["sliding_attention"] * 5, "sliding_window": 8}),
    ("qwen3_moe", "num_experts_per_tok", {"num_experts_per_tok": 7}),
    ("qwen3_moe", "num_experts", {"num_experts": 0}),
    ("qwen3_moe", "moe_intermediate_size", {"moe_intermediate_size": None}),
    ("qwen3_moe", "norm_topk_prob", {"norm_topk_prob": 1}),
    ("qwen3_moe", "mlp_only_layers", {"mlp_only_layers": "3"}),
    ("qwen3_moe", "decoder_sparse_step", {"decoder_sparse_step": 0}),
    ("qwen3_moe", "layer_types", {"layer_types": ["sliding_attention"] * 4}),
    ("qwen3_moe", "shared_expert_intermediate_size", {"shared_expert_intermediate_size": 64}),
    ("muse_glimmer", "layer_rope_theta", {"layer_rope_theta": [0, 1e4, 0, 1e4, 1e4, 1e4]}),
    ("muse_glimmer", "qk_scale_factor", {"qk_scale_factor": 0}),
    ("muse_glimmer", "post_norm_eps", {"post_norm_eps": -1}),
    ("muse_glimmer", "query_pre_attn_scalar", {"query_pre_attn_scalar": 8}),
]


@pytest.mark.parametrize(("name", "field", "change"), WRONG)
def test_mistakes_are_named(tmp_path, name, field, change):
    folder = write_family(tmp_path, CONFIGS[name])
    with pytest.raises(ConfigError, match=rf"{field}\b"):
        config_at(folder, CONFIGS[name], **change)


@pytest.mark.parametrize("field", OTHERS)
def test_fields_of_other_networks_are_refused_with_their_value(tmp_path, field):
    """In every family that does not read them; values that mean "not used" pass."""
    plain = config_of(Shape())
    folder = write(tmp_path, plain, {"a": np.zeros(1, np.float32)})
    for value in OTHERS[field]:
        assert config_at(folder, plain, **{field: value}).model_type == "llama"
    with pytest.raises(ConfigError, match=rf"{field} = 0\.37.*llama"):
        config_at(folder, plain, **{field: 0.37})
    assert not all(field in getattr(module, "FIELDS", ()) for module in MODULES.values())


def test_unknown_fields_are_warned_about_with_their_values(tmp_path, caplog):
    plain = config_of(Shape())
    folder = write(tmp_path, plain, {"a": np.zeros(1, np.float32)})
    with caplog.at_level(logging.WARNING):
        config_at(folder, plain, pretraining_tp=1, no_such_flag=False)
        assert not caplog.records
        config_at(folder, plain, brand_new_switch="fast")
    assert "'brand_new_switch': 'fast'" in caplog.text


@pytest.mark.parametrize("name", CONFIGS)
def test_info_recognises_the_family(tmp_path, name):
    folder, c = write_family(tmp_path, CONFIGS[name]), text(CONFIGS[name])
    with open_checkpoint(folder) as checkpoint:
        facts = describe(checkpoint)
    assert facts["architecture"] == CONFIGS[name]["model_type"]
    assert facts["num_layers"] == c["num_hidden_layers"] and facts["vocab_size"] == 97
    assert facts["windows"] == ([] if name in NO_WINDOW else [WINDOW])
    assert (facts["experts"], facts["experts_per_token"]) == ((6, 2) if "moe" in name else (None, None))


NO_WINDOW = ("mistral without window", "phi4", "smollm3", "qwen3_moe", "qwen3_moe mixed")


def test_windows_and_unrotated_layers():
    def of(name: str, **change: Any) -> Any:
        return MODULES[text(CONFIGS[name])["model_type"]].read_config(text(changed(CONFIGS[name], **change)))

    assert of("gemma2").windows == (WINDOW, 0, WINDOW, 0)
    assert of("gemma2 without caps").windows == (WINDOW, WINDOW, 0, WINDOW)
    assert of("gemma3").windows == (WINDOW, WINDOW, 0, WINDOW)
    assert of("gemma3", layer_types=None, sliding_window_pattern=2).windows == (WINDOW, 0, WINDOW, 0)
    assert of("muse_glimmer").windows == (WINDOW, 0, WINDOW, WINDOW, WINDOW, 0)
    assert of("muse_glimmer").traits.unrotated == (False, True, False, False, False, True)
    stated = [5000.0, 5000.0, 0, 5000.0, 5000.0, 5000.0]
    assert of("muse_glimmer", layer_rope_theta=stated).traits.unrotated == (False, False, True, False, False, False)
    assert of("smollm3").traits.unrotated == (False, False, False, True, False)
    assert of("qwen3_moe mixed").traits.experts.layers == (False, True, False, False)
    assert (
        MODULES["mistral"].read_config({k: v for k, v in CONFIGS["mistral"].items() if k != "sliding_window"}).windows
        == (4096,) * 4
    )


def test_gemma_2_has_the_defaults_of_its_class():
    """A field that is absent means what it means to `transformers`; a cap that is null is none."""
    least = {k: CONFIGS["gemma2"][k] for k in ("model_type", "vocab_size", "hidden_size", "intermediate_size")}
    least |= {"num_hidden_layers": 3, "num_attention_heads": 8}
    found = MODULES["gemma2"].read_config(least)
    assert (found.head_dim, found.num_kv_heads, found.max_position_embeddings) == (256, 4, 8192)
    assert found.windows == (4096, 0, 4096) and found.tie_word_embeddings
    assert (found.traits.attention_softcap, found.traits.logit_softcap) == (50.0, 30.0)
    assert found.traits.attention_scale == 1 / 16
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    traits = MODULES["gemma2"].read_config(least | none).traits
    assert (traits.attention_softcap, traits.logit_softcap) == (0.0, 0.0)


# ---- long contexts


def test_the_longest_text_decides_which_frequencies_there_are(tmp_path):
    """One set for an engine: its texts never change theirs, so caches of any text serve any other."""
    folder = write_family(tmp_path, CONFIGS["phi4"], tokenizer=True)
    short, long = (load_model(folder, dtype="float32", threads=1, max_model_len=n) for n in (64, 65))
    whole = load_model(folder, dtype="float32", threads=1)
    assert np.array_equal(long.config.rope.inv_freq, whole.config.rope.inv_freq)
    assert not np.array_equal(short.config.rope.inv_freq, long.config.rope.inv_freq)
    assert short.config.rope.scale == long.config.rope.scale > 1
    engine = LLM(folder, dtype="float32", threads=1, max_model_len=64)
    assert np.array_equal(engine.model.config.rope.inv_freq, short.config.rope.inv_freq)


# ---- layouts of files


def test_the_text_part_of_a_model_that_sees(tmp_path):
    """Published Gemma 3 folders nest the text model; both layouts of names give the same bits, other parts stay out."""
    c, weights = CONFIGS["gemma3"], tensors(CONFIGS["gemma3"])
    want, _ = load_model(write_family(tmp_path / "plain", c), dtype="float32", threads=1).logits(IDS)
    nested = {"model_type": "gemma3", "text_config": {**c, "model_type": "gemma3_text"}, "vision_config": {}}
    sight = {"vision_tower.x.weight": np.zeros((2, 2), np.float32)}
    for i, prefix in enumerate(("language_model.model.", "model.language_model.")):
        renamed = {prefix + name.removeprefix("model."): value for name, value in weights.items()}
        folder = write(
            tmp_path / str(i), nested, renamed | sight | {"multi_modal_projector.w": np.zeros(2, np.float32)}
        )
        got, _ = load_model(folder, dtype="float32", threads=1).logits(IDS)
        assert (got.view(np.uint32) == want.view(np.uint32)).all()


def test_stacked_experts_are_the_same_model(tmp_path):
    c, weights = CONFIGS["qwen3_moe"], tensors(CONFIGS["qwen3_moe"])
    want, _ = load_model(write_family(tmp_path / "each", c), dtype="float32", threads=1).logits(IDS)
    stacked = {n: v for n, v in weights.items() if ".experts." not in n}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts"
        parts = {
            p: np.stack([weights[f"{at}.{e}.{p}_proj.weight"] for e in range(c["num_experts"])])
            for p in ("gate", "up", "down")
        }
        stacked[f"{at}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked[f"{at}.down_proj"] = parts["down"]
    got, _ = load_model(write(tmp_path / "stacked", c, stacked), dtype="float32", threads=1).logits(IDS)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe", "gemma3", "muse_glimmer"])
def test_missing_and_foreign_tensors_are_named(tmp_path, name):
    weights = tensors(CONFIGS[name])
    first = next(n for n in weights if "layers.1.mlp" in n and "down" in n)
    folder = write(tmp_path / "less", CONFIGS[name], {n: v for n, v in weights.items() if n != first})
    with pytest.raises(CheckpointError, match="down_proj"):
        load_model(folder, threads=1)
    extra = {first.replace("down_proj", "other_proj"): np.zeros((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match="other_proj"):
        load_model(write(tmp_path / "more", CONFIGS[name], weights | extra), threads=1)


@pytest.mark.parametrize("name", ["phi4", "qwen3_moe", "gemma3"])
def test_quantised_folders(tmp_path, name):
    """What `paceline quantize` writes loads as what it was made from would be quantised; routers stay exact."""
    folder = write_family(tmp_path / "model", CONFIGS[name], tokenizer=True)
    quantise_model(folder, tmp_path / "int8", quantization="int8")
    want, _ = load_model(folder, quantization="int8", threads=1).logits(IDS)
    got, _ = load_model(tmp_path / "int8", quantization="auto", threads=2).logits(IDS)
    np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())
    if name == "qwen3_moe":
        stored = SafetensorsFile(tmp_path / "int8" / "model.safetensors").entries
        assert stored["model.layers.0.mlp.gate.weight"].dtype in ("BF16", "F32")


def test_its_own_assistant_is_not_converted(tmp_path):
    target = write_family(tmp_path / "target", CONFIGS["muse_glimmer"])
    assistant = write_assistant(tmp_path / "assistant", ASSISTANT)
    with open_checkpoint(assistant) as drafter, open_checkpoint(target) as model:
        assert decoder_view(model).config["model_type"] == "muse_glimmer_text"
        with pytest.raises(ConfigError, match="no other packaging"):
            convert_drafter(drafter, model, "native")
