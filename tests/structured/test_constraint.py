"""The state of one sequence: what drafts leave behind (nothing), where documents end, where reasoning ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import StructuredOutputsParams
from paceline.sampling import DraftProbs, make_state, verify
from paceline.sampling_params import SamplingParams
from paceline.speculation.drafting import Proposal
from paceline.structured.constraint import GrammarConstraint
from paceline.structured.marker import Marker
from paceline.structured.passes import bitmask, trim_drafts
from paceline.structured.vocabulary import allows

from .conftest import SHAPE, World

V = SHAPE.vocab
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(ab|a{2}c)*d?"},
    {"regex": "[a-c]{1,4}(é|€|😀)b*"},
    {"choice": ["a", "ab", "abc", "b ha", "haha"]},
    {"json": {"type": "object", "properties": {"abc": {"enum": ["a", None, 12]}, "d": {"type": "boolean"}}}},
    {"json": {"type": "array", "items": {"type": "integer"}}, "disable_any_whitespace": True},
    {"json_object": True},
    {"grammar": 'start: pair ("," pair)*\npair: /[ab]+/ "=" (pair | "0")'},
    {"regex": "a*", "reasoning_end": "ha"},
    {"json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "reasoning_end": "abcab"},
    {"regex": "a*", "reasoning_end": "ha", "reasoning_start": "haha"},
]


def start(world: World, fields: dict[str, Any], prompt: tuple[int, ...] = (5,), **params: Any) -> GrammarConstraint:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), **params)
    grammar = world.plain.grammars.constraint(asked, prompt)
    assert grammar is not None
    return grammar


def allowed(mask: np.ndarray) -> list[int]:
    return [i for i in range(V) if allows(mask, i)]


def encode(world: World, text: str) -> list[int]:
    return world.plain.tokenizer.encode(text, add_special_tokens=False)


@QUICK
@given(fields=st.sampled_from(GRAMMARS), data=st.data(), seed=st.integers(0, 1 << 32))
def test_drafts_leave_no_trace(world: World, fields: dict[str, Any], data: Any, seed: int):
    """Masks behind drafts are those of a state that was never drafted on, whatever was drafted and dropped before."""
    rng = np.random.default_rng(seed)
    drafted, plain = start(world, fields), start(world, fields)
    for _ in range(data.draw(st.integers(1, 12))):
        drafts: list[int] = []
        walk = start(world, fields)
        walk_tokens = list(drafted._document) if fields.get("reasoning_end") is None else None
        for token in walk_tokens or []:
            walk.commit(token)
        for _ in range(data.draw(st.integers(0, 5))):
            likely = allowed(walk.masks([])[0]) if walk_tokens is not None else list(range(V))
            token = int(rng.choice(likely)) if rng.random() < 0.85 else int(rng.integers(V))
            drafts.append(token)
            if walk_tokens is not None and (token not in likely or walk.commit(token) is not None):
                break
        kept = drafted.prepare(drafts, data.draw(st.sampled_from([0, 3, 8])))
        shared = min(len(kept), len(drafts))
        assert kept[:shared] == drafts[:shared] and drafted.kept == shared and drafted.drafted == len(drafts)
        masks = drafted.masks(kept)
        assert len(masks) == len(kept) + 1
        # commit what a target could draw: right drafts, then a token of its own
        block = list(kept[: int(rng.integers(0, len(kept) + 1))])
        own = allowed(masks[len(block)])
        assert own, "a row that allows nothing"
        block.append(int(rng.choice(own)))
        for j, token in enumerate(block):
            assert np.array_equal(plain.masks([])[0], masks[j]), (fields, j, block, kept)
            ends = drafted.commit(token), plain.commit(token)
            assert ends[0] == ends[1] and plain.failed is None and drafted.failed is None
            if ends[0]:
                return


@pytest.mark.parametrize("fields", GRAMMARS[:7])
def test_eos_exactly_where_the_grammar_accepts(world: World, fields: dict[str, Any]):
    """Against the matcher's own word, along random documents."""
    rng = np.random.default_rng(3)
    eos = world.plain.tokenizer.eos_token_ids[0]
    for _ in range(20):
        grammar = start(world, fields)
        matcher = grammar._grammar.matcher()
        for _ in range(30):
            ids = allowed(grammar.masks([])[0])
            assert (eos in ids) == matcher.is_accepting()
            token = int(rng.choice(ids))
            ended = grammar.commit(token)
            if ended == "eos":
                assert token == eos
                break
            assert matcher.consume_token(token)
            assert (ended == "complete") == matcher.is_stopped()
            if ended:
                assert matcher.is_accepting()
                break


