"""Tokenizers of GGUF files with SentencePiece vocabularies, against `sentencepiece` itself and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.detokenizer import IncrementalDetokenizer
from paceline.errors import CheckpointError
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.convert import convert
from paceline.weights.gguf_file import GGUFFile
from paceline.weights.gguf_sentencepiece import MAX_CHARACTERS
from weights.builders import ARRAY, BOOL, F32, I32, STRING, U32, gguf_bytes, model_metadata, model_tensors
from weights.builders import random_weights as weights_of
from weights.prompts import TORTURE
from weights.sentencepiece_models import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Row,
    metadata,
    path,
    pieces,
    rows,
)
from weights.test_gguf_tokenizer import LlamaCpp

SIZE = 1024
RELAXED = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
VENDORED: dict[str, dict[str, list[int]]] = json.loads((Path(__file__).parent / "sentencepiece_ids.json").read_text())


def write(file: Path, vocabulary: list[Row], *changes: Row, without: str = "") -> Path:
    """A tiny model with this vocabulary; `changes` take the place of rows of the same key."""
    replaced = {row[0] for row in changes} | {f"tokenizer.ggml.{without}"}
    kept = [row for row in vocabulary if row[0] not in replaced]
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    tensors = model_tensors("llama", weights_of("llama", vocab=SIZE, **sizes), heads=2, kv_heads=1)
    file.write_bytes(gguf_bytes(model_metadata("llama", **sizes) + kept + list(changes), tensors))
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / f"{name}.gguf", metadata(name, size=SIZE)) for name in ("llama", "gemma", "unigram")}


@pytest.fixture(scope="module")
def ours(files) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(file) for name, file in files.items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    package = pytest.importorskip("sentencepiece")
    return {name: package.SentencePieceProcessor(model_file=str(path(name))) for name in ("llama", "gemma")}


# -- sentencepiece itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TORTURE)
@pytest.mark.parametrize("name", VENDORED)
def test_torture_text(ours, name, text):
    ids = ours[name].encode(TORTURE[text], add_special_tokens=False)
    assert ids == VENDORED[name][text]
    assert ours[name].decode(ids) == TORTURE[text]


def test_the_vendored_ids_are_those_of_sentencepiece(reference):
    for name, model in reference.items():
        assert {key: model.encode(text) for key, text in TORTURE.items()} == VENDORED[name]


PIECES = [
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "aa",
    "=",
    "*",
    "**",
    "1",
    "12",
    "\u2581",
    "é",
    "😀",
    "👍🏽",
    "\u200b",
]
WORDS = [word for text in TORTURE.values() for word in text.split(" ")]
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.lists(st.sampled_from(WORDS) | st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join),
).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_ids_are_those_of_sentencepiece(ours, reference, name):
    # llama.cpp finds user-defined tokens of spaces where spaces are, SentencePiece where the sign for them is, too
    texts = TEXTS if name == "llama" else TEXTS.map(lambda text: text.replace("\u2581", " "))

    @RELAXED
    @given(text=texts)
    def check(text: str) -> None:
        assert ours[name].encode(text, add_special_tokens=False) == reference[name].encode(text)

    check()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_text_of_any_ids_is_that_of_sentencepiece(ours, reference, name):
    """Bytes that make no character included: each of them becomes one U+FFFD."""
    silent = [
        i for i, (text, _, kind) in enumerate(pieces(path(name))) if kind in (UNKNOWN, CONTROL) or text == "<0x20>"
    ]
    allowed = st.integers(0, len(pieces(path(name))) - 1).filter(lambda i: i not in silent)
    first_byte = next(i for i, (_, _, kind) in enumerate(pieces(path(name))) if kind == BYTE)
    raw = st.integers(0x80, 0xFF).map(lambda byte: first_byte + byte)

    @RELAXED
    @given(ids=st.lists(allowed | raw, max_size=30))
    def check(ids: list[int]) -> None:
        assert ours[name].decode(ids) == reference[name].decode(ids)

    check()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_streamed_text_of_any_ids_is_the_whole_text(ours, name):
    @RELAXED
    @given(ids=st.lists(st.integers(0, SIZE + 3) | st.integers(130, 262), max_size=40), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        stream = IncrementalDetokenizer(ours[name], skip_special_tokens=skip)
        parts = [*map(stream.push, ids), stream.finish()]
        assert "".join(parts) == ours[name].decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_text_is_never_broken(ours, name):
    @RELAXED
    @given(text=TEXTS)
    def check(text: str) -> None:
        stream = IncrementalDetokenizer(ours[name])
        parts = [*map(stream.push, ours[name].encode(text)), stream.finish()]
        assert "".join(parts) == text.replace("\u2581", " ")
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)

    check()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_text_inside_another_begins_with_no_space_of_its_own(ours, name):
    tokenizer = ours[name]

    @RELAXED
    @given(text=TEXTS.map(lambda text: text.replace("\u2581", " ")))
    def check(text: str) -> None:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_inside(text))) == text.encode()

    check()


def test_bytes_of_a_character_come_out_together(ours):
    tokenizer = ours["llama"]
    *_, one, two, three, four = tokenizer.encode("x🫠", add_special_tokens=False)
    assert tokenizer.token_bytes(one) == b"\xf0"
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push(i) for i in (one, two, three, four)] == ["", "", "", "🫠"]
    broken = IncrementalDetokenizer(tokenizer)
    letter = tokenizer.backend.token_to_id("a")
    assert [broken.push(i) for i in (one, two, letter)] == ["", "", "\ufffd\ufffda"]


def test_the_backend_alone_decodes_well_formed_text_in_the_same_way(ours):
    """It is what `convert` writes for other programs."""
    for name in ("llama", "gemma"):
        for text in TORTURE.values():
            ids = ours[name].encode(text)
            assert ours[name].backend.decode(ids) == ours[name].decode(ids) == text


# -- llama.cpp -------------------------------------------------------------------------------------------------------

SPOKEN = {
    "llama": ["<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<tool>", "<|user|>"],
    "gemma": ["<s>", "<start_of_turn>", "<end_of_turn>", "<table>", "\n\n", "  ", "   "],
    "unigram": ["<s>"],
}


def marked(name: str) -> list[str]:
    """Texts with special tokens in every place."""
    out = []
    for token in SPOKEN[name]:
        for text in ("{}", "{}a", "a{}", "a {} b", " {} ", "{}{}", "{} {}", "\n{}\n", "a{}b{}c", "  {}  x"):
            out.append(text.replace("{}", token))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_ids_are_those_of_llama_cpp(ours, files, name):
    theirs = LlamaCpp(files[name])
    texts = [*(text.replace("\0", "") for text in TORTURE.values()), *marked(name)]
    texts += ["x" + " " * n + "y" for n in range(40)] + [" " * n for n in range(40)] + ["\n" * n for n in range(20)]
    for text in texts:
        assert ours[name].encode(text) == theirs.encode(text, add_special=True), repr(text)

    @settings(RELAXED, max_examples=150)
    @given(text=TEXTS.map(lambda text: text.replace("\0", "")))
    def check(text: str) -> None:
        assert ours[name].encode(text) == theirs.encode(text, add_special=True)

    check()


def test_a_vocabulary_that_is_no_bpe_is_merged_by_score_as_in_llama_cpp(ours, files):
    """Scores of a unigram model are log probabilities. Some are equal, which only texts with both tokens show."""
    theirs = LlamaCpp(files["unigram"])
    for key, text in TORTURE.items():
        if key not in ("right to left", "control characters"):
            assert ours["unigram"].encode(text) == theirs.encode(text, add_special=True), key


@pytest.mark.slow
def test_runs_of_spaces_with_one_score_for_all(tmp_path):
    """As in Llama 2, Mistral and Phi-3, whose tokens of 2 to 16 spaces come last, all with the same score."""
    lengths = [2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15]
    kept = [(t, s, k) for t, s, k in pieces(path("llama")) if k != NORMAL or set(t) != {"\u2581"}]
    vocabulary = [*kept, ("\u2581", -1e9, NORMAL), *(("\u2581" * n, -1e9, NORMAL) for n in lengths)]
    vocabulary += [(f"[PAD{i}]", -1e4, UNUSED) for i in range(len(vocabulary), SIZE)]
    file = write(tmp_path / "m.gguf", rows(vocabulary))
    tokenizer, theirs = load_tokenizer(file), LlamaCpp(file)
    for n in range(100):
        for text in (" " * n, "x" + " " * n + "y", " " * n + "def", "\n" + " " * n + "\n"):
            assert tokenizer.encode(text) == theirs.encode(text, add_special=True), (n, text)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_space_prefix": False},
        {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False},
        {"remove_extra_whitespaces": True},
    ],
)
def test_flags(tmp_path, flags):
    file = write(tmp_path / "m.gguf", metadata("llama", size=SIZE, **flags))
    tokenizer, theirs = load_tokenizer(file), LlamaCpp(file)
    for text in ("", "a", " a", "a[INST] b  c", "[INST]x", "  two  words  "):
        assert tokenizer.encode(text) == theirs.encode(text, add_special=True), repr(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), repr(text)
        if "[INST]" not in text:
            assert tokenizer.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Phi 3 Mini 4k Instruct", "Phi-3-mini", "phi3"])
def test_white_space_behind_special_tokens_of_phi_3(tmp_path, name):
    """Their tokenizer takes it away. A file does not say so; llama.cpp goes by the model's name."""
    marks = ["<|user|>", "<|end|>", "<|assistant|>"]
    vocabulary = [*pieces(path("llama")), *((t, -1000.0, CONTROL) for t in (*marks[1:], "<|endoftext|>"))]
    vocabulary += [(f"[PAD{i}]", -1e4, UNUSED) for i in range(len(vocabulary), SIZE)]
    file = write(tmp_path / "m.gguf", rows(vocabulary), ("general.name", STRING, name))
    tokenizer, theirs = load_tokenizer(file), LlamaCpp(file)
    for mark in (*marks, "<s>", "</s>", "<unk>", "<|endoftext|>"):
        for white in ("", " ", "\n", " \n\t ", "\r\n"):
            for text in (f"{mark}{white}hello{white}{mark}{white}", f"a{white}{mark}{white}"):
                assert tokenizer.encode(text) == theirs.encode(text, add_special=True), (name, repr(text))
    strips = tokenizer.encode("<|end|>\nx") == tokenizer.encode("<|end|>x")
    assert strips == ("3 " not in name)


