"""Training DFlash 2: its parts against the reference and the engine, their start, their loss, runs and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from paceline import LLM, SamplingParams  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.models.drafter_config import read_drafter_config  # noqa: E402
from paceline.speculation.dflash2 import DFlash2Proposer  # noqa: E402
from paceline.train import loss as loss_module  # noqa: E402
from paceline.train.cli import app  # noqa: E402
from paceline.train.errors import TrainError  # noqa: E402
from paceline.train.evaluate import evaluate  # noqa: E402
from paceline.train.export import export_drafter, load_drafter  # noqa: E402
from paceline.train.feature_store import FeatureStore  # noqa: E402
from paceline.train.loading import load_heads, open_model  # noqa: E402
from paceline.train.loss import LossConfig, head_loss, position_weights, selector_loss  # noqa: E402
from paceline.train.model import DFLASH2_FIELDS, LARGEST, LARGEST_TOP_K, Drafter, DrafterConfig  # noqa: E402
from paceline.train.runs import Start  # noqa: E402
from tests.golden.cases import Case, golden_root  # noqa: E402

from .recorded import load_drafter as recorded_drafter  # noqa: E402
from .recorded import rounds, target_head  # noqa: E402
from .test_loss import example  # noqa: E402

PARTS = [
    {"conv_kernel": 2, "conv_group": 8, "selector_rank": 5, "selector_top_k": 6},
    {"conv_kernel": 3, "conv_group": 4},
    {"selector_rank": 5, "selector_top_k": 3},
]


def shape(**options: object) -> DrafterConfig:
    base = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    base |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 97, "num_target_layers": 4}
    return DrafterConfig(**{**base, "target_layer_ids": (2, 0, 3), "mask_token_id": 90, "block_size": 4, **options})  # type: ignore[arg-type]


def shaken(config: DrafterConfig, amount: float = 0.2) -> Drafter:
    """Random weights everywhere, those that start without effect included."""
    torch.manual_seed(0)
    drafter = Drafter(config)
    for p in drafter.parameters():
        p.data.add_(torch.randn_like(p) * amount)
    return drafter


@pytest.mark.skipif(not (golden_root() / "C" / "expected.json").exists(), reason="no golden vectors")
@torch.no_grad()
def test_equals_the_reference_in_every_recorded_round() -> None:
    case = Case("C", golden_root())
    drafter, head = recorded_drafter(case), target_head(case)
    selector = drafter.candidate_selector
    assert selector is not None
    checked = 0
    for recorded in rounds(case):
        facts, hidden = recorded.facts, recorded.hidden(drafter)
        torch.testing.assert_close(hidden, recorded["draft_hidden"], atol=1e-4, rtol=1e-4)
        logits = hidden[1:] @ head.T
        path = facts["draft_tokens"]
        before = torch.tensor([facts["anchor_token"], *path[:-1]])
        every = torch.arange(len(head))
        assert drafter.best_tokens(hidden[1:], logits, before, every, torch.float32).tolist() == path
        ids = recorded["selector_candidates"].long()
        scores = selector.scores(logits.gather(-1, ids), ids, hidden[1:], before, torch.float32)
        torch.testing.assert_close(scores, recorded["selector_scores"], atol=2e-4, rtol=2e-4)
        checked += 1
    assert checked


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    "layers", [{}, {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4, "is_causal": False}]
)
@torch.no_grad()
def test_training_forward_equals_inference_forward(parts: dict[str, int], layers: dict[str, object]) -> None:
    """Many blocks at once, or each alone: no row mixes with another block's."""
    drafter = shaken(shape(**parts, **layers))
    taps, embeds = torch.randn(2, 20, 96), torch.randn(2, 3, 4, 32)
    anchors = torch.tensor([[3, 9, 17], [1, 5, 20]])
    together = drafter(embeds, anchors, taps)
    for s in range(2):
        for a in range(3):
            at = int(anchors[s, a])
            alone = drafter(embeds[s : s + 1, a : a + 1], anchors[s : s + 1, a : a + 1], taps[s : s + 1, :at])
            torch.testing.assert_close(together[s, a], alone[0, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", PARTS)
@torch.no_grad()
def test_new_parts_have_no_effect(parts: dict[str, int], target_folder: Path, tmp_path: Path) -> None:
    """A drafter of DFlash and the same one with parts that start: the same bits, the same drafts."""
    from paceline.train.start import with_heads

    before = shaken(shape())
    with open_model(str(target_folder)) as checkpoint:
        after = with_heads(checkpoint, before, shape(**parts), seed=1)
    taps, embeds, anchors = torch.randn(2, 20, 96), torch.randn(2, 3, 4, 32), torch.tensor([[3, 9, 17], [1, 5, 20]])
    hidden = before(embeds, anchors, taps)
    assert torch.equal(after(embeds, anchors, taps), hidden)
    logits, rows = torch.randn(2, 3, 4, 60), torch.arange(0, 97)[:60]
    tokens = torch.randint(0, 97, (2, 3, 4))
    best = after.best_tokens(hidden, logits, tokens, rows, torch.float32)
    assert torch.equal(best, before.best_tokens(hidden, logits, tokens, rows, torch.float32))
    if after.candidate_selector is not None:
        assert after.candidate_selector.successor_codebook.any()


@torch.no_grad()
def test_a_run_from_nothing_starts_with_the_same_backbone(target_folder: Path) -> None:
    """Parts draw no random number before the backbone has its own: runs with and without them can be compared."""
    from paceline.train.start import fresh_drafter

    with open_model(str(target_folder)) as checkpoint:
        plain, more = (fresh_drafter(checkpoint, shape(**p), 5, from_target=False) for p in ({}, PARTS[0]))
    assert all(torch.equal(v, more.state_dict()[k]) for k, v in plain.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("top_k", [3, 50])
def test_loss_and_gradients_equal_the_plain_formula(frozen: bool, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BLOCKS", 3)
    hidden, head, labels, valid, teacher = example()
    hidden = hidden.detach().requires_grad_(not frozen)
    config = LossConfig(ce=0.4, kl=0.6, selector=0.7)
    tables = [torch.randn(11, 3), torch.randn(11, 3), torch.randn(3, hidden.shape[-1])]
    before = torch.randint(0, 11, labels.shape)

    def score_with(h: torch.Tensor, a: torch.Tensor, c: torch.Tensor, p: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda values, rows: values + torch.einsum("...r,...kr->...k", a[before] * (h @ p.T), c[rows])

    mine = [t.clone().requires_grad_() for t in tables]
    total, weight, hit = selector_loss(hidden, head, labels, valid, config, teacher, top_k, score_with(hidden, *mine))
    (2.5 * total).backward()

    h = hidden.detach().clone().requires_grad_()
    plain = [t.clone().requires_grad_() for t in tables]
    base, weight_sum, _ = head_loss(h, head, labels, valid, config, teacher)
    logits = h @ head.T
    log_prob = torch.log_softmax(logits, -1)
    seen = labels >= 0
    picked = log_prob.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    weights = position_weights(config, picked.detach().exp() * seen, valid) * seen
    values, rows = logits.topk(min(top_k, 11))
    scores = score_with(h, *plain)(values, rows)
    own = sum_of = torch.zeros(())
    inside = 0
    for n in range(labels.shape[0]):
        for k in range(labels.shape[1]):
            place = (rows[n, k] == labels[n, k]).nonzero()
            if len(place):
                inside += 1
                own = own + weights[n, k] * F.cross_entropy(scores[n, k], place[0, 0])
                assert hit[n, k] == (scores[n, k].argmax() == place[0, 0])
            else:
                assert not hit[n, k]
    assert inside > 0 and (top_k == 50 or inside < int(seen.sum()))
    sum_of = base + 0.7 * own
    (2.5 * sum_of).backward()
    torch.testing.assert_close(total, sum_of)
    torch.testing.assert_close(weight, weight_sum)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)
    assert hidden.grad is None if frozen else torch.allclose(hidden.grad, h.grad, atol=1e-5)


@pytest.mark.parametrize("parts", PARTS)
def test_the_configuration_is_read_as_it_was_written(parts: dict[str, int]) -> None:
    config = Start(**parts).shape(shape())  # type: ignore[arg-type]
    assert config.is_causal is False
    assert DrafterConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    whole = config.complete()
    assert whole.conv_kernel and whole.selector_rank and whole.complete() == whole


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"conv_kernel": 2, "conv_group": 5}, "conv_group_size"),
        ({"selector_rank": 4, "selector_top_k": 98}, "selector_top_k"),
        ({"selector_rank": 4, "markov_rank": 4}, "--markov-rank"),
        ({"conv_kernel": 2, "confidence": True}, "--confidence"),
        ({"conv_kernel": 2, "anchor_first": True}, "--anchor-first"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(TrainError, match=word):
        shape(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--conv-kernel", 65, "--conv-group", 8], "conv_kernel is 65"),
        (["--selector-rank", 1 << 17], "selector_rank is 131072"),
        (["--block-size", 257], "block_size is 257"),
    ],
)
def test_what_the_engine_would_refuse_is_not_trained(
    target_folder: Path, features: Path, tmp_path: Path, options: list[object], word: str
) -> None:
    fit = ["fit", "-m", target_folder, "--features", features, "--out", tmp_path / "run", "--mask-token", 92]
    result = CliRunner().invoke(app, [str(a) for a in [*fit, *FIT, "--steps", 1, *options]])
    assert isinstance(result.exception, TrainError) and word in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_the_largest_parts_are_those_that_the_engine_loads() -> None:
    """Read as the engine reads it: at the limit, and one above."""
    wide: dict[str, object] = {"vocab_size": 2000, "selector_top_k": LARGEST_TOP_K, "conv_group": 8}
    largest = shape(**wide, **{name: most for name, most in LARGEST.items() if name != "markov_rank"})
    read_drafter_config(largest.to_hf(), "here")
    for name in ("block_size", "conv_kernel", "selector_rank", "selector_top_k"):
        config = largest.to_hf()
        own = config if name == "block_size" else config["dflash_config"]
        own[DFLASH2_FIELDS.get(name, name)] += 1
        for read in (DrafterConfig.from_hf, lambda config: read_drafter_config(config, "here")):
            with pytest.raises(PacelineError, match=name):
                read(config)


@pytest.mark.parametrize("parts", PARTS)
@torch.no_grad()
def test_an_export_is_read_as_it_was_written(parts: dict[str, int], tmp_path: Path) -> None:
    """Also one with a half of DFlash 2: the file has both, the added half has no effect and is left out again."""
    model = shaken(Start(**parts).shape(shape()))  # type: ignore[arg-type]
    export_drafter(model, [3, 5, 40], tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert "candidate_selector.predecessor_codebook" in stored and "layers.1.mlp_conv.base_kernel" in stored
    again, rows = load_drafter(tmp_path)
    assert rows == [3, 5, 40] and again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


DAMAGE = {
    "predecessor_codebook is missing": lambda config, tensors: tensors.pop("candidate_selector.predecessor_codebook"),
    "other belongs to no drafter": lambda config, tensors: tensors.update(other=torch.zeros(1)),
    r"base_kernel has shape .*\[2, 3, 32\]": lambda config, tensors: config["dflash_config"].update(conv_kernel_size=3),
    "fc.weight has values": lambda config, tensors: tensors["fc.weight"].view(-1)[3:4].fill_(float("nan")),
    "conv_kernel_size = '2'": lambda config, tensors: config["dflash_config"].update(conv_kernel_size="2"),
    "lacks head_dim": lambda config, tensors: config.pop("head_dim"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    export_drafter(shaken(shape(**PARTS[0])), None, tmp_path, torch.float32)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    DAMAGE[fault](config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TrainError, match=fault):
        load_drafter(tmp_path)


@pytest.mark.parametrize("rows", [[], [5, 3], [3, 3], [-1, 4], [3, 97]])
def test_wrong_head_rows_are_refused(rows: list[int], tmp_path: Path) -> None:
    export_drafter(shaken(shape(**PARTS[0])), None, tmp_path, torch.float32)
    save_file({"head_rows": torch.tensor(rows, dtype=torch.int32)}, tmp_path / "head_rows.safetensors")
    with pytest.raises(TrainError, match="head_rows must be ascending token ids below 97"):
        load_drafter(tmp_path)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


FIT = ["--batch-size", 4, "--anchors", 6, "--warmup", 1, "--checkpoint-every", 10, "--dtype", "float32"]
BOTH = ["--conv-kernel", 2, "--conv-group", 8, "--selector-rank", 8, "--selector-top-k", 6]


@pytest.fixture(scope="module")
def plain(target_folder: Path, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlash drafter, a little trained, that drafts from a list of head rows."""
    out = tmp_path_factory.mktemp("plain")
    fit = ["fit", "-m", target_folder, "--features", features, "--out", out / "run", "--steps", 20, "--layers", 1]
    run(*fit, "--block-size", 4, "--head-rows", 60, "--mask-token", 92, *FIT)
    run("export", "--run", out / "run", "--out", out / "drafter", "--dtype", "float32")
    return out / "drafter"


@pytest.fixture(scope="module")
def trained(target_folder: Path, features: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From `plain`: everything trained, with both parts."""
    out = tmp_path_factory.mktemp("trained")
    fit = ["fit", "-m", target_folder, "--features", features, "--init-from", plain, "--out", out / "run", *BOTH, *FIT]
    run(*fit, "--steps", 40)
    run("export", "--run", out / "run", "--out", out / "drafter", "--dtype", "float32")
    return out / "drafter"


def opened(target_folder: Path, drafter: Path | None, **options: object) -> LLM:
    config = None if drafter is None else {"method": "dflash2", "model": str(drafter)}
    return LLM(target_folder, threads=1, dtype="float32", speculative_config=config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [BOTH, BOTH[:4], BOTH[4:]], ids=["both", "convolutions", "selector"])
def test_parts_alone_are_trained_on_a_frozen_backbone(
    target_folder: Path, features: Path, plain: Path, tmp_path: Path, parts: list[object]
) -> None:
    """They draft better, the backbone is the same, and a run that was cut ends with the same bits."""
    options = ["fit", "-m", target_folder, "--features", features, "--init-from", plain, "--freeze", "backbone", *parts]
    options += [*FIT, "--lr", 0.02, "--loss", "ce=1"]
    run(*options, "--out", tmp_path / "run", "--steps", 60)
    run(*options, "--out", tmp_path / "cut", "--steps", 60, "--until", 25)
    run(*options, "--out", tmp_path / "cut", "--steps", 60)
    run("export", "--run", tmp_path / "run", "--out", tmp_path / "two", "--dtype", "float32")
    run("export", "--run", tmp_path / "cut", "--out", tmp_path / "again", "--dtype", "float32")
    (after, rows), (again, _), (before, old_rows) = map(load_drafter, (tmp_path / "two", tmp_path / "again", plain))
    assert rows == old_rows
    assert all(torch.equal(v, after.state_dict()[k]) for k, v in before.state_dict().items())
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in after.state_dict().items())
    store = FeatureStore(features)
    with open_model(str(target_folder)) as checkpoint:
        heads = load_heads(checkpoint, rows, after.config.mask_token_id, torch.float32)
    lengths = [evaluate(m, heads, store, range(10))["all"].length for m in (before, after)]
    assert lengths[1] > lengths[0] + 0.1


def test_a_dflash2_drafter_is_where_a_run_goes_on(
    target_folder: Path, features: Path, trained: Path, tmp_path: Path
) -> None:
    fit = ["fit", "-m", target_folder, "--features", features, "--init-from", trained, *FIT]
    run(*fit, "--out", tmp_path / "run", "--steps", 5)
    run("export", "--run", tmp_path / "run", "--out", tmp_path / "more", "--dtype", "float32")
    before, after = load_drafter(trained)[0], load_drafter(tmp_path / "more")[0]
    assert before.config == after.config
    changed = {k for k, v in before.state_dict().items() if not torch.equal(v, after.state_dict()[k])}
    assert {"candidate_selector.successor_codebook", "layers.0.mlp_conv.kernel_projection.weight"} <= changed


def test_the_trainer_drafts_what_the_engine_drafts(target_folder: Path, features: Path, trained: Path) -> None:
    """One round by PyTorch and by the engine, from listed head rows: hidden states are compared by their logits."""
    model, rows = load_drafter(trained)
    assert rows is not None and len(rows) == 60
    store = FeatureStore(features)
    with open_model(str(target_folder)) as checkpoint:
        heads = load_heads(checkpoint, rows, model.config.mask_token_id, torch.float32)
    tokens = store.sequences[3]["tokens"]
    s = len(tokens) - 6
    llm = opened(target_folder, trained)
    proposer = llm.engine.proposer
    assert isinstance(proposer, DFlash2Proposer)
    seen, taps = [], []
    inner, add_context = proposer._run, proposer.drafter.add_context

    def kept(cache, rows, *rest):  # type: ignore[no-untyped-def]
        taps.append(torch.from_numpy(rows.copy()))
        add_context(cache, rows, *rest)

    def watched(sequences, counts):  # type: ignore[no-untyped-def]
        blocks = inner(sequences, counts)
        drawn = proposer._draw(blocks)
        seen.append((list(sequences[0].token_ids), blocks.logits.copy(), blocks.features.copy(), drawn))
        return blocks

    proposer._run, proposer.drafter.add_context = watched, kept  # type: ignore[method-assign]
    prompt = [tokens[:s]]
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), num_speculative_tokens=3)
    text, logits, features_seen, drawn = seen[0]
    context = torch.cat(taps)[:s]  # in fp32; those of the feature folder are rounded
    assert text[:-1] == tokens[:s] and len(context) == s
    with torch.no_grad():
        hidden = model(heads.block_embeds(torch.tensor([[text[-1]]]), 4), torch.tensor([[s]]), context[None])[0, 0, 1:]
        mine = hidden @ heads.head.T
        projected = model.candidate_selector.hidden_projection(hidden, torch.float32)  # type: ignore[union-attr]
        torch.testing.assert_close(torch.from_numpy(logits), mine, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(torch.from_numpy(features_seen), projected, atol=1e-3, rtol=1e-3)
        drafts, previous = [], text[-1]
        for slot in range(3):
            at = slice(slot, slot + 1)
            before = torch.tensor([previous])
            previous = int(model.best_tokens(hidden[at], mine[at], before, heads.rows, torch.float32))
            drafts.append(previous)
    assert drawn.drafts == [drafts]


@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_text_is_that_of_plain_decoding(target_folder: Path, trained: Path, features: Path, sampler: str) -> None:
    """Greedy, and for the sampler that promises it, drawn with a seed."""
    prompts = [FeatureStore(features).sequences[i]["tokens"][: 9 + i] for i in range(8)]
    plainly, drafting = opened(target_folder, None), opened(target_folder, trained, sampler=sampler)
    accepted = 0
    for params in (
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        *([SamplingParams(temperature=0.7, seed=4, max_tokens=50, ignore_eos=True)] if sampler == "coupled" else []),
    ):
        want = [o.outputs[0].token_ids for o in plainly.generate(prompts, params)]
        got = drafting.generate(prompts, params, num_speculative_tokens=3)
        assert [o.outputs[0].token_ids for o in got] == want
        accepted += sum(o.metrics.spec_decode.num_accepted_tokens for o in got)  # type: ignore[union-attr]
    assert accepted > 0


def test_info_and_eval_know_the_drafter(target_folder: Path, trained: Path, features: Path, tmp_path: Path) -> None:
    from paceline.cli.app import app as main

    result = CliRunner().invoke(main, ["info", str(trained)])
    assert result.exit_code == 0 and "dflash2" in result.output
    answers = tmp_path / "answers.jsonl"
    store = FeatureStore(features)
    lines = []
    for s in store.sequences[:6]:
        prompt, answer = s["tokens"][: s["prompt_len"]], s["tokens"][s["prompt_len"] :]
        lines.append({"id": s["id"], "domain": s["domain"], "prompt_tokens": prompt, "tokens": answer})
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = run("eval", "-m", target_folder, "--drafter", trained, "--answers", answers)
    assert "tokens/round" in output