def test_drafts_behind_the_end_are_trimmed(world: World):
    eos = world.plain.tokenizer.eos_token_ids[0]
    grammar = start(world, {"regex": "ab?"})
    a, b = encode(world, "a")[0], encode(world, "b")[0]
    assert grammar.prepare([a, b, a, a]) == [a, b] and (grammar.drafted, grammar.kept) == (4, 2)
    assert len(grammar.masks([a, b])) == 3
    assert grammar.prepare([a, eos, a]) == [a]
    assert grammar.prepare([b]) == []
    assert grammar.commit(a) is None and grammar.commit(b) == "complete"


def test_forced_tokens_are_drafted(world: World):
    """The grammar leaves no choice: all of it is drafted, as far as there is room."""
    grammar = start(world, {"regex": "z(abchaha){3}[0-9]"})
    z, rest = encode(world, "z"), encode(world, "abchaha" * 3)
    assert grammar.prepare([], 0) == []
    whole = grammar.prepare([], 50)
    assert whole[:1] == z and len(whole) > 3 and (z + rest)[: len(whole)] == whole
    assert grammar.prepare([], 3) == whole[:3] and grammar.kept == grammar.drafted == 0
    wrong = encode(world, "b")
    assert grammar.prepare(wrong, 4) == [], "the drafter's own wrong token is trimmed, and nothing is put in its place"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ignore_eos(world: World, ignore_eos: bool):
    eos = world.plain.tokenizer.eos_token_ids[0]
    grammar = start(world, {"regex": "a{0,2}"}, ignore_eos=ignore_eos)
    assert (eos in allowed(grammar.masks([])[0])) != ignore_eos
    empty = start(world, {"grammar": 'start: ""'}, ignore_eos=ignore_eos)
    assert allowed(empty.masks([])[0]) == [eos] and empty.commit(eos) == "eos"


def test_min_tokens_keeps_stops_out_unless_nothing_else_is_left(world: World):
    eos = world.plain.tokenizer.eos_token_ids[0]
    a, b = encode(world, "a")[0], encode(world, "b")[0]
    grammar = start(world, {"regex": "(a|b)*"}, min_tokens=2, stop_token_ids=[b])
    masks = [allowed(mask) for mask in (grammar.prepare([a, a, a]) and grammar.masks([a, a, a]))]
    assert [b in ids for ids in masks] == [False, False, True, True]
    assert [eos in ids for ids in masks] == [False, False, True, True]
    only = start(world, {"regex": "b{3}"}, min_tokens=3, stop_token_ids=[b])
    assert allowed(only.masks([])[0]) == [b]


def test_a_document_that_no_token_can_go_on_fails_without_ending_as_if_it_were_whole(world: World):
    vocabulary = world.plain.grammars.vocabulary
    grammar = start(world, {"regex": "[ab]x"})
    x = [i for i in range(V) if vocabulary.tokens[i] == b"x"]
    original = grammar._grammar.mask
    gone = ~vocabulary.ids_of(x)
    grammar._grammar.mask = lambda matcher: original(matcher) & gone  # type: ignore[method-assign]
    try:
        a = encode(world, "a")[0]
        assert grammar.prepare([a, a]) == [], "behind the first draft nothing can follow"
        assert grammar.failed is None
        assert grammar.commit(a) is None
        assert len(grammar.masks([])) == 1 and grammar.failed
    finally:
        del grammar._grammar.mask


# ---- reasoning


