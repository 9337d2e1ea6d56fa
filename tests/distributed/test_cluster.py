"""Replicas on a local cluster of two Ray nodes: own cores, prefixes that stay together, streams, cancellation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from models.tiny import Shape, write_target

from paceline import LLM, SamplingParams
from paceline.ray.cores import physical_cores

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
APPLICATION = "distributed.tiny_app:create_app"
OPTIONS = {"dtype": "float32", "threads": 1, "speculative_config": None, "max_num_seqs": 8}
PORT = 18265


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("model") / "tiny", Shape(sharp=3.0), tokenizer=True)


@pytest.fixture(scope="module")
def base_url(model: Path) -> Iterator[str]:
    """Two nodes with one CPU each, so that each must take one replica."""
    if len(physical_cores()) < 2:
        pytest.skip("two replicas need two physical cores")
    from paceline.ray import DeployOptions, build

    # a machine that is busy starts processes slowly; the cluster's own inherit these
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
    monkeypatch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": str(TESTS)}}, log_to_driver=False)
        serve.start(http_options={"port": PORT, "host": "127.0.0.1"})
        options = DeployOptions(model=str(model), replicas=2, cores=1, application=APPLICATION, engine=OPTIONS)
        serve.run(build(options))
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        monkeypatch.undo()


def complete(base_url: str, prompt: list[int], tokens: int = 12, **extra: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, **extra}
    response = httpx.post(f"{base_url}/v1/completions", json=body, timeout=600)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_replicas_lie_on_different_nodes_and_cores(base_url: str) -> None:
    facts = serve.get_deployment_handle("Replica", "default").broadcast("facts").results(timeout_s=300)
    assert len({fact["node"] for fact in facts}) == len(facts) == 2
    first, second = (set(fact["cpus"]) for fact in facts)
    assert first and second and not first & second


def test_every_thread_of_a_replica_is_pinned(base_url: str) -> None:
    facts = serve.get_deployment_handle("Replica", "default").broadcast("facts").results(timeout_s=300)
    who = httpx.get(f"{base_url}/whoami", timeout=600).json()
    allowed = [sorted(fact["cpus"]) for fact in facts]
    assert {tuple(cpus) for cpus in who["affinity"]} <= {tuple(cpus) for cpus in allowed}
    assert len({tuple(cpus) for cpus in who["affinity"]}) == 1


def test_answers_are_those_of_the_engine_alone(base_url: str, model: Path) -> None:
    llm = LLM(model, **OPTIONS)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5 + i, 7, 11, 3 * i + 1] for i in range(8)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert [complete(base_url, prompt)["token_ids"] for prompt in prompts] == expected


def test_a_prefix_stays_on_its_replica_and_others_spread(base_url: str) -> None:
    families = [[(17 * family + i) % 90 for i in range(40)] for family in range(8)]
    where = [
        {complete(base_url, [*family, turn, turn + 1], tokens=2)["pid"] for turn in range(4)} for family in families
    ]
    assert all(len(pids) == 1 for pids in where)
    assert len(set.union(*where)) == 2


def test_a_stream_arrives_piece_by_piece(base_url: str) -> None:
    whole = complete(base_url, [1, 2, 3], tokens=24)["token_ids"]
    body = {"prompt": [1, 2, 3], "max_tokens": 24, "stream": True}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=600) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers.get_list("x-twice") == ["a", "b"]
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(pieces) == 24
    assert [token for piece in pieces for token in piece] == whole


def test_a_client_that_leaves_is_noticed_by_the_replica(base_url: str) -> None:
    with httpx.stream("GET", f"{base_url}/forever", timeout=600) as response:
        assert next(response.iter_bytes()) == b"waiting"
    deadline = time.monotonic() + 60
    while sum(values(base_url, "tiny_left").values()) < 1:
        assert time.monotonic() < deadline, "the replica still waits for a client that left"
        time.sleep(0.2)


def values(base_url: str, name: str) -> dict[str, float]:
    """Value of a metric by replica."""
    page = httpx.get(f"{base_url}/metrics", timeout=600).text
    rows = [line for line in page.splitlines() if line.startswith(name + "{")]
    return {row.split('"')[1]: float(row.rsplit(" ", 1)[1]) for row in rows}


def test_metrics_name_every_replica(base_url: str) -> None:
    before = values(base_url, "tiny_requests")
    complete(base_url, [9, 9, 9], tokens=1)
    after = values(base_url, "tiny_requests")
    assert len(after) == 2
    assert sum(after.values()) == sum(before.values()) + 1


def test_errors_of_the_application_pass_and_large_bodies_do_not(base_url: str) -> None:
    assert httpx.get(f"{base_url}/nothing", timeout=600).status_code == 404
    large = httpx.post(f"{base_url}/v1/completions", content=b"x" * (33 << 20), timeout=600)
    assert large.status_code == 413
    assert "max_body_bytes" in large.json()["error"]["message"]


def test_the_server_itself_behind_ray(base_url: str, model: Path) -> None:
    """Last in this file: it replaces the small application by the one of `paceline serve`, and uses its cores."""
    from paceline.ray import DeployOptions, build

    serve.delete("default")
    named = {"model_names": ["tiny"]}
    serve.run(build(DeployOptions(model=str(model), replicas=2, cores=1, engine=OPTIONS, server=named)))
    assert [m["id"] for m in httpx.get(f"{base_url}/v1/models", timeout=600).json()["data"]] == ["tiny"]
    llm = LLM(model, **OPTIONS)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5 + i, 7, 11, 3 * i + 1] for i in range(4)]
    for output in llm.generate(prompts, params):
        body = {"model": "tiny", "prompt": output.prompt_token_ids, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{base_url}/v1/completions", json={**body, "ignore_eos": True}, timeout=600).json()
        assert answer["choices"][0]["text"] == output.outputs[0].text
        assert answer["usage"]["completion_tokens"] == 12
    refused = httpx.post(f"{base_url}/v1/completions", json={"model": "other", "prompt": [1]}, timeout=600)
    assert refused.status_code == 404
    assert sum(values(base_url, "vllm:generation_tokens_total").values()) == 4 * 12
