"""Training the heads of DSpark: their loss against autograd, a frozen backbone, and what comes out in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from paceline import LLM, SamplingParams  # noqa: E402
from paceline.speculation.dspark import DSparkProposer  # noqa: E402
from paceline.train import loss as loss_module  # noqa: E402
from paceline.train.cli import app  # noqa: E402
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.evaluate import evaluate  # noqa: E402
from paceline.train.export import load_drafter  # noqa: E402
from paceline.train.feature_store import FeatureStore  # noqa: E402
from paceline.train.loading import load_heads, load_tensor, open_model  # noqa: E402
from paceline.train.loss import LossConfig, dspark_loss, position_weights  # noqa: E402
from paceline.train.model import Drafter, DrafterConfig  # noqa: E402
from paceline.train.start import principal_rows  # noqa: E402

from .test_loss import example  # noqa: E402


@pytest.mark.parametrize("mix", [(1.0, 0.0, 0.0), (0.1, 0.0, 0.9), (0.2, 0.3, 0.5)])
@pytest.mark.parametrize("frozen", [False, True])
def test_value_and_gradients_equal_the_plain_formula(
    mix: tuple[float, float, float], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BLOCKS", 3)
    hidden, head, labels, valid, teacher = example()
    hidden = hidden.detach().requires_grad_(not frozen)
    ce, kl, tv = mix
    config = LossConfig(ce=ce, kl=kl, tv=tv, confidence=0.7)
    leaves = [torch.randn(7, 4, 3), torch.randn(11, 3), torch.randn(7, 4)]
    given, table, sure = (x.clone().requires_grad_() for x in leaves)
    total, weight, hit = dspark_loss(hidden, head, labels, valid, config, teacher, given, table, sure)
    (2.5 * total).backward()

    h = hidden.detach().clone().requires_grad_()
    g, t, c = (x.clone().requires_grad_() for x in leaves)
    log_prob = torch.log_softmax(h @ head.T + g @ t.T, -1)
    picked = log_prob.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    seen = labels >= 0
    weights = position_weights(config, picked.detach().exp() * seen, valid) * seen
    soft = torch.softmax(teacher @ head.T, -1)
    apart = (log_prob.exp() - soft).abs().sum(-1)
    judged = F.binary_cross_entropy_with_logits(c, 1 - 0.5 * apart.detach(), reduction="none")
    plain = weights * (-ce * picked - kl * (soft * log_prob).sum(-1) + tv * apart + 0.7 * judged)
    (2.5 * plain.sum()).backward()
    torch.testing.assert_close(total, plain.sum())
    torch.testing.assert_close(weight, weights.sum())
    assert torch.equal(hit, (log_prob.argmax(-1) == labels) & seen)
    for mine, reference in ((given, g), (table, t), (sure, c)):
        torch.testing.assert_close(mine.grad, reference.grad)
    assert hidden.grad is None if frozen else torch.allclose(hidden.grad, h.grad, atol=1e-5)


def test_without_a_markov_head_the_confidence_is_trained_alone() -> None:
    hidden, head, labels, valid, teacher = example()
    sure = torch.zeros(7, 4, requires_grad=True)
    total, _, _ = dspark_loss(hidden, head, labels, valid, LossConfig(), teacher, None, None, sure)
    total.backward()
    assert sure.grad is not None and sure.grad.abs().sum() > 0 and hidden.grad is not None


def test_principal_rows_keep_what_tells_tokens_apart() -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 3) @ torch.randn(3, 12) + 4.0  # three directions, all rows far from the origin
    rows = principal_rows(table, 3)
    assert float(rows.square().mean()) == pytest.approx(1.0, rel=1e-4)
    near = torch.cdist(table, table) + 1e9 * torch.eye(50)
    kept = torch.cdist(rows, rows) + 1e9 * torch.eye(50)
    assert torch.equal(near.argmin(1), kept.argmin(1))
    assert principal_rows(table, 20).shape == (50, 20)


def shape(**options: object) -> DrafterConfig:
    base = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    base |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 97, "num_target_layers": 4}
    return DrafterConfig(**base, target_layer_ids=(2, 0), mask_token_id=90, block_size=4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"markov_rank": 5, "confidence": True},
        {"markov_rank": 5, "confidence": True, "anchor_first": True},
        {"confidence": True, "anchor_first": True},
        {"anchor_first": True},
        {},
    ],
)
def test_the_configuration_is_read_as_it_was_written(options: dict[str, object]) -> None:
    config = shape(**options)
    assert DrafterConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert config.drafts == (4 if options.get("anchor_first") else 3)


def test_a_drafter_without_heads_cannot_be_frozen() -> None:
    with pytest.raises(TrainError, match="--freeze backbone"):
        Drafter(shape()).freeze_backbone()


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def plain(target_folder: Path, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlash drafter, a little trained."""
    out = tmp_path_factory.mktemp("plain")
    fit = ["fit", "-m", target_folder, "--features", features, "--out", out / "run", "--steps", 20, "--layers", 1]
    run(
        *fit,
        "--block-size",
        4,
        "--head-rows",
        60,
        "--batch-size",
        4,
        "--anchors",
        8,
        "--hold-every",
        5,
        "--dtype",
        "float32",
    )
    run("export", "--run", out / "run", "--out", out / "drafter", "--dtype", "float32")
    return out / "drafter"


