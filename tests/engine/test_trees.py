"""Draft trees in the step loop: the text, its log-probabilities and every cached row are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.hybrid import HybridShape, write_hybrid
from models.tiny import Draft, Shape, write_drafter, write_target
from safetensors.numpy import save_file

from paceline import LLM
from paceline.errors import ConfigError
from paceline.speculation.drafting import Proposal
from paceline.speculation.tree import DraftTree

from .harness import Scripted, assert_idle, assert_same, assert_stats, kib, open_llm, params_of, watched
from .test_dflash import PARAMS
from .test_drafters import prompts

TARGET = Shape("qwen3", vocab=40, hidden=32, inner=40, layers=3, heads=4, kv_heads=2, context=640)
WINDOWED = Shape(
    "qwen3", vocab=40, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=640, window=24, sliding=(0, 2)
)
DRAFTS = {
    "full": Draft(taps=(0, 2)),
    "sliding": Draft(taps=(1,), window=32, sliding=(0, 1)),
    "from the anchor": Draft(taps=(0, 2), extra={"sample_from_anchor": True}),
}


class Trees(Scripted):
    """Random trees, in which the right continuation stands on a branch as often as `right` says."""

    tree_budget: Any = 24

    def __init__(self, oracle: dict[tuple[int, ...], list[int]], seed: int, taps: tuple[int, ...] = ()) -> None:
        super().__init__(max_drafts=9, taps=taps)
        self.rng = np.random.default_rng(seed)
        self.oracle = oracle
        self.most = 0

    def propose(self, sequences: Any, limits: Any) -> Proposal:
        super().propose(sequences, limits)  # checks the protocol
        trees = [self.tree(s, limit) if limit else None for s, limit in zip(sequences, limits, strict=True)]
        return Proposal([[] if t is None else t.tokens[:1] for t in trees], None, None, trees)

    def tree(self, sequence: Any, limit: int) -> DraftTree:
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        right = self.oracle[prompt][sequence.num_output_tokens :][:limit]
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        on_path = [-1]  # nodes of the right path
        for _ in range(int(self.rng.integers(1, 24))):
            parent = int(self.rng.integers(-1, len(tokens)))
            if self.rng.random() < 0.5:
                parent = on_path[-1]
            at = 0 if parent < 0 else depth[parent] + 1
            token = int(self.rng.integers(0, TARGET.vocab))
            follows = parent == on_path[-1] and at < len(right) and self.rng.random() < 0.6
            if follows:
                token = right[at]
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            if at >= limit or token in siblings:
                continue
            if parent == on_path[-1] and at < len(right) and token == right[at]:
                on_path.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depth.append(at)
        self.most = max(self.most, len(tokens))
        return DraftTree(tokens, parents, [0.9 ** (i + 1) for i in range(len(tokens))])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "full": write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True),
        "windowed": write_target(tmp_path_factory.mktemp("windowed"), WINDOWED, tokenizer=True),
    }


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_drafter(tmp_path_factory.mktemp("drafter"), TARGET, d) for name, d in DRAFTS.items()}


def real(folder: Path, drafter: Path, budget: Any, **options: Any) -> LLM:
    config = {"method": "dflash", "model": str(drafter), "tree_budget": budget}
    llm = LLM(folder, **{"threads": 1, "dtype": "float32", "speculative_config": config, **options})
    return watched(llm)


def cached_rows(llm: LLM, tokens: int) -> list[np.ndarray]:
    """Keys and values of the first rows of the only sequence that runs."""
    (sequence,) = llm.engine.running
    c = llm.model.config
    out = []
    for layer in range(c.num_layers):
        for position in range(tokens):
            keys = np.empty((c.num_kv_heads, c.head_dim), np.float32)
            values = np.empty_like(keys)
            llm.engine.cache.read(layer, sequence.block_ids[position // 16], position % 16, keys, values)
            out += [keys, values]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_random_trees_leave_the_text_as_it_is(folders, kind, dtype, threads):
    """Greedy, sampled, with penalties, biases and log-probabilities; alone and in batches with chunks of prompts."""
    plain = open_llm(folders[kind], None, dtype=dtype)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    oracle = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in want}
    accepted = 0
    for seed in range(3):
        drafter = Trees(oracle, seed, taps=(0, 2))
        llm = open_llm(folders[kind], drafter, dtype=dtype, threads=threads, max_num_batched_tokens=70, max_num_seqs=4)
        for part in ([0], [1], [0, 1, 2, 3]):
            got = llm.generate([batch[i] for i in part], [PARAMS[i] for i in part])
            for mine, i in zip(got, part, strict=True):
                assert_same(mine, want[i], (kind, seed))
                assert_stats(mine)
                accepted += mine.metrics.spec_decode.num_accepted_tokens
            assert_idle(llm)
        assert drafter.most > 10
    assert accepted > 30


@pytest.mark.parametrize(("dtype", "cache"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_the_cache_holds_the_rows_of_plain_decoding(folders, dtype, cache):
    (prompt,) = prompts(21)
    plain = open_llm(folders["full"], None, dtype=dtype, kv_cache_dtype=cache)
    params = params_of(max_tokens=40, ignore_eos=True)
    want = plain.generate(prompt, params)[0]
    trees = Trees({tuple(prompt): want.outputs[0].token_ids}, 5)
    llm = open_llm(folders["full"], trees, dtype=dtype, kv_cache_dtype=cache)
    rows = {}
    for name, model in (("plain", plain), ("tree", llm)):
        for _ in model.stream(prompt, params):
            running = model.engine.running
            if running and running[0].num_computed >= 50:
                rows[name] = cached_rows(model, 50)
                break
    assert llm.engine.stats.num_accepted_tokens > 5
    for mine, his in zip(rows["tree"], rows["plain"], strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), his.view(np.uint32))


@pytest.mark.parametrize("name", list(DRAFTS))
@pytest.mark.parametrize("budget", [1, 3, 20, "auto"])
def test_a_drafters_trees_leave_the_text_as_it_is(folders, drafters, name, budget):
    plain = open_llm(folders["full"], None)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    llm = real(folders["full"], drafters[name], budget, max_num_batched_tokens=60, max_num_seqs=4)
    drafted = 0
    for drafts in (2, None):
        got = llm.generate(batch, PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, (name, budget))
            assert_stats(mine)
            drafted += mine.metrics.spec_decode.num_draft_tokens
        assert_idle(llm)
    assert drafted > 0 or budget == "auto"


def test_trees_accept_more_than_drafts_in_a_row(folders, drafters):
    """The likeliest chain is part of the tree of twice as many nodes, so that no step accepts less."""
    params = [params_of(max_tokens=60, ignore_eos=True, seed=i, temperature=t) for i, t in enumerate((0.0, 0.0, 1.0))]
    lengths = []
    for budget in (None, 60):
        config = {"method": "dflash", "model": str(drafters["full"]), "tree_budget": budget}
        if budget is None:
            del config["tree_budget"]
        llm = watched(LLM(folders["full"], threads=1, dtype="float32", speculative_config=config))
        llm.generate(prompts(20, 30, 40), params)
        lengths.append(llm.engine.stats.acceptance_length)
    assert lengths[1] > lengths[0]


@pytest.mark.parametrize("name", list(DRAFTS))
def test_contexts_of_many_windows_up_to_the_last_token(folders, drafters, name):
    plain = open_llm(folders["windowed"], None, max_model_len=300)
    llm = real(folders["windowed"], drafters[name], 16, max_model_len=300, max_num_batched_tokens=64)
    for length in (32, 64, 8 * 32 + 7, 297, 298, 299):
        params = params_of(temperature=1.0, seed=length, ignore_eos=True, max_tokens=None if length > 100 else 20)
        (prompt,) = prompts(length)
        output = llm.generate(prompt, params)[0]
        assert_same(output, plain.generate(prompt, params)[0], (name, length))
        if length > 100:
            assert len(output.outputs[0].token_ids) == 300 - length and output.outputs[0].finish_reason == "length"
    assert_idle(llm)


def test_few_blocks_preemption_and_prefix_caching(folders, drafters):
    """Trees take blocks that are free, and give way when there are none."""
    plain = open_llm(folders["full"], None)
    llm = real(folders["full"], drafters["full"], 12, kv_cache_space=kib(12, plain), max_num_seqs=4)
    batch = prompts(30, 31, 33, 60)
    params = [params_of(max_tokens=50, ignore_eos=True, seed=i, temperature=i % 2) for i in range(4)]
    want = [plain.generate(p, q)[0] for p, q in zip(batch, params, strict=True)]
    for _ in range(2):
        for mine, his in zip(llm.generate(batch, params), want, strict=True):
            assert_same(mine, his, "small cache")
        assert_idle(llm)
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.stats.num_draft_tokens > 0


def test_stop_strings_and_stop_tokens_cut_inside_a_branch(folders, drafters):
    plain = open_llm(folders["full"], None)
    llm = real(folders["full"], drafters["full"], 20)
    (prompt,) = prompts(12)
    whole = plain.generate(prompt, params_of(max_tokens=40, ignore_eos=True, seed=1))[0].outputs[0].token_ids
    for token in sorted(set(whole[3:20])):
        params = params_of(max_tokens=40, ignore_eos=True, stop_token_ids=[token], seed=1)
        assert_same(llm.generate(prompt, params)[0], plain.generate(prompt, params)[0], token)
    assert_idle(llm)


def test_a_grammar_among_the_requests_verifies_rows(folders, drafters):
    plain = open_llm(folders["full"], None)
    llm = real(folders["full"], drafters["full"], 20)
    batch = prompts(12, 20)
    params = [
        params_of(max_tokens=20, structured_outputs={"regex": "[a-f ]{4,18}"}, seed=1),
        params_of(max_tokens=30, seed=2),
    ]
    want = [plain.generate(p, q)[0] for p, q in zip(batch, params, strict=True)]
    for mine, his in zip(llm.generate(batch, params), want, strict=True):
        assert_same(mine, his, "grammar")
    assert_idle(llm)


def test_lookup_may_stand_in_for_a_tree(folders, drafters):
    plain = open_llm(folders["full"], None)
    config = {"method": "dflash", "model": str(drafters["full"]), "tree_budget": 12, "prompt_lookup_max": 3}
    llm = watched(LLM(folders["full"], threads=1, dtype="float32", speculative_config=config))
    batch = [prompts(6)[0] * 4, prompts(40)[0]]
    params = [params_of(max_tokens=60, ignore_eos=True, temperature=t, seed=2) for t in (0.0, 0.7)]
    for mine, his in zip(llm.generate(batch, params), plain.generate(batch, params), strict=True):
        assert_same(mine, his, "hybrid")
    assert min(llm.engine.proposer.chosen.values()) > 0
    assert_idle(llm)


def test_a_slot_without_a_permitted_candidate_ends_the_draft(tmp_path, folders):
    """Bad words that are all rows of a short head, from the first slot on or behind one of its tokens."""
    drafter = write_drafter(tmp_path, TARGET, DRAFTS["full"])
    save_file({"head_rows": np.array([1, 2, 3, 4], np.int32)}, str(drafter / "head_rows.safetensors"))
    config = {"method": "dflash", "model": str(drafter), "tree_budget": 8}
    llm = watched(LLM(folders["full"], threads=1, dtype="float32", speculative_config=config))
    plain = open_llm(folders["full"], None)
    for words in (["a", "b", "c", "d"], ["aa", "ab", "ac", "ad", "b", "c", "d"]):
        for temperature in (0.0, 1.0):
            params = params_of(max_tokens=20, ignore_eos=True, bad_words=words, temperature=temperature, seed=1)
            assert_same(llm.generate([1, 2], params)[0], plain.generate([1, 2], params)[0], words)
    assert_idle(llm)


def test_rejection_sampling_and_trees_do_not_go_together(folders, drafters):
    with pytest.raises(ConfigError, match="tree_budget=4: the sampler 'rejection'"):
        real(folders["full"], drafters["full"], 4, sampler="rejection")


def test_a_recurrent_model_has_no_trees(tmp_path):
    """Its states follow one text."""
    shape = HybridShape()
    target = write_hybrid(tmp_path / "target", shape, tokenizer=True)
    plain = Shape("qwen3", vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers)
    drafter = write_drafter(tmp_path / "drafter", plain, Draft(taps=(0,)))
    with pytest.raises(ConfigError, match=r"tree_budget=4: .* has recurrent layers"):
        real(target, drafter, 4)