@QUICK
@given(text=st.text("hab\n", max_size=12), marker=st.sampled_from(["ha", "haha", "ab", "aab", "a\nb"]))
def test_a_marker_is_found_where_it_first_ends(world: World, text: str, marker: str):
    found = Marker(marker, world.plain.grammars.vocabulary)
    state, seen, ids = 0, "", encode(world, text)
    for token in ids:
        ok = allows(found.mask(state), token)
        piece = world.plain.tokenizer.token_bytes(token).decode()
        end = (seen + piece).find(marker)
        beyond = end >= 0 and end + len(marker) < len(seen + piece)
        assert ok == (not beyond), (seen, piece)
        if beyond:
            return
        state, seen = found.advance(state, token), seen + piece
        assert found.is_complete(state) == seen.endswith(marker)
        if found.is_complete(state):
            return


def test_reasoning_that_ends_inside_a_block(world: World):
    """Drafts behind the marker are constrained, those before it are not; line ends may separate the two."""
    fields = {"regex": "[0-9]{2}", "reasoning_end": "haha"}
    grammar = start(world, fields)
    eos = world.plain.tokenizer.eos_token_ids[0]
    think, marker, gap, answer = (encode(world, t) for t in ("bcd", "haha", "\n\n", "42"))
    fence = encode(world, "b")
    assert grammar.prepare([*think, *marker, *fence]) == [*think, *marker]
    assert grammar.prepare([*think, *marker, *gap, *fence]) == [*think, *marker, *gap]
    kept = grammar.prepare([*think, *marker, *gap, *answer, *fence])
    assert kept == [*think, *marker, *gap, *answer]
    masks = [allowed(mask) for mask in grammar.masks(kept)]
    assert all(eos not in ids for ids in masks[:-1])
    assert all(len(ids) > 200 for ids in masks[: len(think) + 1])
    digits = {i for i in range(V) if world.plain.tokenizer.token_bytes(i).isdigit()}
    newlines = set(encode(world, "\n")) | set(gap)
    assert set(masks[len(think) + len(marker)]) == digits | newlines
    for token in [*think, *marker, *gap, answer[0]]:
        assert grammar.commit(token) is None
    assert set(allowed(grammar.masks([])[0])) == digits
    assert grammar.commit(answer[1]) == "complete"


def test_line_ends_behind_reasoning_are_bounded(world: World):
    grammar = start(world, {"regex": "[0-9]", "reasoning_end": "haha"})
    newline = encode(world, "\n")[0]
    for token in encode(world, "haha"):
        grammar.commit(token)
    for _ in range(2):
        assert newline in allowed(grammar.masks([])[0])
        grammar.commit(newline)
    assert newline not in allowed(grammar.masks([])[0])


def test_the_output_says_whether_it_reasons(world: World):
    """It begins with the tag, and the document comes behind the reasoning, or it begins with the document."""
    fields = {"regex": "[0-9]{2}", "reasoning_end": "haha", "reasoning_start": "ab"}
    [tag], end, answer = (encode(world, t) for t in ("ab", "haha", "42"))
    digits = {i for i in range(V) if world.plain.tokenizer.token_bytes(i).isdigit()}
    grammar = start(world, fields)
    assert set(allowed(grammar.masks([])[0])) == digits | {tag}
    assert grammar.prepare([*encode(world, "x"), tag]) == []
    assert grammar.prepare([*answer, tag]) == answer
    block = [tag, *encode(world, "x"), *end, *answer]
    assert grammar.prepare(block) == block and grammar.prepare([tag, tag, answer[0]]) == [tag, tag, answer[0]]
    assert set(allowed(grammar.masks(grammar.prepare([]))[0])) == digits | {tag}, "drafts leave no trace"
    assert grammar.commit(tag) is None and len(allowed(grammar.masks([])[0])) > 200
    for token in (*end, answer[0]):
        assert grammar.commit(token) is None
    assert grammar.commit(answer[1]) == "complete"
    direct = start(world, fields)
    assert [direct.commit(token) for token in answer] == [None, "complete"]
    split = start(world, {**fields, "reasoning_start": "no single token"})
    assert len(allowed(split.masks([])[0])) > 200, "then the output is taken to reason"


