"""Requests of OpenAI's interfaces, with vLLM's additions. Types are strict; ranges are SamplingParams' business."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from paceline.sampling_params import SamplingParams, SamplingParamsError
from paceline.server import tool_fields
from paceline.server.errors import bad, shown, with_limit
from paceline.server.features import ModelFeatures, take_features
from paceline.server.fields import check_extra, check_nested
from paceline.server.functions import NAMES, as_tools
from paceline.server.message_checks import check_messages
from paceline.server.thinking import effort_variables, thinking_variables
from paceline.server.turn import Asked
from paceline.server.wanted import Wanted, from_fields

MAX_STOPS = 64
MAX_BAD_WORDS = 4096
MAX_NAME = 256

# Fields that SamplingParams has under the same name; null means its default.
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
)


class _FailFast(FailFast):
    """pydantic's has no hash, which unions need before Python 3.12."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# Lists whose first wrong item ends the check: an error for each of a million would take minutes and gigabytes.
Texts = Annotated[list[str], _FailFast()]
Ids = Annotated[list[int], _FailFast()]
Objects = Annotated[list[dict[str, Any]], _FailFast()]


def _first_wrong_bias(value: Any) -> Any:
    """The same for a mapping, which has no such mode."""
    for token, bias in value.items() if isinstance(value, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"the bias of token {shown(token)} is {shown(bias)}; use a number")
    return value


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    def check(self) -> None:
        """Every field that is not part of the schema is known, and cannot change the output. Raises ApiError."""
        check_extra(take_features(self.model_extra), type(self).model_fields)


class StreamOptions(BaseModel):
    """continuous_usage_stats: usage in every chunk. include_obfuscation: accepted, there is none."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None


class GenerationRequest(ApiModel):
    """What chat and plain completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_first_wrong_bias)] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_meta_info: bool | None = None
    request_id: str | None = None
    structured_outputs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None:
            if not self.stream:
                raise bad("stream_options", self.stream_options.model_dump(exclude_none=True), "needs stream=true")
            known = type(self.stream_options).model_fields
            check_nested("stream_options", self.stream_options.model_extra or {}, tuple(known))
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise bad("stop", self.stop, f"at most {MAX_STOPS} stop strings")
        if self.bad_words is not None and len(self.bad_words) > MAX_BAD_WORDS:
            raise bad("bad_words", self.bad_words, f"at most {MAX_BAD_WORDS} bad words")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_NAME:
            raise bad("cache_salt", self.cache_salt, f"use 1 to {MAX_NAME} characters")
        # printable: it stands in the log, where a line end would begin a line of the client's own
        if (name := self.request_id) is not None and not (1 <= len(name) <= MAX_NAME and name.isprintable()):
            raise bad("request_id", name, f"use 1 to {MAX_NAME} printable characters")

    def usage_wanted(self) -> tuple[bool, bool]:
        """(in a last chunk, in every chunk)."""
        options = self.stream_options
        return (
            (False, False) if options is None else (bool(options.include_usage), bool(options.continuous_usage_stats))
        )

    def limit(self) -> tuple[str, int | None]:
        """The field that limits the output's tokens, by the name under which it was given, and its value."""
        return "max_tokens", self.max_tokens

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Raises SamplingParamsError, which calls the limit as the client does."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
        except SamplingParamsError as error:
            raise SamplingParamsError(with_limit(str(error), self.limit()[0])) from None


class FormattedRequest(GenerationRequest):
    """What chat and plain completions alone have: log-probabilities of the prompt, and the form of the output: one of
    its fields, or structured_outputs."""

    prompt_logprobs: int | None = None

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # there is one

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs", self.prompt_logprobs, "is not served with stream=true; leave one of them out")

    def checked_prompt_logprobs(self, most: int) -> int | None:
        """Raises ApiError."""
        count = self.prompt_logprobs
        return None if count is None else checked_logprobs("prompt_logprobs", count, most)

    def wanted(self) -> Wanted | None:
        """Raises ApiError."""
        return from_fields(self)


