"""`paceline bench`: reports in three formats, shapes with random weights, the plan of a long run."""

from __future__ import annotations

import json
import re

import pytest
from fakes.openai_server import FakeServer

from paceline.bench import floors, grid, shapes
from paceline.bench.floors import Machine
from paceline.bench.shapes import Shape


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Reading 2 GiB to know the bandwidth would take a test's time."""
    monkeypatch.setattr("paceline.bench.study.measure_machine", lambda _backend: Machine(50.0, 400.0))
    monkeypatch.setattr(floors, "measure_machine", None)


def fake_profile(_arms, _prompts, _params):
    parts = {"draft": 1.0, "pass": 5.0, "sampling": 0.5, "context": 0.25, "rest": 0.25}
    return [{"arm": "k = 4", "k": 4, "steps": 9, **parts}]


def test_reports_in_three_formats(paceline, llm, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.bench.study.profile", fake_profile)
    paths = [tmp_path / f"report{suffix}" for suffix in (".html", ".md", ".json")]
    ran = paceline(
        *("bench", "-d", str(rows), "-k", "0,2,4", "--repeats", "2", "--price-per-hour", "3.6"),
        *(part for path in paths for part in ("--report", str(path))),
    )
    assert ran.code == 0, ran.err
    html, markdown, values = (path.read_text() for path in paths)
    study = json.loads(values)
    assert list(study) == ["facts", "synthetic", "price_per_hour", "results", "rounds", "predictions", "choices"]
    assert [row["num_speculative_tokens"] for row in study["results"]] == [0, 2, 4]
    assert (study["synthetic"], study["price_per_hour"]) == (False, 3.6)
    assert study["facts"]["engine"].startswith("fake: avx512, 2 threads")
    assert "2 prompts, at most 128 tokens an answer, greedy, 2 repeats, arms interleaved" in study["facts"]["measured"]
    assert study["rounds"][0]["floor"] > 0
    speedup = f"{study['results'][2]['speedup']:.2f}"
    row = re.search(r"^\| prompts.jsonl \| 4 \|.*$", markdown, re.MULTILINE)
    assert row is not None
    assert f"| {speedup} |" in row[0]
    for text in (html, markdown):
        for heading in ("Speed-up per set", "Cost per token", "Acceptance", "Survival per position"):
            assert heading in text
        assert "SYNTHETIC" not in text
    assert html.count("<svg") >= 4
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_server_is_reported_without_this_machines_parts(paceline, rows, tmp_path):
    with FakeServer().running() as server:
        ran = paceline(
            *("bench", "-d", str(rows), "--base-url", server.url, "-k", "0,2", "--repeats", "1"),
            *("--report", str(tmp_path / "r.json")),
        )
    assert ran.code == 0, ran.err
    study = json.loads((tmp_path / "r.json").read_text())
    assert (study["rounds"], study["predictions"], study["choices"]) == ([], [], [])
    assert study["facts"]["engine"] == f"{server.url}: fake-model"
    assert "machine" not in study["facts"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--report", "r.pdf"], "end it in .html, .md, .json"),
        (["--report", "/nowhere/r.md"], "there is no folder /nowhere"),
        (["--price-per-hour", "0"], "0.0 is no price"),
        (["--random-weights", "Qwen3-4B", "-d", "gsm8k"], "has prompts of its own"),
        (["--random-weights", "GPT-5"], "GPT-5: unknown; use Qwen3.5-9B"),
        (["--random-weights", "Qwen3-4B", "--synthetic-acceptance", "0.5,0.6"], "which never rise"),
        (["--random-weights", "Qwen3-4B", "--synthetic-acceptance", "1.5"], "1.5"),
        (["--random-weights", "Qwen3-0.6B", "-k", "0,3"], "has no known drafter"),
    ],
)
def test_what_cannot_be_is_refused_before_minutes_of_measuring(paceline, llm, rows, argv, told):
    own = [] if "--random-weights" in argv else ["-d", str(rows)]
    ran = paceline("bench", *own, *argv)
    assert ran.code in (1, 2)
    assert told in ran.err
    assert not llm.opened


