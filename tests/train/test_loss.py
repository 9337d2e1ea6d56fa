"""The head loss against autograd on plain formulas, and what its weights mean."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train import loss as loss_module  # noqa: E402
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.loss import LossConfig, acceptance, head_loss, parse_loss, position_weights  # noqa: E402


def example(blocks: int = 7, slots: int = 4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(blocks)
    hidden = torch.randn(blocks, slots, 6, requires_grad=True)
    head = torch.randn(11, 6)
    labels = torch.randint(0, 11, (blocks, slots))
    valid = torch.ones(blocks, slots, dtype=torch.bool)
    valid[0, 2:] = False
    labels[1, 1] = -1
    labels[~valid] = -1
    return hidden, head, labels, valid, torch.randn(blocks, slots, 6)


@pytest.mark.parametrize("weighting", ["dpace", "decay", "uniform"])
@pytest.mark.parametrize("mix", [(1.0, 0.0, 0.0), (0.7, 0.3, 0.0), (0.0, 1.0, 0.0), (0.1, 0.0, 0.9), (0.2, 0.3, 0.5)])
def test_value_and_gradient_equal_the_plain_formula(
    weighting: str, mix: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BLOCKS", 3)  # several chunks, the last one short
    hidden, head, labels, valid, teacher = example()
    ce, kl, tv = mix
    config = LossConfig(weighting=weighting, ce=ce, kl=kl, tv=tv)  # type: ignore[arg-type]
    total, weight, hit = head_loss(hidden, head, labels, valid, config, teacher)
    (2.5 * total).backward()

    reference = hidden.detach().clone().requires_grad_()
    log_prob = torch.log_softmax(reference @ head.T, -1)
    picked = log_prob.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    seen = labels >= 0
    weights = position_weights(config, picked.detach().exp() * seen, valid) * seen
    soft = torch.softmax(teacher @ head.T, -1)
    apart = (log_prob.exp() - soft).abs().sum(-1)
    plain = weights * (-ce * picked - kl * (soft * log_prob).sum(-1) + tv * apart)
    (2.5 * plain.sum()).backward()
    torch.testing.assert_close(total, plain.sum())
    torch.testing.assert_close(weight, weights.sum())
    torch.testing.assert_close(hidden.grad, reference.grad)
    assert torch.equal(hit, (log_prob.argmax(-1) == labels) & seen)


def test_loss_weights_are_read_by_name() -> None:
    assert parse_loss("ce=0.1, tv=0.9") == {"ce": 0.1, "kl": 0.0, "tv": 0.9}
    for wrong in ("ce", "ce=x", "mse=1", "ce=-1", "kl=0", "ce=inf", "ce=nan"):
        with pytest.raises(TrainError, match="--loss"):
            parse_loss(wrong)


def test_dpace_weight_is_the_expected_length_that_hangs_on_a_slot() -> None:
    p = torch.tensor([[0.9, 0.5, 0.2]], dtype=torch.float64)
    valid = torch.ones(1, 3, dtype=torch.bool)
    q = (0.5 * p + 0.5)[0]
    wanted = [
        q[0] + q[0] * q[1] + q[0] * q[1] * q[2],
        q[0] * q[1] + q[0] * q[1] * q[2],
        q[0] * q[1] * q[2],
    ]
    torch.testing.assert_close(position_weights(LossConfig(), p, valid)[0], torch.stack(wanted))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 8))
def test_dpace_weights_fall_along_a_block_and_vanish_behind_its_end(probs: list[float], length: int) -> None:
    valid = (torch.arange(len(probs)) < length)[None]
    weights = position_weights(LossConfig(), torch.tensor([probs], dtype=torch.float64), valid)[0]
    assert torch.all(weights[~valid[0]] == 0)
    assert torch.all(weights[valid[0]] > 0)
    inside = weights[valid[0]]
    assert torch.all(inside[1:] <= inside[:-1] + 1e-12)


def test_decay_weights() -> None:
    weights = position_weights(LossConfig("decay", gamma=4.0), torch.rand(1, 3), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(weights[0], torch.exp(-torch.arange(3) / 4.0))


def test_acceptance_counts_prefixes_of_whole_blocks() -> None:
    hit = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[3, 2] = False  # reaches beyond its answer: not counted
    survival, length = acceptance(hit, valid)
    torch.testing.assert_close(survival, torch.tensor([2 / 3, 2 / 3, 1 / 3]))
    assert float(length) == pytest.approx(1 + 5 / 3)


def test_gradient_reaches_the_hidden_states_in_their_own_dtype() -> None:
    hidden = torch.randn(2, 3, 6, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(2, 3, dtype=torch.long)
    total, _, _ = head_loss(hidden, torch.randn(11, 6), labels, labels == 0, LossConfig())
    total.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert F.normalize(hidden.grad.float(), dim=-1).abs().sum() > 0
