"""Who runs when: admission, chunks of prompt, limits of a pass, and drafters that break their promises."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.engine import Engine
from paceline.errors import CapacityError, ConfigError
from paceline.models import load_model
from paceline.speculation.stats import SpecDecodeStats

from .conftest import SHAPE
from .harness import Oracle, Scripted, assert_idle, assert_same, kib, nothing, open_llm, repeat_last, scripted

V = SHAPE.vocab
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_a_request_larger_than_the_cache_is_refused(tiny_target):
    probe = open_llm(tiny_target)
    llm = open_llm(tiny_target, kv_cache_space=kib(4, probe))
    assert llm.engine.pool.size == 4
    with pytest.raises(CapacityError, match="kv_cache_space"):
        llm.generate([1] * 40, SamplingParams(max_tokens=25))
    output = llm.generate([1] * 40, SamplingParams(max_tokens=24, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 24
    assert_idle(llm)


def test_without_room_for_one_block_there_is_no_engine(tiny_target):
    with pytest.raises(CapacityError, match="kv_cache_space"):
        open_llm(tiny_target, kv_cache_space=1e-9)
    with pytest.raises(CapacityError, match="kv_cache_space"):
        open_llm(tiny_target, kv_cache_space=1e6)
    for bad in (0, -1.0, "much"):
        with pytest.raises(ConfigError, match="kv_cache_space"):
            open_llm(tiny_target, kv_cache_space=bad)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", SHAPE.context + 1),
        ("max_model_len", 1),
        ("dtype", "float16"),
        ("threads", 0),
        ("isa", "sse2"),
        ("sampler", "beam"),
    ],
)
def test_wrong_options_are_named(tiny_target, option, value):
    with pytest.raises(ConfigError, match=option):
        open_llm(tiny_target, **{option: value})


def test_more_sequences_than_rows_are_refused(tiny_target):
    model = load_model(tiny_target, dtype="float32", threads=1, max_rows=4)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Engine(model, proposer=None, max_model_len=64, max_num_seqs=5, kv_blocks=8)


def test_passes_keep_to_their_rows_and_sequences(tiny_target):
    """Never more rows than max_num_batched_tokens, nor more sequences than max_num_seqs; first come, first served."""
    probe = open_llm(tiny_target)
    llm = open_llm(tiny_target, Scripted(), max_num_batched_tokens=10, max_num_seqs=4, kv_cache_space=kib(12, probe))
    engine = llm.engine
    passes: list[list[tuple[int, int, int]]] = []
    started: list[int] = []
    forward = engine._forward

    def watched(work):
        passes.append([(w.sequence.request_id, len(w.tokens), w.rows_wanted) for w in work])
        started.extend(r for r, *_ in passes[-1] if r not in started)
        return forward(work)

    engine._forward = watched  # type: ignore[method-assign]
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, n).tolist() for n in (33, 2, 17, 50, 1, 9, 28, 40)]
    with scripted(llm, repeat_last):
        outputs = llm.generate(prompts, GREEDY)
    assert all(sum(rows for _, rows, _ in p) <= 10 for p in passes)
    assert max(len(p) for p in passes) <= 4 and max(len(p) for p in passes) > 1
    assert any(len(p) > 1 and {w for *_, w in p} >= {0, 1} for p in passes), "prompts and decoding share passes"
    assert started == sorted(started)
    assert engine.stats == SpecDecodeStats.total(o.metrics.spec_decode for o in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == probe.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert_idle(llm)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
def test_any_chunk_size_gives_the_same(tiny_target, world, rows):
    """Prompts in chunks of `rows`, drafts in what is left of a pass."""
    llm = open_llm(tiny_target, Scripted(), dtype=world.dtype, max_num_batched_tokens=rows, max_num_seqs=min(rows, 3))
    prompts = [[(3 * i) % V for i in range(n)] for n in (1, 16, 65)]
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=12, logprobs=1, ignore_eos=True)
    want, oracle = [world.plain.generate(p, params)[0] for p in prompts], Oracle()
    for output in want:
        oracle.learn(output)
    for script in (nothing, oracle):
        with scripted(llm, script):
            for mine, his in zip(llm.generate(prompts, params), want, strict=True):
                assert_same(mine, his, rows)
    assert_idle(llm)


@pytest.mark.parametrize(
    "bad", [lambda s, limit: [V] * limit, lambda s, limit: [-1] * limit], ids=["past the vocabulary", "below 0"]
)
def test_drafts_outside_the_vocabulary_are_an_error(world, bad):
    with scripted(world.spec, bad), pytest.raises(ValueError, match="token id"):
        world.spec.generate([1, 2, 3], GREEDY)
    assert_idle(world.spec)


def test_too_many_drafts_touch_no_neighbour(world):
    """A drafter that ignores its limit must not make a sequence write into blocks of another."""

    class Greedy(Scripted):
        def propose(self, sequences, limits):
            proposal = super().propose(sequences, limits)
            for i, s in enumerate(sequences):
                if len(s.token_ids) > 12:  # ten tokens from the end of its last block: 17 drafts reach past it
                    proposal.drafts[i] = [1] * 17
            return proposal

    llm = open_llm(world.folder, Greedy(), dtype=world.dtype, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    stream = llm.stream([5] * 8, long)  # holds block 0 and many more
    next(stream)
    with pytest.raises(ValueError, match="block_tables"):
        llm.generate([[2] * 7], params)
    stream.close()
    assert_idle(llm)


@pytest.mark.parametrize("taps", [(0, 1), (1,), (-1, 1, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_observes_exactly_the_committed_rows(tiny_target, worlds, dtype, taps):
    """Once each, in order, with the bits that the model gives for the final text, across chunks and rejected drafts."""
    world = worlds[dtype]
    options = {"max_num_batched_tokens": 20, "max_num_seqs": 3, "dtype": dtype}
    llm = open_llm(tiny_target, Scripted(taps=taps), **options)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, V, n).tolist() for n in (45, 3, 20, 1)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=25, ignore_eos=True) for i in range(4)]
    oracle, count = Oracle(), 0
    for prompt, p in zip(prompts, params, strict=True):
        oracle.learn(world.plain.generate(prompt, p)[0])

    def script(sequence, limit):
        right = oracle(sequence, limit)
        return [*right[: sequence.num_output_tokens % 4], 0][:limit]

    with scripted(llm, script) as drafter:
        outputs = llm.generate(prompts, params)
        rows = dict(drafter.rows)
    assert len(rows) == len(prompts)
    for output, seen in zip(outputs, rows.values(), strict=True):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        _, want = llm.model.logits(ids, taps=taps)
        assert len(ids) - 9 <= len(seen) < len(ids)
        assert np.array_equal(np.array(seen).view(np.uint32), want[: len(seen)].view(np.uint32))
        count += len(seen)
    assert count > 100
    # a request without speculation is not tapped
    with scripted(llm, script) as drafter:
        llm.generate(prompts[0], params[0], num_speculative_tokens=0)
        assert not drafter.rows
    assert_idle(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_the_committed_rows(tiny_target, worlds, dtype):
    """After every step: keys and values of each running sequence are those of its text, replayed alone."""
    world = worlds[dtype]
    llm = open_llm(tiny_target, Scripted(), dtype=dtype, max_num_batched_tokens=20, max_num_seqs=3)
    model, engine, compared = llm.model, llm.engine, 0
    width = model.config.num_kv_heads, model.config.head_dim

    def row(cache, layer, block, slot):
        keys, values = np.empty(width, np.float32), np.empty(width, np.float32)
        cache.read(layer, int(block), slot, keys, values)
        return np.concatenate([keys, values]).view(np.uint32)

    step = engine.step

    def checked():
        nonlocal compared
        results = step()
        for s in engine.running:
            if s.num_computed == 0 or s.blocks is None:
                continue
            cache = model.new_cache(10)
            ids = np.array(s.token_ids[: s.num_computed], np.int32)
            for first in range(0, len(ids), 20):
                part = ids[first : first + 20]
                model.plan().forward(
                    cache,
                    np.arange(first, first + len(part), dtype=np.int32),
                    np.array([0, len(part)], np.int32),
                    tokens=part,
                    block_tables=np.arange(10, dtype=np.int32)[None],
                )
            for at in range(max(0, len(ids) - 12), len(ids)):
                for layer in range(model.config.num_layers):
                    mine = row(engine.cache, layer, s.blocks[at // 16], at % 16)
                    assert (mine == row(cache, layer, at // 16, at % 16)).all(), (s.token_ids, at, layer)
                    compared += 1
        return results

    engine.step = checked  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    oracle = Oracle()
    prompts = [[4] * 30, [1, 2, 3], [9, 8] * 11]
    for prompt in prompts:
        oracle.learn(world.plain.generate(prompt, params)[0])
    with scripted(llm, lambda s, limit: [*oracle(s, limit)[:2], 1, 1][:limit]):
        llm.generate(prompts, params)
    assert compared > 200
    assert_idle(llm)
