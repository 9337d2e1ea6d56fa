"""GGUF files of families beyond the Llama layout: the same model as the Hugging Face folder with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import BASE, CONFIGS, LONG, config, tensors, write_family

from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.errors import CheckpointError
from paceline.models import load_model
from paceline.outputs import own_logprob
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.convert import convert
from weights import sentencepiece_models
from weights.builders import (
    ARRAY,
    BOOL,
    F32,
    GGML_NAMES,
    STRING,
    U32,
    gguf_bytes,
    permute,
    tokenizer_metadata,
)

MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# multiples of 32 wherever a matrix may be quantised
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": config("qwen3_moe", **MOE, hidden_size=64, norm_topk_prob=True, rope_theta=1e4),
    "smollm3": config("smollm3", num_hidden_layers=5, hidden_size=64, rope_theta=2e4),
    "phi3": {**CONFIGS["phi4"], "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    # their files do not say how attention is scaled: with the size of a head
    "gemma2": {**CONFIGS["gemma2"], "hidden_size": 64, "intermediate_size": 96, "query_pre_attn_scalar": 16},
    "gemma3": {**CONFIGS["gemma3"], "hidden_size": 64, "intermediate_size": 96, "query_pre_attn_scalar": 16},
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OTHER = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp"}
GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def stored(c: dict[str, Any], arch: str) -> list[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's converter writes them."""
    out, experts = [], {}
    gemma = arch.startswith("gemma")
    for name, value in tensors(c).items():
        if gemma and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if name in GLOBAL:
            out.append((GLOBAL[name], value))
            continue
        _, _, layer, rest = name.split(".", 3)
        if ".experts." in rest:
            _, _, _, part, _ = rest.split(".")
            experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", []).append(value)
            continue
        part, _, kind = rest.rpartition(".")
        if arch in ("smollm3", "llama") and part.endswith(("q_proj", "k_proj")):
            value = permute(value, c["num_attention_heads" if "q_proj" in part else "num_key_value_heads"])
        names = {**GGML_NAMES, **_OTHER, **(_GEMMA if gemma else {})}
        out.append((f"blk.{layer}.{names[part]}.{kind}", value))
    return out + [(name, np.stack(values)) for name, values in experts.items()]


def metadata(c: dict[str, Any], arch: str) -> list[tuple[str, int, Any]]:
    heads = c["num_attention_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    rows = [
        ("general.architecture", STRING, arch),
        (f"{arch}.block_count", U32, c["num_hidden_layers"]),
        (f"{arch}.context_length", U32, c["max_position_embeddings"]),
        (f"{arch}.embedding_length", U32, c["hidden_size"]),
        (f"{arch}.feed_forward_length", U32, c["intermediate_size"]),
        (f"{arch}.attention.head_count", U32, heads),
        (f"{arch}.attention.head_count_kv", U32, c["num_key_value_heads"]),
        (f"{arch}.attention.layer_norm_rms_epsilon", F32, c["rms_norm_eps"]),
        (f"{arch}.attention.key_length", U32, size),
        (f"{arch}.attention.value_length", U32, size),
        (f"{arch}.rope.freq_base", F32, c["rope_theta"]),
    ]
    if arch == "qwen3moe":
        rows += [
            (f"{arch}.expert_count", U32, c["num_experts"]),
            (f"{arch}.expert_used_count", U32, c["num_experts_per_tok"]),
            (f"{arch}.expert_feed_forward_length", U32, c["moe_intermediate_size"]),
        ]
    if arch == "phi3":
        rows += [
            (f"{arch}.rope.dimension_count", U32, int(size * c.get("partial_rotary_factor", 1.0))),
            (f"{arch}.rope.scaling.original_context_length", U32, c.get("original_max_position_embeddings", 512)),
        ]
    if arch.startswith("gemma"):
        rows.append((f"{arch}.attention.sliding_window", U32, c["sliding_window"]))
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            rows += [(f"{arch}.{name}", F32, c[name])] if c.get(name) else []
    if arch == "gemma3":
        sliding = [int(kind == "sliding_attention") for kind in c["layer_types"]]
        rows += [
            (f"{arch}.attention.sliding_window_pattern", ARRAY, (BOOL, sliding)),
            (f"{arch}.rope.freq_base_swa", F32, c["rope_local_base_freq"]),
            (f"{arch}.rope.scaling.type", STRING, "linear"),
            (f"{arch}.rope.scaling.factor", F32, c["rope_scaling"]["factor"]),
        ]
    return rows


