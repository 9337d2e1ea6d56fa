"""Small SentencePiece models, and their vocabularies as llama.cpp's converter writes them into GGUF files.

The models in `sentencepiece/` were made by `python -m weights.sentencepiece_models` in `tests/`, with the package
`sentencepiece`; reading them needs none.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weights.builders import ARRAY, BOOL, F32, I32, STRING, U32
from weights.prompts import TORTURE

FOLDER = Path(__file__).parent / "sentencepiece"
# how models of these names are like: a space before a text, user-defined tokens
NAMES = ("llama", "gemma", "unigram")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Row = tuple[str, int, Any]


def path(name: str) -> Path:
    return FOLDER / f"{name}.model"


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer's fields: int, or bytes of what has a length or four bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = varint() if key & 7 == 2 else 4
            yield key >> 3, data[at : at + size]
            at += size


def pieces(model: Path) -> list[tuple[str, float, int]]:
    """(text, score, type) of every token of a *.model file."""
    import struct

    out = []
    for number, value in _fields(model.read_bytes()):
        if number == 1:
            piece = dict(_fields(value))
            out.append((piece[1].decode(), struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0], piece.get(3, NORMAL)))
    return out


def rows(vocabulary: list[tuple[str, float, int]], *, prefix: bool = True, **flags: bool) -> list[Row]:
    """GGUF metadata. User-defined tokens have spaces, and -1000 as their score, as converters write them."""
    own = [(t.replace("\u2581", " "), -1000.0, k) if k == USER_DEFINED else (t, s, k) for t, s, k in vocabulary]
    texts, scores, kinds = zip(*own, strict=True)
    return [
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.pre", STRING, "default"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, list(texts))),
        ("tokenizer.ggml.scores", ARRAY, (F32, list(scores))),
        ("tokenizer.ggml.token_type", ARRAY, (I32, list(kinds))),
        ("tokenizer.ggml.bos_token_id", U32, texts.index("<s>")),
        ("tokenizer.ggml.eos_token_id", U32, texts.index("</s>")),
        ("tokenizer.ggml.unknown_token_id", U32, texts.index("<unk>")),
        *([] if prefix else [("tokenizer.ggml.add_space_prefix", BOOL, 0)]),
        *((f"tokenizer.ggml.{name}", BOOL, int(value)) for name, value in flags.items()),
    ]


def metadata(name: str, *, size: int | None = None, **flags: bool) -> list[Row]:
    """Of one of the models here; unused tokens up to `size`."""
    vocabulary = pieces(path(name))
    missing = range(len(vocabulary), size or len(vocabulary))
    vocabulary += [(f"[PAD{i}]", -10000.0, UNUSED) for i in missing]
    return rows(vocabulary, prefix=name != "gemma", **flags)


def _sentences() -> Iterator[str]:
    for _ in range(3):
        for text in TORTURE.values():
            yield from (line for line in text.split("\n") if line)
    yield from (Path(__file__).parents[2] / "LICENSE").read_text().splitlines()
    for n in range(300):
        yield f"def f{n}(x):  return {{'a': x ** {n}}}   # {n * 37},{n * 991}"


def train(name: str) -> bytes:
    """A *.model file."""
    import sentencepiece

    own: dict[str, Any] = {
        "llama": {"user_defined_symbols": ["<tool>", "<|user|>"], "control_symbols": ["[INST]", "[/INST]"]},
        "gemma": {
            "add_dummy_prefix": False,
            "user_defined_symbols": [*("\n" * n for n in range(1, 7)), *("\u2581" * n for n in range(2, 9)), "<table>"],
            "control_symbols": ["<start_of_turn>", "<end_of_turn>"],
        },
        "unigram": {"model_type": "unigram"},
    }[name]
    out = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 1000,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "pad_id": -1,
        "num_threads": 1,
        "minloglevel": 2,
        **own,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=_sentences(), model_writer=out, **options)
    return out.getvalue()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in NAMES:
        path(each).write_bytes(train(each))
