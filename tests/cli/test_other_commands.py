from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.errors import PacelineError

COMMANDS = (
    "generate",
    "chat",
    "demo",
    "serve",
    "pull",
    "convert",
    "quantize",
    "info",
    "drafters",
    "train",
    "bench",
    "eval",
)


def test_help_lists_every_command(paceline):
    ran = paceline("--help")
    assert ran.code == 0
    assert all(command in ran.out for command in COMMANDS)


def test_no_arguments_show_the_help(paceline):
    ran = paceline()
    assert "Usage: paceline" in ran.out + ran.err


def test_version(paceline, monkeypatch):
    assert paceline("--version").out == f"paceline {version('paceline')}\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"paceline {version('paceline')}\n")


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from paceline.cli import run\n"
        "for command in '', 'generate', 'serve', 'bench', 'bench kernels', 'info':\n"
        "    assert run([*command.split(), '--help']) == 0, command\n"
        "heavy = {'numpy', 'fastapi', 'uvicorn', 'torch', 'tokenizers', 'jinja2', 'huggingface_hub', 'httpx',"
        " 'paceline._native'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_pull_prints_where_the_model_lies(paceline, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "paceline.weights.store.resolve_model", lambda name, **_: asked.append(name) or Path("/models/x.gguf")
    )
    ran = paceline("pull", "org/name")
    assert (ran.code, ran.out, asked) == (0, "/models/x.gguf\n", ["org/name"])


def test_an_unknown_model_is_an_error_with_a_remedy(paceline, monkeypatch):
    def unknown(name: str, **_: object) -> Path:
        raise PacelineError(f"model {name!r} is neither a path nor a known name; use smollm2-135m or a path")

    monkeypatch.setattr("paceline.weights.store.resolve_model", unknown)
    for argv in (
        ["pull", "nope"],
        ["generate", "hi", "--model", "nope"],
        ["info", "nope"],
        ["convert", "nope", "d"],
    ):
        ran = paceline(*argv)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("paceline: model 'nope' is neither")


def test_convert_passes_source_and_destination(paceline, monkeypatch, tmp_path):
    calls = []
    module = types.ModuleType("paceline.weights.convert")
    module.convert = lambda source, destination, dtype, **_: calls.append((source, destination, dtype))
    monkeypatch.setitem(sys.modules, "paceline.weights.convert", module)
    monkeypatch.setattr("paceline.weights.store.resolve_model", lambda _name, **_: tmp_path / "m.gguf")
    ran = paceline("convert", "m.gguf", str(tmp_path / "out"), "--dtype", "float32")
    assert (ran.code, ran.out) == (0, f"{tmp_path / 'out'}\n")
    assert calls == [(tmp_path / "m.gguf", tmp_path / "out", "float32")]
    assert paceline("convert", "m.gguf", "out", "--dtype", "int8").code == 2


def test_drafters_lists_pairs_and_filters(paceline):
    rows = json.loads(paceline("drafters", "--json").out)
    runs = {row["drafter"]: row["runs_here"] for row in rows}
    assert runs["z-lab/Qwen3-8B-DFlash-b16"] is True
    assert runs["z-lab/gpt-oss-20b-DFlash"] is False
    assert len(rows) > 30
    assert all(
        set(row) == {"target", "drafter", "method", "family", "draft_tokens", "note", "runs_here"} for row in rows
    )
    assert len({(row["target"], row["drafter"], row["method"]) for row in rows}) == len(rows)
    only = json.loads(paceline("drafters", "llama-3.1", "--json").out)
    assert [row["drafter"] for row in only] == ["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"]
    assert "Qwen3-8B-DFlash-b16" in paceline("drafters", "qwen3-8b").out


def test_drafters_that_nobody_knows(paceline):
    for extra, shown in (["--json"], "[]\n"), ([], ""):
        ran = paceline("drafters", "no-such-model", *extra)
        assert (ran.code, ran.out) == (1, shown)
        assert "'no-such-model'" in ran.err


def test_the_list_of_drafters_starts_with_what_runs_here_under_short_names(paceline):
    from paceline.speculation.factory import SHIPPED

    shown = paceline("drafters").out
    assert "\n  * built-in smollm2-135m-dflash " in shown
    assert str(SHIPPED) not in shown
    blocks = re.split(r"\n(?=\S)", shown)[:-1]
    marks = [[line[2] for line in block.splitlines()[1:]] for block in blocks]
    assert marks == sorted(marks, key=lambda block: "*" not in block)
    assert all(block == sorted(block, reverse=True) for block in marks)
    assert str(SHIPPED / "smollm2-135m-dflash") in paceline("drafters", "--json").out
    assert json.loads(paceline("drafters", str(SHIPPED), "--json").out) == []  # names are searched, not paths


