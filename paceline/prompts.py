"""What may be given as a prompt, and what is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Required, TypedDict

import numpy as np

from paceline.errors import ConfigError
from paceline.sampling_params import SamplingParams
from paceline.tokenizer import Tokenizer
from paceline.values import as_integer


class TextPrompt(TypedDict, total=False):
    """vLLM's mapping of a text. cache_salt: only prompts with the same one share cached blocks."""

    prompt: Required[str]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """vLLM's mapping of token ids, which count; prompt: their text, for the reader. cache_salt: as in TextPrompt."""

    prompt_token_ids: Required[list[int]]
    prompt: str
    cache_salt: str


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several -> several: a text, a mapping and a list of token ids are one prompt each."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    scalar = isinstance(prompts, np.ndarray) and prompts.ndim == 0
    if scalar or isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence | np.ndarray):
        raise ConfigError(
            f"prompts: {_kind(prompts)} is neither text, token ids nor a list of them; {_remedy(prompts)}"
        )
    prompts = list(prompts)
    if prompts and not isinstance(prompts[0], str | list | tuple | np.ndarray | Mapping):
        return [prompts]
    return prompts


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is messages, right or wrong. Raises ConfigError for several prompts in the place of one."""
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], str | list | tuple | Mapping):
        if isinstance(prompt, np.ndarray) and prompt.ndim > 1:
            raise _several(prompt)
        return False
    if isinstance(prompt[0], Mapping) and not {"prompt", "prompt_token_ids"} & {*prompt[0]}:
        return True
    raise _several(prompt)


def _several(prompts: Any) -> ConfigError:
    return ConfigError(
        f"prompt: a list of prompts ({len(prompts)}) given where there is one; call it for each of them, or "
        "LLM.generate(prompts) for all, LLM.chat for conversations"
    )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _remedy(value: Any) -> str:
    """What to do with something that is no prompt."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "decode bytes first"
    if as_integer(value) is not None:
        return f"token ids come in a list: [{value}]"
    if isinstance(value, Iterable):  # a generator, a set, a column of a table
        return "make a list of it: list(...)"
    return "give a text or a list of token ids"


def token_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> tuple[str | None, list[int]]:
    """(text if it was given as one, token ids). Raises ConfigError for anything else, an empty prompt, or bad ids."""
    if isinstance(prompt, Mapping):
        prompt = _unwrap(prompt)
    text = prompt if isinstance(prompt, str) else None
    ids = tokenizer.encode(text) if text is not None else _ids(prompt)
    if not ids:
        raise ConfigError("prompt: empty; give at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        remedy = "; the tokenizer belongs to another model" if text is not None else ""
        raise ConfigError(f"prompt: token id {wrong} is outside the vocabulary of {vocab_size}{remedy}")
    return text, ids


def cache_salt(prompt: Any) -> str | None:
    """The "cache_salt" of a prompt mapping: only prompts with the same salt share cached blocks."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ConfigError(f"cache_salt: {salt!r} must be text that is not empty")
    return salt


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation for a chat template: text parts joined by line ends. Raises ConfigError for what is none."""
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise ConfigError("messages: give a list of {'role': ..., 'content': ...} mappings")
    return [_chat_message(dict(message), f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ConfigError(f"{where}: role {role!r} is no text; use 'system', 'user', 'assistant' or 'tool'")
    if content is None:  # of an assistant that only called tools
        if role in ("system", "user"):
            raise ConfigError(f"{where}: a message of the role {role!r} needs 'content'")
        return {**message, "content": ""}
    if isinstance(content, list | tuple):
        return {**message, "content": "\n".join(_part(part, where) for part in content)}
    if not isinstance(content, str):
        raise ConfigError(f"{where}: content {type(content).__name__} is neither text nor a list of text parts")
    return message


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"{where}: a content part of the kind {kind!r} cannot be read; models here read text alone")


def params_for(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt, from None, one, or a list of as many."""
    each = list(params) if isinstance(params, list | tuple) else [params] * count
    if len(each) != count:
        raise ConfigError(f"sampling_params: {len(each)} given for {count} prompts; give one, or one each")
    return [one_params(p) for p in each]


def one_params(params: Any) -> SamplingParams:
    """SamplingParams, or the defaults for None."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling_params: {type(params).__name__} given; use SamplingParams(...)")
    return params


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Token ids of a parameter must exist in this model."""
    for token in ids:
        if token >= vocab_size:
            raise ConfigError(f"{name}: token id {token} is outside the vocabulary of {vocab_size}")


def _unwrap(prompt: Mapping[str, Any]) -> Any:
    """vLLM's prompt mappings: {"prompt_token_ids": [...]} or {"prompt": text}, the ids first if both are there."""
    for key in ("multi_modal_data", "prompt_embeds"):
        if prompt.get(key) is not None and not (isinstance(prompt[key], Mapping) and not prompt[key]):
            raise ConfigError(f"prompt: {key!r} is not supported; models here read text and token ids alone")
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    found = sorted(map(str, prompt))
    remedy = "; messages go to LLM.chat" if "role" in found else ""
    raise ConfigError(f"prompt: a mapping needs 'prompt' or 'prompt_token_ids', this one has {found}{remedy}")


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence | np.ndarray):
        raise ConfigError(f"prompt: {_kind(prompt)} is neither text, token ids nor messages; {_remedy(prompt)}")
    ids = []
    for token in prompt:
        if isinstance(token, bool | np.bool_):
            raise ConfigError(f"prompt: token id {token!r} is not a whole number")
        try:
            ids.append(operator.index(token))
        except TypeError:
            raise ConfigError(f"prompt: token id {token!r} is not a whole number") from None
    return ids
