"""Build a `tokenizers` byte-level BPE tokenizer from a GGUF file's metadata.

llama.cpp is the reference: the file's `tokenizer.ggml.pre` names the pre-tokenizer, and the expressions below
are those that llama.cpp applies for it (llama-vocab.cpp), each to the pieces of the one before. Like
llama.cpp, and unlike some Hugging Face originals, there is no Unicode normalisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from paceline.errors import CheckpointError

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

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def build_tokenizer(metadata: dict[str, Any], where: object) -> Tokenizer:
    """`metadata` as `GGUFFile` reads it; `where` names the file in errors. Raises `CheckpointError`."""

    def error(message: str) -> CheckpointError:
        return CheckpointError(f"{where}: {message}")

    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise error("the file has no tokenizer (tokenizer.ggml.model is missing)")
    if model != "gpt2":
        raise error(
            f"tokenizer.ggml.model {model!r} is not supported, only byte-level BPE ('gpt2') is; "
            "use the model's Hugging Face folder"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise error(
            f"tokenizer.ggml.pre {pre!r} is not among the known {', '.join(sorted(PRE_TOKENIZERS))}; "
            "use the model's Hugging Face folder"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", error)
    merges = _strings(metadata, "tokenizer.ggml.merges", error)
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise error(f"tokenizer.ggml.token_type must have one entry for each of the {len(tokens)} tokens")
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
    control = np.flatnonzero((kinds == _UNKNOWN) | (kinds == _CONTROL))
    special = [AddedToken(tokens[i], special=True, normalized=False) for i in control]
    plain = [AddedToken(tokens[i], special=False, normalized=False) for i in np.flatnonzero(kinds == _USER_DEFINED)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    _add_frame(tokenizer, metadata, tokens, pre in _WHOLE_PIECES_FIRST, error)
    return tokenizer


def _strings(metadata: dict[str, Any], key: str, error: Any) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise error(f"{key} is missing or not a list of strings")
    return value


def token_id(metadata: dict[str, Any], kind: str, vocabulary: int, error: Any) -> int | None:
    """tokenizer.ggml.{kind}_token_id, checked against the vocabulary; None when the file has none."""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocabulary:
        raise error(f"{key} is {str(value)[:40]}, outside the vocabulary of {vocabulary}")
    return value


def _add_frame(
    tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], bos_default: bool, error: Any
) -> None:
    """BOS before and EOS behind a text, where the file asks for it."""
    bos = token_id(metadata, "bos", len(tokens), error)
    eos = token_id(metadata, "eos", len(tokens), error)
    before = bos if metadata.get("tokenizer.ggml.add_bos_token", bos_default) is True else None
    behind = eos if metadata.get("tokenizer.ggml.add_eos_token", False) is True else None
    if before is None and behind is None:
        return
    frame = [i for i in (before, behind) if i is not None]
    single = [*(["BOS"] if before is not None else []), "$A", *(["EOS"] if behind is not None else [])]
    names = {before: "BOS", behind: "EOS"}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[p if p == "$A" else tokens[before if p == "BOS" else behind] for p in single],  # type: ignore[index]
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(frame) if i in names],
    )