TARGET = shapes._decoder("qwen3", 4, 64, 128, 4, 2, 16, 512, rope_theta=1e6, tie_word_embeddings=True)
DRAFTER = {
    **shapes._drafter(TARGET, 1, 128, [0, 2], 8, 511),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_random_weights_keep_as_many_drafts_as_asked(paceline, monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(TARGET, DRAFTER, "this shape is a test's"))
    ran = paceline(
        *("bench", "--random-weights", "tiny", "--synthetic-acceptance", "1,1,1,0,0,0,0", "-k", "0,7"),
        *("--num-prompts", "2", "--output-len", "33", "--repeats", "1", "--threads", "1"),
        *("--report", str(tmp_path / "r.md"), "--report", str(tmp_path / "r.json"), "-o", str(tmp_path / "o.json")),
    )
    assert ran.code == 0, ran.err
    assert "SYNTHETIC: random weights, made-up acceptance. " in ran.out
    assert "SYNTHETIC: this shape is a test's" in ran.out
    plain, drafted = json.loads((tmp_path / "o.json").read_text())
    assert drafted["identical"] is True
    assert plain["output_tokens"] == drafted["output_tokens"] == 66
    # 32 tokens after the first, 4 to a round
    assert drafted["spec_decode"]["num_drafts"] == 16
    assert drafted["spec_decode"]["acceptance_length"] == pytest.approx(4.0)
    assert drafted["spec_decode"]["per_position_acceptance_rates"][:4] == [1.0, 1.0, 1.0, 0.0]
    assert (tmp_path / "r.md").read_text().count("SYNTHETIC") > 1
    study = json.loads((tmp_path / "r.json").read_text())
    assert study["synthetic"] is True
    assert {row["k"]: "floor" in row for row in study["rounds"]} == {0: True, 7: True}


def test_a_config_of_ones_own_has_no_drafter(paceline, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TARGET))
    ran = paceline(
        *("bench", "--random-weights", str(path), "-k", "0", "--num-prompts", "1", "--output-len", "4"),
        *("--repeats", "1", "--threads", "1", "--json"),
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)[0]["output_tokens"] == 4


@pytest.mark.parametrize(("options", "told"), [([], "bfloat16"), (["--quantization", "int8"], "int8")])
def test_random_weights_have_the_format_that_was_asked_for(paceline, monkeypatch, options, told):
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(TARGET, DRAFTER))
    ran = paceline(
        *("bench", "--random-weights", "tiny", "-k", "0,7", "--num-prompts", "1", "--output-len", "4", *options),
        *("--repeats", "1", "--threads", "1"),
    )
    assert ran.code == 0, ran.err
    assert f"MiB {told} weights" in ran.out


def test_passes_of_random_weights_against_their_floors(paceline, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(TARGET, DRAFTER))
    monkeypatch.setattr("paceline.bench.kernels.READ_BYTES", 1 << 20)
    ran = paceline("bench", "kernels", "--random-weights", "tiny", "--rows", "1,3", "--repeats", "1", "--json")
    assert ran.code == 0, ran.err
    assert ran.err.startswith("SYNTHETIC: random weights")
    rows = json.loads(ran.out)["rows"]
    assert [row["rows"] for row in rows] == [1, 3]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)


def test_random_weights_stand_in_place_of_a_model(paceline):
    ran = paceline("bench", "kernels", "--random-weights", "Qwen3-4B", "--model", "smollm2-135m")
    assert ran.code == 2
    assert "drop --model" in ran.err


def test_the_default_grid_repeats_less_above_one_request_unless_told(paceline, llm, rows, tmp_path):
    path = tmp_path / "o.json"
    for argv, later in (((), 2), (("--repeats", "3"), 3), (("--repeats", "1"), 1)):
        assert paceline("bench", "-d", str(rows), "--output-len", "4", "-o", str(path), *argv).code == 0
        found = {(row["concurrency"] > 1, row["repeats"]) for row in json.loads(path.read_text())}
        assert found == {(False, int(argv[1]) if argv else 3), (True, later)}


