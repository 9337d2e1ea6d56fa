from __future__ import annotations

import json

import pytest
from fakes.openai_server import FakeServer

from paceline.bench import grid
from paceline.bench import kernels as bench_kernels
from paceline.bench.figures import RESULT_KEYS


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "id": "a"}\n{"prompt": "two", "id": "b"}\n{"prompt": "three", "id": "c"}\n')
    return path


def test_result_and_outputs_are_written_and_a_table_shown(paceline, llm, rows, tmp_path):
    result, ids = tmp_path / "result.json", tmp_path / "ids.jsonl"
    ran = paceline(
        *("bench", "--dataset", str(rows), "--num-prompts", "2", "--output-len", "8"),
        *("--num-speculative-tokens", "0,4", "--output", str(result), "--save-outputs", str(ids)),
    )
    assert ran.code == 0, ran.err
    assert "speed-up" in ran.out
    assert ran.out.startswith("fake: avx512, 2 threads, ")
    arms = json.loads(result.read_text())
    assert [tuple(arm) for arm in arms] == [RESULT_KEYS] * 2
    assert [(arm["num_speculative_tokens"], arm["completed"], arm["output_tokens"]) for arm in arms] == [
        (0, 2, 16),
        (4, 2, 16),
    ]
    assert {arm["dataset"] for arm in arms} == {str(rows)}
    outputs = [json.loads(line) for line in ids.read_text().splitlines()]
    assert [(o["index"], o["num_speculative_tokens"], o["id"]) for o in outputs] == [
        (0, 0, "a"),
        (0, 4, "a"),
        (1, 0, "b"),
        (1, 4, "b"),
    ]
    assert all(len(o["logprobs"]) == len(o["token_ids"]) == 8 for o in outputs)
    assert outputs[0]["logprobs"] == outputs[1]["logprobs"]


def test_logprobs_are_only_computed_when_they_are_kept(paceline, llm, rows):
    paceline("bench", "--dataset", str(rows))
    assert {params.logprobs for _, params, _ in llm.log} == {None}


def test_several_sets_share_a_run_and_their_outputs_say_which(paceline, llm, rows, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "four"}\n')
    ids = tmp_path / "ids.jsonl"
    ran = paceline("bench", "-d", f"{rows},{other}", "-k", "0", "--save-outputs", str(ids), "--json")
    assert [(row["dataset"], row["completed"]) for row in json.loads(ran.out)] == [
        (str(rows), 3),
        (str(other), 1),
    ]
    outputs = [json.loads(line) for line in ids.read_text().splitlines()]
    assert [(o["dataset"], o["index"]) for o in outputs] == [(str(rows), i) for i in range(3)] + [(str(other), 0)]


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_an_interrupted_run_leaves_what_it_measured(paceline, llm, rows, tmp_path, monkeypatch, parts):
    real, result, ids = grid.run_grid, tmp_path / "result.json", tmp_path / "ids.jsonl"

    def cut(*args):
        for n, part in enumerate(real(*args)):
            if n == parts:
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(grid, "run_grid", cut)
    ran = paceline(
        *("bench", "-d", str(rows), "-k", "0,4", "-c", "1,2,3", "--output", str(result), "--save-outputs", str(ids)),
    )
    assert ran.code == 130
    if not parts:
        assert not result.exists() and not ran.out
        return
    assert "Interrupted: " in ran.err and "outputs equal those of k = 0." in ran.out
    assert [row["concurrency"] for row in json.loads(result.read_text())] == [1, 1, 2, 2][: 2 * parts]
    assert len(ids.read_text().splitlines()) == 6 * parts


def test_options_reach_the_engine(paceline, llm, rows):
    paceline(
        *("bench", "-d", str(rows), "--temperature", "0.8", "--seed", "5", "--ignore-eos", "--threads", "1"),
        *("--dtype", "float32", "--speculative-config", '{"method": "ngram"}', "-k", "0,2"),
    )
    params, options = llm.log[-1][1], llm.opened[0]
    assert (params.temperature, params.seed, params.ignore_eos, params.max_tokens) == (0.8, 5, True, 128)
    assert (options.threads, options.dtype, options.speculative_config) == (1, "float32", {"method": "ngram"})
    assert options.speculation


def test_plain_arms_alone_load_no_drafter(paceline, llm, rows):
    paceline("bench", "-d", str(rows), "-k", "0")
    assert llm.opened[0].speculation is False


def test_a_difference_is_code_1_after_everything_is_written(paceline, llm, rows, tmp_path):
    llm.corrupt_speculation = True
    ran = paceline("bench", "-d", str(rows), "-k", "0,4", "-o", str(tmp_path / "r.json"))
    assert ran.code == 1
    assert "outputs differ between arms" in ran.err
    assert json.loads((tmp_path / "r.json").read_text())[1]["identical"] is False