def write_gguf(
    path: Path,
    arch: str,
    quantised: bool = False,
    *,
    model: dict[str, Any] | None = None,
    tokenizer: list[tuple[str, int, Any]] | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """fp32, or every matrix but the embedding, the router and odd ones in Q8_0.

    model: another config than MODELS has; changes: rows of the metadata, None for none.
    """
    c, rows = model or MODELS[arch], []
    for name, value in stored(c, arch):
        kind, data = 0, value.tobytes()
        if quantised and value.ndim > 1 and value.shape[-1] % 32 == 0 and "_inp" not in name:
            gguf = pytest.importorskip("gguf")
            kind, data = 8, gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0).tobytes()
        rows.append((name, value.shape, kind, data))
    if arch == "phi3" and c.get("rope_scaling"):
        for which in ("long", "short"):
            factors = np.array(LONG[f"{which}_factor"], np.float32)
            rows.append((f"rope_factors_{which}.weight", factors.shape, 0, factors.tobytes()))
    head = [row for row in metadata(c, arch) if row[0] not in (changes or {})]
    head += [row for row in (changes or {}).values() if row is not None]
    path.write_bytes(gguf_bytes(head + (tokenizer or tokenizer_metadata()), rows))
    return path


IDS = np.random.default_rng(1).integers(0, BASE["vocab_size"], 90).tolist()


@pytest.mark.parametrize("arch", MODELS)
def test_logits_are_those_of_the_folder(tmp_path, arch):
    folder = write_family(tmp_path / "hf", MODELS[arch])
    want, _ = load_model(folder, dtype="float32", threads=1).logits(IDS)
    got, _ = load_model(write_gguf(tmp_path / "m.gguf", arch), dtype="float32", threads=1).logits(IDS)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("arch", MODELS)
def test_quantised_blocks_are_used_as_they_are(tmp_path, arch):
    """Q8_0 files with int8 products, near their bf16 expansion; nothing is converted."""
    path = write_gguf(tmp_path / "m.gguf", arch, quantised=True)
    model = load_model(path, quantization="auto", threads=2)
    assert "int8" in model.formats and not model.conversions.describe()
    want, _ = load_model(path, threads=2).logits(IDS)
    got, _ = model.logits(IDS)
    assert np.sqrt(((got - want) ** 2).mean()) < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("arch", MODELS)
def test_converted_folders_are_the_same_model(tmp_path, arch):
    path = write_gguf(tmp_path / "m.gguf", arch)
    folder = convert(path, tmp_path / "hf", dtype="float32")
    assert json.loads((folder / "config.json").read_text())["model_type"] == MODELS[arch]["model_type"]
    want, _ = load_model(path, dtype="float32", threads=1).logits(IDS)
    got, _ = load_model(folder, dtype="float32", threads=1).logits(IDS)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("arch", ["gemma", "gemma4", "qwen2moe", "llama4", "muse-glimmer"])
def test_other_architectures_are_refused_by_name(tmp_path, arch):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([("general.architecture", STRING, arch)], []))
    with pytest.raises(CheckpointError, match=arch):
        open_checkpoint(path)


# -- Gemma -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemma_logits_are_those_of_transformers(tmp_path, arch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write_family(tmp_path / "hf", MODELS[arch])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        want = reference(torch.tensor([IDS])).logits[0].numpy()
    got, _ = load_model(write_gguf(tmp_path / "m.gguf", arch), dtype="float32", threads=1).logits(IDS)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)


