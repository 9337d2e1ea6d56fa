"""The PyTorch target against transformers: logits, taps, and what padding may not change."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.target import TargetConfig, TorchTarget  # noqa: E402

from .conftest import CONFIG  # noqa: E402


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equals_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen2": ("Qwen2Config", "Qwen2ForCausalLM")}
    config_name, model_name = kinds.get(family, ("Qwen3Config", "Qwen3ForCausalLM"))
    fields = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = getattr(transformers, config_name)(**fields)
    torch.manual_seed(1)
    reference = getattr(transformers, model_name)(config).eval()
    for p in reference.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    ours = TorchTarget(TargetConfig.from_hf(config.to_dict()), dict(reference.state_dict()))
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 19))
    with torch.no_grad():
        wanted = reference(ids, output_hidden_states=True)
    taps, final = ours.forward(ids, [0, 2])
    torch.testing.assert_close(taps[0], wanted.hidden_states[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(taps[1], wanted.hidden_states[3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(F.linear(final, ours.head), wanted.logits, atol=1e-4, rtol=1e-4)


def test_padding_behind_a_sequence_changes_nothing(target: TorchTarget) -> None:
    ids = torch.randint(0, 90, (1, 13))
    padded = torch.cat((ids, torch.zeros(1, 9, dtype=torch.long)), 1)
    taps, final = target.forward(ids, [1])
    padded_taps, padded_final = target.forward(padded, [1])
    torch.testing.assert_close(padded_taps[0][:, :13], taps[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded_final[:, :13], final, atol=1e-5, rtol=1e-5)


def test_taps_come_in_list_order(target: TorchTarget) -> None:
    ids = torch.randint(0, 90, (1, 5))
    forward, _ = target.forward(ids, [0, 3])
    backward, _ = target.forward(ids, [3, 0])
    assert torch.equal(forward[0], backward[1])
    assert torch.equal(forward[1], backward[0])


def test_unknown_families_and_rope_variants_are_refused_by_field() -> None:
    with pytest.raises(TrainError, match="model_type"):
        TargetConfig.from_hf({**CONFIG, "model_type": "gemma3"})
    with pytest.raises(TrainError, match="rope_scaling"):
        TargetConfig.from_hf({**CONFIG, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