def test_failed_requests_are_code_1_and_quoted(paceline, llm, rows):
    llm.context = 20
    ran = paceline("bench", "-d", str(rows), "-k", "0")
    assert ran.code == 1
    assert "requests failed; the first: the prompt has" in ran.err


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["-k", "0,x"], 2, "'x' in '0,x' is not a whole number or auto"),
        (["-k", "0,-1"], 2, "-1 in '0,-1' is below 0"),
        (["-k", "0,7,7"], 2, "7 appears twice"),
        (["-k", ""], 2, "is not a whole number"),
        (["--num-prompts", "0"], 2, "--num-prompts"),
        (["--output-len", "-5"], 2, "--output-len"),
        (["--concurrency", "4,0"], 2, "0 in '4,0' is below 1"),
        (["--full", "-k", "0"], 2, "stands for lists of its own"),
        (["-k", "auto,0,auto"], 2, "auto appears twice"),
        (["--repeats", "0"], 2, "--repeats"),
        (["--temperature", "0.8"], 2, "needs a seed"),
        (["--speculative-config", "{"], 2, "not valid JSON"),
        (["-d", "mmlu"], 2, "dataset 'mmlu' is unknown"),
        (["-d", "missing.jsonl"], 2, "missing.jsonl"),
        (["--output", "/nowhere/at/all.json"], 1, "there is no folder /nowhere/at"),
        (["--model", "x", "kernels"], 2, "write it after `kernels`"),
    ],
)
def test_errors_come_before_a_model_is_loaded(paceline, llm, argv, code, told):
    ran = paceline("bench", *argv)
    assert ran.code == code
    assert told in ran.err
    assert not llm.opened


def test_help_shows_no_seed_that_would_be_drawn_at_random(paceline):
    for command in ("bench", "demo"):
        shown = paceline(command, "--help").out
        assert "random" not in " ".join(shown.split()).replace("--random-weights", "").replace("random weights", "")
        assert "needed with a temperature above 0" in " ".join(shown.replace("│", " ").split())


def test_one_failed_request_is_one_request(paceline, llm, rows):
    llm.context = 30
    rows.write_text('{"prompt": "one"}\n{"prompt": "%s"}\n' % ("x" * 80))
    ran = paceline("bench", "-d", str(rows), "-k", "0")
    assert ran.code == 1
    assert "paceline: 1 request failed; the first: " in ran.err


def test_a_bad_row_is_named_by_its_line(paceline, llm, rows):
    rows.write_text('{"prompt": "one"}\n{"prompt": \n')
    ran = paceline("bench", "-d", str(rows))
    assert (ran.code, llm.opened) == (1, [])
    assert "prompts.jsonl:2: not JSON" in ran.err


def test_an_empty_file_is_refused(paceline, llm, rows):
    rows.write_text("")
    ran = paceline("bench", "-d", str(rows))
    assert ran.code == 1
    assert "holds no rows" in ran.err


def test_kernels_prints_a_table_or_json_and_writes(paceline, llm, monkeypatch, tmp_path):
    asked = []

    def measure(fake, rows, repeats, *, on_step):
        asked.append((rows, repeats))
        samples = bench_kernels.KernelSamples([50.0], [300.0], {count: [0.001 * count] for count in rows})
        return bench_kernels.summarise(samples, dict.fromkeys(rows, (1e7, 1e7)), isa="avx2", threads=2)

    monkeypatch.setattr(bench_kernels, "measure", measure)
    ran = paceline("bench", "kernels", "--rows", "1,8", "--repeats", "2", "-o", str(tmp_path / "k.json"))
    assert (ran.code, asked) == (0, [([1, 8], 2)])
    assert "50.0 GB/s" in ran.out
    assert llm.opened[0].speculation is False
    written = json.loads((tmp_path / "k.json").read_text())
    assert json.loads(paceline("bench", "kernels", "--rows", "1,8", "--json").out) == written
    assert list(written) == ["read_bandwidth_gbs", "peak_gflops", "isa", "threads", "rows"]
    assert paceline("bench", "kernels", "--rows", "0").code == 2


def test_lists_of_concurrency_and_an_adaptive_arm(paceline, llm, rows, tmp_path):
    ran = paceline(
        *("bench", "-d", str(rows), "-k", "0,auto", "-c", "1,2", "--repeats", "2", "--output-len", "8"),
        *("--output", str(tmp_path / "r.json")),
    )
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "r.json").read_text())
    assert [(r["concurrency"], r["num_speculative_tokens"], r["completed"]) for r in found] == [
        *[(1, 0, 3), (1, "auto", 3)],
        *[(2, 0, 4), (2, "auto", 4)],
    ]
    assert "drafts of auto: 4 in 100%" in ran.out
    assert "ngram drafts up to 4 tokens" in ran.out
    assert llm.opened[0].max_num_seqs == 32


def test_more_clients_than_usual_get_an_engine_that_takes_them(paceline, llm, rows):
    paceline("bench", "-d", str(rows), "-k", "0", "-c", "40", "--repeats", "1")
    assert llm.opened[0].max_num_seqs == 40
    assert llm.most_streams == 40


