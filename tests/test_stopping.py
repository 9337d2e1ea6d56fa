"""Stops inside accepted blocks. Every scenario must end exactly where token-by-token decoding ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling_params import SamplingParams
from paceline.stopping import StopChecker

EOS = 0


class FakeDetokenizer:
    """Token -> piece of text; pieces of "~" wait for the next token, like half a UTF-8 sequence."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces
        self.waiting = ""

    def push(self, token_id: int) -> str:
        text = self.waiting + self.pieces.get(token_id, f"<{token_id}>")
        if text.endswith("~"):
            self.waiting = text
            return ""
        self.waiting = ""
        return text

    def finish(self) -> str:
        text, self.waiting = self.waiting, ""
        return text


LETTERS = dict(enumerate(["", "a", "b", "c", "ab", "ba", "aab", "b~", " "]))


def checker(params: SamplingParams, pieces=LETTERS, prompt=10, max_model_len=1000) -> StopChecker:
    return StopChecker(
        params, FakeDetokenizer(pieces), eos_token_ids=[EOS], num_prompt_tokens=prompt, max_model_len=max_model_len
    )


def run(params, blocks, pieces=LETTERS, **where):
    """Feed blocks until the output ends: (tokens delivered, text, text shown in pieces, reasons)."""
    c = checker(params, pieces, **where)
    delivered: list[int] = []
    shown = ""
    for block in blocks:
        result = c.feed(block)
        delivered += block[: result.num_tokens]
        shown += result.text
        assert c.num_tokens == len(delivered)
        if result.finish_reason:
            assert (c.finish_reason, c.stop_reason) == (result.finish_reason, result.stop_reason)
            break
    if c.finish_reason is None:
        shown += c.flush()
    return delivered, c.text, shown, c.finish_reason, c.stop_reason


def test_a_stop_string_cuts_ids_and_text_inside_a_block():
    pieces = {1: "so", 2: " ha", 3: " he"}
    blocks = [[1], [2, 2, 2, 3, 3]]
    got = run(SamplingParams(stop=[" ha ha ha"]), blocks, pieces)
    assert got == ([1, 2, 2, 2], "so", "so", "stop", " ha ha ha")


def test_the_length_cap_does_not_mask_an_earlier_stop():
    got = run(SamplingParams(max_tokens=5, stop_token_ids=[7]), [[10], [11], [7, 20, 21, 22]], {})
    assert got[0] == [10, 11, 7] and got[3:] == ("stop", 7)


def test_a_stop_beyond_the_cap_does_not_count():
    got = run(SamplingParams(max_tokens=2, stop_token_ids=[7]), [[10, 11, 12, 7, 13]], {})
    assert got[0] == [10, 11] and got[3:] == ("length", None)


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    assert run(SamplingParams(max_tokens=3), [[1, 2, EOS, 3]])[3:] == ("stop", None)
    assert run(SamplingParams(max_tokens=2, stop=["ab"]), [[1, 2, 3]])[3:] == ("stop", "ab")


def test_a_stop_string_early_in_a_long_block_is_found():
    pieces = {i: f"w{i} " for i in range(1, 30)}
    got = run(SamplingParams(stop=["w2"]), [list(range(1, 17))], pieces)
    assert got == ([1, 2], "w1 ", "w1 ", "stop", "w2")


def test_a_block_that_crosses_max_tokens_delivers_exactly_the_budget():
    got = run(SamplingParams(max_tokens=8), [[1] * 5, [2] * 5, [3] * 5])
    assert got[0] == [1] * 5 + [2] * 3 and got[1] == "aaaaabbb" and got[3] == "length"


def test_tokens_behind_eos_are_not_delivered():
    got = run(SamplingParams(max_tokens=64), [[1], [2, 3, EOS, 1, 2]])
    assert got == ([1, 2, 3, EOS], "abc", "abc", "stop", None)


def test_the_context_ends_the_output_at_exactly_its_length():
    got = run(SamplingParams(), [[1, 1], [1, 1, 1]], prompt=7, max_model_len=10)
    assert got[0] == [1, 1, 1] and got[3] == "length"
    c = checker(SamplingParams(max_tokens=5), prompt=7, max_model_len=10)
    assert c.remaining == 3
    c.feed([1])
    assert c.remaining == 2


def test_ignored_eos_is_a_token_like_any_other():
    pieces = LETTERS | {EOS: "<eos>"}
    got = run(SamplingParams(ignore_eos=True, max_tokens=3), [[1, EOS, 2, 3]], pieces)
    assert got == ([1, EOS, 2], "a<eos>b", "a<eos>b", "length", None)
    both = run(SamplingParams(ignore_eos=True, stop_token_ids=[EOS]), [[1, EOS, 2]], pieces)
    assert both[3:] == ("stop", EOS)


