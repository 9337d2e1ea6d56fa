"""Compilation: what does not compile is refused by name, hostile grammars are bounded, results are shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams, StructuredOutputsParams
from paceline.errors import ConfigError, QueueFullError
from paceline.structured import compiler as compiler_module
from paceline.structured.compiler import GrammarCompiler
from paceline.structured.vocabulary import Vocabulary, allows, is_single

from .conftest import World

MANY = [{"pattern": f"[ab]*a[ab]{{{k}}}"} for k in range(9)]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "string", "allOf": MANY}}, "allOf: more than 8 patterns"),
    ({"json": {"properties": {"a": {"allOf": [MANY[0], {"anyOf": [{"allOf": MANY[1:]}]}]}}}}, "more than 8 patterns"),
    ({"json": {"allOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"allOf": MANY}}}}, "more than 8 patterns"),
    ({"grammar": "start: X\nX: " + " & ".join("/a&b/" for _ in range(10))}, "more than 8 intersections"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"$ref": "http://example.org/schema"}}, "not fetch"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    ({"json_object": True, "whitespace_pattern": "["}, "unclosed"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "a{2,1}"}, "repetition"),
    ({"grammar": 'begin: "a"'}, "start"),
    ({"grammar": "start: nothing"}, "nothing"),
    ({"grammar": 'start: "a" ("b"'}, "Expected"),
]


@pytest.mark.parametrize(("fields", "cause"), REFUSED, ids=[str(fields)[:50] for fields, _ in REFUSED])
def test_refusals_name_field_and_cause_before_anything_runs(world: World, fields: dict[str, Any], cause: str):
    asked = StructuredOutputsParams(**fields)
    with pytest.raises(ConfigError, match=f"structured_outputs.{asked.kind}=.*cannot be compiled.*{cause}"):
        world.plain.generate([5, 6], SamplingParams(structured_outputs=asked))
    with pytest.raises(ConfigError, match="cannot be compiled"):
        world.plain.stream([5, 6], SamplingParams(structured_outputs=asked))
    assert not world.plain.engine.busy


HOSTILE: dict[str, dict[str, Any]] = {
    "a million forced letters": {"regex": "(a{1000}){1000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){30}"},
    "nested counts": {"regex": "((a{0,100}){0,100}){0,100}"},
    "deep regex": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "large class count": {"regex": "[a-z]{1,1000000}"},
    "many alternatives": {"regex": "|".join(f"w{i}" for i in range(9_000))},
    "deep rule": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "self reference": {"grammar": "start: start"},
    "ambiguous": {"grammar": 'start: start start | "a" | ""'},
    "chain of rules": {"grammar": "start: x0\n" + "".join(f"x{i}: x{i + 1}\n" for i in range(4_000)) + 'x4000: "a"'},
    "doubling rules": {
        "grammar": "start: x0\n" + "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(60)) + 'x60: "a"'
    },
    "deep schema": {"json": '{"items":' * 60_000 + "{}" + "}" * 60_000},
    "chain of references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(10_000)} | {"d10000": {}},
        }
    },
    "reference to itself": {"json": {"$ref": "#"}},
    "large enumeration": {"json": {"enum": [f"v{i}" for i in range(40_000)]}},
    "many properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(3_000)}}},
    "product of choices": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]}
    },
}
# The imports are made once; each grammar gets a fork, with nothing compiled before it and no other thread.
PROBE = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
from paceline.structured.compiler import GrammarCompiler
from paceline.structured.params import StructuredOutputsParams
from paceline.errors import ConfigError, QueueFullError
from paceline.tokenizer import load_tokenizer

def probe(fields):
    try:
        compiler = GrammarCompiler(load_tokenizer(sys.argv[1]), 300)
        grammar = compiler.compile(StructuredOutputsParams(**fields))
        matcher = grammar.matcher()
        for _ in range(20):
            mask = grammar.mask(matcher)
            if mask is None or matcher.is_stopped():
                break
            allowed = [i for i in range(256) if mask[i // 32] >> i % 32 & 1]
            if not allowed or not matcher.consume_token(allowed[0]):
                break
        return "compiled"
    except ConfigError as error:
        return "refused: " + str(error)[:200]

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        said, code = "", 1
        try:
            said, code = probe(json.loads(line)), 0
        except BaseException as error:
            said = repr(error)[:2000]
        finally:
            print(json.dumps(said), flush=True)
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def prober(world: World) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROBE, str(world.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_neither_crash_nor_take_the_machine(prober: subprocess.Popen[str], name: str):
    """In a process of its own with 2 GiB of memory: what overflows a stack or allocates without bounds would end it."""
    assert prober.stdin is not None and prober.stdout is not None
    prober.stdin.write(json.dumps(HOSTILE[name]) + "\n")
    prober.stdin.flush()
    said = prober.stdout.readline()
    code = prober.stdout.readline() if said.startswith('"') else said  # who crashed said nothing
    assert code == "0\n", (code, said)
    assert json.loads(said).startswith(("compiled", "refused:")), said


def test_compilation_ends_in_time(world: World, monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()

    def stuck(*_: Any) -> Any:
        release.wait()
        raise AssertionError

    monkeypatch.setattr(compiler_module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(compiler_module, "new_matcher", stuck)
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    with pytest.raises(ConfigError, match=r"structured_outputs.regex='a': .*not compiled within"):
        compiler.compile(StructuredOutputsParams(regex="a"))
    release.set()


def test_compilers_that_nobody_waits_for_count(world: World, monkeypatch: pytest.MonkeyPatch):
    """They cannot be stopped: as many as may run at a time, then no more until one ends. They give way to others."""
    release, running = threading.Event(), []
    real = compiler_module.new_matcher

    def stuck(*arguments: Any) -> Any:
        running.append(threading.get_native_id())
        release.wait()
        return real(*arguments)

    monkeypatch.setattr(compiler_module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(compiler_module, "YIELD_AFTER", 0.02)
    monkeypatch.setattr(compiler_module, "new_matcher", stuck)
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    for i in range(compiler_module.MAX_COMPILING):
        with pytest.raises(ConfigError, match="not compiled within"):
            compiler.compile(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    with pytest.raises(QueueFullError, match="structured_outputs: 4 other grammars"):
        compiler.compile(StructuredOutputsParams(regex="b"))
    assert len(running) == compiler_module.MAX_COMPILING
    if sys.platform == "linux":
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in running} == {compiler_module.LATE}
    monkeypatch.setattr(compiler_module, "COMPILE_SECONDS", 600.0)
    release.set()
    assert compiler.compile(StructuredOutputsParams(regex="b"))


def test_a_thread_that_cannot_be_started_holds_no_place(world: World, monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        for _ in range(compiler_module.MAX_COMPILING + 1):
            with pytest.raises(QueueFullError, match="can't start new thread"):
                compiler.compile(StructuredOutputsParams(regex="b"))
    assert compiler.compile(StructuredOutputsParams(regex="b"))


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_step_waits_for_a_slow_grammar_to_be_compiled_again(world: World, monkeypatch: pytest.MonkeyPatch):
    """A quick one is; a slow one that met a limit goes on with what it has, and the next request gets a new one."""
    params = StructuredOutputsParams(regex="[ab]{3}")
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    quick = compiler.compile(params)
    quick.fresh_matcher()
    assert not quick.spent and compiler.compile(params) is quick
    quick._seconds = compiler_module.FRESH_SECONDS + 1
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "new_matcher", None)
        assert not quick.fresh_matcher().is_error()
    assert quick.spent and not compiler.knows(params)
    assert compiler.compile(params) is not quick and compiler.knows(params)


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "string", "allOf": MANY[:3]}},
        {"json": {"type": "object", "properties": {f"p{i}": p for i, p in enumerate(MANY)}, "allOf": [{"$ref": "#"}]}},
        {"json": {"type": "string", "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}},
        {"grammar": 'start: "' + "&" * 40 + '" | /&&&&&&&&&&&&/ // &&&&&&&&&&&&&'},
    ],
)
def test_what_only_looks_like_many_intersections_is_none(world: World, asked: dict[str, Any]):
    try:
        GrammarCompiler(world.plain.tokenizer, world.vocab).compile(StructuredOutputsParams(**asked))
    except ConfigError as error:
        assert "more than" not in str(error)


def test_grammars_are_compiled_once(world: World):
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    first = compiler.compile(StructuredOutputsParams(json={"type": "object"}))
    assert compiler.compile(StructuredOutputsParams(json_object=True)) is first
    assert compiler.compile(StructuredOutputsParams(json_object=True, disable_any_whitespace=True)) is not first
    assert compiler.vocabulary is first.vocabulary
    for i in range(compiler_module.CACHED_GRAMMARS):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    assert len(compiler._grammars) == compiler_module.CACHED_GRAMMARS
    assert compiler.compile(StructuredOutputsParams(json_object=True)) is not first


def test_threads_may_compile_at_once(world: World):
    compiler = GrammarCompiler(world.plain.tokenizer, world.vocab)
    grammars: list[Any] = []

    def work() -> None:
        grammars.append(compiler.compile(StructuredOutputsParams(regex="[ab]+c")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(grammars) == 8 and len({id(g.vocabulary) for g in grammars}) == 1


class _Padded:
    """A tokenizer whose model has a wider head, with more than one end of sequence, or none."""

    def __init__(self, tokenizer: Any, eos: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("eos", [(299,), (299, 5), (), (1000,)])
@pytest.mark.parametrize("width", [256, 300, 333, 352])
def test_heads_of_any_width(world: World, eos: tuple[int, ...], width: int):
    tokenizer: Any = _Padded(world.plain.tokenizer, eos)
    compiler = GrammarCompiler(tokenizer, width)
    grammar = compiler.compile(StructuredOutputsParams(regex="a*"))
    mask = grammar.mask(grammar.matcher())
    assert mask is not None and mask.shape == (-(-width // 32),) and mask.dtype == np.int32
    got = {i for i in range(len(mask) * 32) if allows(mask, i)}
    letters = {i for i in range(width) if set(tokenizer.token_bytes(i)) == {ord("a")} and i not in eos}
    assert got == letters | {i for i in eos if i < width}


def test_special_tokens_are_no_text(world: World):
    vocabulary = Vocabulary(world.plain.tokenizer, world.vocab)
    compiler = world.plain.grammars
    start = world.plain.tokenizer.backend.token_to_id("<|start|>")
    text = compiler.compile(StructuredOutputsParams(regex=".*"))
    mask = text.mask(text.matcher())
    assert mask is not None and not allows(mask, start)
    named = compiler.compile(StructuredOutputsParams(grammar="start: <|start|>"))
    mask = named.mask(named.matcher())
    assert mask is not None and allows(mask, start) and is_single(mask)
    assert vocabulary.special_ids == {297, 298, 299}


def test_bits():
    for ids in ([0], [31], [32], [63], [95]):
        mask = np.zeros(3, np.uint32)
        for i in ids:
            mask[i // 32] |= np.uint32(1 << i % 32)
        assert is_single(mask.view(np.int32))
        assert [i for i in range(96) if allows(mask.view(np.int32), i)] == ids
    assert not is_single(np.array([3, 0], np.int32)) and not is_single(np.array([1, 1], np.int32))
    assert not is_single(np.zeros(2, np.int32)) and not is_single(np.array([-1, 0], np.int32))