def test_without_lists_the_default_grid_runs(paceline, llm, rows, tmp_path):
    ran = paceline("bench", "-d", str(rows), "--output-len", "4", "-o", str(tmp_path / "r.json"))
    assert ran.code == 0, ran.err
    found = [(r["concurrency"], r["num_speculative_tokens"]) for r in json.loads((tmp_path / "r.json").read_text())]
    assert found[:4] == [(1, 0), (1, 3), (1, 5), (1, 7)]
    assert [c for c, _ in found[4:]] == [2, 2, 4, 4, 8, 8]
    repeats = {(r["concurrency"] > 1, r["repeats"]) for r in json.loads((tmp_path / "r.json").read_text())}
    assert repeats == {(False, 3), (True, 2)}


@pytest.fixture
def server():
    with FakeServer().running() as running:
        yield running


def test_a_server_is_measured_by_its_url(paceline, llm, rows, server, tmp_path):
    ran = paceline(
        *("bench", "-d", str(rows), "--base-url", server.url, "-c", "1,2", "--repeats", "1", "--output-len", "8"),
        *("-o", str(tmp_path / "r.json")),
    )
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{server.url}: fake-model")
    found = json.loads((tmp_path / "r.json").read_text())
    assert [(r["concurrency"], r["num_speculative_tokens"], r["arm"]) for r in found] == [
        (1, None, "server"),
        (2, None, "server"),
    ]
    assert [tuple(r) for r in found] == [RESULT_KEYS] * 2
    assert not llm.opened


def test_draft_lengths_go_to_the_server_with_the_requests(paceline, rows, server):
    ran = paceline("bench", "-d", str(rows), "--base-url", server.url, "-k", "0,2", "--repeats", "1", "--json")
    assert [row["num_speculative_tokens"] for row in json.loads(ran.out)] == [0, 2]
    assert {body["num_speculative_tokens"] for body in server.bodies} == {0, 2}
    assert json.loads(ran.out)[1]["speedup"] is not None


def test_two_servers_are_compared_and_may_differ(paceline, rows, server):
    with FakeServer().running() as other:
        other.llm.corrupt_speculation = True
        ran = paceline(
            *("bench", "-d", str(rows), "--base-url", server.url, "--base-url", other.url, "--repeats", "1", "--json")
        )
    first, second = json.loads(ran.out)
    assert ran.code == 0, ran.err
    assert first["arm"] in server.url
    assert (first["speedup"], second["identical"]) == (1.0, False)
    assert f"Warning: outputs differ from those of {first['arm']}" in ran.err


def test_configurations_are_compared(paceline, llm, rows, server):
    arms = [
        {"label": "plain", "num_speculative_tokens": 0},
        {"label": "lookup", "speculative_config": {"method": "ngram"}, "num_speculative_tokens": 2},
        {"label": "there", "base_url": server.url, "model": "fake-model", "extra_body": {"x": 1}},
    ]
    argv = [part for arm in arms for part in ("--arm", json.dumps(arm))]
    ran = paceline("bench", "-d", str(rows), "--threads", "1", "--repeats", "1", "--json", *argv)
    assert ran.code == 0, ran.err
    assert [(r["arm"], r["num_speculative_tokens"]) for r in json.loads(ran.out)] == [
        ("plain", 0),
        ("lookup", 2),
        ("there", None),
    ]
    assert [(o.speculation, o.speculative_config, o.threads) for o in llm.opened] == [
        (False, None, 1),
        (True, {"method": "ngram"}, 1),
    ]
    assert server.bodies[-1]["x"] == 1


def test_arms_of_one_model_that_differ_are_a_bug(paceline, llm, rows):
    llm.corrupt_speculation = True
    arms = ['{"label": "a", "num_speculative_tokens": 0}', '{"label": "b", "num_speculative_tokens": 2}']
    ran = paceline("bench", "-d", str(rows), "--repeats", "1", "--arm", arms[0], "--arm", arms[1])
    assert ran.code == 1
    assert "outputs differ between arms" in ran.err


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"lable": "x"}', "unknown key 'lable'; known: label"),
        ('{"base_url": "http://x", "dtype": "auto"}', "'dtype' belongs to an engine in this process"),
        ('{"extra_body": {"a": 1}}', "'extra_body' belongs to an arm with base_url"),
        ('{"num_speculative_tokens": -1}', "-1 in '-1' is below 0"),
        ('{"speculative_config": {"method": "x"}}', "not supported"),
        ('{"dtype": "int8"}', "use auto, bfloat16 or float32"),
        ('{"threads": "2"}', "threads='2' is no int"),
    ],
)
def test_a_wrong_arm_is_refused_before_anything_is_opened(paceline, llm, rows, arm, told):
    ran = paceline("bench", "-d", str(rows), "--arm", arm)
    assert ran.code == 2
    assert told in ran.err
    assert not llm.opened