def fields(tmp_path: Path, arch: str, layers: int, *changes: tuple[str, int, Any], **settings: Any) -> dict[str, Any]:
    """Config of a file with these rows in the place of others."""
    model = {**MODELS[arch], "num_hidden_layers": layers, "layer_types": ["sliding_attention"] * layers, **settings}
    new = {f"{arch}.{key}": (f"{arch}.{key}", kind, value) for key, kind, value in changes if kind >= 0}
    new |= {f"{arch}.{key}": None for key, kind, _ in changes if kind < 0}
    path = write_gguf(tmp_path / "m.gguf", arch, model=model, changes=new)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config


NONE = -1  # in the place of a type: no such row


@pytest.mark.parametrize(
    ("arch", "layers", "rows", "want"),
    [
        ("gemma2", 5, [], [0, 2, 4]),
        ("gemma3", 7, [("attention.sliding_window_pattern", NONE, 0)], [0, 1, 2, 3, 4, 6]),
        ("gemma3", 4, [("attention.sliding_window_pattern", U32, 2)], [0, 2]),
        ("gemma3", 3, [("attention.sliding_window_pattern", U32, 1)], []),
        ("gemma3", 3, [("attention.sliding_window_pattern", U32, 0)], [0, 1, 2]),
        ("gemma3", 3, [("attention.sliding_window_pattern", ARRAY, (BOOL, [0, 1, 0]))], [1]),
        ("gemma3", 3, [("attention.sliding_window", NONE, 0)], []),
        ("gemma3", 3, [("attention.sliding_window", U32, 0)], []),
    ],
)
def test_gemma_windows(tmp_path, arch, layers, rows, want):
    kinds = fields(tmp_path, arch, layers, *rows)["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "sliding_attention"] == want


@pytest.mark.parametrize(("arch", "layers", "want"), [("gemma2", 46, 12), ("gemma2", 45, 16), ("gemma3", 62, 12)])
def test_gemma_27b_scales_attention_otherwise(tmp_path, arch, layers, want):
    config = fields(tmp_path, arch, layers, hidden_size=48, intermediate_size=32)
    assert config["query_pre_attn_scalar"] == want


def test_what_gemma_files_leave_out(tmp_path):
    keys = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    config = fields(tmp_path, "gemma2", 2, *((key, NONE, 0) for key in keys))
    assert [config[k.removeprefix("attention.")] for k in keys] == [4096, 50.0, 30.0]
    config = fields(tmp_path, "gemma3", 2, *((key, NONE, 0) for key in (*keys, "rope.freq_base_swa")))
    assert [config[k.removeprefix("attention.")] for k in keys] == [None, None, None]
    assert config["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("attention.sliding_window_pattern", ARRAY, (BOOL, [0, 1])), "pattern' is 2 entries, expected"),
        (("attention.sliding_window_pattern", STRING, "often"), "pattern' is 'often', expected"),
        (("attention.sliding_window", STRING, "wide"), "sliding_window' is 'wide', expected"),
        (("final_logit_softcapping", F32, float("nan")), "final_logit_softcapping' is 'nan', expected"),
        (("rope.freq_base_swa", F32, -1.0), "freq_base_swa' is '-1.0', expected"),
    ],
)
def test_gemma_metadata_that_is_wrong_is_named(tmp_path, row, message):
    with pytest.raises(CheckpointError, match=message):
        fields(tmp_path, "gemma3", 3, row)


def test_gemma_2_has_one_rotation(tmp_path):
    assert fields(tmp_path, "gemma2", 2, ("rope.freq_base_swa", F32, 10000.0))["rope_theta"] == 10000.0
    with pytest.raises(CheckpointError, match="freq_base_swa"):
        fields(tmp_path, "gemma2", 2, ("rope.freq_base_swa", F32, 20000.0))


