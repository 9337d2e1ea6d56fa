"""Tokenizers built from GGUF metadata against llama.cpp itself (its server, run in this process by xllamacpp)."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.gguf_tokenizer import PRE_TOKENIZERS
from weights.builders import (
    BOOL,
    SPECIAL_TOKENS,
    STRING,
    gguf_bytes,
    model_metadata,
    model_tensors,
    random_weights,
    smollm2_path,
    tiny_gguf,
    tokenizer_metadata,
)
from weights.prompts import TORTURE, evaluation_prompts


class LlamaCpp:
    """llama.cpp's /tokenize for one model file."""

    def __init__(self, path: Path) -> None:
        self.httpx = pytest.importorskip("httpx")
        xllamacpp = pytest.importorskip("xllamacpp")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 256
        parameters.warmup = False
        parameters.cpuparams.n_threads = 1
        self.server = xllamacpp.Server(parameters)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        answer = self.httpx.post(self.server.listening_address + "/tokenize", json=body, timeout=600)
        answer.raise_for_status()
        return answer.json()["tokens"]

    def render(self, messages: list[dict]) -> str:
        answer = self.httpx.post(
            self.server.listening_address + "/apply-template", json={"messages": messages}, timeout=60
        )
        answer.raise_for_status()
        return answer.json()["prompt"]


# llama.cpp's answers for the torture texts, so that they are compared where llama.cpp is not installed, too.
VENDORED_IDS: dict[str, list[int]] = json.loads((Path(__file__).parent / "smollm2_ids.json").read_text())


@cache
def real_tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_path())


@pytest.fixture(scope="module")
def smollm2():
    return real_tokenizer(), LlamaCpp(smollm2_path())


@pytest.mark.parametrize("name", TORTURE)
def test_smollm2_torture_text(name):
    assert real_tokenizer().encode(TORTURE[name]) == VENDORED_IDS[name]


def test_the_vendored_ids_are_llama_cpps(smollm2):
    _, theirs = smollm2
    assert {name: theirs.encode(text) for name, text in TORTURE.items()} == VENDORED_IDS


@pytest.mark.slow
def test_smollm2_all_evaluation_prompts(smollm2):
    ours, theirs = smollm2
    prompts = evaluation_prompts()
    different = [text for text in prompts if ours.encode(text) != theirs.encode(text)]
    assert len(prompts) == 164 + 100 + 160
    assert different == []


def test_smollm2_digits_are_split_before_the_byte_level():
    ours = real_tokenizer()
    ids = ours.encode("in 2024")
    assert [ours.decode([i]) for i in ids] == ["in", " ", "2", "0", "2", "4"]


def test_smollm2_chat_prompt(smollm2):
    ours, theirs = smollm2
    messages = [
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Wörter & <tags> \"quoted\" 'x'"},
    ]
    assert ours.apply_chat_template(messages) == theirs.render(messages)
    assert ours.encode_chat(messages) == theirs.encode(theirs.render(messages))
    assert "You are a helpful AI assistant named SmolLM" in ours.apply_chat_template(messages)
    with_system = [{"role": "system", "content": "Be brief."}, *messages]
    assert ours.apply_chat_template(with_system).startswith("<|im_start|>system\nBe brief.<|im_end|>")


# -- every pre-tokenizer family, on a vocabulary whose merges would cross any boundary that a family draws
# -----------------


