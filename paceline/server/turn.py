"""A turn of a conversation, whichever interface asks for it: its prompt, its grammar, and how its output is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.parsing.chat import ChatParser
from paceline.parsing.reasoning import (
    ReasoningCounter,
    ReasoningParser,
    ReasoningStyle,
    begins_behind,
    begins_in_reasoning,
)
from paceline.parsing.registry import make_tool_parser
from paceline.parsing.tools import ToolPlan, plan_tools
from paceline.sampling_params import SamplingParams
from paceline.server.errors import ApiError, as_api_error, bad
from paceline.server.features import ModelFeatures
from paceline.server.messages import chat_prompt
from paceline.server.reader import Reader
from paceline.server.wanted import OR, TOOLS, Wanted, renamed
from paceline.structured.params import StructuredOutputsError, StructuredOutputsParams
from paceline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """What the interfaces have in common. tools, tool_choice: in OpenAI's form. variables: of the template, from
    switches for reasoning. names: what errors about tools have to say instead of OpenAI's names."""

    messages: list[dict[str, Any]]
    kwargs: dict[str, Any] | None = None
    variables: Mapping[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    wanted: Wanted | None = None
    show_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """ids: of the prompt. grammar_field: the field that asked for the grammar in params, for errors; schemas: the
    fields with the schemas of its tools."""

    ids: list[int]
    params: SamplingParams
    grammar_field: str
    plan: ToolPlan
    style: ReasoningStyle | None
    begins: bool | None
    parallel_tool_calls: bool
    show_reasoning: bool
    tokenizer: Tokenizer
    named: bool  # tool_choice names a function
    schemas: tuple[str, ...] = ()

    def reader(self) -> Reader:
        """For one choice."""
        splitter = None if self.style is None else ReasoningParser(self.style, self.begins)
        tools = None if self.plan.parser is None else make_tool_parser(self.plan.parser, self.plan.tool_names)
        return Reader(
            ChatParser(splitter, tools) if splitter is not None or tools is not None else None,
            calls=tools is not None,
            parallel_calls=self.parallel_tool_calls,
            show_reasoning=self.show_reasoning,
            form=self.plan.form,
            opening="" if tools is None else tools.markers[0],
        )

    def counter(self) -> ReasoningCounter | None:
        """Of one choice's reasoning tokens; None for a model without reasoning."""
        return None if self.style is None else ReasoningCounter(self.style, self.begins, self.tokenizer.token_bytes)


async def prepare(engine: AsyncLLM, model: ModelFeatures, asked: Asked, params: SamplingParams) -> Turn:
    """Raises ApiError, which names the field, and ChatTemplateError."""
    plan, field = await engine.work(partial(_plan, engine.llm.tokenizer, model, asked))
    text, ids = await chat_prompt(
        engine,
        asked.messages,
        {**(asked.variables or {}), **(asked.kwargs or {})},
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens,
        tools=plan.template_tools,
        knows_tools=model.knows_tools,
    )
    style, begins = model.reasoning, None
    if style is not None:
        last = asked.messages[-1].get("content") if asked.continue_final_message else None
        begins = begins_behind(style, last) if isinstance(last, str) else begins_in_reasoning(style, text)
    grammar = plan.structured_outputs
    if grammar is not None and style is not None and begins is not False and grammar.reasoning_end is None:
        start = style.start if begins is None else None
        grammar = replace(grammar, reasoning_end=style.end, reasoning_start=start)
    return Turn(
        ids,
        replace(
            params,
            structured_outputs=grammar,
            skip_special_tokens=params.skip_special_tokens and plan.skip_special_tokens and not model.special_tags,
        ),
        field,
        plan,
        style,
        begins,
        asked.parallel_tool_calls,
        asked.show_reasoning,
        engine.llm.tokenizer,
        isinstance(asked.tool_choice, Mapping) and asked.tool_choice.get("type") == "function",
        tuple(_renamed(f"tools[{i}].function.parameters", asked.names) for i in plan.constrained),
    )


def _plan(tokenizer: Tokenizer, model: ModelFeatures, asked: Asked) -> tuple[ToolPlan, str]:
    """What the tools come to, with the grammar of the whole request, and the field that this comes from."""
    wanted, names = asked.wanted, dict(asked.names)
    calls, chosen = names.get(TOOLS, TOOLS), names.get("tool_choice", "tool_choice")
    answer: StructuredOutputsParams | None = wanted.params if wanted is not None and wanted.yields else None
    try:
        plan = plan_tools(
            asked.tools,
            asked.tool_choice,
            tokenizer=tokenizer,
            parser=model.tool_parser,
            parallel_tool_calls=asked.parallel_tool_calls,
            answer=answer,
        )
    except StructuredOutputsError as error:
        raise renamed(error, calls) from None
    except RecursionError:
        raise ApiError(400, f"{calls}: a schema is nested too deeply", param=calls) from None
    except ConfigError as error:
        raise _under_other_names(as_api_error(error), asked.names) from None
    if plan.template_tools is not None and model.tool_parser is None:
        raise bad(
            calls,
            list(plan.tool_names),
            "nothing here reads the calls of this model; the operator can choose a format (--tool-call-parser)",
            code="unsupported_field",
        )
    if wanted is None or answer is not None:
        if wanted is None:
            return plan, calls
        return plan, wanted.field if plan.parser is None else f"{wanted.field}{OR}{calls}"
    if plan.structured_outputs is not None:
        raise ApiError(
            400,
            f"{wanted.field}: contradicts {chosen}, which leaves calls alone; give one of them",
            param=wanted.field,
        )
    return replace(plan, structured_outputs=wanted.params), wanted.field


def _under_other_names(error: ApiError, names: tuple[tuple[str, str], ...]) -> ApiError:
    param = None if error.param is None else _renamed(error.param, names)
    return ApiError(error.status, _renamed(error.message, names), param=param, code=error.code)


def _renamed(text: str, names: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in names:
        text = text.replace(ours, theirs)
    return text
