"""The GPU run in small on a CPU: packed, staged, run in a process without the native core, cut off, and joined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.export import load_drafter  # noqa: E402
from paceline.train.package import PackedPrompts, join_bundle, split_bundle  # noqa: E402
from paceline.train.quarter_hour import fitting  # noqa: E402

from .conftest import VOCAB  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train" / "gpu_quarter_hour.sh"

# paceline as it is on a machine where nothing was built
BARE = """
import runpy, sys
sys.modules["paceline._native"] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def bare_python(folder: Path) -> Path:
    """A `python3` that runs `-m MODULE ...` without the native core."""
    program = folder / "bare.py"
    program.write_text(BARE)
    wrapper = folder / "python3"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = -m ] && shift\nexec "{sys.executable}" "{program}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def script(*arguments: object, **environment: object) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    env |= {k: str(v) for k, v in environment.items()}
    done = subprocess.run([SCRIPT, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_from_prompts_to_a_measured_drafter(target_folder: Path, tmp_path: Path) -> None:
    prompts, held = tmp_path / "prompts.jsonl", tmp_path / "held.jsonl"
    lines = [json.dumps({"prompt": f"w{5 + i} w{9 + i} w7", "domain": "ab"[i % 2]}) for i in range(40)]
    prompts.write_text("\n".join(lines[:32]) + "\n")
    held.write_text("\n".join(json.dumps({"prompt": f"w{50 + i} w{4 + i}"}) for i in range(6)) + "\n")
    packed, work, out = tmp_path / "packed", tmp_path / "work", tmp_path / "out"
    said = script("pack", prompts, packed, "--model", target_folder, "--held-out", held, "--part-mib", 0.05)
    parts = sorted(packed.iterdir())
    assert "32 prompts" in said
    assert len(parts) > 1
    there = {"WORK": work, "OUT": out, "PYTHON": bare_python(tmp_path)}
    for part in parts:
        script("stage", part, **there)
    options = ["--device", "cpu", "--dtype", "float32", "--max-tokens", 20, "--samples", 2, "--decode-batch", 8]
    options += ["--taps", "2,0,3", "--layers", 1, "--block-size", 4, "--head-rows", 60, "--batch-size", 8]
    options += ["--anchors", 4, "--checkpoint-every", 5, "--log-every", 5, "--steps", 12]
    said = script("run", *options, **there)
    assert "features of 64 answers" in said  # a greedy and a sampled answer to each prompt
    assert "finished" in said
    made = sorted(p.name for p in out.iterdir())
    assert made == ["bundle.0", "curve.jsonl", "log.jsonl", "parts.json"]
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve] == [5, 10, 12]
    assert set(curve[-1]["length"]) == {"held", "mean"}
    script("join", out, tmp_path / "drafter")
    drafter, rows = load_drafter(tmp_path / "drafter")
    assert rows is not None
    assert len(rows) == 60
    assert drafter.config.block_size == 4
    state = torch.load(work / "run" / "checkpoint.pt", weights_only=True)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(tensor, state["model"][name].to(torch.bfloat16).float())
    other = ["--name", "other", "--domains", "a", "--weighting", "decay", "--block-sizes", "3,4"]
    assert "answers:" not in script("run", *options, *other, **there)  # it shares the answers, and trains by itself
    assert torch.load(work / "other" / "checkpoint.pt", weights_only=True)["step"] == 12
    again = script("run", *options, **there)  # nothing is left to do, and nothing is made again
    assert "answers:" not in again
    assert "finished" in again


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_and_has_left_a_drafter(target_folder: Path, tmp_path: Path) -> None:
    from paceline.train.pack_run import pack
    from paceline.train.quarter_hour import main

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{5 + i} w7"}) + "\n" for i in range(24)))
    sizes = {"held_count": 4, "longest": 100, "limit": None, "part": 1 << 20}
    parts = pack(str(target_folder), prompts, [str(prompts)], tmp_path / "packed", **sizes)  # type: ignore[arg-type]
    work, out = tmp_path / "work", tmp_path / "out"
    options = ["--inputs", *map(str, parts), "--work", str(work), "--out", str(out), "--device", "cpu"]
    options += ["--dtype", "float32", "--max-tokens", "16", "--samples", "1", "--taps", "2,0,3", "--layers", "1"]
    options += ["--block-size", "4", "--head-rows", "60", "--batch-size", "8", "--anchors", "4", "--log-every", "1"]
    # no time at all: the call measures nothing, trains a step and must still hand over a drafter
    main([*options, "--minutes", "0"])
    first = torch.load(work / "run" / "checkpoint.pt", weights_only=True)["step"]
    assert first >= 1
    join_bundle([out], tmp_path / "early")
    load_drafter(tmp_path / "early")
    spent = json.loads((work / "run.json").read_text())["spent"]
    main([*options, "--steps", "10"])
    assert torch.load(work / "run" / "checkpoint.pt", weights_only=True)["step"] == 10
    assert json.loads((work / "run.json").read_text())["spent"] > spent


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["code", "chat", "ü"]), st.lists(st.integers(0, 200_000), max_size=9)), min_size=1
    )
)
def test_packed_prompts_come_back(rows: list[tuple[str, list[int]]]) -> None:
    import tempfile

    packed = PackedPrompts([d for d, _ in rows], [ids for _, ids in rows])
    with tempfile.TemporaryDirectory() as folder:
        packed.save(Path(folder) / "p.npz")
        assert PackedPrompts.load(Path(folder) / "p.npz") == packed


def test_bundles_are_cut_and_joined_and_a_missing_part_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = [(f"a/{i}.bin", tmp_path / f"{i}.bin") for i in range(3)]
    for _, path in files:
        path.write_bytes(rng.bytes(7000))
    parts = split_bundle(files, tmp_path / "parts", 8192)
    assert all(f.stat().st_size <= 8192 for p in parts for f in p.iterdir())
    join_bundle(parts[::-1], tmp_path / "back")
    for name, path in files:
        assert (tmp_path / "back" / name).read_bytes() == path.read_bytes()
    with pytest.raises(TrainError, match=r"bundle\.1"):
        join_bundle([parts[0], *parts[2:]], tmp_path / "x")
    (parts[1] / "bundle.1").write_bytes(b"half")
    with pytest.raises(TrainError, match="4 bytes"):
        join_bundle(parts, tmp_path / "x")
    with pytest.raises(TrainError, match=r"parts\.json"):
        join_bundle([tmp_path], tmp_path / "x")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 9), st.floats(0, 3000))
def test_features_that_fit_are_the_longest_prefix(lengths: list[int], row: int, room: float) -> None:
    count = fitting(lengths, row, room)
    assert sum(lengths[:count]) * row <= room
    assert count == len(lengths) or sum(lengths[: count + 1]) * row > room


def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(TrainError, match="packed prompts"):
        PackedPrompts.load(tmp_path / "p.npz")
    assert VOCAB < 1 << 16
