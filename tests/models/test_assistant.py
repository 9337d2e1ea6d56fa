"""Muse Glimmer with the drafter that it ships: the drafts and the tokens of transformers' assisted generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.cli.drafter_info import describe_drafter
from paceline.errors import ConfigError
from paceline.models import load_model
from paceline.models.dflash import load_drafter
from paceline.weights.checkpoint import open_checkpoint

from .families import ASSISTANT, CONFIGS, tensors, write_assistant, write_family

TARGET = CONFIGS["muse_glimmer"]
TOKENS = 40
SLOTS = ASSISTANT["block_size"] - 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = write_family(tmp_path_factory.mktemp("target"), TARGET, sharp=3.0, tokenizer=True)
    return target, write_assistant(tmp_path_factory.mktemp("assistant"), ASSISTANT)


def prompts() -> list[list[int]]:
    """Within the drafter's window of 20, across it, and far beyond it."""
    rng = np.random.default_rng(2)
    return [rng.integers(0, 90, n).tolist() for n in (7, 33, 120)]


def theirs(folders: tuple[Path, Path], prompt: list[int]) -> tuple[list[int], list[list[int]]]:
    """(new tokens, drafts of every round)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    target = transformers.MuseGlimmerForConditionalGeneration.from_pretrained(folders[0], **options)
    assistant = transformers.MuseGlimmerAssistantModel.from_pretrained(folders[1], **options)
    target.generation_config.eos_token_id = None
    rounds: list[list[int]] = []
    candidates = Generator.get_candidates

    def noting(self: Any, input_ids: Any, *arguments: Any, **named: Any) -> Any:
        out = candidates(self, input_ids, *arguments, **named)
        rounds.append(out[0][0, input_ids.shape[1] :].tolist())
        return out

    ids = torch.tensor([prompt])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "get_candidates", noting)
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=TOKENS,
        )
    return out[0, len(prompt) :].tolist(), [r for r in rounds if r]


def ours(llm: LLM, prompt: list[int]) -> tuple[list[int], list[list[int]]]:
    rounds: list[list[int]] = []
    proposer = llm.engine.proposer
    assert proposer is not None
    propose = proposer.propose

    def noting(*arguments: Any) -> Any:
        proposal = propose(*arguments)
        rounds.extend(list(drafts) for drafts in proposal.drafts)
        return proposal

    proposer.propose = noting  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    output = llm.generate(prompt, params, num_speculative_tokens=SLOTS)[0]
    proposer.propose = propose  # type: ignore[method-assign]
    return output.outputs[0].token_ids, rounds


@pytest.mark.slow
def test_drafts_and_tokens_are_those_of_transformers(folders):
    target, assistant = folders
    config = {"method": "dflash", "model": str(assistant)}
    llm = LLM(target, dtype="float32", threads=1, speculative_config=config)
    plain = LLM(target, dtype="float32", threads=1)
    steps = 0
    for prompt in prompts():
        tokens, rounds = theirs(folders, prompt)
        got, drafts = ours(llm, prompt)
        assert got == tokens == ours_plain(plain, prompt)
        # near the end blocks are shorter here, and a whole one is cut there: other masks, other drafts
        whole = [(mine, his) for mine, his in zip(drafts, rounds, strict=False) if len(mine) == len(his) == SLOTS]
        assert len(whole) >= TOKENS // SLOTS and abs(len(drafts) - len(rounds)) <= 1
        for mine, his in whole:
            assert mine == his
        steps += len(drafts)
    assert steps < (TOKENS - 1) * len(prompts()), "no draft was taken: the cache of accepted rows was not tried"


def ours_plain(llm: LLM, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_it_is_recognised_and_fits(folders):
    target, assistant = folders
    with open_checkpoint(assistant) as drafter, open_checkpoint(target) as model:
        facts = describe_drafter(drafter, model)
    assert (facts["family"], facts["packaging"], facts["fits"]) == ("dflash", "transformers", True)
    assert facts["layers"] == ["window of 21, slots see each other"] * 2
    assert facts["recognised_by"][0] == "architectures = 'MuseGlimmerAssistantModel'"
    with open_checkpoint(target) as model:
        assert len(tensors(TARGET)) == len(model.names())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("mask_token_id", {"mask_token_id": 97}),
        ("target_layer_ids", {"target_layer_ids": [1, 6]}),
        ("target_layer_ids", {"target_layer_ids": None}),
        ("block_size", {"block_size": None}),
        ("sliding_window", {"sliding_window": None}),
        ("hidden_size", {"hidden_size": 96}),
        ("hidden_act", {"hidden_act": "gelu"}),
    ],
)
def test_what_does_not_fit_is_named(folders, tmp_path, field, change):
    target = load_model(folders[0], dtype="float32", threads=1)
    config = {**ASSISTANT, **change}
    folder = write_assistant(tmp_path, ASSISTANT)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=field):
        load_drafter(folder, target)
