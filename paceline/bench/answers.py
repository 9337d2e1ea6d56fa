"""What a model's answer says: the program of a HumanEval answer, the number of a GSM8K answer.

Small models forget code fences, repeat the problem before they solve it, add examples, or are cut off in mid-line.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, takewhile
from typing import Any

INDENT = "    "
TRIED = 20  # places in an answer without fences at which code may begin

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_START = re.compile(r"^[ \t]*(?:(?:async def|def|class|import|from)\b|@)", re.MULTILINE)
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+"
_FOUND = re.compile(rf"(?<![\w.])(?:{_NUMBER})(?:\s*/\s*\d+)?")
_MARKED = re.compile(rf"####\s*\$?\s*({_NUMBER})")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def program_of(answer: str, problem: dict[str, Any]) -> str:
    """The program that a HumanEval answer stands for, without the tests. problem: a row of the set.

    The problem's own text comes first: its imports and helpers count, and an answer that is a body alone goes on there.
    Of the answer, definitions, imports and assignments are kept: its examples and prints are not what is asked for.
    """
    name, prompt = problem["entry_point"], problem["prompt"]
    blocks = [match[1] for match in _FENCE.finditer(answer)]
    written = [tree for text in [*blocks, *_unfenced(answer)] if (tree := _parse(text)) is not None]
    for tree in written:  # the first that solves it; a repeated problem has nothing but a docstring
        function = _function(tree, name)
        if function is not None and not _is_stub(function):
            return f"{prompt}\n\n{_definitions(written, tree)}\n"
    return f"{prompt.rstrip()}\n{_body(prompt, blocks[0] if blocks else answer)}\n"


def test_program(answer: str, problem: dict[str, Any]) -> str:
    """The program and the problem's tests behind it: it ends without an exception if the answer is right."""
    return f"{program_of(answer, problem)}\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def _unfenced(answer: str) -> Iterator[str]:
    """An answer without fences, from each line that may begin code; words such as "from" begin prose as well."""
    text = re.sub(r"^[ \t]*```.*$", "", answer, flags=re.MULTILINE)
    for match in islice(_START.finditer(text), TRIED):
        yield text[match.start() :]


def _parse(text: str) -> ast.Module | None:
    """The longest beginning of the lines that is valid Python, None if there is none. The rest is prose, or was cut."""
    lines = textwrap.dedent(text.expandtabs(4)).splitlines()
    trees = (_tree("\n".join(lines[:end])) for end in range(len(lines), 0, -1))
    return next((tree for tree in trees if tree is not None and tree.body), None)


def _tree(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on invalid escapes in the text
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The last definition counts, as in Python."""
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    solved = [n for n in found if not _is_stub(n)]
    return solved[-1] if solved else found[-1] if found else None


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A docstring, an ellipsis, `pass`, imports: nothing that does anything."""
    return all(
        isinstance(n, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in function.body
    )


def _definitions(trees: list[ast.Module], chosen: ast.Module) -> str:
    """Definitions of the chosen block, behind those of the blocks before it, whose helpers it may use."""
    until = trees[: trees.index(chosen) + 1]
    nodes = [node for tree in until for node in tree.body if isinstance(node, _KEPT)]
    return "\n\n".join(ast.unparse(node) for node in nodes if not _is_empty(node))


def _is_empty(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_stub(node)


def _body(prompt: str, text: str) -> str:
    """An answer that goes on where the problem stopped, indented as a body: as it is, all of it further in, or only its
    first line (of which the spaces were lost). Whichever keeps most lines that are valid Python."""
    lines = [line for line in text.expandtabs(4).splitlines() if not line.lstrip().startswith("```")]
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return ""
    whole = textwrap.dedent("\n".join(lines)).splitlines()
    tries = [_indented(lines), [INDENT + line for line in whole], [INDENT + lines[0].lstrip(), *_indented(lines[1:])]]
    best = max((_valid(prompt, candidate) for candidate in tries), key=len)
    return "\n".join(best)


def _indented(lines: list[str]) -> list[str]:
    """Up to the first line that is not."""
    return list(takewhile(lambda line: line.startswith(" ") or not line.strip(), lines))


def _valid(prompt: str, body: list[str]) -> list[str]:
    ends = (end for end in range(len(body), 0, -1) if _tree("\n".join([prompt.rstrip(), *body[:end]])) is not None)
    return body[: next(ends, 0)]


def number_of(answer: str) -> Fraction | None:
    r"""The final number: in the last \boxed{} that holds one, behind the last ####, else the last number."""
    for content in reversed(_boxed(answer)):
        if (value := _last_number(content)) is not None:
            return value
    marked = _MARKED.findall(answer)
    return _last_number(marked[-1] if marked else answer)


def _boxed(text: str) -> list[str]:
    r"""Contents of every \boxed{...}, braces inside it matched; one that is cut off reaches to the end."""
    found = []
    for match in re.finditer(r"\\f?boxed\s*\{", text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found.append(text[match.end() : end - (depth == 0)])
    return found


def _last_number(text: str) -> Fraction | None:
    plain = _FRACTION.sub(r"\1/\2", text).replace("\\!", "").replace("\\,", "").replace("{,}", ",").replace("−", "-")
    for match in reversed(_FOUND.findall(plain)):
        over, _, under = match.replace(",", "").partition("/")
        try:
            return Fraction(over.strip()) / Fraction(under.strip() or "1")
        except (ValueError, ZeroDivisionError):
            continue
    return None


def same_number(answer: str, expected: str) -> bool:
    """Whether the final number of an answer is the expected one. Raises ValueError if the latter is no number."""
    return number_of(answer) == Fraction(expected.replace(",", "").strip())
