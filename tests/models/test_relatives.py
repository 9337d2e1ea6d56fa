"""DSpark and DFlash 2 drafters against their definitions, and what is refused of their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline import _native
from paceline.errors import CheckpointError
from paceline.models import TargetModel, load_model
from paceline.models.dflash import load_drafter
from paceline.models.dflash2 import DFlash2Drafter
from paceline.sampling import make_state
from paceline.sampling_params import SamplingParams
from paceline.speculation.dflash import DFlashProposer
from paceline.speculation.dflash2 import DFlash2Proposer
from paceline.speculation.dspark import DSparkProposer, own_logits

from .reference import Reference
from .relatives import Spark, SparkReference, Walk, WalkReference, write_spark, write_walk
from .tiny import Draft, Shape, config_of, tensors_of, write_target

SHAPE = Shape("qwen3", vocab=97, layers=3)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = write_target(tmp_path_factory.mktemp("target"), SHAPE)
    return load_model(folder, dtype="float32", threads=2, max_rows=128)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(config_of(SHAPE), tensors_of(SHAPE))


@dataclass
class Text:
    """A sequence with its blocks."""

    token_ids: list[int]
    blocks: np.ndarray
    params: SamplingParams = GREEDY
    request_id: int = 0
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.state = make_state(self.params, self.token_ids, vocab_size=SHAPE.vocab, seed=self.request_id)


def texts(proposer: DFlashProposer, target: TargetModel, lengths: list[int]) -> list[Text]:
    """Sequences of so many tokens, the anchor included, whose context the drafter has seen."""
    proposer.bind(64, 8)
    out, first = [], 0
    for i, length in enumerate(lengths):
        ids = np.random.default_rng(i).integers(0, SHAPE.vocab, length).tolist()
        blocks = np.arange(first, first + (length + 20) // 16 + 1, dtype=np.int32)
        first += len(blocks)
        text = Text(ids, blocks, request_id=i)
        if length > 1:
            _, taps = target.logits(ids[:-1], taps=proposer.taps)
            proposer.observe([(text, 0, taps)])
        out.append(text)
    return out


def features(reference: Reference, ids: list[int], taps: tuple[int, ...]) -> np.ndarray:
    if not ids:
        return np.zeros((0, len(taps) * SHAPE.hidden))
    found = reference.forward(ids).taps
    return np.concatenate([found[i] for i in taps], 1)


SPARKS = {
    "vanilla": Spark(),
    "gated": Spark(kind="gated"),
    "rnn": Spark(kind="rnn", draft=Draft(block_size=5, taps=(2, 0))),
    "no confidence": Spark(confidence=False, kind="rnn"),
    "confidence of the hidden state": Spark(with_markov=False, kind="gated"),
    "headless": Spark(rank=0, confidence=False),
    "confidence alone": Spark(rank=0, with_markov=False),
    "SpecForge": Spark(packaging="SpecForge", kind="gated"),
    "LiquidAI": Spark(packaging="LiquidAI"),
    "speculators": Spark(packaging="speculators"),
    "speculators, reduced": Spark(packaging="speculators", kind="rnn", reduced=(0, 3, 4, 31, 32, 40, 64, 90)),
    "fill-in": Spark(draft=Draft(extra={"sample_from_anchor": False})),
    "scales and cap": Spark(draft=Draft(extra={"output_multiplier": 0.5, "final_logit_softcapping": 3.0})),
    "sliding": Spark(draft=Draft(window=9, sliding=(0,))),
}


@pytest.mark.parametrize("name", SPARKS)
def test_dspark_drafts_follow_the_definition(tmp_path, target, reference, name):
    """Tokens, biased logits and confidence, at contexts of 1 token to 8 windows, alone and in one mixed batch."""
    d = SPARKS[name]
    drafter = load_drafter(write_spark(tmp_path, SHAPE, d), target)
    proposer = DSparkProposer(drafter, drafter.config.max_drafts)
    want_of = SparkReference(SHAPE, d, reference)
    lengths, limits = [2, 9, 18, 72, 40], [drafter.config.max_drafts, 2, 3, drafter.config.max_drafts, 1]
    items = texts(proposer, target, lengths)
    together = proposer.propose(items, limits)
    for i, (text, limit) in enumerate(zip(items, limits, strict=True)):
        ids = text.token_ids
        alone = proposer.propose([text], [limit])
        tokens, _, confidence = want_of.drafts(features(reference, ids[:-1], d.draft.taps), ids[-1], limit)
        assert together.drafts[i] == alone.drafts[0] == tokens
        if d.confidence:
            assert alone.confidence is not None and together.confidence is not None
            np.testing.assert_allclose(alone.confidence[0], confidence, atol=2e-4)
            np.testing.assert_array_equal(alone.confidence[0], together.confidence[i])
        else:
            assert alone.confidence is None
    assert proposer.propose(items[:2], [0, 1]).drafts[0] == []


def test_dspark_logits_have_the_bias_of_the_tokens_drawn(tmp_path, target, reference):
    d = SPARKS["rnn"]
    drafter = load_drafter(write_spark(tmp_path, SHAPE, d), target)
    proposer = DSparkProposer(drafter, 5)
    (text,) = texts(proposer, target, [30])
    seen = []
    inner = drafter.draft_logits
    drafter.draft_logits = lambda *a, **k: seen.append(inner(*a, **k)) or seen[-1]  # type: ignore[method-assign]
    proposer.propose([text], [5])
    taps = features(reference, text.token_ids[:-1], d.draft.taps)
    _, logits, _ = SparkReference(SHAPE, d, reference).drafts(taps, text.token_ids[-1], 5)
    np.testing.assert_allclose(seen[0], logits, atol=2e-4)


def test_the_certainty_of_a_slot_is_that_of_its_likeliest_token(tmp_path, target):
    d = SPARKS["gated"]
    drafter = load_drafter(write_spark(tmp_path, SHAPE, d), target)
    proposer = DSparkProposer(drafter, 6)
    items = texts(proposer, target, [30, 12])
    seen = []
    inner = drafter.draft_logits
    drafter.draft_logits = lambda *a, **k: seen.append(inner(*a, **k)) or seen[-1]  # type: ignore[method-assign]
    proposer.propose(items, [6, 3])
    rows = seen[0]  # slot by slot, the longer block first
    places = [[0, 2, 4, 6, 7, 8], [1, 3, 5]]
    for mine, (_, own) in zip(places, proposer.said, strict=True):
        np.testing.assert_allclose(own, own_logits(rows[mine]), rtol=1e-4, atol=1e-4)
        shares = np.exp(rows[mine]) / np.exp(rows[mine]).sum(1, keepdims=True)
        top = shares.max(1)
        np.testing.assert_allclose(own, np.log(top / (1 - top)), rtol=1e-3, atol=1e-3)


def test_a_threshold_drops_drafts_behind_the_first_doubt(tmp_path, target):
    d = SPARKS["vanilla"]
    drafter = load_drafter(write_spark(tmp_path, SHAPE, d), target)
    proposer = DSparkProposer(drafter, 8)
    items = texts(proposer, target, [20, 35, 5, 61])
    whole = proposer.propose(items, [8] * 4)
    assert whole.confidence is not None
    for threshold in (0.0, 0.3, 0.6, 1.0):
        proposer.confidence_threshold = threshold
        got = proposer.propose(items, [8] * 4)
        for drafts, mine, row in zip(whole.drafts, got.drafts, whole.confidence, strict=True):
            length = next((j for j, c in enumerate(row) if c < threshold), 8)
            assert mine == drafts[:length]


WALKS = {
    "plain": Walk(),
    "wide kernel": Walk(kernel=4, group=4, draft=Draft(taps=(2, 0), window=9, sliding=(0, 1), causal=False)),
    "full attention": Walk(draft=Draft(causal=False), group=40, top_k=1),
    "all candidates": Walk(top_k=97, rank=3),
    "top level, capped": Walk(
        draft=Draft(nested=False, extra={"output_multiplier": 0.3, "final_logit_softcapping": 2.0})
    ),
    "listed rows": Walk(rows=(0, 3, 4, 7, 11, 20, 31, 32, 40, 55, 64, 71, 80, 90, 96)),
    "biases": Walk(draft=Draft(bias=True, fc_bias=True, layers=3, taps=(1,))),
}


@pytest.mark.parametrize("name", WALKS)
def test_dflash2_drafts_follow_the_definition(tmp_path, target, reference, name):
    d = WALKS[name]
    drafter = load_drafter(write_walk(tmp_path, SHAPE, d), target)
    proposer = DFlash2Proposer(drafter, 7)
    want_of = WalkReference(SHAPE, d, reference)
    lengths, limits = [2, 9, 18, 72, 40], [7, 2, 3, 7, 1]
    items = texts(proposer, target, lengths)
    together = proposer.propose(items, limits)
    for i, (text, limit) in enumerate(zip(items, limits, strict=True)):
        ids = text.token_ids
        tokens, _ = want_of.drafts(features(reference, ids[:-1], d.draft.taps), ids[-1], limit)
        assert together.drafts[i] == proposer.propose([text], [limit]).drafts[0] == tokens


@pytest.mark.parametrize("part", ["conv", "candidate_selector"])
def test_a_part_without_effect_is_left_out(tmp_path, target, reference, part):
    """Drafts are as if it were in place: a drafter of which one part was trained costs what that part does."""
    d = Walk(rows=(0, 3, 4, 7, 11, 20, 31, 32, 40, 55, 64, 71, 80, 90, 96))
    folder = write_walk(tmp_path, SHAPE, d)
    path, want_of = folder / "model.safetensors", WalkReference(SHAPE, d, reference)
    tensors = load_file(path)
    for name, values in tensors.items():
        if part in name:
            values[:] = 0
        if name.endswith("base_kernel") and part == "conv":
            values[:, 0] = 1
        want_of.w[name] = values
    save_file(tensors, str(path))
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, DFlash2Drafter)
    assert (drafter.selector is None) == (part != "conv") and bool(drafter.features_width) == (part == "conv")
    proposer = DFlash2Proposer(drafter, 7)
    (text,) = texts(proposer, target, [25])
    tokens, _ = want_of.drafts(features(reference, text.token_ids[:-1], d.draft.taps), text.token_ids[-1], 7)
    assert proposer.propose([text], [7]).drafts[0] == tokens
    tensors["layers.1.mlp_conv.base_kernel"][1, 1, 0] = 0.5  # one number is enough to keep them all
    save_file(tensors, str(path))
    assert load_drafter(folder, target)._convs


@pytest.mark.parametrize("name", ["plain", "listed rows"])
def test_candidates_and_their_chances_are_those_of_the_scores(tmp_path, target, reference, name):
    """Mode rejection: a softmax of the scores at the request's temperature; its filters do not touch it."""
    d = WALKS[name]
    drafter = load_drafter(write_walk(tmp_path, SHAPE, d), target)
    proposer = DFlash2Proposer(drafter, 7, "rejection")
    (text,) = texts(proposer, target, [25])
    text.params = SamplingParams(temperature=0.7, top_k=2, top_p=0.5, seed=3)
    text.__post_init__()
    proposal = proposer.propose([text], [7])
    assert proposal.probs is not None and proposal.probs.ids is not None
    want_of = WalkReference(SHAPE, d, reference)
    hidden = want_of.block(features(reference, text.token_ids[:-1], d.draft.taps), text.token_ids[-1], 8)[1:]
    logits, previous = want_of.head_logits(hidden), text.token_ids[-1]
    for k, token in enumerate(proposal.drafts[0]):
        ids, scores = want_of.scores(hidden[k], logits[k], previous)
        q = np.exp((scores - scores.max()) / 0.7)
        assert proposal.probs.ids[k].tolist() == ids.tolist()
        np.testing.assert_allclose(proposal.probs.probs[k], q / q.sum(), atol=1e-4)
        previous = token


