"""DSpark and DFlash 2 in the layouts they were published in and in that of speculators: there, back, and bit-equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.models import TargetModel, load_model
from paceline.models.dflash import load_drafter
from paceline.models.drafter_config import DFlashConfig
from paceline.weights.convert import write_json

from .relatives import Spark, Walk, spark_config, spark_tensors, walk_config, walk_tensors, write_walk
from .test_drafter_export import converted, same
from .tiny import Draft, Shape, write, write_target

SHAPE = Shape("qwen3", vocab=40, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=256)
ROWS = (0, 3, 5, 12, 20, 31, 39)
SLIDING = Draft(taps=(0, 1), window=9, sliding=(0, 1))
BOTH_WAYS = Draft(taps=(0, 2), window=9, sliding=(0, 1), causal=False, block_size=6)
SPARKS = {
    "vanilla": Spark(Draft(taps=(0, 2))),
    "gated": Spark(SLIDING, kind="gated"),
    "rnn": Spark(Draft(taps=(0, 1, 2), block_size=5), kind="rnn"),
    "fill-in": Spark(Draft(taps=(0, 2), extra={"sample_from_anchor": False})),
    "no heads": Spark(Draft(taps=(0, 2), block_size=4), rank=0, confidence=False),
    "confidence alone": Spark(Draft(taps=(2,)), rank=0, with_markov=False),
    "confidence beside": Spark(Draft(taps=(2,)), with_markov=False),
}
WALKS = {
    "windowed": Walk(BOTH_WAYS),
    "full attention": Walk(Draft(taps=(0, 2), causal=False), kernel=3, group=4, top_k=3),
}


@pytest.fixture(scope="module", params=[False, True], ids=["head apart", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "tied": request.param})
    folder = write_target(tmp_path_factory.mktemp("target"), shape, tokenizer=True)
    # values that bf16 holds, as files do: a head quantised from a file then equals rows of the target's that runs
    bits = {name: x.view(np.uint32) & 0xFFFF0000 for name, x in load_file(folder / "model.safetensors").items()}
    save_file({name: x.view(np.float32) for name, x in bits.items()}, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, target: Path) -> TargetModel:
    return load_model(target, dtype=request.param, threads=1, max_rows=40)


def with_targets_matrices(folder: Path, target: Path) -> Path:
    """DeepSpec's checkpoints carry copies of the target's embedding and head."""
    theirs = load_file(target / "model.safetensors")
    embed = theirs["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embed, "lm_head.weight": theirs.get("lm_head.weight", embed)}
    save_file(load_file(folder / "model.safetensors") | copies, str(folder / "model.safetensors"))
    return folder


def meaning(c: DFlashConfig) -> tuple[Any, ...]:
    return (
        c.family, c.anchor_first, c.max_drafts, c.target_layer_ids, c.mask_token_id, c.causal, c.decoder.windows,
        c.markov, c.confidence, c.selector,
    )  # fmt: skip


def drafts(folder: Path, target: Path, model: TargetModel, method: str) -> list[tuple[list[int], list[int], Any]]:
    """What the drafter proposes in the engine, greedy and with noise: texts, accepted per pass, and its confidence."""
    config = {"method": method, "model": str(folder)}
    llm = LLM(target, threads=1, dtype=model.dtype, speculative_config=config)
    seen: list[Any] = []
    inner = llm.engine.proposer.propose

    def propose(sequences: Any, limits: Any) -> Any:
        out = inner(sequences, limits)
        seen.append(([list(row) for row in out.drafts], out.confidence))
        return out

    llm.engine.proposer.propose = propose  # type: ignore[method-assign]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9)]
    prompt = np.random.default_rng(1).integers(0, SHAPE.vocab, 25).tolist()
    for p in params:
        llm.generate(prompt, p, num_speculative_tokens=3)
    assert len(seen) > 4
    return seen


@pytest.mark.parametrize("name", SPARKS)
def test_dspark_there_and_back(tmp_path, target, model, name):
    d = SPARKS[name]
    plain = write(tmp_path / "first", spark_config(SHAPE, d), spark_tensors(SHAPE, d))
    first = with_targets_matrices(plain, target)
    there = converted(first, target, tmp_path / "there", "speculators")
    back = converted(there, target, tmp_path / "back", "native")
    again = converted(back, target, tmp_path / "again", "speculators")
    same(first, back)
    same(there, again)
    assert json.loads((there / "config.json").read_text()) == json.loads((again / "config.json").read_text())
    folders = (first, there, back, again)
    configs = [load_drafter(f, model).config for f in folders]
    assert [c.packaging for c in configs] == ["DeepSpec", "speculators", "DeepSpec", "speculators"]
    assert len({meaning(c) for c in configs}) == 1
    want = drafts(first, target, model, "dspark")
    assert all(drafts(f, target, model, "dspark") == want for f in folders[1:])


@pytest.mark.parametrize("name", WALKS)
def test_dflash2_there_and_back(tmp_path, target, model, name):
    d = WALKS[name]
    first = write(tmp_path / "first", walk_config(SHAPE, d), walk_tensors(SHAPE, d))
    there = converted(first, target, tmp_path / "there", "speculators")
    back = converted(there, target, tmp_path / "back", "native")
    again = converted(back, target, tmp_path / "again", "speculators")
    same(first, back)
    same(there, again)
    folders = (first, there, back, again)
    configs = [load_drafter(f, model).config for f in folders]
    assert [c.packaging for c in configs] == ["z-lab", "speculators", "z-lab", "speculators"]
    assert len({meaning(c) for c in configs}) == 1
    want = drafts(first, target, model, "dflash2")
    assert all(drafts(f, target, model, "dflash2") == want for f in folders[1:])


def test_listed_rows_of_dflash2_have_no_place_in_speculators(tmp_path, target):
    """That format's DFlash 2 drafts from the whole vocabulary; the native one keeps the list."""
    first = write_walk(tmp_path / "first", SHAPE, replace(WALKS["windowed"], rows=ROWS))
    with pytest.raises(ConfigError, match=r"head_rows\.safetensors.*remove it"):
        converted(first, target, tmp_path / "there", "speculators")
    same(first, converted(first, target, tmp_path / "again", "native"))


