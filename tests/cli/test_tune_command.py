from __future__ import annotations

import json

import pytest
from fakes.llm import FakeLLM

from paceline.cli.tune import _candidate
from paceline.speculation.config import SpeculativeConfig


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one question"}\n{"prompt": "two questions"}\n')
    return path


def test_the_recommendation_is_written_said_and_read_again(paceline, llm, rows, tmp_path):
    file = tmp_path / "spec.json"
    ran = paceline("tune", "-d", str(rows), "--output-len", "12", "--repeats", "1", "-o", str(file))
    assert ran.code == 0, ran.err
    config = json.loads(file.read_text())
    assert config["method"] == "ngram"
    assert f"--speculative-config {file}" in ran.out
    assert "as fast as plain decoding on these prompts" in ran.out
    for name in (str(file), f"@{file}"):
        assert paceline("generate", "hello", "--speculative-config", name).code == 0
        assert llm.opened[-1].speculative_config == config


def test_weights_are_tuned_for_as_they_will_run(paceline, llm, rows, tmp_path):
    file = tmp_path / "spec.json"
    argv = ("tune", "-d", str(rows), "--output-len", "12", "--repeats", "1", "-o", str(file), "-m", "my model")
    ran = paceline(*argv, "--quantization", "int8", "--kv-cache-dtype", "int8")
    assert ran.code == 0, ran.err
    assert {(o.model, o.quantization, o.kv_cache_dtype) for o in llm.opened} == {("my model", "int8", "int8")}
    use = f"'my model' --quantization int8 --kv-cache-dtype int8 --speculative-config {file}"
    assert f"paceline serve {use}\n" in ran.out and f'paceline generate "..." -m {use}\n' in ran.out


def test_json_holds_what_was_measured(paceline, llm, rows, tmp_path):
    argv = ("tune", "-d", str(rows), "--output-len", "12", "--repeats", "1", "-o", str(tmp_path / "s.json"), "--json")
    values = json.loads(paceline(*argv).out)
    assert list(values) == ["speculative_config", "why", "file", "tried"]
    assert [tried["drafter"] for tried in values["tried"]] == ["ngram"]  # the same drafter is not tried twice
    assert {"speedups", "predicted", "predicted_best_vs_measured_best"} <= set(values["tried"][0])


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["--drafter", "{"], 2, "not valid JSON"),
        (["-d", "nothing"], 2, "dataset 'nothing' is unknown"),
        (["-o", "/nowhere/at/all.json"], 1, "there is no folder"),
        (["--temperature", "1"], 2, "needs a seed"),
    ],
)
def test_errors_come_before_a_model_is_loaded(paceline, llm, argv, code, told):
    ran = paceline("tune", *argv)
    assert (ran.code, llm.opened) == (code, [])
    assert told in ran.err


def test_a_config_file_that_cannot_be_used_is_named(paceline, llm, tmp_path):
    missing = paceline("generate", "x", "--speculative-config", f"@{tmp_path}/none.json")
    assert missing.code == 2
    assert "none.json: No such file" in missing.err
    (tmp_path / "bad.json").write_text('{"method": "nothing"}')
    bad = paceline("generate", "x", "--speculative-config", str(tmp_path / "bad.json"))
    assert bad.code == 2
    assert "bad.json: speculative config: method='nothing'" in bad.err
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in paceline("generate", "x", "--speculative-config", str(tmp_path / "binary.json")).err


def test_a_config_of_no_drafts_loads_no_drafter(paceline, llm, tmp_path, monkeypatch):
    (tmp_path / "none.json").write_text('{"method": "none"}')
    assert paceline("generate", "x", "--speculative-config", str(tmp_path / "none.json")).code == 0
    from paceline.cli import options as opt

    assert llm.opened[0].speculative_config == opt.NO_DRAFTS


def test_open_llm_takes_no_drafts_as_none(monkeypatch):
    import paceline.llm
    from paceline.cli import options as opt

    given = {}
    monkeypatch.setattr(paceline.llm, "LLM", lambda model, **arguments: given.update(arguments))
    monkeypatch.setattr("paceline.weights.store.resolve_model", lambda *_, **__: None)
    from paceline.cli.engine import open_llm

    open_llm(opt.EngineOptions(speculative_config=dict(opt.NO_DRAFTS)))
    assert given["speculative_config"] is None


def test_what_auto_stands_for_is_written_out() -> None:
    """The drafter by its method alone, since it ships, and prompt lookup beside it."""
    llm = FakeLLM()
    auto = {"method": "dflash", "model": "drafters/shipped", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    llm.speculative_config = SpeculativeConfig.parse(auto)
    assert _candidate(llm, None).config == {key: value for key, value in auto.items() if key != "model"}
    assert _candidate(llm, {"method": "dflash", "num_speculative_tokens": 3}).config == {"method": "dflash"}
