"""What tokenizers of every kind have in a GGUF file's metadata: tokens, types, special ids, the frame of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, processors

from paceline.errors import CheckpointError

# tokenizer.ggml.token_type
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
# ids that SentencePiece files need not name
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}

# End-of-generation tokens that metadata often leaves out, by their text (a short form of llama.cpp's list).
END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)

Error = Callable[[str], CheckpointError]


def strings(metadata: dict[str, Any], key: str, error: Error) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise error(f"{key} is missing or not a list of strings")
    return value


def token_types(metadata: dict[str, Any], tokens: list[str], error: Error) -> np.ndarray:
    """int array [tokens]"""
    key = "tokenizer.ggml.token_type"
    kinds = metadata.get(key)
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise error(
            f"{key} {described(kinds)}; it must have one whole number for each of the {len(tokens)} tokens; "
            "use the model's Hugging Face folder or a file that was converted anew"
        )
    return kinds


def described(value: Any) -> str:
    """A metadata array, or what is there instead of one, for messages."""
    if value is None:
        return "is missing"
    if isinstance(value, np.ndarray | list):
        return f"has {len(value)} entries of {value.dtype if isinstance(value, np.ndarray) else 'text'}"
    return f"is {str(value)[:40]!r}"


def is_sentencepiece(metadata: dict[str, Any]) -> bool:
    model = metadata.get("tokenizer.ggml.model")
    return isinstance(model, str) and model == "llama"


def token_id(metadata: dict[str, Any], kind: str, vocabulary: int, error: Error) -> int | None:
    """tokenizer.ggml.{kind}_token_id, checked against the vocabulary; None when the file has none.

    SentencePiece files that do not say have 1 (bos), 2 (eos) and 0 (unknown), as in llama.cpp.
    """
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is None:
        default = _SENTENCEPIECE_IDS.get(kind) if is_sentencepiece(metadata) else None
        return default if default is not None and default < vocabulary else None
    if type(value) is not int or not 0 <= value < vocabulary:
        raise error(f"{key} is {str(value)[:40]}, outside the vocabulary of {vocabulary}")
    return value


def flag(metadata: dict[str, Any], name: str, default: bool, error: Error) -> bool:
    """tokenizer.ggml.{name}"""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not bool:
        raise error(f"tokenizer.ggml.{name} is {str(value)[:40]!r}, expected true or false")
    return value


def add_frame(tokenizer: Tokenizer, tokens: list[str], before: int | None, behind: int | None) -> None:
    """Put these ids around every text."""
    pieces = [i for i in (before, behind) if i is not None]
    if not pieces:
        return
    template = [*(["BOS"] if before is not None else []), "$A", *(["EOS"] if behind is not None else [])]
    named = [("BOS", before), ("EOS", behind)]
    # By a name of ours: a token's own text may mean something in a template ("$A", "a:1").
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[{"id": n, "ids": [i], "tokens": [tokens[i]]} for n, i in named if i is not None],
    )
