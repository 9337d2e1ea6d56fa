"""The golden harness itself: it finds every case, accepts recorded runs and rejects deviations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from . import cases, checks
from .cases import VENDORED, Case


@pytest.fixture
def case() -> Case:
    return Case("A", VENDORED)


def _recorded(case: Case, expected: dict[str, Any]) -> checks.Run:
    """The run that a perfect engine would report: the expected values themselves."""
    rounds = []
    for index, each in enumerate(expected["rounds"]):
        prefix = f"p{expected['prompt']}.w{expected['width']}.r{index}."
        names = [name for name in case.tensors if name.startswith(prefix)]
        rounds.append(
            checks.Round(
                anchor_position=each["anchor_position"],
                anchor_token=each["anchor_token"],
                draft_tokens=list(each["draft_tokens"]),
                num_accepted=each["num_accepted"],
                produced_tokens=list(each["produced_tokens"]),
                verified_draft_tokens=each.get("verified_draft_tokens"),
                confidence=each.get("confidence"),
                tensors={name.removeprefix(prefix): case.tensors[name].copy() for name in names},
            )
        )
    return checks.Run(list(expected["output"]), rounds)


def test_vendored_cases_are_always_found() -> None:
    names = [name for name, _, _ in cases.all_parts()]
    assert {"vendored/A:target", "vendored/A:speculation", "vendored/H/llama:target"} <= set(names)
    assert len(names) == len(set(names))


def test_every_case_of_a_folder_is_found(tmp_path) -> None:
    for name in ("X/target", "X/drafter", "Y/deep/target", "Z"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("X", "Y/deep", "Z"):
        (tmp_path / name / "expected.json").write_text("{}")
    found = {case.name: case.parts for case in cases.discover(tmp_path)}
    assert found == {"X": ("target", "speculation"), "Y/deep": ("target",), "Z": ("sampling",)}


def test_a_golden_folder_that_does_not_exist_is_an_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PACELINE_GOLDEN_DIR", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="PACELINE_GOLDEN_DIR"):
        cases.golden_root()


def test_pending_lists_whole_cases_and_parts() -> None:
    listed = cases.read_pending("# note\nA:speculation  # why\n\nH/x\n")
    assert listed == {("A", "speculation"), ("H/x", "target"), ("H/x", "speculation"), ("H/x", "sampling")}
    with pytest.raises(ValueError, match="part 'drafter' is none of"):
        cases.read_pending("A:drafter")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case, part in cases.all_parts() if part == "speculation"]
)
def test_a_perfect_run_passes(case: Case) -> None:
    for expected in case.expected["runs"]:
        checks.check_run(case, expected, _recorded(case, expected))


def _change_output(run: checks.Run) -> None:
    run.output[-1] ^= 1


def _shift_position(run: checks.Run) -> None:
    run.rounds[1].anchor_position += 1


def _change_draft(run: checks.Run) -> None:
    run.rounds[2].draft_tokens[-1] ^= 1


def _change_count(run: checks.Run) -> None:
    run.rounds[0].num_accepted += 1


def _change_produced(run: checks.Run) -> None:
    run.rounds[0].produced_tokens.append(0)


def _drop_rounds(run: checks.Run) -> None:
    del run.rounds[2:]


def _move_logit(run: checks.Run) -> None:
    run.rounds[0].tensors["draft_logits"][0, 0] += 1e-2


def _spoil_logit(run: checks.Run) -> None:
    run.rounds[0].tensors["verify_logits"][-1, -1] = np.nan


def _omit_logits(run: checks.Run) -> None:
    del run.rounds[0].tensors["draft_logits"]


@pytest.mark.parametrize(
    "deviate",
    [
        _change_output,
        _shift_position,
        _change_draft,
        _change_count,
        _change_produced,
        _drop_rounds,
        _move_logit,
        _spoil_logit,
        _omit_logits,
    ],
)
def test_a_deviating_run_fails(case: Case, deviate: Callable[[checks.Run], None]) -> None:
    expected = next(run for run in case.expected["runs"] if run.get("dumped_rounds"))
    observed = _recorded(case, expected)
    deviate(observed)
    with pytest.raises(AssertionError):
        checks.check_run(case, expected, observed)


def test_drafts_of_a_block_cut_by_the_end_are_free(case: Case) -> None:
    expected = case.expected["runs"][0]
    last = expected["rounds"][-1]
    assert last["verify_width"] < expected["width"]
    observed = _recorded(case, expected)
    observed.rounds[-1].draft_tokens = [0] * expected["width"]
    checks.check_run(case, expected, observed)


class _Replay:
    """A target that answers from the recorded values; what is not recorded is zero."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.error = 0.0

    def logits(self, ids):
        vocabulary = len(self.case.tensors["p0.prefill_last_logits"])
        logits = np.zeros((len(ids), vocabulary), np.float32)
        for index, prompt in enumerate(self.case.expected["prompts"]):
            if list(ids) == prompt["ids"]:
                last = self.case.tensors.get(f"p{index}.prompt_logits_last8")
                if last is not None:
                    logits[-8:] = last
                logits[-1] = self.case.tensors[f"p{index}.prefill_last_logits"]
            elif list(ids) == prompt["ids"] + prompt["ar"]:
                logits[-1] = self.case.tensors[f"p{index}.final_logits"]
        return logits + np.float32(self.error)

    def greedy(self, ids, count):
        (found,) = (prompt["ar"] for prompt in self.case.expected["prompts"] if prompt["ids"] == list(ids))
        return list(found[:count])

    def hidden_states(self, ids):
        return None


def test_target_check_passes_on_recorded_values_and_fails_on_others() -> None:
    replay = _Replay(Case("H/llama", VENDORED))
    checks.check_target(replay.case, replay)
    replay.error = 1e-2
    with pytest.raises(AssertionError, match="prefill_last_logits"):
        checks.check_target(replay.case, replay)