def test_the_stop_itself_is_text_only_on_request():
    pieces = LETTERS | {EOS: "</s>", 9: "END"}
    for ids, token, reason in [([], EOS, None), ([9], 9, 9)]:
        bare = run(SamplingParams(stop_token_ids=ids), [[1, token, 2]], pieces)
        assert bare == ([1, token], "a", "a", "stop", reason)
        kept = run(SamplingParams(include_stop_str_in_output=True, stop_token_ids=ids), [[1, token, 2]], pieces)
        assert kept == ([1, token], "a" + pieces[token], "a" + pieces[token], "stop", reason)
    kept = run(SamplingParams(include_stop_str_in_output=True, stop=["ba"]), [[1, 4, 4, 2]])
    assert kept == ([1, 4, 4], "aaba", "aaba", "stop", "ba")


def test_nothing_stops_within_min_tokens():
    got = run(SamplingParams(min_tokens=3, stop_token_ids=[3], stop=["b"]), [[3, 2, EOS, 1, 2, 1]])
    assert got[0] == [3, 2, EOS, 1, 2] and got[1] == "cba" and got[3:] == ("stop", "b")


def test_a_stop_string_may_begin_within_min_tokens():
    got = run(SamplingParams(min_tokens=1, stop=["ab"]), [[1, 2, 3]])
    assert got[:2] == ([1, 2], "") and got[4] == "ab"


def test_the_stop_whose_last_character_comes_first_wins():
    pieces = {1: "xxhello world"}
    for stops in (["world", "hello"], ["hello", "world"]):
        assert run(SamplingParams(stop=stops), [[1]], pieces)[1:] == ("xx", "xx", "stop", "hello")
    assert run(SamplingParams(stop=["lo", "hello"]), [[1]], pieces)[1:] == ("xx", "xx", "stop", "hello")


def test_text_that_may_begin_a_stop_string_is_held_back():
    c = checker(SamplingParams(stop=["abc", "bb"]))
    assert c.feed([1]).text == ""  # a
    assert c.feed([2]).text == ""  # ab: may become abc
    assert c.feed([1]).text == "ab"  # aba: the first two are safe now
    assert c.feed([3]).text == "ac"
    assert c.feed([2]).text == ""
    assert c.text == "abacb"
    assert c.flush() == "b"


def test_no_text_is_held_back_if_the_stop_string_is_wanted():
    c = checker(SamplingParams(stop=["abc"], include_stop_str_in_output=True))
    assert [c.feed([t]).text for t in (1, 2)] == ["a", "b"]
    assert c.feed([3, 1]).text == "c"


def test_bytes_that_come_out_at_the_end_may_complete_a_stop_string():
    got = run(SamplingParams(stop=["b~"]), [[1, 7, EOS]])
    assert got == ([1, 7, EOS], "a", "a", "stop", "b~")
    assert run(SamplingParams(max_tokens=2), [[1, 7, 2]])[1:4] == ("ab~", "ab~", "length")


def test_a_finished_output_takes_no_more_tokens():
    c = checker(SamplingParams(max_tokens=1))
    c.feed([1])
    with pytest.raises(ValueError, match="finished"):
        c.feed([2])


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenizer"):
        StopChecker(SamplingParams(stop="x"), None, eos_token_ids=[], num_prompt_tokens=1, max_model_len=9)
    c = StopChecker(SamplingParams(), None, eos_token_ids=[EOS], num_prompt_tokens=1, max_model_len=9)
    assert c.feed([5, EOS, 5]).num_tokens == 2 and c.text == ""


@st.composite
def params(draw):
    min_tokens = draw(st.integers(0, 4))
    return SamplingParams(
        stop=draw(st.lists(st.text("ab c~", min_size=1, max_size=4), max_size=3)),
        stop_token_ids=draw(st.sampled_from([[], [3], [EOS, 8]])),
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=min_tokens,
        max_tokens=draw(st.none() | st.integers(max(1, min_tokens), 25)),
        ignore_eos=draw(st.booleans()),
    )


@given(params(), st.lists(st.integers(0, 8), max_size=40), st.lists(st.integers(1, 7), max_size=40))
def test_blocks_end_where_plain_decoding_ends(p, tokens, sizes):
    """Any split into blocks gives the tokens, text and reasons of one token at a time; shown text is the text."""
    plain = run(p, [[t] for t in tokens])
    blocks, at = [], 0
    for size in [*sizes, len(tokens)]:
        if at < len(tokens):
            blocks.append(tokens[at : at + size])
            at += size
    assert run(p, blocks) == plain
    delivered, text, shown, reason, _ = plain
    assert shown == text
    assert delivered == tokens[: len(delivered)]
    assert reason is not None or len(delivered) == len(tokens)
    if reason is None or reason == "length":
        everything = FakeDetokenizer(LETTERS)
        assert text == "".join(map(everything.push, delivered)) + everything.finish()


@given(params(), st.lists(st.integers(0, 8), max_size=40))
def test_shown_text_never_contains_a_stop(p, tokens):
    """What was streamed before the end could not have been part of the stop string found later."""
    delivered, text, shown, _, stop = run(p, [[t] for t in tokens])
    if isinstance(stop, str) and not p.include_stop_str_in_output:
        whole = FakeDetokenizer(LETTERS)
        full = "".join(map(whole.push, delivered)) + whole.finish()
        assert full.startswith(text + stop)
        if p.min_tokens == 0:
            assert all(s not in text for s in p.stop_strings)
    assert shown == text