FIT = ["--batch-size", 4, "--anchors", 8, "--hold-every", 5, "--dtype", "float32", "--markov-rank", 16, "--confidence"]


def test_heads_on_a_frozen_backbone_end_up_in_the_engine(
    target_folder: Path, features: Path, plain: Path, tmp_path: Path
) -> None:
    """From a DFlash drafter to a calibrated DSpark one: it drafts better, its backbone is the same, it is resumable."""
    options = ["fit", "-m", target_folder, "--features", features, "--init-from", plain, "--freeze", "backbone", *FIT]
    options += ["--lr", 0.02, "--loss", "ce=1"]
    run(*options, "--out", tmp_path / "run", "--steps", 60)
    run(*options, "--out", tmp_path / "cut", "--steps", 60, "--until", 25)
    run(*options, "--out", tmp_path / "cut", "--steps", 60)
    run("export", "--run", tmp_path / "run", "--out", tmp_path / "spark", "--dtype", "float32")
    run("export", "--run", tmp_path / "cut", "--out", tmp_path / "again", "--dtype", "float32")
    after, rows = load_drafter(tmp_path / "spark")
    again, _ = load_drafter(tmp_path / "again")
    before, rows_before = load_drafter(plain)
    assert rows == rows_before
    changed = {k for k, v in before.state_dict().items() if not torch.equal(v, after.state_dict()[k])}
    assert not changed
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in after.state_dict().items())
    store = FeatureStore(features)
    with open_model(str(target_folder)) as checkpoint:
        heads = load_heads(checkpoint, rows, after.config.mask_token_id, torch.float32)
        embed = load_tensor(checkpoint, "model.embed_tokens.weight", torch.float32)
    assert len(embed) == 97
    lengths = [evaluate(m, heads, store, range(10))["all"].length for m in (before, after)]
    assert lengths[1] > lengths[0] + 0.2

    llm = LLM(
        target_folder,
        threads=1,
        dtype="float32",
        speculative_config={"method": "dspark", "model": str(tmp_path / "spark")},
    )
    proposer = llm.engine.proposer
    assert isinstance(proposer, DSparkProposer) and proposer.confident
    plainly = LLM(target_folder, threads=1, dtype="float32")
    prompt = store.sequences[0]["tokens"][:12]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    want = plainly.generate([prompt], params)[0].outputs[0].token_ids
    assert llm.generate([prompt], params, num_speculative_tokens=3)[0].outputs[0].token_ids == want


