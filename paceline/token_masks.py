"""`allowed_token_ids` and `bad_words` of a request in this model's token ids."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import ConfigError
from paceline.prompts import check_ids
from paceline.sampling import stopping_ids
from paceline.sampling_params import SamplingParams
from paceline.tokenizer import Tokenizer
from paceline.values import shown


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each word as it begins a text and as it follows a space, without repetitions.

    Raises ConfigError for a word without tokens, or with ids that the model does not have.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = word.lstrip(" ") or word
        forms = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (plain, f" {plain}")]
        if not forms[0]:  # behind a space it would be the space alone
            raise ConfigError(f"bad_words={shown(word)}: this model has no tokens for it; leave it out")
        for ids in filter(None, forms):
            check_ids("bad_words", ids, vocab_size)
            found[ids] = None
    return [list(ids) for ids in found]


def read_masks(
    params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]
) -> list[list[int]]:
    """The bad words of a request as token ids, once all of its masks are checked.

    Raises ConfigError for ids that the model does not have, and for allowed ids of which none can be the first token.
    """
    bad_words = bad_word_ids(params.bad_words or (), tokenizer, vocab_size)
    if params.allowed_token_ids is None:
        return bad_words
    check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    allowed = shown(list(params.allowed_token_ids))
    left = set(params.allowed_token_ids) - {ids[0] for ids in bad_words if len(ids) == 1}
    if not left:
        raise ConfigError(f"allowed_token_ids={allowed}: bad_words rule all of them out; allow another id")
    if params.min_tokens and left <= stopping_ids(params, eos_token_ids):
        raise ConfigError(
            f"allowed_token_ids={allowed}: all that is left of them stops, and min_tokens={params.min_tokens} rules "
            "that out; allow another id, or leave min_tokens out"
        )
    return bad_words
