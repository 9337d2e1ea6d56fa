"""Recorded rounds of a drafter (tests/golden), for the drafter of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.train.model import Drafter, DrafterConfig
from tests.golden.cases import Case


@dataclass(frozen=True, slots=True)
class Round:
    """facts: what `expected.json` says of it; taps: of the rows that came with it; context: of all rows so far."""

    facts: dict[str, Any]
    name: str
    tensors: dict[str, torch.Tensor]
    taps: torch.Tensor
    context: torch.Tensor

    def __getitem__(self, tensor: str) -> torch.Tensor:
        return self.tensors[self.name + tensor]

    def hidden(self, drafter: Drafter) -> torch.Tensor:
        """What the drafter makes of the round's block: [slots, hidden size]."""
        anchors = torch.tensor([[self.facts["anchor_position"]]])
        hidden: torch.Tensor = drafter(self["block_embeds"][None, None], anchors, self.context[None])[0, 0]
        return hidden


def load_drafter(case: Case) -> Drafter:
    drafter = Drafter(DrafterConfig.from_hf(json.loads((case.drafter / "config.json").read_text())))
    drafter.load_state_dict({k: v.float() for k, v in load_file(case.drafter / "model.safetensors").items()})
    return drafter.eval()


def target_head(case: Case) -> torch.Tensor:
    tensors = load_file(case.target / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()


def rounds(case: Case) -> Iterator[Round]:
    tensors = {k: torch.from_numpy(v) for k, v in case.tensors.items()}
    for run in case.expected["runs"]:
        taps: list[torch.Tensor] = []
        for number, facts in enumerate(run["rounds"]):
            name = f"p{run['prompt']}.w{run['width']}.r{number}."
            if name + "taps" not in tensors:
                break  # the context is no longer whole: later rounds cannot be replayed
            taps.append(tensors[name + "taps"])
            yield Round(facts, name, tensors, taps[-1], torch.cat(taps))
