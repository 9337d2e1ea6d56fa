from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from paceline.cli import demo, panes
from paceline.sampling_params import SamplingParams

KEYS = ["plain_tok_s", "spec_tok_s", "speedup", "identical", "spec_decode"]


def race(llm, prompt="hello", drafts=None, **fields):
    return demo.Race(llm, prompt, SamplingParams(temperature=0.0, **{"max_tokens": 64} | fields), drafts)


def show(llm, *, terminal: bool, width: int, side_by_side: bool, height: int = 24) -> str:
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        height=height,
        soft_wrap=True,
        highlight=False,
        color_system="standard" if terminal else None,
    )
    panes.show_race(race(llm, max_tokens=2000), "hello", side_by_side=side_by_side, console=console)
    return console.file.getvalue()


def test_json_has_exactly_the_promised_keys_and_the_fakes_figures(paceline, llm):
    ran = paceline("demo", "hello", "--json")
    result = json.loads(ran.out)
    assert list(result) == KEYS
    assert (ran.code, ran.err, result["identical"]) == (0, "", True)
    # "You said: hello" and the end: 16 tokens. Plain: 15 rounds of 10 ms; speculative: 5 rounds of 12 ms with
    # 3 tokens each.
    assert result["plain_tok_s"] == pytest.approx(100)
    assert result["spec_tok_s"] == pytest.approx(250)
    assert result["speedup"] == pytest.approx(2.5)
    assert result["spec_decode"]["acceptance_length"] == pytest.approx(3)


def test_arms_take_turns_at_going_first(paceline, llm):
    paceline("demo", "hello", "--json", "--repeats", "3", "-k", "2")
    lengths = [drafts for _, _, drafts in llm.log]
    assert lengths == [*(0, 2), *(0, 2), *(2, 0), *(0, 2)]


def test_both_arms_draw_with_the_same_seed(paceline, llm):
    paceline("demo", "hello", "--json", "--temperature", "0.8")
    assert {params.seed for _, params, _ in llm.log} == {0}
    assert {params.temperature for _, params, _ in llm.log} == {0.8}


def test_a_difference_is_code_1_and_said_last(paceline, llm):
    llm.corrupt_speculation = True
    ran = paceline("demo", "hello", "--json")
    assert (ran.code, json.loads(ran.out)["identical"]) == (1, False)
    ran = paceline("demo", "hello")
    assert ran.code == 1
    assert ran.out.rstrip().splitlines()[-1].startswith("Outputs identical: NO")


def test_a_pipe_gets_both_answers_in_plain_text_and_the_verdict_last(paceline, llm):
    llm.answers["hello"] = "abcdefgh"
    ran = paceline("demo", "hello")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "--- plain decoding ---\nabcdefgh\n" in ran.out
    assert "--- speculative decoding ---\na⟦bc⟧d⟦ef⟧g⟦h⟧\n" in ran.out
    assert ran.out.index("plain decoding") < ran.out.index("speculative decoding")
    assert "acceptance length" in ran.out
    assert ran.out.rstrip().splitlines()[-1] == "Outputs identical: yes (9 token ids compared)"


