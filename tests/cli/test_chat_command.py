from __future__ import annotations

import io
from dataclasses import replace

import pytest

from paceline.cli.chat import HELP, Conversation


@pytest.fixture
def conversation(llm):
    from paceline.sampling_params import SamplingParams

    return Conversation(llm, SamplingParams(temperature=0.0, max_tokens=100))


def test_each_turn_carries_those_before(conversation, llm, capsys):
    llm.answers.update({"one": "first", "two": "second"})
    assert conversation.take("one")
    assert conversation.take("two")
    assert llm.log[1][0] == "<user>one\n<assistant>first\n<user>two\n<assistant>"
    assert capsys.readouterr().out == "first\nsecond\n"


def test_reset_keeps_the_system_message(conversation, llm):
    conversation.take("/system Be brief.")
    conversation.take("one")
    conversation.take("/reset")
    conversation.take("two")
    assert llm.log[1][0] == "<system>Be brief.\n<user>two\n<assistant>"


def test_system_without_text_goes_back_to_the_default(conversation, llm):
    conversation.take("/system Be brief.")
    conversation.take("/system")
    conversation.take("one")
    assert llm.log[0][0] == "<user>one\n<assistant>"


def test_quit_ends_and_help_lists_every_command(conversation, capsys):
    assert conversation.take("/help")
    shown = capsys.readouterr().out
    assert shown == HELP + "\n"
    assert all(command in shown for command in ("/help", "/reset", "/system", "/quit"))
    assert not conversation.take("/quit")


def test_an_unknown_command_is_not_sent_to_the_model(conversation, llm, capsys):
    assert conversation.take("/frobnicate now")
    assert "/frobnicate is not a command" in capsys.readouterr().err
    assert not llm.log


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(conversation, llm, capsys):
    def interrupt(count: int) -> None:
        if count == 6:
            raise KeyboardInterrupt

    llm.answers["one"] = "abcdefghij"
    llm.on_token = interrupt
    assert conversation.take("one")
    assert "(interrupted)" in capsys.readouterr().err
    assert llm.open_streams == 0
    llm.on_token = lambda _count: None
    conversation.take("two")
    assert llm.log[1][0] == "<user>one\n<assistant>abcd\n<user>two\n<assistant>"


def test_ctrl_c_before_the_first_token_takes_the_message_back(conversation, llm):
    def interrupt(_count: int) -> None:
        raise KeyboardInterrupt

    llm.on_token = interrupt
    assert conversation.take("one")
    assert conversation.messages == []


def test_an_error_takes_the_message_back(conversation, llm, capsys):
    llm.context = 60
    assert conversation.take("x" * 80)
    assert "/reset" in capsys.readouterr().err
    assert conversation.take("short")
    assert llm.log[1][0] == "<user>short\n<assistant>"


def test_a_pipe_is_one_turn_a_line(paceline, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/reset\ntwo\n/quit\nthree\n"))
    llm.answers.update({"one": "1", "two": "2"})
    ran = paceline("chat", "--stats")
    assert (ran.code, ran.out) == (0, "1\n(conversation forgotten)\n2\n")
    assert len(llm.log) == 2
    assert ran.err.count("first token") == 2


def test_a_line_of_a_pipe_goes_on_behind_a_backslash(paceline, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one \\\nmore\n\\\n\ntwo\nlast\\"))
    assert paceline("chat").code == 0
    said = [prompt.rpartition("<user>")[2] for prompt, *_ in llm.log]
    assert said == ["one \nmore\n<assistant>", "two\n<assistant>", "last\n<assistant>"]


def test_a_turn_that_fails_on_a_pipe_is_code_1_and_the_others_are_answered(paceline, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'x' * 80}\nshort\n"))
    llm.context = 60
    ran = paceline("chat")
    assert (ran.code, ran.out) == (1, "You said: short\n")
    assert "the context holds 60" in ran.err


def test_an_answer_that_was_cut_off_says_by_what(conversation, llm, capsys):
    llm.answers.update({"long": "x" * 200, "full": "abc"})
    conversation.take("long")
    assert capsys.readouterr().err == "(cut off: --max-tokens)\n"
    conversation.take("full")
    assert capsys.readouterr().err == ""
    conversation.params = replace(conversation.params, max_tokens=None)
    llm.context = 60
    conversation.start(None)
    conversation.take("long")
    assert capsys.readouterr().err == "(cut off: the context is full)\n"


def test_a_base_model_is_refused(paceline, llm):
    llm.tokenizer.chat_template = None
    ran = paceline("chat")
    assert ran.code == 1
    assert "no chat template" in ran.err


class Keyboard(io.StringIO):
    """A terminal on standard input."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_prompts_joins_lines_and_survives_ctrl_c_at_the_prompt(paceline, llm, monkeypatch):
    typed = iter(["one \\", "more", KeyboardInterrupt, "  ", EOFError])
    prompts = []

    def typing(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("builtins.input", typing)
    ran = paceline("chat")
    assert ran.code == 0
    assert llm.log[0][0] == "<user>one \nmore\n<assistant>"
    assert len(llm.log) == 1
    assert prompts == ["> ", ". ", "> ", "> ", "> "]
    assert "Ctrl-D or /quit leaves" in ran.out
    assert ran.out.startswith(
        "fake: avx512, 2 threads, 3 MiB bfloat16 weights, KV cache up to 1 MiB, ngram drafts up to 4 tokens\n"
    )
