"""Build a `tokenizers` tokenizer from a GGUF file's metadata; this module has those of byte-level BPE.

llama.cpp is the reference: the file's `tokenizer.ggml.pre` names the pre-tokenizer, and the expressions below
are those that llama.cpp applies for it (llama-vocab.cpp), each to the pieces of the one before. Like
llama.cpp, and unlike some Hugging Face originals, there is no Unicode normalisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import CheckpointError
from paceline.weights import gguf_sentencepiece
from paceline.weights.gguf_vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    add_frame,
    is_sentencepiece,
    strings,
    token_id,
    token_types,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS_FROM = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_SMOLLM = (r"\p{N}", _GPT2)
_QWEN2 = (_CONTRACTIONS + _WORDS_FROM + r"\p{N}" + _REST,)
_QWEN35 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),)
_LLAMA3 = (_CONTRACTIONS + _WORDS_FROM + r"\p{N}{1,3}" + _REST,)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# tokenizer.ggml.pre -> expressions; the names that share a family in llama.cpp
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SMOLLM),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
}
# These look a whole piece up in the vocabulary before they merge, and begin a text with BOS unless the file
# says otherwise.
_WHOLE_PIECES_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"})


def build_tokenizer(metadata: dict[str, Any], where: object) -> Tokenizer:
    """`metadata` as `GGUFFile` reads it; `where` names the file in errors. Raises `CheckpointError`."""

    def error(message: str) -> CheckpointError:
        return CheckpointError(f"{where}: {message}")

    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise error("the file has no tokenizer (tokenizer.ggml.model is missing)")
    if is_sentencepiece(metadata):
        return gguf_sentencepiece.build(metadata, error)
    if not isinstance(model, str) or model != "gpt2":
        raise error(
            f"tokenizer.ggml.model {str(model)[:40]!r} is not supported, only byte-level BPE ('gpt2') and "
            "SentencePiece ('llama') are; use the model's Hugging Face folder"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise error(
            f"tokenizer.ggml.pre {pre!r} is not among the known {', '.join(sorted(PRE_TOKENIZERS))}; "
            "use the model's Hugging Face folder"
        )
    tokens = strings(metadata, "tokenizer.ggml.tokens", error)
    merges = strings(metadata, "tokenizer.ggml.merges", error)
    kinds = token_types(metadata, tokens, error)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise error("tokenizer.ggml.tokens holds a token twice")

    # A merge is "left right"; pieces never hold a raw space, but the first character may be one.
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise error("tokenizer.ggml.merges holds an entry that is not two tokens with a space between")
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_PIECES_FIRST)
    except Exception as problem:  # the package raises a plain Exception, e.g. for a merge of unknown tokens
        raise error(f"tokenizer.ggml.merges does not fit the tokens: {problem}") from problem

    tokenizer = Tokenizer(bpe)
    steps: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = np.flatnonzero((kinds == UNKNOWN) | (kinds == CONTROL))
    special = [AddedToken(tokens[i], special=True, normalized=False) for i in control]
    plain = [AddedToken(tokens[i], special=False, normalized=False) for i in np.flatnonzero(kinds == USER_DEFINED)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    _add_frame(tokenizer, metadata, tokens, pre in _WHOLE_PIECES_FIRST, error)
    return tokenizer


def _add_frame(
    tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], bos_default: bool, error: Any
) -> None:
    """BOS before and EOS behind a text, where the file asks for it."""
    bos = token_id(metadata, "bos", len(tokens), error)
    eos = token_id(metadata, "eos", len(tokens), error)
    before = bos if metadata.get("tokenizer.ggml.add_bos_token", bos_default) is True else None
    behind = eos if metadata.get("tokenizer.ggml.add_eos_token", False) is True else None
    add_frame(tokenizer, tokens, before, behind)