def test_an_answer_of_one_token_cannot_be_measured(paceline, llm):
    llm.answers["hello"] = ""
    ran = paceline("demo", "hello", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "single token" in ran.err


def test_the_measured_figures_are_those_shown(paceline, llm):
    shown = paceline("demo", "hello").out
    assert "100.0 tok/s" in shown
    assert "250.0 tok/s" in shown
    assert "2.50x" in shown
    assert "tokens per pass   │        3.00" in shown
    assert "Drafts came with 5 of 5 passes.\nOf all drafts, short ones included, " in shown
    assert "survived to each position:\n   1  100.0%  ██" in shown
    assert "Medians of 3 runs of each" in shown
    assert "One run of each:" in paceline("demo", "hello", "--repeats", "1").out
    assert "\n   3    0.0%" in shown


def test_a_narrow_terminal_shows_one_after_the_other_with_accepted_tokens_styled(llm):
    llm.answers["hello"] = "abcdefgh"
    shown = show(llm, terminal=True, width=60, side_by_side=False)
    assert "\x1b[4;32m" in shown
    assert "⟦" not in shown
    assert shown.index("plain decoding") < shown.index("speculative decoding")


def test_accepted_white_space_is_not_styled():
    marked = panes._styled("  self.x\n", True)
    assert marked.plain == "  self.x\n"
    assert [(span.start, span.end) for span in marked.spans] == [(2, 8)]
    assert not panes._styled("self", False).spans


def test_a_wide_terminal_shows_both_panes_in_one_row_with_a_legend(llm):
    llm.answers["hello"] = "abcdefgh"
    shown = show(llm, terminal=True, width=120, side_by_side=True)
    assert "Accepted draft tokens look" in shown
    heading = [line for line in shown.splitlines() if "plain decoding" in line][-1]
    assert "speculative decoding" in heading
    assert "9 tokens" in heading
    assert "\x1b[4;32mb\x1b[0m" in shown


def test_panes_show_the_whole_answer_at_the_end_and_no_more_than_the_screen_before(llm):
    llm.answers["hello"] = "\n".join(f"line {number}" for number in range(40))
    frames = show(llm, terminal=True, width=120, side_by_side=True, height=12)
    frames = re.sub("\x1b\\[[0-9;]*m", "", frames).split("plain decoding")
    assert all(sum("│ line" in row for row in frame.splitlines()) <= 8 for frame in frames[1:-1])
    for number in range(40):
        assert frames[-1].count(f"line {number} ") >= 2


def test_ctrl_c_leaves_both_panes_as_they_stand(llm):
    def interrupt(count: int) -> None:
        if count == 8:
            raise KeyboardInterrupt

    llm.answers["hello"] = "abcdefghij"
    llm.on_token = interrupt
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=24, soft_wrap=True)
    with pytest.raises(KeyboardInterrupt):
        panes.show_race(race(llm), "hello", side_by_side=True, console=console)
    last = console.file.getvalue().rpartition("plain decoding")[2]
    assert "│ abcdefg" in last
    assert "\x1b[1A" not in last.partition("╰")[2]  # nothing is taken away again


def test_panes_leave_room_for_what_the_terminal_echoes(llm):
    """`^C` behind a frame as wide as the terminal would wrap, scroll, and leave a line of the frame behind."""
    frames = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", show(llm, terminal=True, width=120, side_by_side=True))
    widths = {len(line.rpartition("\r")[2]) for line in frames.splitlines() if line.rpartition("\r")[2][:1] in "╭╰"}
    assert max(widths) == 118


def test_wide_enough_is_judged_by_the_terminal(paceline, llm, monkeypatch):
    seen = []
    monkeypatch.setattr(panes, "show_race", lambda *_, side_by_side: seen.append(side_by_side))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns in ("99", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        race_result = demo.RaceResult(1.0, 2.0, True, 1, 5, 2, {})
        monkeypatch.setattr(demo.Race, "measure", lambda _self, _repeats, result=race_result: result)
        monkeypatch.setattr(panes, "show_result", lambda _result: None)
        paceline("demo", "hello")
    assert seen == [False, True]


def test_pieces_follow_tokens_through_split_characters_and_stop_cuts(llm):
    llm.answers["hello"] = "aé世b"
    pane = panes.Pane("arm", race(llm))
    for delta, worked in race(llm).stream(None):
        pane.add(delta, worked)
    assert pane.text.plain == "aé世b"
    assert pane.tokens == 8


def test_engine_time_leaves_out_what_the_caller_does_in_between(llm):
    from time import perf_counter, sleep

    started = perf_counter()
    worked = 0.0
    for _delta, worked in race(llm).stream(0):  # noqa: B007
        sleep(0.002)
    assert worked < (perf_counter() - started) / 2


def test_wrong_usage(paceline, llm):
    for argv, told in (
        (["-k", "0"], "at least 1"),
        (["--repeats", "0"], "--repeats"),
        (["--max-tokens", "1"], "--max-tokens"),
        ([" "], "empty"),
        (["--speculative-config", "no"], "not valid JSON"),
    ):
        ran = paceline("demo", *argv)
        assert ran.code == 2
        assert told in ran.err
    assert not llm.opened
