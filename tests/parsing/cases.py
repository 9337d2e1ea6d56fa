"""Outputs of models, and what they say."""

from __future__ import annotations

from typing import Any

# (parser, text, content, [(name, arguments as a value, or as text where they are cut short)])
CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # ---- hermes
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", "  text with space \n", "  text with space \n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>\n{"arguments": {"a": [1, "}"]}, "name": "f"}\n</tool_call>', "", [("f", {"a": [1, "}"]})]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": {"c": null, "d": -1.5e3, "é": "\\u20ac"}}}\n</tool_call>\nDone.',
        "Let me see.\nDone.",
        [("f", {"a": "</tool_call>"}), ("g", {"b": {"c": None, "d": -1500.0, "é": "€"}})],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} more', "more", [("f", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "<tool_cal", "<tool_cal", []),
    ("hermes", "a < b <tool <tool_call", "a < b <tool <tool_call", []),
    ("hermes", '<<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<", [("f", {})]),
    # ---- llama3_json
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '\n{"type": "function", "name": "f", "parameters": {"a": "x;y"}}', "", [("f", {"a": "x;y"})]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {"b": [{}]}}',
        "",
        [("f", {"a": 1}), ("g", {"b": [{}]})],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", "Hello {you}", "Hello {you}", []),
    ("llama3_json", " Hi", " Hi", []),
    ("llama3_json", "{not json", "{not json", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
    ("llama3_json", '{"name": "f", "parameters": {}} and more', "and more", [("f", {})]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    # ---- mistral
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    (
        "mistral",
        'Text [TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"arguments": {}, "name": "g"}] rest',
        "Text rest",
        [("f", {"a": "]"}), ("g", {})],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}', "", [("f", {"a": {"b": "}"}})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
    ("mistral", "[TOOL_CALLS] []", "", []),
    ("mistral", "[TOOL_CALLS] ?", "[TOOL_CALLS] ?", []),
    ("mistral", "[TOOL", "[TOOL", []),
    ("mistral", "[1, 2] [TOOLS]", "[1, 2] [TOOLS]", []),
    # ---- pythonic
    ("pythonic", "[f(a=1)]", "", [("f", {"a": 1})]),
    (
        "pythonic",
        '[f(a="x, y)", b=[1, -2.5, {"k": None}], c=True), g()]',
        "",
        [("f", {"a": "x, y)", "b": [1, -2.5, {"k": None}], "c": True}), ("g", {})],
    ),
    ("pythonic", "<|python_start|>[f(a='it\\'s')]<|python_end|>", "", [("f", {"a": "it's"})]),
    ("pythonic", "[f(a=true, b=null)]", "", [("f", {"a": True, "b": None})]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    ("pythonic", "Hello [f(a=1)]", "Hello [f(a=1)]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[f(a=1), g(", ", g(", [("f", {"a": 1})]),
    ("pythonic", " plain ", " plain ", []),
    ("pythonic", "[f(a=" + "[" * 300 + "]" * 300 + ")]", "[f(a=" + "[" * 300 + "]" * 300 + ")]", []),
]

# (style, prompt, text, reasoning, content)
REASONING: list[tuple[str, str, str, str, str]] = [
    ("qwen3", "", "<think>\nA b.\n\nc\n</think>\n\nAnswer.", "A b.\n\nc", "Answer."),
    ("qwen3", "", "\n<think></think>Answer\n", "", "Answer\n"),
    ("qwen3", "", "No thoughts. </think> <think>", "", "No thoughts. </think> <think>"),
    ("qwen3", "", " <b>bold</b>", "", " <b>bold</b>"),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "x<think>\n", "thoughts</think>answer", "thoughts", "answer"),
    ("qwen3", "x<think>\n", "<think>thoughts</think>answer", "thoughts", "answer"),
    ("qwen3", "x<think>\n", "cut short </thin", "cut short </thin", ""),
    ("qwen3", "x<think>\n\n</think>\n\n", "\nanswer <think>", "", "answer <think>"),
    ("qwen3", "", "<think>a < b </ think> </think>\n 1", "a < b </ think>", "1"),
    ("deepseek_r1", "", "thoughts\n</think>\n\nanswer", "thoughts", "answer"),
    ("deepseek_r1", "", "<think>thoughts</think>answer", "thoughts", "answer"),
    ("deepseek_r1", "", "only thoughts", "only thoughts", ""),
    ("deepseek_r1", "a</think>", "answer", "", "answer"),
    ("mistral", "", "[THINK]a[/THINK]b", "a", "b"),
    ("seed_oss", "", "<seed:think>a</seed:think>b", "a", "b"),
    ("qwen3", "", "", "", ""),
    ("qwen3", "", " ", "", " "),
]
