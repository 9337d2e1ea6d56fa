from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from paceline.speculation.dflash import DFlashProposer


def test_streams_the_answer_and_ends_the_line(paceline, llm):
    llm.answers["hello"] = "Grüß dich, 世界!"
    ran = paceline("generate", "hello")
    assert (ran.code, ran.out, ran.err) == (0, "Grüß dich, 世界!\n", "")
    assert llm.open_streams == 0


def test_adds_no_second_line_end(paceline, llm):
    llm.answers["hello"] = "a line\n"
    assert paceline("generate", "hello").out == "a line\n"


def test_the_default_is_greedy_chat_with_the_configured_draft_length(paceline, llm):
    paceline("generate", "hello")
    (prompt, params, drafts), options = llm.log[0], llm.opened[0]
    assert prompt == "<user>hello\n<assistant>"
    assert (params.temperature, params.max_tokens, drafts) == (0.0, 512, llm.default_drafts)
    assert (options.model, options.speculation, options.speculative_config) == ("smollm2-135m", True, None)


def test_raw_completes_the_text_itself(paceline, llm):
    paceline("generate", "--raw", "def f(")
    assert llm.log[0][0] == "def f("


def test_a_base_model_completes_the_text_itself(paceline, llm):
    llm.tokenizer.chat_template = None
    paceline("generate", "def f(")
    assert llm.log[0][0] == "def f("


def test_system_message(paceline, llm):
    paceline("generate", "hello", "--system", "Be brief.")
    assert llm.log[0][0] == "<system>Be brief.\n<user>hello\n<assistant>"