@pytest.mark.parametrize("rows", [(), tuple(range(5, 70, 5)), (5, 60, 61)], ids=["all", "listed", "fewer than asked"])
def test_banned_tokens_are_no_candidates(tmp_path, target, rows):
    """Penalties and biases act on the logits that candidates are taken from, also when few tokens are left."""
    drafter = load_drafter(write_walk(tmp_path, SHAPE, replace(WALKS["plain"], rows=rows)), target)
    for sampler in ("coupled", "rejection"):
        proposer = DFlash2Proposer(drafter, 7, sampler)  # type: ignore[arg-type]
        (text,) = texts(proposer, target, [25])
        allowed = {5, 60, 61}
        bans = {i: float("-inf") for i in range(SHAPE.vocab) if i not in allowed}
        text.state = make_state(replace(GREEDY, temperature=1.0), text.token_ids, vocab_size=SHAPE.vocab, seed=1)
        text.state = type(text.state)(SHAPE.vocab, text.token_ids, temperature=1.0, logit_bias=sorted(bans.items()))
        proposal = proposer.propose([text], [7])
        assert set(proposal.drafts[0]) <= (allowed & set(rows) if rows else allowed)
        if proposal.probs is not None:
            assert proposal.probs.ids is not None
            for ids, probs in zip(proposal.probs.ids, proposal.probs.probs, strict=True):
                assert len(set(ids.tolist())) == len(ids) and abs(probs.sum() - 1) < 1e-5
                assert {i for i, p in zip(ids.tolist(), probs, strict=True) if p > 0} <= allowed


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash2"])
def test_missing_misshapen_and_damaged_heads_are_named(tmp_path, target, kind):
    if kind == "dflash2":
        folder = write_walk(tmp_path / "x", SHAPE, Walk())
    else:
        folder = write_spark(tmp_path / "x", SHAPE, Spark(kind=kind))
    load_drafter(folder, target)
    path: Path = folder / "model.safetensors"
    tensors = load_file(path)
    own = [n for n in tensors if any(part in n for part in ("markov", "confidence", "conv", "selector"))]
    assert len(own) >= 4
    for name in own:
        pattern = name.replace(".", r"\.")
        save_file({k: v for k, v in tensors.items() if k != name}, str(path))
        with pytest.raises(CheckpointError, match=f"{pattern}.*missing"):
            load_drafter(folder, target)
        save_file({**tensors, name: np.zeros(np.array(tensors[name].shape) + 1, np.float32)}, str(path))
        with pytest.raises(CheckpointError, match=f"{pattern}.*shape"):
            load_drafter(folder, target)
        save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, str(path))
        with pytest.raises(CheckpointError, match=f"{pattern}.*not numbers"):
            load_drafter(folder, target)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "speculators, reduced", "dflash2"])
