"""Switches for reasoning: what clients of different interfaces send, as variables of the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.server.errors import bad
from paceline.server.fields import check_nested

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # template variables that are true or false
EFFORT = "reasoning_effort"  # a template variable of its own
_DISPLAY = {"display": "is not supported; leave it out, or use 'summarized'"}
_REMEDY = "this model's chat template has no switch for reasoning; leave it out"


def effort_variables(field: str, effort: Any, known: frozenset[str], *, reasons: bool) -> dict[str, Any]:
    """OpenAI's effort. field: its name. known: variables that the template reads. reasons: the model's output has
    reasoning at all. Raises ApiError where the template cannot be told."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise bad(field, effort, f"use one of {', '.join(EFFORTS)}")
    out: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in known}
    if EFFORT in known and not (effort == "none" and out):
        out[EFFORT] = effort
    if not out and (reasons or effort != "none"):
        raise bad(field, effort, _REMEDY, code="unsupported_field")
    return out


def thinking_variables(thinking: Mapping[str, Any] | None, known: frozenset[str], *, reasons: bool) -> dict[str, Any]:
    """Anthropic's {"type": "enabled", "budget_tokens": N}, "disabled" or "adaptive". Raises ApiError."""
    if not thinking:
        return {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad("thinking.type", kind, "use 'enabled', 'disabled' or 'adaptive'")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise bad("thinking.budget_tokens", budget, "use a number of tokens")
    shown = ("display",) if thinking.get("display") == "summarized" else ()  # what is shown is all of it
    check_nested("thinking", thinking, ("type", "budget_tokens", *shown), _DISPLAY)
    if kind == "adaptive":
        return {}
    out = {name: kind == "enabled" for name in SWITCHES if name in known}
    if not out and reasons != (kind == "enabled"):
        raise bad("thinking.type", kind, _REMEDY, code="unsupported_field")
    return out