def test_reads_the_prompt_from_standard_input(paceline, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    paceline("generate", "-")
    assert "<user>from a pipe\n" in llm.log[0][0]


def test_every_sampling_option_reaches_the_engine(paceline, llm):
    paceline(
        *("generate", "hello", "-n", "9", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "20"),
        *("--min-p", "0.05", "--seed", "7", "--repetition-penalty", "1.1", "--presence-penalty", "0.2"),
        *(
            "--frequency-penalty",
            "0.3",
            "--stop",
            "END",
            "--stop",
            "\n\n",
            "--min-tokens",
            "2",
            "--ignore-eos",
        ),
    )
    params = llm.log[0][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.8, 0.9, 20)
    assert (params.min_p, params.seed, params.repetition_penalty) == (0.05, 7, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert (list(params.stop), params.min_tokens, params.ignore_eos) == (["END", "\n\n"], 2, True)


def test_every_engine_option_reaches_the_engine(paceline, llm):
    paceline(
        *(
            "generate",
            "hello",
            "-m",
            "other",
            "--dtype",
            "float32",
            "--threads",
            "3",
            "--max-model-len",
            "99",
        ),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}', "-k", "3"),
    )
    options = llm.opened[0]
    assert (options.model, options.dtype, options.threads, options.max_model_len) == (
        "other",
        "float32",
        3,
        99,
    )
    assert options.speculative_config == {"method": "ngram", "num_speculative_tokens": 5}
    assert llm.log[0][2] == 3


def test_no_speculation_loads_no_drafter_and_drafts_nothing(paceline, llm):
    paceline("generate", "hello", "--no-speculation")
    assert llm.opened[0].speculation is False
    assert llm.log[0][2] == 0


def test_json_is_one_object_with_the_documented_keys(paceline, llm):
    llm.answers["hello"] = "abcdef"
    result = json.loads(paceline("generate", "hello", "--json", "--max-tokens", "5", "--seed", "3").out)
    assert list(result) == [
        *(
            "model",
            "text",
            "token_ids",
            "finish_reason",
            "stop_reason",
            "seed",
            "usage",
            "timings",
            "spec_decode",
        )
    ]
    assert (result["model"], result["text"], result["token_ids"]) == ("fake", "abcde", list(b"abcde"))
    assert (result["finish_reason"], result["seed"]) == ("length", 3)
    prompt_tokens = len("<user>hello\n<assistant>")
    assert result["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
    }
    # 1 + 3 + 1 tokens in three rounds: four tokens after the first in two speculative rounds of 12 ms.
    assert result["timings"]["time_to_first_token_ms"] == pytest.approx(50)
    assert result["timings"]["decode_tok_s"] == pytest.approx(4 / 0.024)
    assert result["spec_decode"]["num_drafts"] == 2


def test_json_of_a_single_token_has_no_rate(paceline, llm):
    result = json.loads(paceline("generate", "hello", "--json", "--max-tokens", "1").out)
    assert result["timings"]["decode_tok_s"] is None


def test_stats_go_to_standard_error(paceline, llm):
    llm.answers["hello"] = "abcdef"
    ran = paceline("generate", "hello", "--stats")
    assert ran.out == "abcdef\n"
    assert "7 tokens (stop)" in ran.err
    assert "acceptance length 3.00" in ran.err
    assert "acceptance" not in paceline("generate", "hello", "--stats", "--no-speculation").err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["generate"], "PROMPT"),
        (["generate", ""], "empty"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "-3"], "--max-tokens"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "x", "--top-p", "1.5"], "--top-p"),
        (["generate", "x", "--threads", "0"], "--threads"),
        (["generate", "x", "--num-speculative-tokens", "-1"], "--num-speculative-tokens"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--speculative-config", "{oops"], "not valid JSON"),
        (["generate", "x", "--speculative-config", "[1]"], "JSON object"),
        (["generate", "x", "--speculative-config", '{"methd": "ngram"}'], "did you mean 'method'"),
        (["generate", "x", "--speculative-config", '{"method": "psychic"}'], "method='psychic'"),
        (["generate", "x", "--seed", "-1"], "seed=-1"),
        (["generate", "x", "--top-p", "0"], "--top-p: top_p=0.0"),
        (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty: repetition_penalty=0.0"),
        (["generate", "x", "--stop", ""], "stop=''"),
        (["generate", "x", "--min-tokens", "600"], "min_tokens=600"),
        (["generate", "x", "--no-speculation", "-k", "3"], "contradicts"),
        (["generate", "x", "--no-speculation", "--speculative-config", "{}"], "contradicts"),
        (["generate", "x", "--raw", "--system", "s"], "--system"),
        (["generate", "x", "--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage_is_code_2_and_says_what(paceline, llm, argv, told):
    ran = paceline(*argv)
    assert ran.code == 2
    assert told in ran.err
    assert ran.out == ""
    assert not llm.opened


def test_an_engine_error_is_code_1_and_one_line(paceline, llm):
    llm.context = 10
    ran = paceline("generate", "x" * 50)
    assert ran.code == 1
    assert ran.err.startswith("paceline: the prompt has ")
    assert ran.err.count("\n") == 1


def test_help_shows_no_range_whose_ends_are_refused(paceline):
    from paceline.sampling_params import SamplingParams, SamplingParamsError

    shown = paceline("generate", "--help").out
    ends = {"--min-p": ("min_p", 0.0, 1.0), "--top-p": ("top_p", 0.0, 1.0)}
    ends |= {"--repetition-penalty": ("repetition_penalty", 0.0, 2.0), "--temperature": ("temperature", 0.0, 1.0)}
    for option, (field, *values) in ends.items():
        line = next(line for line in shown.splitlines() if option in line)
        for value in values:
            try:
                SamplingParams(**{field: value})
            except SamplingParamsError:
                assert "x>=" not in line, option
                assert "<=x" not in line, option


def test_an_answer_that_fills_the_context_says_so(paceline, llm):
    llm.context = 40
    llm.answers["hello"] = "x" * 100
    ran = paceline("generate", "hello")
    assert (ran.code, ran.err) == (0, "(cut off: the context is full)\n")
    assert paceline("generate", "hello", "-n", "5").err == ""
    assert json.loads(paceline("generate", "hello", "--json").out)["finish_reason"] == "length"


@pytest.mark.parametrize("command", ["generate", "demo", "bench", "chat"])
def test_drafts_beyond_what_a_drafter_was_trained_for_are_noted(paceline, llm, command, monkeypatch, tmp_path):
    proposer = object.__new__(DFlashProposer)
    proposer.drafter = SimpleNamespace(config=SimpleNamespace(max_drafts=7))
    llm.engine.proposer = proposer
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one"}\n')
    argv = {"chat": [], "bench": ["-d", str(rows)]}.get(command, ["hello"])
    for wanted, noted in ((["-k", "7"], False), (["-k", "9"], True)):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        ran = paceline(command, *argv, *wanted)
        assert ran.code == 0
        assert ran.err.startswith("Note: -k 9 is more than the 7 drafts") is noted


def test_summary_says_what_drafts(llm):
    from paceline.cli.engine import summary

    for lengths, said in (
        ((None,), "ngram drafts up to 4 tokens"),
        ((3,), "ngram drafts 3 tokens"),
        ((1,), "ngram drafts 1 token"),
        ((0, 3, 7), "ngram drafts 3 or 7 tokens"),
        ((0,), "plain"),
    ):
        assert summary(llm, lengths).endswith(f", {said}")


def test_an_interrupt_is_code_130_and_frees_the_request(paceline, llm):
    def interrupt(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    llm.answers["hello"] = "abcdefghij"
    llm.on_token = interrupt
    ran = paceline("generate", "hello")
    assert ran.code == 130
    assert ran.out == "abcd"
    assert "Traceback" not in ran.err
    assert llm.open_streams == 0