def test_a_run_of_minutes_says_so_first(paceline, llm, rows, monkeypatch):
    assert "takes at most about" not in paceline("bench", "-d", str(rows), "--output-len", "4").err
    monkeypatch.setattr(llm, "time_forward", lambda _rows, _context: 1.0)
    ran = paceline("bench", "-d", str(rows), "-k", "0", "-c", "1,2", "--repeats", "2", "--output-len", "60")
    # 2 prompts x 2 repeats one by one, and 4 requests (two for each client) x 2 repeats in pairs: 240 + 240 s
    assert ran.err.startswith("12 requests of at most 60 tokens: decoding takes at most about 8 min\n")


def test_the_line_on_the_cost_models_choice(paceline, llm, rows, monkeypatch):
    found = [
        {"dataset": "s", "k": k, "predicted": predicted, "measured": measured}
        for k, predicted, measured in ((0, 1.0, 1.0), (3, 1.5, 1.2), (4, 1.6, None), (5, 1.4, 1.6))
    ]
    monkeypatch.setattr("paceline.bench.costmodel.prediction_rows", lambda _rows, _arms: found)
    ran = paceline("bench", "-d", str(rows), "-k", "0,2", "--repeats", "1")
    assert (
        "s: the cost model would choose k = 3 (1.20x measured), the fastest was k = 5 (1.60x): 0.75 of it"
        in ran.out.splitlines()
    )


def test_arms_of_one_engine_and_a_report(paceline, llm, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.bench.study.profile", fake_profile)
    arms = ['{"label": "plain", "num_speculative_tokens": 0}', '{"label": "lookup", "num_speculative_tokens": 4}']
    ran = paceline(
        *("bench", "-d", str(rows), "--repeats", "1", "--arm", arms[0], "--arm", arms[1]),
        *("--report", str(tmp_path / "r.md"), "--report", str(tmp_path / "r.json")),
    )
    assert ran.code == 0, ran.err
    assert "| prompts.jsonl | lookup |" in (tmp_path / "r.md").read_text()
    facts = json.loads((tmp_path / "r.json").read_text())["facts"]
    assert facts["arm 1"].startswith("plain: ")
    assert facts["arm 2"].startswith("lookup: ")


def test_the_plan_counts_what_the_grid_runs(llm):
    from paceline.bench.backend import Arm
    from paceline.bench.datasets import BenchPrompt
    from paceline.bench.local import LocalBackend

    backend = LocalBackend(llm)
    arms = [Arm(backend, k) for k in (0, 3, 5, 7)]
    sets = {"s": [BenchPrompt(i, [{"role": "user", "content": "x"}]) for i in range(20)]}
    stages = grid.default_grid(arms, (1, 2, 4, 8), 2)
    assert grid.total_steps(stages, sets, 3) == 3 * 4 * 20 + 3 * (2 * 2 * 20)
    seconds = grid.longest_seconds(stages, sets, 3, 10, lambda rows: 1.0 + rows)
    assert seconds == pytest.approx(240 * 10 * 2 + 80 / 2 * 10 * 3 + 80 / 4 * 10 * 5 + 80 / 8 * 10 * 9)
    assert grid.repeats_line(stages, 3) == "3 repeats (2 above concurrency 1)"
    assert grid.repeats_line(grid.default_grid(arms, (1, 2), 3), 3) == "3 repeats"


def test_a_model_that_is_named_must_be_the_servers(paceline, rows):
    with FakeServer().running() as server:
        here = ("bench", "-d", str(rows), "--base-url", server.url, "--repeats", "1")
        assert paceline(*here, "--model", "fake-model").code == 0
        ran = paceline(*here, "--model", "other")
    assert (ran.code, "serves fake-model" in ran.err) == (1, True)
