"""The Grafana dashboard asks for what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine.harness import repeat_last, scripted
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "paceline.json").read_text())
PANELS = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
EXPRESSIONS = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]
METRIC = re.compile(r"((?:vllm|paceline):[a-z0-9_]+)(\{[^}]*\})?")
BY_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds
BY_GRAFANA = {"__rate_interval"}


@pytest.fixture(scope="module")
def exposed(server, spec) -> dict[str, set[str]]:
    """Sample name -> its labels, after requests with drafts and without, and one that was found in the cache."""
    with scripted(spec, repeat_last):
        for _ in range(2):
            body = {"prompt": "abcdefgh" * 20, "max_tokens": 20, "num_speculative_tokens": 3}
            server.ok("/v1/completions", **body)
    server.ok("/v1/completions", prompt="ab", max_tokens=3)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_panels_are_those_that_are_promised():
    words = " ".join(p["title"].lower() for p in PANELS)
    for word in (
        "throughput",
        "first token",
        "time per output token",
        "queue",
        "kv cache",
        "acceptance length",
        "survival by position",
        "draft length",
        "where a round's time goes",
        "prefix cache hits",
    ):
        assert word in words
    assert len(EXPRESSIONS) >= 30


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[f"{t}-{i}" for i, (t, _) in enumerate(EXPRESSIONS)])
def test_every_metric_is_one_that_the_server_has(exposed, title, expression):
    found = METRIC.findall(expression)
    assert found, expression
    for name, selector in found:
        assert name in exposed, f"{title}: {name}"
        labels = set(re.findall(r"([a-z_]+)=", selector))
        assert {"model_name", "instance"} <= labels
        assert labels <= exposed[name] | BY_PROMETHEUS
    for group, name in re.findall(r"by \((\w+)\) \((?:rate\()?([a-z0-9_:]+)", expression):
        assert group in exposed[name] | BY_PROMETHEUS
    for legend in re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD)):
        assert legend in {"position", "part", "instance", "finished_reason"}
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_counters_are_queried_as_rates():
    for title, expression in EXPRESSIONS:
        for name, _ in METRIC.findall(expression):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert f"rate({name}" in expression, title


def test_it_loads_with_any_data_source():
    """No identity of someone's Prometheus is in it: every panel and variable takes the one that is chosen on top."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    for panel in PANELS:
        assert panel["datasource"] == source and all(t["datasource"] == source for t in panel["targets"])
    used = set(re.findall(r"\$(\w+)", "".join(e for _, e in EXPRESSIONS)))
    assert used == {"model_name", "instance"} | BY_GRAFANA
    assert used - BY_GRAFANA <= variables.keys()
    assert "id" not in DASHBOARD and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    ids = [p["id"] for p in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_variables_ask_for_what_there_is(exposed):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(
                r"label_values\(([a-z0-9_:]+)(?:\{.*\})?, (\w+)\)", variable["definition"]
            ).groups()
            assert name in exposed and label in exposed[name] | BY_PROMETHEUS
            assert variable["query"]["query"] == variable["definition"]


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_parts_of_a_round_add_up(server, spec, exposed):
    """draft + forward + commit + schedule is the time of the steps, and each is some of it."""
    text = server.client.get("/metrics").text
    parts = {
        s.labels["part"]: s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if s.name == "paceline:round_part_seconds_total"
    }
    assert parts.keys() == {"draft", "forward", "commit", "schedule"} and min(parts.values()) > 0
    stats = server.engine.stats()
    assert sum(parts.values()) <= stats.step_seconds
    assert max(parts, key=lambda part: parts[part]) in ("forward", "commit")


def test_the_scrape_example_asks_the_right_path():
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=underscores",
        "",
    ],
)
def test_names_keep_their_colon_for_every_prometheus(server, accept):
    """What Prometheus 2 and 3 ask for: `vllm:num_drafts` must not become `vllm_num_drafts`."""
    answer = server.client.get("/metrics", headers={"accept": accept})
    assert "vllm:num_requests_running{" in answer.text and "vllm_" not in answer.text and "paceline_" not in answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