def test_relatives_run_in_int8_and_draft_nearly_as_in_floats(tmp_path, kind):
    """The default beside a target that is not fp32: layers, rows of the head and the Markov head's large matrix."""
    model = load_model(write_target(tmp_path / "t", SHAPE), dtype="bfloat16", threads=1)
    if kind == "dflash2":
        folder: Path = write_walk(tmp_path / "d", SHAPE, WALKS["plain"])
    else:
        folder = write_spark(tmp_path / "d", SHAPE, SPARKS[kind])
    drafters = [load_drafter(folder, model, quantization=q) for q in ("none", None)]
    assert [d.quantization for d in drafters] == ["none", "int8"]
    assert drafters[1].weights.layers[0].qkv.quant == _native.Quant.INT8
    if kind in SPARKS and SPARKS[kind].reduced:
        assert drafters[1].weights.head.quant == _native.Quant.INT8
    seen: list[np.ndarray] = []
    for drafter in drafters:
        limit = drafter.config.max_drafts
        proposer = DFlash2Proposer(drafter, limit) if kind == "dflash2" else DSparkProposer(drafter, limit)
        (text,) = texts(proposer, model, [30])
        inner = drafter.draft_logits
        drafter.draft_logits = lambda *a, inner=inner, **k: seen.append(inner(*a, **k)) or seen[-1]
        drafts = proposer.propose([text], [limit]).drafts[0]
        assert len(drafts) == limit and all(0 <= t < SHAPE.vocab for t in drafts)
    apart = np.abs(seen[0][0] - seen[1][0])
    assert apart.max() > 0 and apart.mean() < 0.1 * seen[0][0].std(), "the first slot, whose bias is the anchor's"
