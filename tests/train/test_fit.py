"""Training: it learns, it resumes to the bit, it survives a kill, and export and loading are inverse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from paceline.train.data import Phase, split_members  # noqa: E402
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.evaluate import evaluate  # noqa: E402
from paceline.train.export import HEAD_ROWS_FILE, INDEX_FILE, export_drafter, load_drafter  # noqa: E402
from paceline.train.feature_store import FeatureStore  # noqa: E402
from paceline.train.fit import FitConfig, Trainer, progress_line, summary  # noqa: E402
from paceline.train.heads import Heads  # noqa: E402
from paceline.train.loss import LossConfig  # noqa: E402
from paceline.train.model import Drafter, DrafterConfig  # noqa: E402
from paceline.train.schedule import Schedule  # noqa: E402
from paceline.weights.checkpoint import open_checkpoint  # noqa: E402

from .conftest import HIDDEN, LAYERS, TAPS, VOCAB, target_weights  # noqa: E402

ROWS = list(range(60))
MASK = VOCAB - 1


def heads() -> Heads:
    embed = target_weights()["model.embed_tokens.weight"]
    return Heads(embed, embed, ROWS, MASK)


def drafter(seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    return Drafter(
        DrafterConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=VOCAB,
            num_target_layers=LAYERS,
            target_layer_ids=TAPS,
            mask_token_id=MASK,
            block_size=4,
        )
    )


CONFIG = FitConfig(
    schedule=Schedule(24, warmup=2),
    batch_size=8,
    anchors=4,
    lr=1e-2,
    seed=4,
    compute_dtype="float32",
    checkpoint_every=6,
    log_every=6,
    loss=LossConfig(ce=0.7, kl=0.3),
)


def trainer(features: Path, out: Path, config: FitConfig = CONFIG) -> Trainer:
    store = FeatureStore(features)
    phases = [Phase(0, tuple(split_members(store, 10)[0]))]
    return Trainer(drafter(), heads(), store, phases, config, out)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("workers", [1, 2])
def test_resume_gives_the_uninterrupted_losses_and_weights(
    features: Path, tmp_path: Path, optimizer: str, workers: int
) -> None:
    config = replace(CONFIG, optimizer=optimizer, workers=workers)
    whole = trainer(features, tmp_path / "whole", config)
    losses = whole.run(report=lambda _: None)
    first = trainer(features, tmp_path / "parts", config)
    parts = first.run(until=12, report=lambda _: None)
    second = trainer(features, tmp_path / "parts", config)
    assert second.resume()
    assert second.step == 12
    parts += second.run(report=lambda _: None)
    assert parts == losses
    for a, b in zip(whole.params, second.params, strict=True):
        assert torch.equal(a, b)


KILLED = """
import sys
from pathlib import Path
import tests.train.test_fit as t
t.torch.set_num_threads(1)
run = t.trainer(Path(sys.argv[1]), Path(sys.argv[2]))
run.resume()
run.run(report=lambda line: print(line, flush=True))
"""


def test_a_killed_run_goes_on_to_the_same_end(features: Path, tmp_path: Path) -> None:
    whole = trainer(features, tmp_path / "whole")
    losses = whole.run(report=lambda _: None)
    root = Path(__file__).parents[2]
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(features), str(out)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 6/24")  # at least one checkpoint is being written now
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = trainer(features, out)
    resumed.resume()
    rest = resumed.run(report=lambda _: None)
    assert rest == pytest.approx(losses[24 - len(rest) :], abs=1e-6)


def test_two_workers_make_the_same_update_as_one(features: Path, tmp_path: Path) -> None:
    one = trainer(features, tmp_path / "one").run(until=4, report=lambda _: None)
    config = replace(CONFIG, workers=2)
    two = trainer(features, tmp_path / "two", config).run(until=4, report=lambda _: None)
    assert two == pytest.approx(one, rel=1e-4)


def test_it_learns_what_can_be_learned(features: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, schedule=Schedule(150), lr=0.02, log_every=50, checkpoint_every=150)
    run = trainer(features, tmp_path, config)
    before = evaluate(run.model, run.heads, run.store, split_members(run.store, 10)[1])["all"].length
    losses = run.run(report=lambda _: None)
    after = evaluate(run.model, run.heads, run.store, split_members(run.store, 10)[1])["all"].length
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert before < 1.5
    assert after > 2.0  # of at most 4, on answers it has not seen


def test_resume_refuses_what_would_change_the_batches_by_name(features: Path, tmp_path: Path) -> None:
    trainer(features, tmp_path).run(until=6, report=lambda _: None)
    with pytest.raises(TrainError, match="anchors was 4"):
        trainer(features, tmp_path, replace(CONFIG, anchors=5)).resume()
    with pytest.raises(TrainError, match="workers was 1"):
        trainer(features, tmp_path, replace(CONFIG, workers=2)).resume()


def test_the_length_of_a_run_may_change_until_its_rate_falls(features: Path, tmp_path: Path) -> None:
    longer = replace(CONFIG, schedule=Schedule(40, warmup=2))
    trainer(features, tmp_path).run(until=12, report=lambda _: None)
    went_on = trainer(features, tmp_path, longer)
    assert went_on.resume()
    rest = went_on.run(until=16, report=lambda _: None)
    assert rest == trainer(features, tmp_path / "other", longer).run(until=16, report=lambda _: None)[12:]
    trainer(features, tmp_path / "late").run(until=20, report=lambda _: None)
    with pytest.raises(TrainError, match="past its peak"):
        trainer(features, tmp_path / "late", longer).resume()


def test_learning_rate_schedules() -> None:
    schedule = Schedule(100, warmup=10, decay=0.3)
    wsd = [schedule.factor(s) for s in range(100)]
    assert wsd[0] == pytest.approx(0.1)
    assert wsd[9:70] == [1.0] * 61
    assert wsd[70:] == sorted(wsd[70:], reverse=True)
    assert wsd[99] == pytest.approx(0.1, abs=0.01)
    cosine = [Schedule(100, "cosine", warmup=10).factor(s) for s in range(100)]
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    assert Schedule(50, warmup=40).warm == 5


def test_blocks_of_several_lengths_train_one_drafter(features: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, block_sizes=(2, 4))
    run = trainer(features, tmp_path, config)
    losses = run.run(until=12, report=lambda _: None)
    assert losses[-1] < losses[0]
    short = [(0.5, torch.ones(3, 3, dtype=torch.bool), torch.tensor([[True, False, False]] * 3))]
    assert "acceptance" not in progress_line(summary(short) | {"step": 1, "seconds_per_step": 1.0}, 2)
    again = trainer(features, tmp_path / "again", config)
    assert again.run(until=12, report=lambda _: None) == losses


def test_unknown_optimizer_is_refused(features: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="optimizer"):
        trainer(features, tmp_path, replace(CONFIG, optimizer="sgd"))


def test_export_and_load_are_inverse(tmp_path: Path) -> None:
    made = drafter(7)
    export_drafter(made, ROWS, tmp_path, torch.float32)
    back, rows = load_drafter(tmp_path)
    assert rows == ROWS
    assert back.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    (tmp_path / HEAD_ROWS_FILE).unlink()
    assert load_drafter(tmp_path)[1] is None


def test_exported_names_and_config_are_z_labs(tmp_path: Path) -> None:
    from safetensors import safe_open

    export_drafter(drafter(), ROWS, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(n).dtype for n in names} == {torch.bfloat16}
    layer = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")),
    }
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.0.{n}.weight" for n in layer)}
    with safe_open(tmp_path / HEAD_ROWS_FILE, framework="np") as file:
        assert file.get_tensor("head_rows").dtype == "int32"


def test_the_index_tells_other_loaders_which_file_holds_the_weights(tmp_path: Path) -> None:
    """vLLM and SGLang read every *.safetensors that the index names, and all of them without one."""
    from safetensors import safe_open

    export_drafter(drafter(), ROWS, tmp_path)
    weight_map = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    named = {file.name for file in tmp_path.glob("*.safetensors")} & set(weight_map.values())
    assert named == {"model.safetensors"}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(weight_map) == set(file.keys())
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(weight_map)


@pytest.mark.parametrize("world", [2, 3, 20])
def test_shares_of_a_batch_have_its_gradient_between_them(features: Path, tmp_path: Path, world: int) -> None:
    """What processes under torchrun exchange: sums over their shares, also with fewer sequences than processes."""
    from paceline.train.data import training_batches

    run = trainer(features, tmp_path)
    options = {"batch_size": 8, "anchors": 4, "block_sizes": (4,), "seed": 1, "first_step": 0, "with_teacher": True}
    batch = next(training_batches(run.store, run.phases, **options))  # type: ignore[arg-type]
    whole = run._gradients(batch)
    parts = [run._gradients(s) for r in range(world) if (s := batch.share(r, world)) is not None]
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1])
    torch.testing.assert_close(sum(p[2] for p in parts), whole[2])
    for i, gradient in enumerate(whole[0]):
        torch.testing.assert_close(sum(p[0][i] for p in parts), gradient, atol=1e-4, rtol=1e-4)