def test_a_reduced_dspark_stays_in_its_format(tmp_path, target, model):
    """Head rows of a DeepSpec drafter become d2t; from there is no way back, and that is said."""
    d = SPARKS["vanilla"]
    first = write(tmp_path / "first", spark_config(SHAPE, d), spark_tensors(SHAPE, d))
    save_file({"head_rows": np.array(ROWS, np.int32)}, str(first / "head_rows.safetensors"))
    there = converted(first, target, tmp_path / "there", "speculators")
    tensors = load_file(there / "model.safetensors")
    assert len(tensors["markov_head.markov_w2.weight"]) == len(tensors["lm_head.weight"]) == len(ROWS)
    assert drafts(there, target, model, "dspark") == drafts(first, target, model, "dspark")
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        converted(there, target, tmp_path / "back", "native")


def test_a_calibration_goes_where_its_drafter_goes(tmp_path, target, model):
    """It is a file of its own, and says the same beside either layout."""
    d = SPARKS["vanilla"]
    first = with_targets_matrices(write(tmp_path / "first", spark_config(SHAPE, d), spark_tensors(SHAPE, d)), target)
    there = converted(first, target, tmp_path / "there", "speculators")
    raw = drafts(first, target, model, "dspark")
    for folder in (first, there):
        write_json(folder / "confidence_calibration.json", {"temperatures": [2.0, 0.5]})
    calibrated = drafts(first, target, model, "dspark")
    assert [c for _, c in calibrated] != [c for _, c in raw]
    assert drafts(there, target, model, "dspark") == calibrated