def test_norms_keep_their_digits_in_bf16(tmp_path):
    """They are stored with their 1, near which bf16 has two digits."""
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", "gemma3")) as checkpoint:
        name = "model.layers.0.input_layernorm.weight"
        exact, rounded = checkpoint.load(name, "float32"), checkpoint.load(name, "bfloat16").astype(np.float32)
    np.testing.assert_allclose(exact, tensors(MODELS["gemma3"])[name], atol=1e-7)
    np.testing.assert_allclose(rounded, exact, rtol=2**-8)


# -- whole files with a SentencePiece vocabulary: Llama 2 and Mistral, Phi-3, Gemma 2 and 3 --------------------------

SPOKEN = {
    "llama": config("mistral", sliding_window=None, hidden_size=64, head_dim=16, rope_theta=1e4),
    "phi3": config("phi3", sliding_window=None, hidden_size=64, intermediate_size=96, rope_theta=1e4),
    **{arch: MODELS[arch] for arch in ("gemma2", "gemma3")},
}


def write_spoken(path: Path, arch: str) -> Path:
    vocabulary = sentencepiece_models.metadata("gemma" if arch.startswith("gemma") else "llama", size=1024)
    return write_gguf(path, arch, model={**SPOKEN[arch], "vocab_size": 1024}, tokenizer=vocabulary)


@pytest.mark.parametrize("arch", SPOKEN)
def test_a_file_with_a_sentencepiece_vocabulary_generates(tmp_path, arch):
    """Text in, text out, with drafts and without."""
    llm = LLM(write_spoken(tmp_path / "m.gguf", arch), threads=1, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = "def f(x):  return x  def f(x):  return x"
    result = llm.generate(prompt, params, num_speculative_tokens=0)[0]
    assert result.prompt_token_ids == llm.tokenizer.encode(prompt)
    assert result.prompt_token_ids[0] == llm.tokenizer.bos_token_id == 1
    output = result.outputs[0]
    assert len(output.token_ids) == 40 and output.text == llm.tokenizer.decode(output.token_ids)
    assert "".join(delta.text for delta in llm.stream(prompt, params)) == output.text
    drafted = LLM(llm.model.path, threads=1, dtype="float32", speculative_config={"method": "ngram"})
    assert drafted.generate(prompt, params)[0].outputs[0].token_ids == output.token_ids


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("drafts", [0, 5])
def test_grammars_with_a_sentencepiece_vocabulary(tmp_path, arch, drafts):
    """Bytes that a grammar forces are tokens without a space in front, drafted or drawn."""
    llm = LLM(write_spoken(tmp_path / "m.gguf", arch), threads=1, speculative_config={"method": "ngram"})
    for choices in (["maybe \U0001f600"], ["return"], ["x <tool>y", "x <tool>z"], ["yes no", "\u4e16\u754c"]):
        asked = StructuredOutputsParams(choice=choices)
        params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=asked)
        output = llm.generate("a maybe a maybe", params, num_speculative_tokens=drafts)[0].outputs[0]
        assert output.text in choices and output.finish_reason == "stop"


@pytest.mark.parametrize("arch", SPOKEN)
def test_tokens_of_a_text_are_those_of_llama_cpp(tmp_path, arch):
    httpx, xllamacpp = pytest.importorskip("httpx"), pytest.importorskip("xllamacpp")
    path, count = write_spoken(tmp_path / "m.gguf", arch), 12
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(path), 256, False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    # longer than a window
    prompt = (
        "You may reproduce and distribute copies of the  Work or\n\n   Derivative Works thereof, caf\u00e9 \U0001f600"
    )
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
    body |= {"return_tokens": True, "n_probs": 1}
    answer = httpx.post(server.listening_address + "/completion", json=body, timeout=120).json()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    result = LLM(path, threads=1, dtype="float32", speculative_config=None).generate(prompt, params)[0]
    assert len(result.prompt_token_ids) == answer["tokens_evaluated"]
    got = result.outputs[0]
    assert got.token_ids == answer["tokens"]
    mine = iter(got.logprobs)
    for each in answer["completion_probabilities"]:  # those of tokens that end a character
        assert abs(next(p for i, p in map(own_logprob, mine) if i == each["id"]).logprob - each["logprob"]) < 1e-2