class ToolRequest(GenerationRequest):
    """What the interfaces of conversations share."""

    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(FormattedRequest, ToolRequest):
    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) and getattr(self, new):
                raise bad(old, getattr(self, old), f"is the old form of {new}; give one of them")
        if self.functions and self.tool_choice:
            raise bad("tool_choice", self.tool_choice, "belongs to tools; use function_call beside functions")
        tool_fields.check_chat(self.tools, self.tool_choice)
        tool_fields.check_functions(self.functions, self.function_call)

    def asked(self, model: ModelFeatures) -> Asked:
        """Raises ApiError."""
        check_messages(self.messages, model.templates)
        reasons = model.reasoning is not None
        old = bool(self.functions)
        functions, called = as_tools(self.functions or (), self.function_call)
        return Asked(
            self.messages,
            self.chat_template_kwargs,
            {
                **thinking_variables(self.thinking, model.variables, reasons=reasons),
                **effort_variables("reasoning_effort", self.reasoning_effort, model.variables, reasons=reasons),
            },
            functions if old else self.tools,
            called if old else self.tool_choice,
            self.parallel_tool_calls is not False and not old,  # an answer has one function_call
            self.wanted(),
            self.include_reasoning is not False,
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
            NAMES if old else (),
        )

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit()
        return "max_completion_tokens", self.max_completion_tokens

    def params(self, max_logprobs: int) -> SamplingParams:
        """Raises ApiError, SamplingParamsError."""
        top = None
        if self.logprobs:
            top = checked_logprobs("top_logprobs", self.top_logprobs or 0, max_logprobs)
        elif self.top_logprobs:
            raise bad("top_logprobs", self.top_logprobs, "needs logprobs=true")
        of_prompt = self.checked_prompt_logprobs(max_logprobs)
        return self.sampling(max_tokens=self.limit()[1], logprobs=top, prompt_logprobs=of_prompt)


class CompletionRequest(FormattedRequest):
    prompt: str | Texts | Ids | Annotated[list[Ids], _FailFast()]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None and self.stream:
            raise bad("echo", True, "with logprobs is not served with stream=true; leave one of them out")
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens", 0, "use 1 or more, or add echo=true for the prompt alone")
        if self.prompt_only and self.stream:
            raise bad("max_tokens", 0, "is not served with stream=true; leave one of them out")
        if self.prompt_only and self.min_tokens:
            raise bad("min_tokens", self.min_tokens, "must not exceed max_tokens=0")

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to be added to the prompt: evaluation harnesses ask for its log-probabilities so."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, max_logprobs: int, wanted: Wanted | None) -> SamplingParams:
        """Raises ApiError, SamplingParamsError."""
        top = None if self.logprobs is None else checked_logprobs("logprobs", self.logprobs, max_logprobs)
        of_prompt = self.checked_prompt_logprobs(max_logprobs)
        if self.echo and top is not None:
            of_prompt = max(top, of_prompt or 0)
        limit = 16 if self.max_tokens is None else self.max_tokens
        limit = 1 if self.prompt_only else limit  # there is no pass without a next token
        params = self.sampling(max_tokens=limit, logprobs=top, prompt_logprobs=of_prompt)
        return params if wanted is None else replace(params, structured_outputs=wanted.params)

    def prompts(self) -> list[str | list[int]]:
        """One or several. Raises ApiError for none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad("prompt", self.prompt, "give at least one token")
        if isinstance(self.prompt[0], int):
            return [[t for t in self.prompt if isinstance(t, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TokenizeRequest(ApiModel):
    """Of a text (prompt, as llama.cpp calls it: content), or of messages under the chat template."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        tool_fields.check_chat(self.tools, None)


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Ids


def checked_logprobs(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise bad(name, value, f"use 0 to {most} (--max-logprobs)")
    return value