class SmallCheckpoint:
    """What `info` asks of a checkpoint."""

    path = Path("/models/small")
    config: ClassVar = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    shapes: ClassVar = {"a": ("BF16", (1000, 64)), "b": ("Q8_0", (64, 64)), "c": ("BF16", (64,))}

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name][1]

    def stored_dtype(self, name: str) -> str:
        return self.shapes[name][0]

    def close(self) -> None:
        pass


def test_info_shows_the_model_and_how_it_would_run(paceline, llm, monkeypatch):
    monkeypatch.setattr("paceline.weights.store.resolve_model", lambda name, **_: Path("/models") / name)
    monkeypatch.setattr("paceline.weights.checkpoint.open_checkpoint", lambda _path: SmallCheckpoint())
    facts = json.loads(paceline("info", "small", "--json").out)
    assert (facts["model"], facts["path"], facts["architecture"]) == ("small", "/models/small", "llama")
    assert facts["parameters"] == 64_000 + 4096 + 64
    assert facts["stored_parameters"] == {"BF16": 64_064, "Q8_0": 4096}
    assert (facts["head_dim"], facts["num_key_value_heads"], facts["tied_head"]) == (16, 2, True)
    assert facts["engine"]["isa"] == "avx512"
    assert facts["engine"]["weights_bytes"] == 3 << 20
    text = paceline("info", "small", "--dtype", "float32", "--threads", "2").out
    for words in ("llama, 2 layers", "68.2 k (64.1 k as BF16, 4.1 k as Q8_0)", "avx512, 2 threads", "3 MiB", "ngram"):
        assert words in text
    assert (llm.opened[-1].dtype, llm.opened[-1].threads) == ("float32", 2)


def test_drafters_in_the_package_come_first(paceline, monkeypatch, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"block_size": 8, "paceline_target": {"name": "org/target", "model_type": "llama"}})
    )
    monkeypatch.setattr("paceline.speculation.factory.SHIPPED", tmp_path)
    first, second, *_ = json.loads(paceline("drafters", "--json").out)
    assert (first["target"], first["drafter"], first["draft_tokens"]) == ("org/target", str(folder), 7)
    assert first["runs_here"] is True
    assert second["drafter"] == "z-lab/Qwen3-4B-DFlash-b16"


def test_train_hands_everything_over(paceline, monkeypatch):
    calls = []
    module = types.ModuleType("paceline.train.cli")
    module.app = lambda args, prog_name: calls.append((args, prog_name))
    monkeypatch.setitem(sys.modules, "paceline.train.cli", module)
    assert paceline("train", "fit", "--data", "x", "--help").code == 0
    assert calls == [(["fit", "--data", "x", "--help"], "paceline train")]


def without_torch(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own where torch cannot be imported (here, other tests may have done so)."""
    code = "import sys; sys.modules['torch'] = None; from paceline.cli import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "argv",
    [
        ["features", "--answers", "a", "--out", "o"],
        ["fit", "--features", "f", "--out", "o", "--steps", "1"],
        ["export", "--run", "r", "--out", "o"],
        ["eval", "--drafter", "d", "--answers", "a"],
    ],
    ids=lambda argv: argv[0],
)
def test_train_without_torch_says_what_to_install(argv: list[str]) -> None:
    ran = without_torch("train", *argv)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "paceline: this step of the training needs PyTorch: pip install torch\n"


def test_train_prompts_and_regenerate_need_no_torch(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    sources = ("stdlib", "codeio", "gsm8k", "nq-open", "self-instruct")
    ran = without_torch("train", "prompts", "--out", str(out), "--limit", "3", *(f"--without={s}" for s in sources))
    assert ran.returncode == 0, ran.stderr
    assert len(out.read_text().splitlines()) == 3
    ran = without_torch("train", "regenerate", "--prompts", str(tmp_path / "missing"), "--out", str(tmp_path / "a"))
    assert ran.returncode == 1
    assert "missing" in ran.stderr
    assert "torch" not in ran.stderr


def test_completion_is_offered_by_the_whole_command_only(paceline):
    assert "--install-completion" in paceline("--help").out
    assert "--install-completion" not in paceline("train", "--help").out


@pytest.mark.parametrize("command", [[c] for c in COMMANDS if c != "train"] + [["bench", "kernels"]])
def test_docs_mention_every_command_and_option(command):
    """docs/cli.md is written by hand; what it must not do is fall behind."""
    import typer

    from paceline.cli.app import app

    node = typer.main.get_command(app)
    for name in command:
        node = node.commands[name]
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert f"`paceline {' '.join(command)}" in text
    for parameter in node.params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert f"`{option}`" in text, option
