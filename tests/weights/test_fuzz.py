"""Damaged model files: whatever the bytes, the only error is CheckpointError, and nothing crashes or hangs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from weights import sentencepiece_models
from weights.builders import gguf_bytes, model_metadata, model_tensors, random_weights, tokenizer_metadata
from weights.test_safetensors_file import written

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
WEIGHTS = random_weights("llama", vocab=280, **SIZES)
GGUF = gguf_bytes(
    model_metadata("llama", **SIZES) + tokenizer_metadata(size=280),
    model_tensors("llama", WEIGHTS, heads=2, kv_heads=1),
)
HEADER_BYTES = GGUF.index(struct.pack("<f", WEIGHTS["model.embed_tokens.weight"][0, 0]))
SPOKEN = gguf_bytes(
    model_metadata("llama", **SIZES) + sentencepiece_models.metadata("llama", size=1000),
    model_tensors("llama", random_weights("llama", vocab=1000, **SIZES), heads=2, kv_heads=1),
)
SAFETENSORS = written(WEIGHTS)
CONFIG = json.dumps({"model_type": "llama", "tie_word_embeddings": True}).encode()
INDEX = json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "a.safetensors")}).encode()

INTERESTING = [struct.pack("<Q", n) for n in (0, 1, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)]
INTERESTING += [struct.pack("<I", n) for n in (0, 1, 8, 9, 99, 2**31 - 1, 2**31, 2**32 - 1)] + [b"\xff", b"\0", b"\x80"]


@st.composite
def damaged(draw: st.DrawFn, original: bytes, focus: int | None = None) -> bytes:
    """The file cut short, with runs of bytes replaced, inserted or removed; most damage goes to the header."""
    data = bytearray(original)
    limit = focus or len(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(limit, len(data)) - 1)))
        kind = draw(st.sampled_from(["write", "write", "write", "insert", "remove", "cut", "copy"]))
        if kind == "write":
            new = draw(st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=12))
            data[at : at + len(new)] = new
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=12))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        else:
            source = draw(st.integers(0, max(0, len(data) - 1)))
            data[at : at + 24] = data[source : source + 24]
    return bytes(data)


def exercise(path: Path) -> None:
    """Use a file as the engine does; anything but CheckpointError is a failure."""
    try:
        with open_checkpoint(path) as checkpoint:
            json.dumps(checkpoint.config)
            for name in checkpoint.names():
                assert checkpoint.load(name).shape == checkpoint.shape(name)
    except CheckpointError as error:
        assert str(path.parent) in str(error)


def exercise_tokenizer(path: Path) -> None:
    try:
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("Hello 12 <|im_end|> 😀"))
    except CheckpointError as error:
        assert str(path.parent) in str(error)


FEW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))


def run(settings_: settings, strategy: st.SearchStrategy[bytes], path: Path, *checks) -> None:
    @settings_
    @given(strategy)
    def check(data: bytes) -> None:
        path.write_bytes(data)
        for use in checks:
            use(path)

    check()


SIZES_OF_RUN = [pytest.param(FEW, id="short"), pytest.param(MANY, id="long", marks=pytest.mark.slow)]


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
def test_gguf(tmp_path, amount):
    run(amount, damaged(GGUF, HEADER_BYTES), tmp_path / "m.gguf", exercise, exercise_tokenizer)


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
def test_gguf_sentencepiece(tmp_path, amount):
    """Damage to tokens, scores, types and ids alone, whatever it does to their length."""
    start, end = SPOKEN.index(b"tokenizer.ggml.model") - 8, SPOKEN.index(b"token_embd.weight") - 8
    path = tmp_path / "m.gguf"

    def whole(data: bytes) -> bytes:
        return SPOKEN[:start] + data + SPOKEN[end:] + bytes(64)

    path.write_bytes(whole(SPOKEN[start:end]))
    assert load_tokenizer(path).encode("a b")
    run(amount, damaged(SPOKEN[start:end]).map(whole), path, exercise_tokenizer)


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
def test_gguf_structure(tmp_path, amount):
    """Damage to the first metadata entries and to the tensor table alone, where counts and offsets are."""
    table = GGUF.index(b"token_embd.weight") - 8
    tail = damaged(GGUF[table:], HEADER_BYTES - table).map(lambda data: GGUF[:table] + data)
    head = damaged(GGUF[:700]).map(lambda data: data + GGUF[700:])
    run(amount, head | tail, tmp_path / "m.gguf", exercise)


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
def test_safetensors(tmp_path, amount):
    (tmp_path / "config.json").write_bytes(CONFIG)
    header = 8 + int.from_bytes(SAFETENSORS[:8], "little")
    run(amount, damaged(SAFETENSORS, header), tmp_path / "model.safetensors", lambda p: exercise(p.parent / "."))


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
@pytest.mark.parametrize(("file", "original"), [("config.json", CONFIG), ("model.safetensors.index.json", INDEX)])
def test_json_files(tmp_path, amount, file, original):
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "a.safetensors").write_bytes(SAFETENSORS)
    run(amount, damaged(original), tmp_path / file, lambda p: exercise(p.parent / "."))


@pytest.mark.parametrize("amount", SIZES_OF_RUN)
def test_tokenizer_json(tmp_path, amount, tokenizer_json):
    run(amount, damaged(tokenizer_json), tmp_path / "tokenizer.json", lambda p: exercise_tokenizer(p.parent))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    path.write_bytes(GGUF)
    return load_tokenizer(path).backend.to_str().encode()
