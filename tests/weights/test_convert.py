"""GGUF -> Hugging Face folder: what we read back, and what transformers makes of it, is the same model."""

from __future__ import annotations

import json
import unicodedata

import ml_dtypes
import numpy as np
import pytest

from paceline.errors import CheckpointError, ConfigError
from paceline.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.convert import convert
from weights.builders import smollm2_path, tiny_gguf
from weights.prompts import TORTURE

MESSAGES = [{"role": "user", "content": "What is 12 + 30? Grüße 😀"}]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_holds_the_same_model(tmp_path, arch, dtype):
    weights = tiny_gguf(tmp_path / "m.gguf", arch, tied=arch != "qwen2")
    calls = []
    folder = convert(tmp_path / "m.gguf", tmp_path / "out", dtype=dtype, progress=lambda *call: calls.append(call))
    assert folder == tmp_path / "out"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]
    with open_checkpoint(folder) as checkpoint, open_checkpoint(tmp_path / "m.gguf") as original:
        assert checkpoint.names() == original.names()
        assert checkpoint.config == {**original.config, "torch_dtype": dtype}
        for name, expected in weights.items():
            got = checkpoint.load(name)
            assert got.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(got.dtype).astype(np.float32))
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == calls[-1][2] == sum(w.size for w in weights.values()) * (2 if dtype == "bfloat16" else 4)
    ours, theirs = load_tokenizer(folder), load_tokenizer(tmp_path / "m.gguf")
    assert ours.encode_chat(MESSAGES) == theirs.encode_chat(MESSAGES)
    assert ours.eos_token_ids == theirs.eos_token_ids == (2, 0)
    assert ours.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.slow
def test_transformers_computes_what_the_weights_say(tmp_path, arch):
    """transformers, given the folder, agrees with transformers, given the original weights by hand."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights = tiny_gguf(tmp_path / "m.gguf", arch, pre="smollm" if arch == "llama" else "qwen2", tied=False)
    folder = convert(tmp_path / "m.gguf", tmp_path / "out", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    state = model.state_dict()
    assert {n for n in state if "rotary" not in n} == set(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), expected)
    config = model.config
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (10000.0, 1e-6)
    assert model.generation_config.eos_token_id == [2, 0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in TORTURE.values():
        # transformers insists on its own class for qwen2, which composes characters first
        text = unicodedata.normalize("NFC", text) if arch == "qwen2" else text
        assert tokenizer(text)["input_ids"] == ours.encode(text)
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.apply_chat_template(MESSAGES)


@pytest.mark.slow
def test_transformers_answers_with_the_real_model(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = convert(smollm2_path(), tmp_path / "smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert ids == load_tokenizer(smollm2_path()).encode_chat(question)
    output = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert tokenizer.decode(output[len(ids) :], skip_special_tokens=True) == "The capital of France is Paris."
    assert output[-1] == 2  # it stopped by itself


def test_an_existing_folder_is_not_touched(tmp_path):
    tiny_gguf(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists already"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    tiny_gguf(tmp_path / "m.gguf")

    def interrupt(what: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_what_cannot_be_converted(tmp_path):
    tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="'int8'"):
        convert(tmp_path / "m.gguf", tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    folder = convert(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(CheckpointError, match="already"):
        convert(folder, tmp_path / "again")
    with pytest.raises(ConfigError, match="cannot be created"):
        convert(tmp_path / "m.gguf", tmp_path / "m.gguf" / "below")