def test_the_trainer_drafts_what_the_engine_drafts(
    target_folder: Path, features: Path, plain: Path, tmp_path: Path
) -> None:
    """Anchor-first slots, Markov head and confidence: one round, by PyTorch and by the engine."""
    options = ["fit", "-m", target_folder, "--features", features, "--init-from", plain, "--anchor-first", *FIT]
    run(*options, "--out", tmp_path / "run", "--steps", 30)
    run("export", "--run", tmp_path / "run", "--out", tmp_path / "spark", "--dtype", "float32")
    model, rows = load_drafter(tmp_path / "spark")
    assert model.config.anchor_first and model.config.drafts == 4
    store = FeatureStore(features)
    with open_model(str(target_folder)) as checkpoint:
        heads = load_heads(checkpoint, rows, model.config.mask_token_id, torch.float32)
    tokens = store.sequences[3]["tokens"]
    s = len(tokens) - 6
    row = store.rows(3)[:s, :-32].float()
    hidden = model(heads.block_embeds(torch.tensor([[tokens[s]]]), 4), torch.tensor([[s]]), row[None])[0, 0]
    drafts, chances, previous = [], [], tokens[s]
    for slot in range(4):
        shift, sure = model.sequential(hidden[slot], torch.tensor(previous), heads.rows)
        assert shift is not None and sure is not None
        previous = int(heads.rows[(hidden[slot] @ heads.head.T + shift).argmax()])
        drafts.append(previous)
        chances.append(torch.sigmoid(sure).item())

    llm = LLM(
        target_folder,
        threads=1,
        dtype="float32",
        speculative_config={"method": "dspark", "model": str(tmp_path / "spark")},
    )
    proposer = llm.engine.proposer
    assert isinstance(proposer, DSparkProposer)
    seen = []
    inner = proposer.propose

    def propose(sequences, limits):  # type: ignore[no-untyped-def]
        out = inner(sequences, limits)
        seen.append((list(sequences[0].token_ids), out.drafts[0][:], out.confidence[0]))  # type: ignore[index]
        return out

    proposer.propose = propose  # type: ignore[method-assign]
    # the first draft follows the first token of the answer: let that be the one behind the prompt
    llm.generate(
        [tokens[:s]],
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={tokens[s]: 100.0}),
        num_speculative_tokens=4,
    )
    text, got, confidence = seen[0]
    assert text == tokens[: s + 1]
    # the bias that forced the anchor also favours its token among the drafts: compare up to there
    same = next((i for i, t in enumerate(got) if t == tokens[s] and drafts[i] != t), 4)
    assert got[:same] == drafts[:same]
    assert confidence[:same] == pytest.approx(chances[:same], abs=2e-3)


def test_calibrate_writes_what_the_drafter_reads(
    target_folder: Path, features: Path, plain: Path, tmp_path: Path
) -> None:
    options = ["fit", "-m", target_folder, "--features", features, "--init-from", plain, "--freeze", "backbone", *FIT]
    run(*options, "--out", tmp_path / "run", "--steps", 10)
    run("export", "--run", tmp_path / "run", "--out", tmp_path / "spark", "--dtype", "float32")
    prompts = tmp_path / "prompts.jsonl"
    words = [" ".join(f"w{5 + (11 * i + 7 * k) % 40}" for k in range(8)) for i in range(12)]
    prompts.write_text("".join(json.dumps({"prompt": text, "domain": "x"}) + "\n" for text in words))
    output = run(
        "calibrate", "-m", target_folder, "--drafter", tmp_path / "spark", "--prompts", prompts,
        "--max-tokens", 40, "--dtype", "float32",
    )  # fmt: skip
    assert "position  drafts  temperature" in output
    fitted = json.loads((tmp_path / "spark" / "confidence_calibration.json").read_text())
    assert len(fitted["temperatures"]) == 3 and fitted["samples"][0] >= 50
    llm = LLM(
        target_folder,
        threads=1,
        dtype="float32",
        speculative_config={"method": "dspark", "model": str(tmp_path / "spark")},
    )
    assert isinstance(llm.engine.proposer, DSparkProposer)
    assert llm.engine.proposer.calibration.temperatures == tuple(fitted["temperatures"])
