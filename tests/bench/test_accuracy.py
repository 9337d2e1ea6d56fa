"""`paceline eval`'s scores against the definition, and its readers of texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny import Shape, write_target

from paceline.bench.accuracy import Text, compare, read_texts, score
from paceline.bench.datasets import DatasetError
from paceline.models import load_model
from paceline.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint

SHAPE = Shape(vocab=120, hidden=48, inner=64, sharp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), SHAPE, tokenizer=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(open_checkpoint(folder))


def test_scores_are_log_softmax_of_what_follows(folder):
    model = load_model(folder, dtype="float32", threads=1)
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 120, n).tolist(), start) for n, start in ((2, 1), (65, 1), (66, 65), (150, 70))]
    done: list[int] = []
    scores = score(model, texts, on_text=lambda: done.append(1))
    assert len(done) == len(texts)
    want, best = [], []
    for text in texts:
        logits = model.logits(text.ids)[0].astype(np.float64)
        log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for at in range(text.start, len(text.ids)):
            want.append(log_softmax[at - 1, text.ids[at]])
            best.append(logits[at - 1].argmax())
    np.testing.assert_allclose(scores.logprobs, want, rtol=1e-6)
    assert (scores.best == best).all()
    assert scores.perplexity == pytest.approx(np.exp(-np.mean(want)))


def test_a_model_agrees_with_itself_and_less_with_its_quantised_self(folder):
    texts = [Text(np.random.default_rng(1).integers(0, 120, 200).tolist())]
    exact = score(load_model(folder, threads=1), texts)
    same = compare(exact, score(load_model(folder, threads=1), texts))
    assert same["greedy_agreement"] == same["perplexity_ratio"] == 1 and same["mean_abs_logprob_difference"] == 0
    agreement = {}
    for quantization in ("int8", "int4"):
        got = compare(score(load_model(folder, quantization=quantization, threads=1), texts), exact)
        agreement[quantization] = got["greedy_agreement"]
        assert got["tokens"] == 199 and got["mean_abs_logprob_difference"] > 0
    assert 1 > agreement["int8"] > agreement["int4"] > 0.5


def test_texts(tmp_path, tokenizer):
    plain = tmp_path / "a.txt"
    plain.write_text("abab cdcd ha ha ha")
    (text,) = read_texts([plain], tokenizer, count=5, length=100)
    assert text == Text(tokenizer.encode("abab cdcd ha ha ha"))
    assert read_texts([plain], tokenizer, count=5, length=3)[0].ids == text.ids[:3]
    rows = [
        {"id": 0, "text": "abc\u2028def"},  # a line for str.splitlines, not for JSON
        {"id": 1, "prompt": "ab", "response": "cd"},
        {"id": 2, "prompt": "ab", "tokens": [1, 2, 3]},
    ]
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode()))
    texts = read_texts([packed], tokenizer, count=5, length=100)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    assert texts[1].ids == [*prompt, *tokenizer.encode("cd")] and texts[1].start == len(prompt)
    assert texts[2].ids == [*prompt, 1, 2, 3] and texts[2].start == len(prompt)
    assert len(read_texts([packed], tokenizer, count=2, length=100)) == 2


def test_two_files_are_joined_by_id(tmp_path, tokenizer):
    (tmp_path / "p.jsonl").write_text('{"id": 7, "prompt": "ab"}\n{"id": 8, "prompt": "cd"}\n\n')
    (tmp_path / "r.jsonl").write_text('{"id": 8, "tokens": [4, 5]}\n{"id": 9, "tokens": [6]}\n')
    (text,) = read_texts([tmp_path / "p.jsonl", tmp_path / "r.jsonl"], tokenizer, count=5, length=100)
    assert text.ids == [*tokenizer.encode_chat([{"role": "user", "content": "cd"}]), 4, 5]


BAD = {
    "not JSON": ("x.jsonl", b'{"text": "ab"}\n{', "line 2"),
    "not an object": ("x.jsonl", b"[1]", "line 1"),
    "no text": ("x.jsonl", b'{"messages": []}', "text"),
    "without a text": (
        "x.jsonl",
        b'{"text": "a"}\n{"body": "b", "id": 2}\n',
        r"x\.jsonl, row 2: needs .* has 'body', 'id'",
    ),
    "not text": ("x.txt", b"\xff\xfe\x00", "cannot be read"),
    "not gzip": ("x.jsonl.gz", b"abc", "cannot be read"),
    "nothing to score": ("x.jsonl", b'{"text": ""}', "no text"),
    "empty": ("x.txt", b"", "no text"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named(tmp_path, tokenizer, what):
    name, data, message = BAD[what]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        read_texts([tmp_path / name], tokenizer, count=5, length=100)
    with pytest.raises(DatasetError, match=r"gone\.txt: cannot be read as text: No such file or directory$"):
        read_texts([tmp_path / "gone.txt"], tokenizer, count=5, length=100)
