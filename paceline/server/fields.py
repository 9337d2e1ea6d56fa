"""Fields of requests that are not in the schemas: accepted because they cannot change the output, or refused by name.

A silent field is a wrong answer: whoever sends `min_p` to a server that ignores it gets text from another distribution.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.other_names import NEUTRAL_SAMPLING, SAMPLING_FIELDS, UNSUPPORTED_SAMPLING
from paceline.server.errors import ApiError, bad, shown

# They are about accounts, storage, scheduling or the transport, not about which tokens come. docs/api.md lists them.
ACCEPTED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "cache_control",
        "cache_prompt",
        "priority",
        "inference_geo",
        "speed",
        "spaces_between_special_tokens",
        "client_metadata",
    }
)

# Known fields without support, and what to do about it.
REFUSED: Mapping[str, str] = UNSUPPORTED_SAMPLING | {
    "suffix": "is not supported; this is no fill-in-the-middle endpoint",
    "length_penalty": "belongs to beam search, which is not supported; leave it out",
    "early_stopping": "belongs to beam search, which is not supported; leave it out",
    "chat_template": "of a request is not accepted; the operator sets one with --chat-template",
    "documents": "is not supported; put documents into the messages",
    "return_tokens_as_token_ids": "is not supported; use return_token_ids",
    "prompt_embeds": "is not supported",
    "mm_processor_kwargs": "is not supported; this model reads text",
    "audio": "is not supported; this model writes text",
    "modalities": "is not supported beyond text",
    "web_search_options": "is not supported",
    "verbosity": "is not supported",
    "kv_transfer_params": "is not supported",
    "vllm_xargs": "is not supported",
    "typical_p": "is not supported",
    "mirostat": "is not supported",
    "top_a": "is not supported",
    "dynatemp_range": "is not supported",
    "tfs": "is not supported",
    "xtc_probability": "is not supported",
    "dry_multiplier": "is not supported",
    "context_management": "is not supported; send what the model is to read",
    "container": "is not supported; there are no tools of the server's own",
    "mcp_servers": "is not supported; call them yourself and offer their tools",
    "grammar": "is llama.cpp's; use structured_outputs",
    "json_schema": "is llama.cpp's; use response_format",
}

# Values that mean the same as leaving the field out, besides null, false, "", [] and {}.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: NEUTRAL_SAMPLING[name] for name in ("best_of", "length_penalty", "truncate_prompt_tokens")},
    "modalities": (["text"],),
    "mirostat": (0,),
    "typical_p": (1, 1.0),
    "tfs": (1, 1.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "top_a": (0, 0.0),
    "verbosity": ("medium",),
    "id_slot": (-1,),
    "dynatemp_range": (0, 0.0),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}


def is_neutral(name: str, value: Any, table: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> bool:
    """Whether a field might as well have been left out."""
    if value is None or value is False or value == "" or value == [] or value == {}:
        return True
    return not isinstance(value, bool) and any(value == other for other in table.get(name, ()))


# Names that other servers have for something that is served here, or need not be asked for.
ELSEWHERE: Mapping[str, str] = {name: why for name, why in SAMPLING_FIELDS.items() if name not in REFUSED} | {
    "echo": "it belongs to plain completions; use /v1/completions",
    "format": "use response_format",
    "id_slot": "leave it out: there are no slots",
    "keep_alive": "leave it out: the model stays in memory",
    "n_ctx": "leave it out: the operator sets it with --max-model-len",
    "n_keep": "leave it out: prompts are never cut",
    "n_probs": "use logprobs",
    "num_ctx": "leave it out: the operator sets it with --max-model-len",
    "num_predict": "use max_tokens",
    "options": "it is Ollama's; put what it holds beside model, with max_tokens for num_predict",
    "repeat_last_n": "leave it out: repetition_penalty looks at the whole text",
    "repeat_penalty": "use repetition_penalty",
    "return_progress": "leave it out: nothing is reported before the first token",
    "return_tokens": "use return_token_ids",
    "think": "use reasoning_effort, or chat_template_kwargs",
    "timings_per_token": "leave it out: every answer ends with timings",
}


def check_extra(extra: Mapping[str, Any] | None, known: Iterable[str]) -> None:
    """Refuse fields that the schema does not have unless they cannot change the output. known: the schema's, for hints.

    Raises ApiError, which names the field.
    """
    for name, value in (extra or {}).items():
        if value is None or name in ACCEPTED or (name in ELSEWHERE and is_neutral(name, value)):
            continue
        if name in REFUSED:
            if not is_neutral(name, value):
                raise ApiError(400, f"{name}={shown(value)}: {REFUSED[name]}", param=name, code="unsupported_field")
            continue
        raise _unknown("", name, known, ELSEWHERE.get(name))


def check_nested(
    where: str, value: Mapping[str, Any], known: Sequence[str], remedies: Mapping[str, str] | None = None
) -> None:
    """The same for an object inside of a request, at this path. known: its fields, also those that change nothing.
    remedies: of fields that are refused for a reason, unless they ask for nothing. Raises ApiError."""
    for name in value:
        if value[name] is None or name in known:
            continue
        why = (remedies or {}).get(name)
        if why is None:
            raise _unknown(where, name, known)
        if not is_neutral(name, value[name]):
            raise bad(f"{where}.{name}", value[name], why, code="unsupported_field")


def _unknown(where: str, name: str, known: Iterable[str], remedy: str | None = None) -> ApiError:
    if remedy is None:
        near = difflib.get_close_matches(name[:80], list(known), n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "leave it out"
    before = f"{where}." if where else ""
    message = f"{before}{shown(name)[1:-1]}: unknown field; {remedy}"
    return ApiError(400, message, param=before + name[:80], code="unknown_field")
