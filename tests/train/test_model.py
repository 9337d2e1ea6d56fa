"""The PyTorch drafter against z-lab's reference outputs, and its training forward against its inference forward."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")


from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.model import Drafter, DrafterConfig  # noqa: E402
from tests.golden.cases import VENDORED, Case, golden_root  # noqa: E402

from .recorded import load_drafter, rounds, target_head  # noqa: E402

CASES = [Case("A", VENDORED)]
CASES += [Case(name, golden_root()) for name in ("A", "B", "D") if (golden_root() / name / "expected.json").exists()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.root.name}-{c.name}")
@torch.no_grad()
def test_equals_the_reference_in_every_recorded_round(case: Case) -> None:
    drafter, head = load_drafter(case), target_head(case)
    outputs: list[torch.Tensor] = []
    for layer in drafter.layers:
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(out[0, 0]))
    checked = 0
    for recorded in rounds(case):
        assert len(recorded.context) == recorded.facts["anchor_position"]
        outputs.clear()
        hidden = recorded.hidden(drafter)
        new = drafter.context(recorded.taps, torch.float32)
        torch.testing.assert_close(new, recorded["ctx"], atol=1e-4, rtol=1e-4)
        for i, out in enumerate(outputs):
            torch.testing.assert_close(out, recorded[f"layer{i}_out"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden, recorded["draft_hidden"], atol=1e-4, rtol=1e-4)
        logits = hidden[1:] @ head.T
        torch.testing.assert_close(logits, recorded["draft_logits"], atol=1e-4, rtol=1e-4)
        assert logits.argmax(-1).tolist() == recorded.facts["draft_tokens"]
        checked += 1
    assert checked


def small(**changes: object) -> Drafter:
    shape: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "vocab_size": 60,
        "num_target_layers": 6,
        "target_layer_ids": (1, 3),
        "mask_token_id": 59,
        "block_size": 5,
    }
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig(**{**shape, **changes}))  # type: ignore[arg-type]
    for p in drafter.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)
    return drafter


VARIANTS = [
    {},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4, "is_causal": False},
    {"is_causal": True},
]


@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_training_forward_equals_inference_forward(changes: dict[str, object]) -> None:
    drafter = small(**changes)
    taps = torch.randn(2, 20, 64)
    anchors = torch.tensor([[3, 9, 17], [1, 5, 20]])
    embeds = torch.randn(2, 3, 5, 32)
    together = drafter(embeds, anchors, taps)
    for s in range(2):
        for a in range(3):
            at = int(anchors[s, a])
            alone = drafter(embeds[s : s + 1, a : a + 1], anchors[s : s + 1, a : a + 1], taps[s : s + 1, :at])
            torch.testing.assert_close(together[s, a], alone[0, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_blocks_see_neither_each_other_nor_what_lies_behind_their_anchor() -> None:
    drafter = small()
    taps = torch.randn(1, 12, 64)
    anchors = torch.tensor([[4, 8]])
    embeds = torch.randn(1, 2, 5, 32)
    before = drafter(embeds, anchors, taps)[0, 0]
    taps[0, 4:] = 100.0
    embeds[0, 1] = -3.0
    torch.testing.assert_close(drafter(embeds, anchors, taps)[0, 0], before, atol=0, rtol=0)
    taps[0, 3] += 1.0
    assert not torch.equal(drafter(embeds, anchors, taps)[0, 0], before)


def test_config_survives_the_trip_through_config_json() -> None:
    for changes in VARIANTS:
        config = small(**changes).config
        assert DrafterConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mask_token_id": 60}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window"),
    ],
)
def test_impossible_shapes_are_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(TrainError, match=field):
        small(**changes)


@pytest.mark.parametrize("missing", ["mask_token_id", "target_layer_ids"])
def test_a_checkpoint_without_a_pairing_field_is_refused(missing: str) -> None:
    config = small().config.to_hf()
    del config["dflash_config"][missing]
    with pytest.raises(TrainError, match=missing):
        DrafterConfig.from_hf(config)
