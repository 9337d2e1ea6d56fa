"""Which sequences, which anchors, which labels: deterministic, complete, inside the answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train.data import (  # noqa: E402
    Phase,
    choose_anchors,
    epoch_batches,
    frequent_rows,
    make_batch,
    split_members,
    training_batches,
)
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.feature_store import FeatureStore, TorchFeatures, batches_by_length  # noqa: E402
from paceline.train.features import extract  # noqa: E402
from paceline.train.target import TorchTarget  # noqa: E402

from .conftest import HIDDEN, TAPS, periodic_answers  # noqa: E402


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 400), min_size=1, max_size=80), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_has_every_sequence_once(lengths: list[int], size: int, epoch: int) -> None:
    batches = epoch_batches(lengths, size, 1, epoch)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert max(map(len, batches)) <= size
    assert batches == epoch_batches(lengths, size, 1, epoch)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(2, 60), st.integers(1, 40))
def test_anchors_lie_in_the_answer_and_have_a_successor(prompt: int, answer: int, count: int) -> None:
    anchors = choose_anchors(prompt, prompt + answer, count, np.random.default_rng(0))
    assert len(anchors) == count
    assert anchors.min() >= prompt
    assert anchors.max() <= prompt + answer - 2
    assert len(set(anchors.tolist())) == min(count, answer - 1)


def test_a_batch_holds_the_blocks_tokens_taps_and_teacher_rows(features: Path) -> None:
    store = FeatureStore(features)
    sequence = store.sequences[3]
    tokens, rows = sequence["tokens"], store.rows(3)
    last = len(tokens) - 2
    anchors = np.array([sequence["prompt_len"], last])
    batch = make_batch(store, [3], [anchors], 4, with_teacher=True)
    first = int(anchors[0])
    assert batch.tokens[0, 0].tolist() == tokens[first : first + 4]
    assert batch.tokens[0, 1].tolist() == [*tokens[-2:], -1, -1]
    assert batch.valid[0].tolist() == [[True] * 3, [True, False, False]]
    assert torch.equal(batch.taps[0, :last], rows[:last, : len(TAPS) * HIDDEN])
    assert batch.teacher is not None
    for slot in range(3):  # the row before a token predicts it
        assert torch.equal(batch.teacher[0, 0, slot], rows[first + slot, -HIDDEN:])
    assert torch.equal(batch.teacher[0, 1, 0], rows[last, -HIDDEN:])


def test_stored_features_are_those_of_the_target(features: Path, target: TorchTarget) -> None:
    store = FeatureStore(features)
    assert len(store) == 60
    for index in (0, 31, 59):
        ids = torch.tensor([store.sequences[index]["tokens"]])
        taps, final = target.forward(ids, TAPS)
        wanted = torch.cat([*(t[0] for t in taps), final[0]], -1)
        torch.testing.assert_close(store.rows(index).float(), wanted, atol=2e-2, rtol=1e-2)


def test_extraction_goes_on_with_the_first_missing_shard(target: TorchTarget, tmp_path: Path) -> None:
    answers = periodic_answers(10)
    extract(TorchFeatures(target), answers, TAPS, tmp_path, shard_sequences=4, report=lambda _: None)
    kept = (tmp_path / "features-00000.bin").stat().st_mtime_ns
    whole = (tmp_path / "features-00001.bin").read_bytes()
    (tmp_path / "features-00001.jsonl").unlink()
    (tmp_path / "features-00001.bin").write_bytes(whole[:100])
    said: list[str] = []
    extract(TorchFeatures(target), answers, TAPS, tmp_path, shard_sequences=4, report=said.append)
    assert len(said) == 1
    assert (tmp_path / "features-00000.bin").stat().st_mtime_ns == kept
    assert (tmp_path / "features-00001.bin").read_bytes() == whole


def test_a_feature_folder_of_other_taps_is_refused(target: TorchTarget, tmp_path: Path) -> None:
    extract(TorchFeatures(target), periodic_answers(2), [1], tmp_path, report=lambda _: None)
    with pytest.raises(TrainError, match="target_layer_ids"):
        extract(TorchFeatures(target), periodic_answers(2), [2], tmp_path, report=lambda _: None)
    with pytest.raises(TrainError, match="target_layer_ids"):
        extract(TorchFeatures(target), periodic_answers(2), [1, 4], tmp_path / "other", report=lambda _: None)


def test_resumed_batches_equal_the_uninterrupted_ones(features: Path) -> None:
    store = FeatureStore(features)
    members, held = split_members(store, 10)
    assert sorted(members + held) == list(range(60))
    assert [store.sequences[i]["id"] for i in held] == [9, 19, 29, 39, 49, 59]
    options = {"batch_size": 8, "anchors": 3, "block_sizes": (3, 4), "seed": 5, "with_teacher": False}
    few = tuple(members[:20])
    phases = [Phase(0, few), Phase(9, tuple(members))]  # in its third epoch of the first 20, data is added
    stream = training_batches(store, phases, first_step=0, **options)  # type: ignore[arg-type]
    whole = [next(stream) for _ in range(20)]
    assert {b.tokens.shape[-1] for b in whole} == {3, 4}
    assert sum(len(b.domains) for b in whole[:9]) == 60
    for step in (3, 7, 8, 9, 15):
        later = next(training_batches(store, phases, first_step=step, **options))  # type: ignore[arg-type]
        assert torch.equal(later.anchors, whole[step].anchors)
        assert torch.equal(later.tokens, whole[step].tokens)
        assert torch.equal(later.taps, whole[step].taps)


def test_splitting_a_batch_keeps_every_sequence(features: Path) -> None:
    store = FeatureStore(features)
    batch = make_batch(store, range(5), [np.array([9, 12])] * 5, 4, with_teacher=True)
    parts = batch.split(2)
    assert [len(p.domains) for p in parts] == [3, 2]
    assert torch.equal(torch.cat([p.tokens for p in parts]), batch.tokens)
    assert [len(p.domains) for p in batch.split(9)] == [1] * 5
    shares = [batch.share(rank, 6) for rank in range(6)]
    assert shares[5] is None
    assert torch.equal(torch.cat([s.taps for s in shares if s]), batch.taps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 900))
def test_padded_batches_stay_below_the_token_limit(lengths: list[int], limit: int) -> None:
    groups = list(batches_by_length(lengths, limit))
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for g in groups:
        assert len(g) == 1 or len(g) * max(lengths[i] for i in g) <= limit


def test_frequent_rows_rank_by_count_and_always_hold_the_end_token() -> None:
    answers = [[5, 5, 5, 7, 7, 2], [9, 7]]
    assert frequent_rows(answers, 3, [19], 20) == [5, 7, 19]
    assert frequent_rows(answers, 6, [19], 20) == [0, 2, 5, 7, 9, 19]
    assert frequent_rows(answers, 99, [19], 20) == list(range(20))