@pytest.fixture(scope="module")
def merges() -> tuple[str, ...]:
    """BPE merges trained without any pre-tokenization, on the torture texts and on Python source."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False, max_token_length=24,
    )  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    source = Path(sys.modules["json"].__file__ or "").parent
    texts = [*TORTURE.values()] * 20 + [path.read_text() for path in sorted(source.glob("*.py"))]
    texts += [f"{n} {n * 37},{n * 991}\r\n  don't {n}th DON'T we'LL\n\n\n" for n in range(2000)]
    tokenizer.train_from_iterator(texts, trainer)
    return tuple(" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"])


def write_model(path: Path, pre: str, merges: tuple[str, ...], *extra: tuple) -> Path:
    metadata = tokenizer_metadata(pre, merges=merges, size=4200)
    replaced = {row[0] for row in extra}
    metadata = model_metadata("llama") + [row for row in metadata if row[0] not in replaced] + list(extra)
    path.write_bytes(gguf_bytes(metadata, model_tensors("llama", random_weights("llama", vocab=4200))))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "starcoder", "dbrx"])
def test_pre_tokenizers_equal_llama_cpp(tmp_path, merges, pre):
    path = write_model(tmp_path / "m.gguf", pre, merges)
    ours, theirs = load_tokenizer(path), LlamaCpp(path)
    prompts = [*TORTURE.values(), *evaluation_prompts()[::9]]
    for text in prompts:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), repr(text[:80])


def test_the_families_differ_on_the_torture_text(tmp_path, merges):
    """Or the comparison above would prove nothing."""
    text = "".join(TORTURE.values())
    seen = set()
    for pre in ("default", "gpt-2", "smollm", "qwen2", "llama-bpe"):
        tokenizer = load_tokenizer(write_model(tmp_path / "m.gguf", pre, merges))
        seen.add(tuple(tokenizer.encode(text, add_special_tokens=False)))
    assert len(seen) == 5


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
@pytest.mark.parametrize("flags", [{}, {"bos": 1}, {"bos": 0}, {"bos": 1, "eos": 1}, {"eos": 1}])
def test_frame_equals_llama_cpp(tmp_path, merges, pre, flags):
    """BOS and EOS around a text: as the metadata says, else as the family's default."""
    extra = [(f"tokenizer.ggml.add_{name}_token", BOOL, value) for name, value in flags.items()]
    path = tmp_path / "m.gguf"
    metadata = [row for row in tokenizer_metadata(pre, merges=merges, size=4200) if "add_bos" not in row[0]]
    path.write_bytes(gguf_bytes(model_metadata("llama") + metadata + extra,
                                model_tensors("llama", random_weights("llama", vocab=4200))))  # fmt: skip
    assert load_tokenizer(path).encode("Hello 12") == LlamaCpp(path).encode("Hello 12", add_special=True)


# -- errors ----------------------------------------------------------------------------------------------------------


BAD = {
    "another kind": (("tokenizer.ggml.model", STRING, "t5"), "'t5' is not supported"),
    "unknown pre": (("tokenizer.ggml.pre", STRING, "klingon"), r"'klingon' is not among the known .*qwen2"),
    "merge of unknown tokens": (("tokenizer.ggml.merges", 9, (STRING, ["q9 zz"])), "does not fit the tokens"),
    "merge of one token": (("tokenizer.ggml.merges", 9, (STRING, ["hello"])), "not two tokens"),
    "tokens twice": (
        ("tokenizer.ggml.tokens", 9, (STRING, ["a", "a"])),
        "token_type .* must have one whole number|twice",
    ),
    "types missing": (("tokenizer.ggml.token_type", STRING, "x"), "token_type"),
    "eos outside": (("tokenizer.ggml.eos_token_id", 4, 10_000_000), "outside the vocabulary"),
    "bos outside": (("tokenizer.ggml.bos_token_id", 4, 10_000_000), "outside the vocabulary"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(tmp_path, case):
    row, message = BAD[case]
    path = tmp_path / "m.gguf"
    metadata = [r for r in tokenizer_metadata() if r[0] != row[0]] + [row]
    path.write_bytes(gguf_bytes(model_metadata("llama") + metadata, model_tensors("llama", random_weights("llama"))))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_file_without_a_tokenizer(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(model_metadata("llama"), model_tensors("llama", random_weights("llama"))))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(path)


def test_every_family_builds(tmp_path):
    for pre in PRE_TOKENIZERS:
        path = tmp_path / "m.gguf"
        tiny_gguf(path, pre=pre)
        tokenizer = load_tokenizer(path)
        assert (
            tokenizer.decode(tokenizer.encode("Hello 123, wörld!\n\n", add_special_tokens=False))
            == "Hello 123, wörld!\n\n"
        )
        assert np.array_equal(tokenizer.special_ids, {0, 1, 2})
