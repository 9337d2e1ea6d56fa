"""`paceline eval`: how near a quantised model is to the same model in bf16, on texts.

Perplexity is exp of the mean negative log-probability of the tokens of the texts behind their first (of those marked
as answers, where a text is a prompt with an answer). Agreement is the share of these positions at which both models'
likeliest token is the same: what greedy decoding would do, were it led along the text.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.bench.datasets import DatasetError

if TYPE_CHECKING:
    from paceline.models.target import TargetModel
    from paceline.tokenizer import Tokenizer

CHUNK = 64  # rows whose logits are held at once


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids; those from `start` on are scored, each given all before it."""

    ids: list[int]
    start: int = 1


def read_texts(paths: Sequence[Path], tokenizer: Tokenizer, *, count: int, length: int) -> list[Text]:
    """The first `count` texts, at most `length` tokens each.

    A file that is not JSON lines is one text. Rows of a .jsonl(.gz) file hold "text", or "prompt" with a "response"
    text or its "tokens", of which the answer is scored. Two files are joined by the rows' "id". Raises DatasetError.
    """
    rows = [dict(row) for row in _rows(paths[0])]
    for path in paths[1:]:
        more = {row["id"]: row for row in _rows(path) if "id" in row}
        rows = [{**row, **more[row["id"]]} for row in rows if row.get("id") in more]
    texts = []
    where = " and ".join(map(str, paths))
    for number, row in enumerate(rows, 1):
        text = _text(row, tokenizer, length, f"{where}, row {number}")
        if len(text.ids) > text.start:
            texts.append(text)
        if len(texts) == count:
            break
    if not texts:
        raise DatasetError(f"{', '.join(map(str, paths))}: holds no text of two tokens or more")
    return texts


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = data.decode("utf-8")
    except (OSError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as text: {getattr(error, 'strerror', None) or error}") from error
    if ".jsonl" not in path.name:
        yield {"text": content}
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, line {number}: not a JSON object")
        yield row


def _text(row: dict[str, Any], tokenizer: Tokenizer, length: int, where: str) -> Text:
    if isinstance(row.get("text"), str):
        return Text(tokenizer.encode(row["text"])[:length])
    prompt, answer = row.get("prompt"), row.get("tokens", row.get("response"))
    if not isinstance(prompt, str) or not isinstance(answer, str | list):
        found = ", ".join(map(repr, list(row)[:8])) or "nothing"
        raise DatasetError(f'{where}: needs "text", or "prompt" with "response" or "tokens"; it has {found}')
    if tokenizer.chat_template is not None:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    tail = tokenizer.encode(answer) if isinstance(answer, str) else [int(i) for i in answer]
    return Text([*ids, *tail][:length], max(1, len(ids)))


@dataclass(slots=True)
class Scores:
    """Of every scored token: log-probability, and the id that the model finds likeliest there."""

    logprobs: np.ndarray  # fp64 [tokens]
    best: np.ndarray  # int64 [tokens]

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


def score(model: TargetModel, texts: Sequence[Text], *, on_text: Callable[[], None] = lambda: None) -> Scores:
    """Run the model along the texts."""
    from paceline import _native

    logprobs: list[np.ndarray] = []
    best: list[np.ndarray] = []
    for text in texts:
        for rows, following in _logits(model, text):
            best.append(_native.argmax_rows(rows))
            shifted = rows.astype(np.float64) - rows.max(1, keepdims=True)
            norm = np.log(np.exp(shifted).sum(1))
            logprobs.append(shifted[np.arange(len(rows)), following] - norm)
        on_text()
    return Scores(np.concatenate(logprobs), np.concatenate(best))


def _logits(model: TargetModel, text: Text) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(logits [rows, vocabulary], the ids that follow) of the scored positions, in chunks."""
    from paceline import _native

    n = len(text.ids) - 1
    blocks = -(-n // _native.KEYS_PER_BLOCK)
    cache, table = model.new_cache(blocks), np.arange(blocks, dtype=np.int32)[None]
    step = min(CHUNK, model.max_rows)
    for start in range(0, n, step):
        rows = min(step, n - start)
        select = np.arange(max(0, text.start - 1 - start), rows, dtype=np.int32)
        logits = np.empty((len(select), model.vocab_size), np.float32)
        model.plan().forward(
            cache,
            np.arange(start, start + rows, dtype=np.int32),
            np.array([0, rows], np.int32),
            tokens=np.asarray(text.ids[start : start + rows], np.int32),
            block_tables=table,
            select=select,
            logits=logits,
        )
        if len(select):
            yield logits, np.asarray(text.ids[start + 1 : start + rows + 1])[select]


def compare(scores: Scores, reference: Scores) -> dict[str, Any]:
    """What `paceline eval` reports about a model beside its reference."""
    return {
        "tokens": len(scores.logprobs),
        "perplexity": scores.perplexity,
        "reference_perplexity": reference.perplexity,
        "perplexity_ratio": scores.perplexity / reference.perplexity,
        "greedy_agreement": float((scores.best == reference.best).mean()),
        "mean_abs_logprob_difference": float(np.abs(scores.logprobs - reference.logprobs).mean()),
    }
