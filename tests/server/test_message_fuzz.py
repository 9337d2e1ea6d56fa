"""The checks of messages against rules written out for every field, and the whole way to a prompt under any values."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.chat_template import render
from paceline.errors import PacelineError
from paceline.server.errors import ApiError, as_api_error
from paceline.server.message_checks import check_messages
from paceline.server.messages import normalised
from paceline.server.tool_prompt import in_words

from .thinker import TEMPLATE as KNOWS_TOOLS

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

CALL = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
# what clients and providers add, near to a known name or not
HARMLESS = {
    "reasoning_text": "ab",
    "reasoning_details": [{"text": "ab"}],
    "cacheControl": {"type": "ephemeral"},
    "annotation": [1],
    "provider_specific_fields": {"refusal": None},
    "prefix": True,
    "parsed": {"a": 1},
    "context": {"citations": []},
    "names": "ab",
    "tool_name": "get",
    "id": "msg_1",
    "refusal": "ab",
    "audio": None,
    "annotations": [],
}
ASK_FOR_NOTHING = [None, [], {}, "", False]
# misspelt -> what was meant, whose roles, and a value
MISSPELT: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "contents": ("content", ("assistant", "tool"), "ab"),
    "Content": ("content", ("assistant", "tool"), [{"type": "text", "text": "ab"}]),
    "tool_call": ("tool_calls", ("assistant",), [CALL]),
    "toolCalls": ("tool_calls", ("assistant",), [CALL]),
    "function_calls": ("function_call", ("assistant",), {"name": "get", "arguments": "{}"}),
    "toolcall_id": ("tool_call_id", ("tool",), "call_1"),
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

GOOD = {
    "content": [None, "", "ab", [], [{"type": "text", "text": "ab"}], [{"text": "ab"}, "ab"]],
    "tool_calls": [None, [], {}, [CALL], [CALL, {"function": {"name": "get"}}], [{"name": "get", "arguments": {}}]],
    "name": [None, "", "ab"],
    "tool_call_id": [None, "call_1"],
    "reasoning": [None, "ab"],
    "reasoning_content": [None, "ab"],
}
BAD: dict[str, list[Any]] = {
    "tool_calls": [
        "get",
        3,
        [None],
        ["get"],
        [{}],
        [{"function": None}],
        [{"function": {}}],
        [CALL, {"arguments": ""}],
    ],
    "name": [3, ["ab"], {}],
    "tool_call_id": [1, []],
    "reasoning": [{"text": "ab"}, 1],
    "reasoning_content": [["ab"], False],
}


@st.composite
def messages(draw: Any) -> tuple[dict[str, Any], set[str]]:
    """(a message, the fields that are wrong in it)."""
    wrong: set[str] = set()
    role = draw(st.sampled_from([*ROLES, *ROLES, "banana", "User", None, 3]))
    message: dict[str, Any] = {"role": role}
    for name in draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True)):
        if name in BAD and draw(st.integers(0, 5)) == 0:
            message[name] = draw(st.sampled_from(BAD[name]))
            wrong.add(name)
        else:
            message[name] = draw(st.sampled_from(GOOD[name]))
    for name in draw(st.lists(st.sampled_from(sorted(HARMLESS)), unique=True, max_size=4)):
        message[name] = HARMLESS[name]
    for name in draw(st.lists(st.sampled_from(sorted(MISSPELT)), unique=True, max_size=2)):
        if draw(st.booleans()):
            message[name] = draw(st.sampled_from(ASK_FOR_NOTHING))
            continue
        meant, roles, message[name] = MISSPELT[name]
        lost = role in roles or (meant == "content" and role in ROLES)
        if meant == "tool_call_id":
            lost = lost and message.get(meant) in (None, [])
        else:  # a message that has calls loses nothing
            lost = lost and not message.get("tool_calls") and message.get(meant) in (None, [], {})
        if lost:
            wrong.add(name)
    if message.get("content") is None and role in ("system", "developer", "user"):
        wrong.add("content")
    if role not in ROLES:
        wrong = {"role"}
    return message, wrong


@FUZZ
@given(found=messages())
def test_the_checks_keep_to_the_rules(found: tuple[dict[str, Any], set[str]]) -> None:
    message, wrong = found
    before = [{"role": "user", "content": "ab"}]
    try:
        check_messages([*before, message], (PLAIN,))
    except ApiError as error:
        assert error.status == 400 and error.param is not None and error.message.startswith(f"{error.param}=")
        assert error.param.removeprefix("messages[1].").split("[")[0] in wrong
        assert ": " in error.message
        return
    assert not wrong
    if message["role"] == "function" and not message.get("name"):
        message["name"] = "get"
    plain = normalised([*before, message])
    assert "ab" in render(PLAIN, in_words(plain, None))
    render(KNOWS_TOOLS, plain)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=8) | st.sampled_from(["get", "{}", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "function", "name", "arguments", "id", "refusal"]) | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
names = st.sampled_from([*GOOD, *HARMLESS, *MISSPELT, "function_call"]) | st.text(max_size=9)


@FUZZ
@given(
    conversation=st.lists(
        st.builds(
            lambda role, rest: {**rest, "role": role},
            st.sampled_from(ROLES) | values,
            st.dictionaries(names, st.sampled_from(["ab", [CALL], {"name": "get", "arguments": "{}"}]) | values),
        ),
        max_size=4,
    )
)
def test_any_messages_make_a_prompt_or_an_error_of_the_client(conversation: list[dict[str, Any]]) -> None:
    conversation = json.loads(json.dumps(conversation))
    for template, knows in ((PLAIN, False), (KNOWS_TOOLS, True)):
        try:
            check_messages(conversation, (template,))
            plain = normalised(conversation)
            render(template, plain if knows else in_words(plain, None))
        except PacelineError as error:
            answer = as_api_error(error)
            assert answer.status == 400 and answer.message
