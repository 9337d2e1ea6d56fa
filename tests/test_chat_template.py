"""Chat templates: what published ones need, in agreement with transformers, and a sandbox around all of it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from paceline.chat_template import ChatTemplateError, render

MESSAGES = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Grüße <b>&amp;</b> \"x\""},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich", "n": 3}}}]},
    {"role": "tool", "content": "sunny"},
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "It's <fine>", "parameters": {"type": "object"}}}
]

# In the manner of Qwen 2.5, Llama 3.1, and of templates that use what jinja itself does not have.
TEMPLATES = {
    "qwen": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama": """{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{% for message in messages %}
    {% if message.name is defined %}{{ raise_exception("names are not supported") }}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
{{ message['role'] }}: {{ message['content'] | trim | upper }}
{% endfor %}
{{ ns.system }} {{ tools | tojson(indent=2) if tools else 'none' }}
""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{{ m.content }}!{% endgeneration %}{% else %}
    {{ m.content }}
{% endif %}{% endfor %}""",
    "indent": """{% if true %}
    {% for m in messages %}
        {{ m.role }}
    {% endfor %}
{% endif %}
end""",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generation", [True, False])
def test_equals_transformers(name, tools, generation):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    # transformers drops the keys that are None one step before this function
    cleaned = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]
    (expected,), _ = utilities.render_jinja_template(
        [cleaned], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=generation, bos_token="<s>"
    )
    got = render(TEMPLATES[name], MESSAGES, tools=tools, add_generation_prompt=generation, bos_token="<s>")
    assert got == expected


def test_tojson_leaves_characters_alone():
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "ü<&'"}]) == (
        '[{"role": "user", "content": "ü<&\'"}]'
    )


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}", MESSAGES).isdigit()


def test_variables():
    assert render("{{ enable_thinking }} {{ undefined is defined }}", MESSAGES, enable_thinking=False) == "False False"


def test_a_template_says_why_it_refuses():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", MESSAGES)


def test_a_template_that_does_not_compile():
    with pytest.raises(ChatTemplateError, match="line 2"):
        render("\n{% if %}", MESSAGES)


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content.foo() }}", "{{ 1 / 0 }}", "{{ messages + 3 }}", "{{ [] | first + 1 }}"]
)
def test_a_template_that_fails(source):
    with pytest.raises(ChatTemplateError):
        render(source, MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    with suppress(ChatTemplateError):
        assert render(source, MESSAGES) == ""  # jinja makes a forbidden attribute undefined, which prints as nothing


@pytest.mark.parametrize(
    "messages", ["hi", [1], [{"content": "x"}], [{"role": 3}], [{"role": "user", "content": object()}]]
)
def test_bad_messages(messages):
    with pytest.raises(ChatTemplateError, match="messages"):
        render("x", messages)


def test_objects_never_reach_a_template():
    with pytest.raises(ChatTemplateError, match="JSON"):
        render("{{ thing }}", MESSAGES, thing=object())
