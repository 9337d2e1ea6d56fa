"""The soak: what it would find is found, and a short one finds nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from engine.conftest import SHAPE
from models.tiny import write_target

from benchmarks.serve_soak import Lived, main
from benchmarks.soak_checks import Scrape, counters_agree, counters_grow, left_behind
from benchmarks.soak_process import COMPLAINT, Usage

LABELS = 'model_name="m",engine="0"'


def scrape(drafts=10, drafted=30, accepted=12, positions=(7, 4, 1), running=0, count=3, **more) -> Scrape:
    spec = "vllm:spec_decode_num"
    lines = [
        f"# TYPE {spec}_drafts_total counter\n{spec}_drafts_total{{{LABELS}}} {drafts}",
        f"# TYPE {spec}_draft_tokens_total counter\n{spec}_draft_tokens_total{{{LABELS}}} {drafted}",
        f"# TYPE {spec}_accepted_tokens_total counter\n{spec}_accepted_tokens_total{{{LABELS}}} {accepted}",
        f"# TYPE {spec}_accepted_tokens_per_pos_total counter",
        *(f'{spec}_accepted_tokens_per_pos_total{{{LABELS},position="{i}"}} {n}' for i, n in enumerate(positions)),
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{LABELS}}} {running}",
        f"# TYPE paceline:engine_alive gauge\npaceline:engine_alive{{{LABELS}}} {more.get('alive', 1)}",
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{LABELS}}} {more.get('cache', 0)}",
        "# TYPE paceline:round_seconds histogram",
        f'paceline:round_seconds_bucket{{{LABELS},le="0.1"}} 2',
        f'paceline:round_seconds_bucket{{{LABELS},le="+Inf"}} 3',
        f"paceline:round_seconds_count{{{LABELS}}} {count}\npaceline:round_seconds_sum{{{LABELS}}} 1.0",
    ]
    return Scrape.parse("\n".join(lines) + "\n")


def test_counters_that_agree_are_fine():
    assert list(counters_agree(scrape())) == []
    assert list(counters_grow(scrape(), scrape(accepted=13, positions=(8, 4, 1)))) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"drafted": 11}, "more draft tokens were accepted"),
        ({"accepted": 13}, "do not add up"),
        ({"positions": (4, 7, 1)}, "survival rises"),
        ({"positions": (12, 0, 0)}, "survival rises"),
        ({"count": 4}, "not that of its last bucket"),
    ],
)
def test_contradictions_are_found(wrong, words):
    assert any(words in text for text in counters_agree(scrape(**wrong)))


def test_counters_that_run_backwards_are_found():
    texts = list(counters_grow(scrape(), scrape(drafts=9, positions=(7, 4))))
    assert any("drafts_total ran backwards" in text for text in texts)
    assert any("is gone" in text for text in texts)


def test_what_is_left_behind_is_found():
    calm = Usage(100.0, 8, 20)
    assert left_behind(0, scrape(), calm, calm) == []
    found = left_behind(1, scrape(running=2, cache=0.5, alive=0), Usage(100.0, 11, 40), calm)
    for words in ("1 requests in flight", "2 requests running", "50.00 %", "not alive", "20 open files", "3 threads"):
        assert any(words in text for text in found), words


def test_complaints_of_a_log():
    assert COMPLAINT.search("12:00:00 ERROR a stream failed") and COMPLAINT.search("Traceback (most recent call last):")
    assert not COMPLAINT.search("12:00:00 INFO Request chatcmpl-1: 3 + 4 tokens (stop)")


def test_time_in_which_nothing_ran_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr("benchmarks.serve_soak.time.monotonic", lambda: now)
    lived = Lived()
    now = 101.0
    assert lived.tick() == pytest.approx(1.0)
    now = 500.0
    assert lived.tick() == pytest.approx(3.0)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A tiny model whose context has room for tools in words."""
    return write_target(tmp_path_factory.mktemp("roomy"), replace(SHAPE, context=2048), tokenizer=True)


@pytest.mark.slow
def test_a_short_soak(roomy, tmp_path, capsys):
    """About twenty seconds of everything at once, on a tiny model."""
    output = tmp_path / "soak.json"
    code = main(["--model", str(roomy), "--minutes", "0.3", "--clients", "6", "--output", str(output)])
    result = json.loads(output.read_text())
    assert (code, result["problems"]) == (0, {}), capsys.readouterr().err[-3000:]
    assert result["requests"] > 50 and len(result["by kind"]) >= 12
    assert result["by status"]["200"] > 20 and result["by status"]["400"] > 0


@pytest.mark.slow
def test_a_soak_notices_a_server_that_dies(roomy, monkeypatch, capsys):
    """A server that ends in the middle is a finding, not a hang."""
    import asyncio

    from benchmarks import serve_soak

    class Dying(serve_soak.Soak):
        async def _schemathesis(self) -> None:
            await asyncio.sleep(3)
            self.server.process.kill()

    monkeypatch.setattr(serve_soak, "Soak", Dying)
    assert main(["--model", str(roomy), "--minutes", "1", "--clients", "2"]) == 1
    assert "the server ended with code -9" in capsys.readouterr().out


@pytest.mark.parametrize(("there", "options"), [(False, []), (True, []), (False, ["--no-schemathesis"])])
def test_a_missing_schemathesis_is_said_at_the_start(tmp_path, monkeypatch, capsys, there, options):
    from benchmarks import serve_soak

    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    program = tmp_path / "schemathesis"
    if there:
        program.touch()
    monkeypatch.setattr(serve_soak, "SCHEMATHESIS", program)
    monkeypatch.setattr(serve_soak, "ServerProcess", start)
    with pytest.raises(Started):
        main(options)
    said = capsys.readouterr().err
    if there or options:
        assert not said
    else:
        assert f"{program} is not there" in said and "pip install schemathesis" in said and "--no-schemathesis" in said
