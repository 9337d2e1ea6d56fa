"""An agent: a loop of tool calls and a structured answer, with drafts and without, on the same server.

    .venv/bin/paceline serve smollm2-135m
    .venv/bin/python examples/agent.py

It talks to any server with OpenAI's interface through the `openai` package. Every task is solved twice per repeat, once
with `num_speculative_tokens: 0` (plain decoding), once as the server likes; what is compared is the wall time of whole
loops, and whether both took the same steps. The tools are deterministic: a calculator, and a search in a folder of
texts.

A small model does not decide by itself when to call what, so each task names the tools in order: `tool_choice` asks for
exactly that call, the server holds its arguments to the tool's schema, and `response_format` does the same for the
answer. With --free the model chooses (`tool_choice: "auto"`), which needs one that can.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

# ---- tools

OPERATIONS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Arithmetic: + - * / and brackets."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and brackets")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):.10g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {error}"


class Corpus:
    """A folder of Markdown files. words: what can be searched for, those of its headings."""

    def __init__(self, folder: Path) -> None:
        self.files = {p.name: p.read_text(encoding="utf-8").splitlines() for p in sorted(folder.glob("*.md"))}
        headings = " ".join(line for lines in self.files.values() for line in lines if line.startswith("#"))
        self.words = sorted(set(re.findall(r"[a-z]{6,}", headings.lower())))
        if not self.words:
            raise SystemExit(f"--corpus {folder}: no Markdown files with headings there")

    def search(self, word: str) -> str:
        """The two lines in which a word stands most often; the first ones where several do."""
        found = [
            (-line.lower().count(word.lower()), name, number, line)
            for name, lines in self.files.items()
            for number, line in enumerate(lines, 1)
        ]
        best = [entry for entry in sorted(found)[:2] if entry[0]]
        return "\n".join(f"{name}:{number}: {line.strip()[:160]}" for _, name, number, line in best) or "nothing found"


def function(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema, "strict": True}}


class Tools:
    """What the model can call, by name."""

    def __init__(self, corpus: Corpus) -> None:
        expression = {"type": "string", "pattern": r"^[0-9]{1,4}(\.[0-9])?( [*/+-] [0-9]{1,4}(\.[0-9])?){1,3}$"}
        self.declared = [
            function("calculate", "Evaluate an arithmetic expression, as 2 * 3 + 4.", expression=expression),
            function("search", "Find lines of the documentation by a word.", word={"enum": corpus.words}),
        ]
        self.run: dict[str, Callable[..., str]] = {"calculate": calculate, "search": corpus.search}

    def call(self, name: str, arguments: str) -> str:
        """The result as text; what went wrong is a result, too."""
        try:
            return self.run[name](**json.loads(arguments))
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"


# ---- tasks


@dataclass(frozen=True)
class Task:
    name: str
    question: str
    plan: Sequence[str]  # tools, in order; then comes the answer


TASKS = [
    Task("pencils", "Tom has 3 boxes of 12 pencils and gives away 7. How many pencils are left?", ["calculate"]),
    Task("speed", "A train travels 84 km in 1.5 hours. How many km does it travel in one hour?", ["calculate"]),
    Task("baker", "A baker sells 14 loaves at 3 euros and 9 cakes at 12 euros. How much is that?", ["calculate"] * 2),
    Task("page", "What does the page of the server show?", ["search"]),
    Task("metrics", "Which metrics does the server have, and what are they called?", ["search", "search"]),
    Task(
        "cache", "How many tokens do 3 requests of 40 blocks hold, with 16 tokens per block?", ["search", "calculate"]
    ),
]
ANSWER = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "minLength": 1, "maxLength": 60},
        "based_on": {"enum": ["calculation", "documentation", "guess"]},
    },
    "required": ["answer", "based_on"],
    "additionalProperties": False,
}
SYSTEM = "You solve tasks with tools, one call at a time. Use what the tools return."


# ---- the loop


@dataclass
class Run:
    """One solved task. steps: what the model wrote, in order."""

    seconds: float = 0.0
    steps: list[str] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    valid: bool = False  # the answer is JSON of the schema


class Agent:
    """arm: fields that every request carries besides."""

    def __init__(self, client: openai.OpenAI, model: str, tools: Tools, max_rounds: int) -> None:
        self.client, self.model, self.tools, self.max_rounds = client, model, tools, max_rounds

    def solve(self, task: Task, arm: Mapping[str, Any], free: bool = False) -> Run:
        run = Run()
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.question}]
        begin = time.perf_counter()
        for round_ in range(self.max_rounds):
            if free:
                choice: Any = "auto"
            elif round_ < len(task.plan):
                choice = {"type": "function", "function": {"name": task.plan[round_]}}
            else:
                break
            message = self._ask(run, arm, messages, tools=self.tools.declared, tool_choice=choice, max_tokens=96)
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls:
                result = self.tools.call(call.function.name, call.function.arguments)
                run.steps += [f"{call.function.name}({call.function.arguments})", f"-> {result}"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
        message = self._ask(run, arm, messages, response_format=form, max_tokens=128)
        run.seconds = time.perf_counter() - begin
        run.steps.append(message.content or "")
        run.valid = is_answer(message.content)
        return run

    def _ask(self, run: Run, arm: Mapping[str, Any], messages: list[Any], **fields: Any) -> Any:
        answer = self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, extra_body=dict(arm), **fields
        )
        run.tokens += answer.usage.completion_tokens if answer.usage else 0
        figures = ((answer.model_extra or {}).get("metrics") or {}).get("speculative_decoding") or {}
        run.drafts += figures.get("num_spec_steps", 0)
        run.accepted += figures.get("num_accepted_draft_tokens", 0)
        return answer.choices[0].message


def is_answer(text: str | None) -> bool:
    try:
        found = json.loads(text or "")
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == ANSWER["properties"].keys()  # type: ignore[attr-defined]


# ---- the comparison


def compare(agent: Agent, tasks: Sequence[Task], repeats: int, free: bool) -> list[dict[str, Any]]:
    """A row per task. Arms take turns; none finds what the other left in the cache, each finds its own rounds."""
    rows = []
    for task in tasks:
        runs: dict[str, list[Run]] = {"plain": [], "speculative": []}
        for repeat in range(repeats):
            arms = [("plain", {"num_speculative_tokens": 0}), ("speculative", {})]
            for name, arm in arms[:: -1 if repeat % 2 else 1]:
                salted = {**arm, "cache_salt": f"{task.name}-{name}-{repeat}-{time.time_ns()}"}
                runs[name].append(agent.solve(task, salted, free))
        plain, spec = runs["plain"], runs["speculative"]
        drafts, accepted = sum(r.drafts for r in spec), sum(r.accepted for r in spec)
        rows.append(
            {
                "task": task.name,
                "calls": sum(step.startswith("->") for step in spec[0].steps),
                "tokens": spec[0].tokens,
                "plain_s": statistics.median(r.seconds for r in plain),
                "speculative_s": statistics.median(r.seconds for r in spec),
                "ratio": statistics.median(p.seconds / s.seconds for p, s in zip(plain, spec, strict=True)),
                "acceptance_length": 1 + accepted / drafts if drafts else None,
                "same_steps": all(r.steps == plain[0].steps for r in plain + spec),
                "valid": all(r.valid for r in plain + spec),
                "steps": spec[0].steps,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| task | calls | tokens | plain | speculative | | acceptance length | same steps | valid answer |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        length = row["acceptance_length"]
        lines.append(
            f"| {row['task']} | {row['calls']} | {row['tokens']} | {row['plain_s']:.2f} s | "
            f"{row['speculative_s']:.2f} s | {row['ratio']:.2f}x | {'-' if length is None else f'{length:.2f}'} | "
            f"{'yes' if row['same_steps'] else 'NO'} | {'yes' if row['valid'] else 'NO'} |"
        )
    plain, spec = (sum(row[f"{arm}_s"] for row in rows) for arm in ("plain", "speculative"))
    tokens = sum(row["tokens"] for row in rows)
    lines.append(f"| all | | {tokens} | {plain:.2f} s | {spec:.2f} s | {plain / spec:.2f}x | | | |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--corpus", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-rounds", type=int, default=6)
    parser.add_argument("--free", action="store_true", help="the model chooses its calls")
    parser.add_argument("--steps", action="store_true", help="print what the agent did")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.base_url, api_key=options.api_key, timeout=600, max_retries=0)
    try:
        model = options.model or client.models.list().data[0].id
    except openai.APIConnectionError:
        parser.exit(1, f"no server answers at {options.base_url}; start one: paceline serve smollm2-135m\n")
    agent = Agent(client, model, Tools(Corpus(options.corpus)), options.max_rounds)
    agent.solve(TASKS[0], {}, options.free)  # warms up the server's grammars and both ends of the connection
    rows = compare(agent, TASKS, options.repeats, options.free)
    for row in rows if options.steps else ():
        print(f"{row['task']}:", *row["steps"], "", sep="\n  ")
    print(table(rows))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["same_steps"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
