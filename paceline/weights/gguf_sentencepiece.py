"""Build a `tokenizers` tokenizer from a GGUF file with a SentencePiece BPE vocabulary (tokenizer.ggml.model "llama").

llama.cpp is the reference (llama-vocab.cpp): of all neighbours that together are a token, those with the highest
score are joined first, the leftmost of equal ones; characters that are no token become their bytes. Here the same is
written as a list of merges in order of score. What the list cannot say: of two overlapping pairs that make the same
token out of parts of different lengths, or tokens of the same score, the leftmost goes first there, and here always
the same pair. Where published vocabularies have equal scores (runs of spaces), both end with the same tokens.

Tokens of the types control, unknown and user-defined are found in a text before anything else, and a space goes
before each piece of text between them, unless tokenizer.ggml.add_space_prefix is false (Gemma).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from paceline.weights.gguf_vocabulary import (
    BYTE,
    CONTROL,
    END_TEXTS,
    UNDEFINED,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Error,
    add_frame,
    described,
    flag,
    strings,
    token_id,
    token_types,
)

SPACE = "\u2581"
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Splitting a token takes time with the square of its length. Published ones have up to some dozens of characters.
MAX_CHARACTERS = 512

_KEYS = {name: f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")}
_REMEDY = "use the model's Hugging Face folder or a file that was converted anew"


def build(metadata: dict[str, Any], error: Error) -> Tokenizer:
    """`metadata` as `GGUFFile` reads it; error(message) makes a `CheckpointError`, the only thing that is raised."""
    tokens = token_texts(metadata, error)
    kinds = token_types(metadata, tokens, error)
    scores = _scores(metadata, len(tokens), error)
    vocabulary = _vocabulary(tokens, error)
    _check_kinds(tokens, kinds, error)

    ends = [i for text in END_TEXTS if (i := vocabulary.get(text)) is not None]
    special = np.isin(kinds, (UNKNOWN, CONTROL))
    special[ends] = True  # whatever their type, as in llama.cpp
    unknown = _unknown(metadata, vocabulary, kinds, tokens, error)
    merges = _merges(tokens, scores, ~special & (kinds != BYTE), kinds != USER_DEFINED, error)
    try:
        bpe = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as problem:  # the package raises a plain Exception
        raise error(f"{_KEYS['tokens']} does not make a vocabulary: {problem}") from problem

    tokenizer = Tokenizer(bpe)
    prefix = flag(metadata, "add_space_prefix", True, error)
    # llama.cpp reads it and does not use it for this kind of tokenizer
    flag(metadata, "remove_extra_whitespaces", False, error)
    escaped = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escaped]) if prefix else escaped
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # An attribute that files do not carry; llama.cpp goes by the model's name.
    strips = any(name in str(metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    for is_special, which in ((True, special), (False, (kinds == USER_DEFINED) & ~special)):
        found = [tokens[i] for i in np.flatnonzero(which)]
        added = [AddedToken(t, special=is_special, normalized=False, rstrip=strips and t not in keeps) for t in found]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)

    bos, eos = (token_id(metadata, kind, len(tokens), error) for kind in ("bos", "eos"))
    before = bos if flag(metadata, "add_bos_token", True, error) else None
    add_frame(tokenizer, tokens, before, eos if flag(metadata, "add_eos_token", False, error) else None)
    return tokenizer


def token_texts(metadata: dict[str, Any], error: Error) -> list[str]:
    """The tokens; an empty one gets a name that no text has, as in llama.cpp."""
    tokens = strings(metadata, _KEYS["tokens"], error)
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]


def silent_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that stand for no text at all (padding of the vocabulary), of metadata that `build` took."""
    return np.flatnonzero(np.isin(metadata[_KEYS["token_type"]], (UNUSED, UNDEFINED))).tolist()


def _scores(metadata: dict[str, Any], count: int, error: Error) -> np.ndarray:
    scores = metadata.get(_KEYS["scores"])
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "iuf" or len(scores) != count:
        raise error(
            f"{_KEYS['scores']} {described(scores)}; it must have one number for each of the {count} tokens; {_REMEDY}"
        )
    scores = scores.astype(np.float32)
    if np.isnan(scores).any():
        raise error(f"{_KEYS['scores']} is not a number at token {int(np.isnan(scores).argmax())}; {_REMEDY}")
    return scores


def _vocabulary(tokens: list[str], error: Error) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        again = next(i for i, token in enumerate(tokens) if vocabulary[token] != i)
        last = vocabulary[tokens[again]]
        raise error(f"{_KEYS['tokens']} holds {tokens[again][:40]!r} twice, as {again} and {last}; {_REMEDY}")
    return vocabulary


def _check_kinds(tokens: list[str], kinds: np.ndarray, error: Error) -> None:
    odd = np.flatnonzero((kinds < UNDEFINED) | (kinds > BYTE))
    if len(odd):
        raise error(f"{_KEYS['token_type']} is {kinds[odd[0]]} at token {odd[0]}, expected 1 to 6; {_REMEDY}")
    for i in np.flatnonzero(kinds == BYTE):
        if not BYTE_TOKEN.fullmatch(tokens[i]):
            raise error(
                f"{_KEYS['token_type']} says that token {i} is a byte, its text is {tokens[i][:40]!r} and not one like "
                f"'<0x0A>'; {_REMEDY}"
            )


def _unknown(
    metadata: dict[str, Any], vocabulary: dict[str, int], kinds: np.ndarray, tokens: list[str], error: Error
) -> str | None:
    """The token for characters that have none, where the vocabulary has no bytes for them."""
    unknown = token_id(metadata, "unknown", len(tokens), error)
    if unknown is not None and kinds[unknown] == UNKNOWN:
        return tokens[unknown]
    lacks = [text for byte in range(256) if (text := f"<0x{byte:02X}>") not in vocabulary]
    if lacks:
        raise error(
            f"{_KEYS['tokens']} has no {lacks[0]!r} and tokenizer.ggml.unknown_token_id names no token of the type "
            f"unknown, so that not every text can be encoded; {_REMEDY}"
        )
    return None


def _merges(
    tokens: list[str], scores: np.ndarray, joined: np.ndarray, short: np.ndarray, error: Error
) -> list[tuple[str, str]]:
    """Every way to make one of the `joined` tokens out of two others of them, the highest score first.

    short: tokens that may not be longer than `MAX_CHARACTERS`; the others are found as a whole.
    """
    parts = {tokens[i] for i in np.flatnonzero(joined)}
    merges: list[tuple[str, str]] = []
    add = merges.append
    for i in np.argsort(-scores, kind="stable").tolist():
        token = tokens[i]
        if not joined[i] or len(token) < 2:
            continue
        if len(token) > MAX_CHARACTERS:
            if short[i]:
                raise error(
                    f"{_KEYS['tokens']} holds one of {len(token)} characters at {i}, more than {MAX_CHARACTERS}"
                )
            continue
        for at in range(len(token) - 1, 0, -1):
            left = token[:at]
            if left in parts and (right := token[at:]) in parts:
                add((left, right))
    return merges
