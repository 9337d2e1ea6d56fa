"""A tiny random target with its own greedy-like answers, and its features, shared by the trainer's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from paceline.train.feature_store import TorchFeatures  # noqa: E402
from paceline.train.features import extract  # noqa: E402
from paceline.train.regenerate import Answer  # noqa: E402
from paceline.train.target import TargetConfig, TorchTarget  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums over threads differ in their last bits; the tests here compare runs."""
    torch.set_num_threads(1)


VOCAB, HIDDEN, LAYERS = 97, 32, 4
TAPS = (2, 0, 3)
RESERVED = 7

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}


def target_weights(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (32, HIDDEN),
            "self_attn.k_proj": (16, HIDDEN),
            "self_attn.v_proj": (16, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 32),
            "mlp.gate_proj": (48, HIDDEN),
            "mlp.up_proj": (48, HIDDEN),
            "mlp.down_proj": (HIDDEN, 48),
        }.items():
            weights[f"{p}{name}.weight"] = draw(*shape)
        weights[p + "input_layernorm.weight"] = 1 + draw(HIDDEN) * 0.1
        weights[p + "post_attention_layernorm.weight"] = 1 + draw(HIDDEN) * 0.1
    return weights


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(target_weights(), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words, special tokens (the ids 0, 1 and, reserved, the last seven), and a chat template that frames nothing."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    reserved = [f"<reserved{i}>" for i in range(VOCAB - RESERVED, VOCAB)]
    special = ["<s>", "</s>", *reserved]
    plain = [f"w{i}" for i in range(2, VOCAB - RESERVED)]
    words = {t: i for i, t in enumerate(["<s>", "</s>", *plain, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def target() -> TorchTarget:
    return TorchTarget(TargetConfig.from_hf(CONFIG), target_weights())


def periodic_answers(count: int) -> list[Answer]:
    """Answers in which every token fixes its successor, which even a tiny drafter learns within seconds."""
    out = []
    for i in range(count):
        walk = [5 + (11 * i + 7 * k) % 40 for k in range(40)]
        out.append(Answer(i, ("code", "math")[i % 2], [0, *walk[:8]], walk[8 : 32 + i % 7]))
    return out


@pytest.fixture(scope="session")
def features(target: TorchTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    source = TorchFeatures(target, batch_tokens=256)
    extract(source, periodic_answers(60), TAPS, folder, shard_sequences=25, report=lambda _: None)
    return folder
