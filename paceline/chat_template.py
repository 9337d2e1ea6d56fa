"""Chat templates: the Jinja program that a model ships to turn messages into its prompt text.

The environment is the one that templates on the Hugging Face hub are written for (transformers'
chat_template_utils): sandboxed and immutable, trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves characters as they are, and the `generation` tag, which only marks
training targets.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from paceline.errors import PacelineError


class ChatTemplateError(PacelineError):
    """A chat template is missing, does not compile, or refuses the messages."""


def render(
    source: str,
    messages: list[dict[str, Any]],
    /,  # variables may have these names
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Run the template over OpenAI-style messages. Raises `ChatTemplateError`, with the template's own words
    if any.
    """
    import jinja2

    plain = _plain(messages, "messages")
    if not isinstance(plain, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in plain):
        raise ChatTemplateError(
            'messages: expected a list of objects with a role, such as [{"role": "user", "content": "Hi"}]'
        )
    # Clients send `"tool_calls": null`; templates test for the key.
    plain = [{key: value for key, value in message.items() if value is not None} for message in plain]
    try:
        return str(
            _compile(source).render(
                {
                    "messages": plain,
                    "tools": _plain(tools, "tools") or None,
                    "add_generation_prompt": add_generation_prompt,
                    **_plain(variables, "template variables"),
                }
            )
        )
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the model's chat template is invalid (line {error.lineno}): {error.message}"
        ) from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
    except Exception as error:  # the template is a program from elsewhere: whatever it trips over is its error
        raise ChatTemplateError(f"the model's chat template failed on these messages: {error}") from error


def _plain(value: Any, what: str) -> Any:
    """Rebuild from JSON types alone: objects with methods have no place in a program from elsewhere, even a
    sandboxed one.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{what}: only JSON values can be given to a chat template ({error})") from error


def marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(messages, mark): the mark stands behind the text of the last message, which generation is to go on with. In the
    rendered text `cut_behind` finds it, where the text itself may stand anywhere: "im" ends in "<|im_end|>" too."""
    if not messages:
        raise ChatTemplateError("continue_final_message: there is no message to go on with")
    last = messages[-1]
    text = (last.get("content") or "") if isinstance(last, Mapping) else None
    if isinstance(last, Mapping) and last.get("tool_calls"):
        raise ChatTemplateError("continue_final_message: the last message ends with tool calls; send their results")
    if not isinstance(text, str):
        raise ChatTemplateError("continue_final_message: the last message has no text to go on with")
    mark = f"[continued here {secrets.token_hex(8)}] "
    return [*messages[:-1], {**last, "content": text + mark}], mark


def cut_behind(text: str, mark: str) -> str:
    """A rendered conversation up to the mark. Space before it stays where the template does not trim messages. Raises
    `ChatTemplateError`."""
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise ChatTemplateError("continue_final_message: the last message's text is not in what the template wrote")
    before = text[:at] if text.startswith(mark, at) else text[:at].rstrip()
    return before.replace(mark, "").replace(mark.rstrip(), "")  # of a template that writes the message twice


def variables_of(source: str) -> frozenset[str]:
    """Names that a template reads and does not set itself. Raises `ChatTemplateError`."""
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template is invalid: {error}") from error


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` renders its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