# -- kinds of tokens -------------------------------------------------------------------------------------------------


def test_kinds_of_tokens(ours):
    tokenizer = ours["llama"]
    ids = {text: i for i, (text, _, _) in enumerate(pieces(path("llama")))}
    assert tokenizer.special_ids == {ids[text] for text in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")}
    assert tokenizer.eos_token_ids == (ids["</s>"],)
    assert tokenizer.bos_token_id == ids["<s>"]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.vocab_size == SIZE
    assert tokenizer.decode([ids["<s>"], ids["[INST]"], ids["<tool>"]]) == "<tool>"
    assert tokenizer.decode([ids["[INST]"], ids["<tool>"]], skip_special_tokens=False) == "[INST]<tool>"
    # padding of the vocabulary is no text, nor what a grammar may choose
    assert tokenizer.decode([SIZE - 1, ids["<tool>"], SIZE + 7]) == "<tool>"
    assert tokenizer.token_bytes(SIZE - 1) == b""
    assert tokenizer.token_bytes(ids["<0xE2>"]) == b"\xe2"
    assert tokenizer.token_bytes(ids["\u2581a"]) == b" a"


def test_ids_that_a_file_leaves_out(tmp_path):
    keys = ("bos", "eos", "unknown")
    kept = [row for row in metadata("llama", size=SIZE) if row[0] not in {f"tokenizer.ggml.{k}_token_id" for k in keys}]
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", kept))
    assert tokenizer.encode("")[:1] == [1] and tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("text", ["<|im_end|>", "<end_of_turn>", "<|end|>"])
def test_tokens_that_end_a_turn_whatever_their_type(tmp_path, text, kind):
    """Fine-tunes with added tokens often have another type for them."""
    vocabulary = [*pieces(path("llama")), (text, -1000.0, kind)]
    with open_checkpoint(write(tmp_path / "m.gguf", rows(vocabulary))) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        assert checkpoint.config["eos_token_id"] == [2, len(vocabulary) - 1]
    assert tokenizer.eos_token_ids == (2, len(vocabulary) - 1)
    ids = tokenizer.encode(f"x{text}")
    assert ids[-1] == len(vocabulary) - 1 and tokenizer.decode(ids) == "x"


def test_an_empty_token_is_one_that_no_text_has(tmp_path):
    vocabulary = [*pieces(path("llama")), ("", -1000.0, NORMAL)]
    at = len(vocabulary) - 1
    vocabulary += [(f"[PAD{i}]", -1e4, UNUSED) for i in range(len(vocabulary), SIZE)]
    file = write(tmp_path / "m.gguf", rows(vocabulary))
    tokenizer = load_tokenizer(file)
    for text in TORTURE.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and at not in ids
    assert tokenizer.encode("a b") == LlamaCpp(file).encode("a b", add_special=True)


def test_a_vocabulary_without_bytes_has_an_unknown_token(tmp_path):
    vocabulary = [(t if k != BYTE else f"[{t}]", s, k if k != BYTE else UNUSED) for t, s, k in pieces(path("llama"))]
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", rows(vocabulary)))
    ids = tokenizer.encode("a🫠🫠b", add_special_tokens=False)
    assert ids.count(0) == 1 and tokenizer.decode(ids) == "ab"


def test_converted_folders_have_the_same_tokenizer(tmp_path, files, ours):
    for name in ("llama", "gemma"):
        other = load_tokenizer(convert(files[name], tmp_path / name, dtype="float32"))
        for text in (*TORTURE.values(), *marked(name)):
            ids = ours[name].encode(text)
            assert other.encode(text) == ids
            assert other.decode(ids) == ours[name].decode(ids)
        assert (other.eos_token_ids, other.bos_token_id) == (ours[name].eos_token_ids, ours[name].bos_token_id)


# -- errors ----------------------------------------------------------------------------------------------------------

G = "tokenizer.ggml."
TYPES = [kind for _, _, kind in pieces(path("llama"))]
TOKENS = [text for text, _, _ in pieces(path("llama"))]
SCORES = [score for _, score, _ in pieces(path("llama"))]
BAD: dict[str, tuple[Row, str]] = {
    "scores of another length": (
        (G + "scores", ARRAY, (F32, [0.0] * 7)),
        "scores has 7 entries of float32; it must .* 1000",
    ),
    "scores are text": ((G + "scores", STRING, "low"), "scores is 'low'; it must have one number"),
    "scores are texts": ((G + "scores", ARRAY, (STRING, ["a"])), "scores has 1 entries of text"),
    "a score is no number": (
        (G + "scores", ARRAY, (F32, [*SCORES[:-1], float("nan")])),
        "scores is not a number at token 999",
    ),
    "types of another length": (
        (G + "token_type", ARRAY, (I32, TYPES[:-1])),
        "token_type has 999 entries of int32; it must",
    ),
    "types are fractions": ((G + "token_type", ARRAY, (F32, TYPES)), "token_type has 1000 entries of float32; it must"),
    "a type that there is not": ((G + "token_type", ARRAY, (I32, [*TYPES[:-1], 9])), "token_type is 9 at token 999"),
    "a byte that is none": ((G + "token_type", ARRAY, (I32, [*TYPES[:-1], 6])), "token 999 is a byte, its text is"),
    "no tokens": ((G + "tokens", ARRAY, (STRING, [])), "tokens is missing or not a list"),
    "tokens are numbers": ((G + "tokens", ARRAY, (I32, [1, 2])), "tokens is missing or not a list"),
    "a token twice": ((G + "tokens", ARRAY, (STRING, [*TOKENS[:-1], "<s>"])), "holds '<s>' twice, as 1 and 999"),
    "a token that is too long": (
        (G + "tokens", ARRAY, (STRING, [*TOKENS[:-1], "a" * (MAX_CHARACTERS + 1)])),
        "holds one of 513 characters at 999",
    ),
    "bos outside": ((G + "bos_token_id", U32, 1000), "bos_token_id is 1000, outside the vocabulary of 1000"),
    "eos outside": ((G + "eos_token_id", U32, 2**31), "eos_token_id is 2147483648, outside"),
    "unknown outside": ((G + "unknown_token_id", I32, -2), "unknown_token_id is -2, outside"),
    "padding outside": ((G + "padding_token_id", U32, 5000), "padding_token_id is 5000, outside"),
    "bos is text": ((G + "bos_token_id", STRING, "<s>"), "bos_token_id' is '<s>', expected int"),
    "add_bos_token": ((G + "add_bos_token", U32, 1), "add_bos_token is '1', expected true or false"),
    "add_eos_token": ((G + "add_eos_token", STRING, "no"), "add_eos_token is 'no', expected true or false"),
    "add_space_prefix": ((G + "add_space_prefix", F32, 0.5), "add_space_prefix is '0.5', expected true or false"),
    "remove_extra_whitespaces": ((G + "remove_extra_whitespaces", U32, 0), "remove_extra_whitespaces is '0', expected"),
    **{
        model: (
            (G + "model", STRING, model),
            f"tokenizer.ggml.model '{model}' is not supported, only .* Hugging Face folder",
        )
        for model in ("t5", "bert", "rwkv", "ugm", "plamo2", "gemma4", "no_vocab")
    },
    "model is a number": ((G + "model", U32, 3), "tokenizer.ggml.model '3' is not supported"),
    "model is a list": ((G + "model", ARRAY, (I32, [1, 2])), "tokenizer.ggml.model .* is not supported"),
}


def refused(file: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(tmp_path, case):
    row, message = BAD[case]
    refused(write(tmp_path / "m.gguf", metadata("llama"), row), message)


@pytest.mark.parametrize("key", ["tokens", "scores", "token_type"])
def test_what_is_missing_is_named(tmp_path, key):
    refused(write(tmp_path / "m.gguf", metadata("llama"), without=key), f"tokenizer.ggml.{key} is missing")


def test_neither_bytes_nor_an_unknown_token(tmp_path):
    types = [NORMAL if kind == UNKNOWN else kind for kind in TYPES]
    tokens = ["?<0xFE>" if text == "<0xFE>" else text for text in TOKENS]
    types[tokens.index("?<0xFE>")] = UNUSED
    file = tmp_path / "m.gguf"
    changes = [(G + "tokens", ARRAY, (STRING, tokens)), (G + "token_type", ARRAY, (I32, types))]
    refused(write(file, metadata("llama"), *changes), "has no '<0xFE>' and .*unknown_token_id names no token")


ODD = st.sampled_from(
    [
        (U32, 7), (I32, -1), (F32, 0.5), (BOOL, 1), (STRING, "llama"), (STRING, ""), (ARRAY, (I32, [])),
        (ARRAY, (I32, [3, 3])), (ARRAY, (STRING, ["a"])), (ARRAY, (F32, [1.0])), (ARRAY, (BOOL, [1])),
        (F32, float("nan")),
    ]
)  # fmt: skip


@st.composite
def odd_metadata(draw: st.DrawFn) -> list[Row]:
    """A small vocabulary with values of other kinds, lengths and ranges."""
    count = draw(st.integers(3, 12))
    known = [*TOKENS[:8], "a", "b", "ab", "\u2581", "\u2581a", "", "<0x41>", "<0xZZ>", "$A", "a:1", "\n"]
    numbers, kinds = st.floats(width=32, allow_nan=False), st.sampled_from([1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 0, 7])
    texts = draw(st.lists(st.sampled_from(known), min_size=count, max_size=count, unique=True))
    scores = draw(st.lists(numbers, min_size=count, max_size=count))
    types = draw(st.lists(kinds, min_size=count, max_size=count))
    types = [BYTE if text == "<0x41>" else kind for text, kind in zip(texts, types, strict=True)]
    unknown = draw(st.integers(0, count - 1))
    types[unknown] = UNKNOWN
    rows_ = {
        "model": (STRING, "llama"),
        "tokens": (ARRAY, (STRING, texts)),
        "scores": (ARRAY, (F32, scores)),
        "token_type": (ARRAY, (I32, types)),
        "bos_token_id": (U32, draw(st.integers(0, count - 1))),
        "eos_token_id": (U32, draw(st.integers(0, count - 1))),
        "add_eos_token": (BOOL, draw(st.integers(0, 1))),
        "add_space_prefix": (BOOL, draw(st.integers(0, 1))),
        "unknown_token_id": (U32, unknown),
    }
    for key in draw(st.lists(st.sampled_from(sorted(rows_)), max_size=2)):
        rows_[key] = draw(ODD)
    for key in draw(st.lists(st.sampled_from(sorted(rows_)), max_size=1)):
        del rows_[key]
    return [(G + key, *value) for key, value in rows_.items()]


def test_any_metadata_gives_a_tokenizer_or_names_what_is_wrong(tmp_path):
    built = 0

    @settings(RELAXED, max_examples=250)
    @given(vocabulary=odd_metadata())
    def check(vocabulary: list[Row]) -> None:
        nonlocal built
        file = write(tmp_path / "m.gguf", vocabulary)
        try:
            tokenizer = load_tokenizer(file)
        except CheckpointError as error:
            assert str(file) in str(error)
            return
        built += 1
        ids = tokenizer.encode("ab a\n<s>\u00e9")
        tokenizer.decode(ids)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)

    check()
    assert built > 10


def test_the_fixture_is_like_published_vocabularies(files):
    kinds = GGUFFile(files["llama"]).metadata[G + "token_type"]
    assert set(np.unique(kinds)) == {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
    assert (kinds == BYTE).sum() == 256
