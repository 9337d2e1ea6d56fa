"""`paceline quantize` and `paceline eval` on a tiny model."""

from __future__ import annotations

import json

import pytest
from models.tiny import Shape, write_target


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    return write_target(folder, Shape(vocab=120, hidden=48, inner=64, sharp=2), tokenizer=True)


def test_quantize_writes_a_folder_that_eval_and_generate_read(paceline, tmp_path, target):
    ran = paceline("quantize", str(target), str(tmp_path / "q"), "--quantization", "int4")
    assert ran.code == 0 and ran.out.strip() == str(tmp_path / "q")
    assert "converted to int4, relative error" in ran.err
    text = tmp_path / "text.txt"
    text.write_text("ha ha ha abab cdcd " * 8)
    ran = paceline("eval", str(tmp_path / "q"), str(text), "--json")
    facts = json.loads(ran.out)
    assert facts["weight_type"] == "int4" and facts["weights_bytes"] < facts["reference_weights_bytes"]
    assert facts["perplexity_ratio"] == pytest.approx(1, abs=0.2) and 0.5 < facts["greedy_agreement"] <= 1
    ran = paceline("eval", str(target), str(text), "--quantization", "int8")
    assert ran.code == 0 and "same greedy token" in ran.out and "int8" in ran.out
    ran = paceline("generate", "ab", "-m", str(tmp_path / "q"), "--quantization", "auto", "--max-tokens", "4")
    assert ran.code == 0


def test_quantize_refuses_a_folder_in_use(paceline, tmp_path, target):
    ran = paceline("quantize", str(target), str(target))
    assert ran.code != 0 and "exists already" in ran.err


def test_eval_names_a_file_without_text(paceline, tmp_path, target):
    (tmp_path / "x.jsonl").write_text('{"text": ""}')
    ran = paceline("eval", str(target), str(tmp_path / "x.jsonl"))
    assert ran.code != 0 and "no text" in ran.err


def test_an_unknown_quantization_is_a_usage_error(paceline, target):
    ran = paceline("generate", "ab", "-m", str(target), "--quantization", "int3")
    assert ran.code == 2 and "int3" in ran.err


def test_an_int8_cache_is_counted_and_compared(paceline, tmp_path, target):
    ran = paceline("info", str(target), "--kv-cache-dtype", "int8", "--json")
    facts = json.loads(ran.out)["engine"]
    assert facts["kv_cache_dtype"] == "int8"
    exact = json.loads(paceline("info", str(target), "--json").out)["engine"]
    assert exact["kv_cache_dtype"] == "bfloat16" and facts["kv_bytes_per_token"] < exact["kv_bytes_per_token"]
    text = tmp_path / "text.txt"
    text.write_text("ha ha ha abab cdcd " * 8)
    facts = json.loads(paceline("eval", str(target), str(text), "--kv-cache-dtype", "int8", "--json").out)
    assert (facts["weight_type"], facts["kv_cache_dtype"]) == ("bfloat16", "int8")
    assert facts["perplexity_ratio"] != 1 and facts["perplexity_ratio"] == pytest.approx(1, abs=0.05)
