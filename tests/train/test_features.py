"""Features by the engine: those of the PyTorch target, whatever shares a pass, by one process or several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("paceline._native")

from filelock import FileLock  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.models.target import TargetModel, load_model  # noqa: E402
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.feature_store import FeatureStore, TorchFeatures  # noqa: E402
from paceline.train.features import EngineFeatures, extract, packed  # noqa: E402
from paceline.train.regenerate import Answer, loop_start, usable  # noqa: E402
from paceline.train.target import TorchTarget  # noqa: E402

from .conftest import HIDDEN, TAPS, periodic_answers  # noqa: E402


@pytest.fixture(scope="module")
def model(target_folder: Path) -> TargetModel:
    return load_model(target_folder, dtype="float32", threads=1, max_rows=64)


def values(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16).float()


@pytest.mark.parametrize("taps", [TAPS, (1,), (3, 0), (0, 1, 2, 3)])
def test_the_engine_and_pytorch_agree(model: TargetModel, target: TorchTarget, taps: tuple[int, ...]) -> None:
    """To 1e-3 of the norm in fp32: what is left is the file's bfloat16, where a value lies between two."""
    sequences = [[5, 6, 7], list(range(2, 60)), [9]]
    for a, b in zip(
        EngineFeatures(model).rows(sequences, taps), TorchFeatures(target).rows(sequences, taps), strict=True
    ):
        assert a.dtype == b.dtype == np.uint16
        assert a.shape == b.shape == (a.shape[0], (len(taps) + 1) * HIDDEN)
        assert float((values(a) - values(b)).norm() / values(b).norm()) < 1e-3


def test_rows_do_not_depend_on_what_shares_their_pass(model: TargetModel) -> None:
    source = EngineFeatures(model)
    sequences = [list(range(2, 2 + n)) for n in (3, 17, 16, 1, 20)]
    together = source.rows(sequences, TAPS)
    for s, rows in zip(sequences, together, strict=True):
        assert np.array_equal(source.rows([s], TAPS)[0], rows)


def test_a_sequence_longer_than_a_pass_is_cut_into_several(target_folder: Path, model: TargetModel) -> None:
    short = EngineFeatures(load_model(target_folder, dtype="float32", threads=1, max_rows=16))
    long = [2 + i % 80 for i in range(50)]
    assert np.array_equal(short.rows([long], TAPS)[0], EngineFeatures(model).rows([long], TAPS)[0])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_packing_keeps_order_and_limit(lengths: list[int], limit: int) -> None:
    groups = list(packed(lengths, limit))
    assert [i for g in groups for i in g] == list(range(len(lengths)))
    assert all(len(g) == 1 or sum(lengths[i] for i in g) <= limit for g in groups)


def test_a_shard_that_another_process_holds_is_left_to_it(model: TargetModel, tmp_path: Path) -> None:
    source, answers = EngineFeatures(model), periodic_answers(20)
    with FileLock(tmp_path / "features-00001.lock"):
        extract(source, answers, TAPS, tmp_path, shard_sequences=5, report=lambda _: None)
        assert sorted(f.name for f in tmp_path.glob("*.jsonl")) == [f"features-0000{i}.jsonl" for i in (0, 2, 3)]
    extract(source, answers, TAPS, tmp_path, shard_sequences=5, report=lambda _: None)
    assert [s["id"] for s in FeatureStore(tmp_path).sequences] == list(range(20))
    assert not list(tmp_path.glob("*.partial"))


WORKER = """
import sys
from pathlib import Path
from paceline.models.target import load_model
from paceline.train.features import EngineFeatures, extract
from tests.train.conftest import TAPS, periodic_answers
model = load_model(sys.argv[1], dtype="float32", threads=1, max_rows=64)
extract(EngineFeatures(model), periodic_answers(40), TAPS, Path(sys.argv[2]), shard_sequences=4, report=lambda _: None)
"""


@pytest.mark.slow
def test_two_processes_fill_a_folder_as_one_does(target_folder: Path, model: TargetModel, tmp_path: Path) -> None:
    two = tmp_path / "two"
    arguments = [sys.executable, "-c", WORKER, str(target_folder), str(two)]
    root = Path(__file__).parents[2]
    workers = [subprocess.Popen(arguments, cwd=root) for _ in range(2)]
    assert [w.wait() for w in workers] == [0, 0]
    extract(EngineFeatures(model), periodic_answers(40), TAPS, tmp_path / "one", shard_sequences=4, report=lambda _: 0)
    for file in sorted((tmp_path / "one").glob("features-*")):
        assert (two / file.name).read_bytes() == file.read_bytes()


def test_taps_that_the_target_lacks_are_refused(model: TargetModel, tmp_path: Path) -> None:
    for taps in ([4], [-1], [1, 1], []):
        with pytest.raises(TrainError, match="target_layer_ids"):
            extract(EngineFeatures(model), periodic_answers(2), taps, tmp_path / "x", report=lambda _: None)
    assert not (tmp_path / "x").exists() or json.loads((tmp_path / "x" / "meta.json").read_text())


@settings(max_examples=150, deadline=None)
@given(
    head=st.lists(st.integers(0, 5), max_size=30),
    period=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    rounds=st.integers(0, 8),
    tail=st.integers(0, 8),
)
def test_loops_are_cut_after_their_second_round(head: list[int], period: list[int], rounds: int, tail: int) -> None:
    tokens = head + period * rounds + period[:tail]
    cut = loop_start(tokens)
    assert 0 <= cut <= len(tokens)
    if rounds >= 3:
        assert cut <= len(head) + 2 * len(period)
    if cut < len(tokens):  # what was cut away is foretold by what was kept
        assert any(all(tokens[i] == tokens[i - p] for i in range(cut, len(tokens))) for p in range(1, cut + 1))


def test_answers_without_a_loop_are_kept_whole() -> None:
    assert loop_start([1, 2, 3, 4, 1, 2, 3, 4]) == 8  # twice may be meant
    answer = Answer(0, "a", [1], [5, 6, 7] * 5)
    assert next(usable([answer], max_prompt=9, max_answer=99)).answer == [5, 6, 7] * 5
    assert next(usable([answer], max_prompt=9, max_answer=99, trim_loops=True)).answer == [5, 6, 7] * 2
    assert next(usable([answer], max_prompt=9, max_answer=8, trim_loops=True)).answer == [5, 6, 7, 5, 6, 7, 5, 6]
