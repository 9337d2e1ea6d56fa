"""Arguments that a call does not have: taken where they ask for nothing, else refused with what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from paceline.errors import ArgumentError
from paceline.other_names import PARAMS_FIELDS
from paceline.sampling_params import SamplingParams
from paceline.values import shown

_LEAVE = "is not supported; leave it out"
# argument of another engine's call -> (values that ask for nothing besides None, remedy)
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template_content_format": (("auto", "string"), f"{_LEAVE}: text parts are joined to one text"),
    "data_parallel_rank": ((0,), _LEAVE),
    "guided_options_request": ((), "put structured_outputs into SamplingParams(...)"),
    "lora_request": ((), f"{_LEAVE}: there are no adapters"),
    "messages": ((), "give them as the first argument, to LLM.chat, LLM.stream or AsyncLLM"),
    "mm_processor_kwargs": (({},), f"{_LEAVE}: models here read text alone"),
    "multi_modal_data": (({},), f"{_LEAVE}: models here read text alone"),
    "params": ((), "use sampling_params"),
    "priority": ((0, []), f"{_LEAVE}: requests run in the order in which they come"),
    "progress": ((False,), "leave it out: LLM.generate and LLM.chat have a bar"),
    "prompt_adapter_request": ((), f"{_LEAVE}: there are no adapters"),
    "prompt_text": ((), _LEAVE),
    "prompt_token_ids": ((), "give the ids as the prompt: [1, 2, 3], or {'prompt_token_ids': [1, 2, 3]}"),
    "reasoning_ended": ((False,), _LEAVE),
    "request_id": ((), "leave it out: LLM numbers its requests; AsyncLLM takes an id"),
    "speculation": ((True,), "use num_speculative_tokens=0 for plain decoding"),
    "stream": ((False,), "use LLM.stream(prompt, ...), which yields pieces, or AsyncLLM.generate"),
    "system": ((), "give it as a message: {'role': 'system', 'content': ...}"),
    "system_prompt": ((), "give it as a message: {'role': 'system', 'content': ...}"),
    "tokenization_kwargs": (({},), f"{_LEAVE}: encode the text yourself and give its token ids"),
    "tokenize": ((True,), f"{_LEAVE}: LLM.get_tokenizer().apply_chat_template(messages) returns the text"),
    "tool_choice": (("auto",), f"{_LEAVE}: docs/structured-outputs.md has tool calls in Python (plan_tools)"),
    "trace_headers": (({},), _LEAVE),
    "use_tqdm": ((True, False), "leave it out: LLM.generate and LLM.chat have a bar"),
}
SAMPLING = tuple(field.name for field in fields(SamplingParams))


def refuse_unknown(unknown: Mapping[str, Any], known: Collection[str], chat: Collection[str], *, takes: bool) -> None:
    """Raise an ArgumentError for the first of these that asks for something.

    known: arguments that the call has. chat: those of conversations, which it has too if `takes`.
    """
    for name, value in unknown.items():
        neutral, remedy = _OTHERS.get(name, ((), ""))
        if remedy and (value is None or any(type(value) is type(n) and value == n for n in neutral)):
            continue
        raise ArgumentError(f"{name}={shown(value)}: {remedy or _remedy(name, known, chat, takes)}")


def _remedy(name: str, known: Collection[str], chat: Collection[str], takes: bool) -> str:
    if name in SAMPLING:
        return f"is a parameter of sampling; put it into SamplingParams({name}=...)"
    if name in PARAMS_FIELDS:
        return f"is no argument here; sampling is up to SamplingParams(...); there: {PARAMS_FIELDS[name]}"
    if name in chat:  # and not taken
        return "belongs to conversations; use LLM.chat(messages, ...)"
    arguments = [*known, *chat] if takes else [*known]
    said = "there is no such argument"
    if close := get_close_matches(name[:80], [*arguments, *SAMPLING], 1):
        said += f"; did you mean {f'SamplingParams({close[0]}=...)' if close[0] in SAMPLING else repr(close[0])}?"
    if takes:
        return (
            f"{said}{' If' if close else '; if'} the chat template reads it, use chat_template_kwargs={{{name!r}: ...}}"
        )
    return f"{said}{' ' if close else '. '}Arguments: {', '.join(arguments)}"