def test_a_prompt_may_have_ended_the_reasoning(world: World):
    prompt = tuple(encode(world, "bcd haha\n\n"))
    closed = start(world, {"regex": "[0-9]", "reasoning_end": "haha"}, prompt)
    assert len(allowed(closed.masks([])[0])) == 10
    open_ = start(world, {"regex": "[0-9]", "reasoning_end": "haha"}, (*prompt, *encode(world, "a")))
    assert len(allowed(open_.masks([])[0])) > 200


# ---- passes


def test_the_distribution_stays_the_targets_in_rejection_mode(world: World):
    """Drafts drawn from an unconstrained q, trimmed by the grammar: what is committed first follows the masked p."""
    rng = np.random.default_rng(11)
    letters = [encode(world, c)[0] for c in "abcdefgh"]
    logits = np.full(V, -9.0, np.float32)
    logits[letters] = rng.normal(0, 1.5, len(letters))
    other = np.full(V, -9.0, np.float32)
    other[letters] = rng.normal(0, 1.5, len(letters))
    q = np.exp(other - other.max())
    q /= q.sum()
    legal = letters[:5]
    p = np.zeros(V)
    p[legal] = np.exp(logits[legal])
    p /= p.sum()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-e]{4}"))
    counts, n, accepted = np.zeros(V), 6000, 0
    rows = np.tile(logits, (2, 1))
    for seed in range(n):
        grammar = world.plain.grammars.constraint(params, [5])
        state = make_state(params, [5], vocab_size=V, seed=seed)
        draft = int(rng.choice(V, p=q.astype(np.float64) / q.sum(dtype=np.float64)))
        proposal = Proposal([[draft]], DraftProbs(q[None].copy()))
        proposal = trim_drafts([grammar], proposal, [1])
        kept = proposal.drafts[0]
        assert proposal.probs is not None and len(proposal.probs.probs) == len(kept)
        mask = bitmask([(grammar, kept)])
        [block] = verify(rows[: len(kept) + 1], [state], [kept], mask, mode="rejection", draft_probs=proposal.probs)
        counts[block[0]] += 1
        accepted += len(block) - 1
    expected = p[legal] * n
    chi2 = float(((counts[legal] - expected) ** 2 / expected).sum())
    assert counts[legal].sum() == n and accepted > n // 10
    assert chi2 < 23.5, (chi2, counts[legal], expected)  # 4 degrees of freedom, p = 1e-4


def test_conditioning_follows_reduced_heads(world: World):
    """probs over a part of the vocabulary, the same for all rows or one list each."""
    letters = np.array([encode(world, c)[0] for c in "abcd"], np.int32)
    for ids in (letters[None], np.stack([letters, letters[::-1]])):
        grammar = start(world, {"regex": "a[ab]c"})
        a, b, d = int(letters[0]), int(letters[1]), int(letters[3])
        probs = np.array([[0.5, 0.25, 0.125, 0.125], [0.4, 0.3, 0.2, 0.1]], np.float32)
        out = trim_drafts([None, grammar], Proposal([[], [a, d]], DraftProbs(probs.copy(), ids)), [0, 2])
        assert out.drafts == [[], [a]] and out.probs is not None
        assert out.probs.probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]
        grammar = start(world, {"regex": "a[ab]c"})
        out = trim_drafts([grammar, None], Proposal([[a, b], []], DraftProbs(probs.copy(), ids)), [2, 0])
        assert out.drafts == [[a, b], []] and out.probs is not None
        second = out.probs.probs[1] if len(ids) == 1 else out.probs.probs[1][::-1]
        left, right = (0.4, 0.3) if len(ids) == 1 else (0.1, 0.2)
        assert np.allclose(second, [left / (left + right), right / (left + right), 0, 0])


def test_rows_of_others_are_not_masked(world: World):
    grammar = start(world, {"regex": "a"})
    mask = bitmask([(None, [1, 2]), (grammar, []), (None, [])])
    assert mask is not None and mask.shape == (5, -(-V // 32))
    assert [bool((row == -1).all()) for row in mask] == [True, True, True, False, True]
    assert bitmask([(None, [1])]) is None
