"""llama.cpp's grammars mean here what they mean there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine.harness import at_random, scripted

from paceline import SamplingParams, StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.structured.gbnf import MAX_GBNF, as_lark, is_gbnf

from .conftest import SHAPE, World

JSON = r"""
root   ::= object  # the whole output
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" [0-9]+ "b"', ["a1b", "a123b"], ["ab", "a1", "1b"]),
    ('root ::= word "b"\nword ::= [a-z]+', ["ab", "abb", "xyzb"], ["b", "ba"]),
    ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
    ('root ::= [^"]* "\\u00e9" [\\u4e00-\\u9fff]', ["é一", "aé一"], ["é", "e一"]),
    ("root ::= [&&a]+ [+--]+ [--/] [a^] [[] [\\]] [a-]", ["&a+,-.^[]-", "a-/a[]a"], ["b", "a-/a[]b"]),
    ('root ::= "\\xe9\\x41\\"\\\\"', ['éA"\\'], ["x"]),
    ('root ::= "a" root | "b" # c ::= "x"', ["aab", "b"], ["a", "x"]),
    ('root-x ::= "q"\nroot ::= root-x+ "."?', ["q", "qq."], [".", "qx"]),
    ('root ::= ([a-z] | "ab")* "ab"', ["ab", "cab", "abab"], ["b"]),
    ('root ::= Foo bar\nFoo ::= "f"\nbar ::= [0-9]{2,3}', ["f12", "f123"], ["f1", "f1234"]),
    ('root ::= ([0-9]+)? (("a" "b"?)*)+ ("c"{2})? [)+] "+)"', ["1abcc)+)", "++)", "aab)+)"], ["c)+)", "1"]),
    ('root ::= item Item start 1x a-b\nitem ::= "2"\nItem ::= "4"\nstart ::= "s"\n1x ::= "x"\na-b ::= a_b\na_b ::= "_"',
     ["24sx_"], ["42sx_", "24s"]),
    (JSON, ['{"a": [1, -2.5e3, "\\u00e9\\n", {}], "b": null}', "{}"], ["[]", '{"a"}', '{"a": 01}', '{"a": "\x01"}']),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=[grammar[:40] for grammar, *_ in CASES])
def test_what_a_grammar_takes(world: World, grammar: str, good: list[str], bad: list[str]):
    compiled = world.plain.grammars.compile(StructuredOutputsParams(grammar=grammar))

    def takes(text: str) -> bool:
        matcher = compiled.matcher()
        ids = compiled.vocabulary.native.tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [text for text in good if not takes(text)] == []
    assert [text for text in bad if takes(text)] == []


def test_outputs_obey(world: World):
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=3, n=4, structured_outputs={"grammar": CASES[0][0]}, ignore_eos=True
    )
    with scripted(world.spec, at_random(SHAPE.vocab, 1)):
        outputs = world.spec.generate([[5, 6]], params)[0].outputs
    for output in outputs:
        whole = output.finish_reason == "stop"
        assert re.fullmatch("a[0-9]+b" if whole else "a[0-9]*", output.text), output.text


def test_lark_is_left_alone():
    for text in ('start: "a ::= b"', "start: /a::=/", '// x ::= y\nstart: "a"', "root = x", ""):
        assert not is_gbnf(text), text
    assert is_gbnf('# c\n  root::="a"') and is_gbnf(JSON)


BAD: list[tuple[str, str]] = [
    ("root ::= (", r"GBNF: Expected '\)'"),
    ('root ::= "\\q"', r"GBNF: the escape \\q is unknown"),
    ('root ::= "\\ud800"', r"\\ud800 is no character"),
    ('begin ::= "a"', "No 'root' rule"),
    ("root ::= other", "'other' not found"),
    ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
    (f"root ::= {'a' * MAX_GBNF}", "write it in Lark"),
    ("root ::= []", ""),
]


@pytest.mark.parametrize(("grammar", "words"), BAD, ids=[words for _, words in BAD])
def test_what_is_none_is_refused_by_name(world: World, grammar: str, words: str):
    params: Any = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
    with pytest.raises(ConfigError, match=rf"structured_outputs\.grammar=.*cannot be compiled: .*{words}"):
        world.plain.generate([5, 6], params)


def test_a_comment_ends_with_its_line():
    assert "x" not in as_lark('root ::= "a" # "x\n  # x ::= "y"\n').replace("\\x", "")


@pytest.mark.parametrize("text", ['"' + "[a" * 4000, "[a" * 8000, "[" * 16000, '"' + '\\"' * 4000 + "\\"])
def test_what_is_never_closed_is_told_at_once(text: str):
    """Each beginning was looked at for itself: seconds for a page of them."""
    for _ in range(2):  # the answer is remembered
        with pytest.raises(ValueError, match="is not closed"):
            as_lark("root ::= " + text)


def test_errors_have_the_names_of_the_grammar():
    with pytest.raises(ValueError, match="Rule 'jsonString' not found"):
        as_lark('root ::= word jsonString\nword ::= "a"')
