"""`paceline serve` under all that clients do, right and wrong, for half an hour: what must not break, hang or grow.

    python -m benchmarks.serve_soak --minutes 30 --output soak.json

A server in a process of its own, on 127.0.0.1 and a free port; clients that ask properly (and know the right answer),
send nonsense, leave in the middle, read slowly, shout, or connect and say nothing; beside them schemathesis, with
requests made from the server's own schema. Everything is bounded in time and number.

It fails (exit code 1) on: an end of the server, a status of 500 or an error event, an answer that takes longer than
--patience, text that differs from what the same prompt gave alone, counters that contradict each other or run
backwards, requests, cache blocks, threads or connections left at the end, and resident memory at the end above 1.05
times what it was after a sixth of the time (5 minutes of 30; below 10 minutes, where the start still weighs, 48 MiB
more are let pass).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak_checks import Scrape, counters_agree, counters_grow, left_behind
from benchmarks.soak_clients import KINDS, Clients, SoakError
from benchmarks.soak_process import ServerProcess, Usage

SETTLE = 60.0  # seconds after the last client in which everything must be free
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
LOOK = 1.0  # seconds between two looks at the process, its health and its metrics
TICK, MOST_PER_TICK = 0.25, 2.0
SHARE_BEFORE_BASE = 1 / 6
ALLOWED_GROWTH = 1.05
SHORT_MINUTES, SHORT_SLACK_MIB = 10.0, 48.0


class Lived:
    """Seconds that this process has been running: those in which all of them were stopped (SIGSTOP, a machine that
    sleeps) are neither the server's fault nor part of the soak."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, MOST_PER_TICK)
        self._last = now
        return self.seconds

    async def keep(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK)


@dataclass
class Outcome:
    """What was seen. problems: sentences, none of which should be there; repeated ones are counted."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    usage: list[Usage] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    schemathesis_rounds: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class Soak:
    """One soak of one server."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.outcome = Outcome()
        self.lived = Lived()
        self.marks: list[float] = []  # lived seconds of each look at the process
        self.end = 60 * options.minutes
        self.left = options.max_requests

    @property
    def over(self) -> bool:
        return self.lived.seconds >= self.end or self.left <= 0 or not self.server.alive

    async def run(self) -> Outcome:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=None) as http:
            self.http = http
            clients = Clients(self.server, http, self.outcome.statuses)
            await clients.learn()
            first = self.server.usage()
            self.lived = Lived()
            ticking = asyncio.create_task(self.lived.keep())
            jobs: list[Awaitable[None]] = [self._worker(clients, i) for i in range(self.options.clients)]
            jobs += [self._watch(), self._schemathesis()]
            await asyncio.gather(*jobs)
            await self._settle(first)
            ticking.cancel()
        self._memory()
        return self.outcome

    def problem(self, text: str) -> None:
        if not self.outcome.problems[text]:
            print(f"{self.lived.seconds:7.1f} s  {text}", file=sys.stderr, flush=True)
        self.outcome.problems[text] += 1

    # ---- clients

    async def _worker(self, clients: Clients, number: int) -> None:
        rng = random.Random(self.options.seed * 1000 + number)
        names = list(KINDS)
        weights = [KINDS[name] for name in names]
        while not self.over:
            name = rng.choices(names, weights)[0]
            self.left -= 1
            self.outcome.requests[name] += 1
            await self._one(name, getattr(clients, name), rng)

    async def _one(
        self, name: str, client: Callable[[random.Random], Coroutine[Any, Any, None]], rng: random.Random
    ) -> None:
        visit = asyncio.ensure_future(client(rng))
        begin = self.lived.seconds
        while not visit.done() and self.lived.seconds < begin + self.options.patience:
            await asyncio.wait((visit,), timeout=1.0)
        if not visit.done():
            visit.cancel()
            await asyncio.wait((visit,))
            self.problem(f"{name}: no answer within {self.options.patience:.0f} s")
            return
        try:
            visit.result()
        except SoakError as error:
            self.problem(f"{name}: {error}")
        except (OSError, httpx.TransportError) as error:
            if self.server.alive:
                self.problem(f"{name}: the connection failed: {type(error).__name__}")

    async def _schemathesis(self) -> None:
        if self.options.no_schemathesis or not SCHEMATHESIS.exists():
            self.outcome.facts["schemathesis"] = "left out" if self.options.no_schemathesis else "not installed"
            return
        with tempfile.TemporaryDirectory() as folder:  # it leaves notes where it runs
            await self._schemathesis_in(folder, SCHEMATHESIS)

    async def _schemathesis_in(self, folder: str, program: Path) -> None:
        seed = self.options.seed
        while not self.over:
            seed += 1
            command = [str(program), "run", f"{self.server.url}/openapi.json", "--checks=not_a_server_error"]
            command += ["--max-examples=5", f"--seed={seed}", "--suppress-health-check=all", "--no-color"]
            command += [f"--request-timeout={self.options.patience:.0f}", "--wait-for-schema=60"]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder
            )
            said = asyncio.ensure_future(process.communicate())
            while not said.done() and not self.over:
                await asyncio.wait((said,), timeout=1.0)
            if not said.done():  # the time is over; what it was asking is given up like any client that leaves
                process.terminate()
                await said
                # beside eight clients a round of two thousand requests may take longer than the whole
                self.outcome.facts["schemathesis"] = f"stopped in round {self.outcome.schemathesis_rounds + 1}"
                return
            self.outcome.schemathesis_rounds += 1
            output = said.result()[0].decode("utf-8", "replace")
            if process.returncode and "Server error" in output:
                self.outcome.facts.setdefault("schemathesis output", output[-4000:])
                self.problem("schemathesis found an answer that it should not get")
            elif process.returncode:  # it gave up waiting: that is looked after elsewhere
                self.outcome.facts["schemathesis rounds cut short"] = (
                    self.outcome.facts.get("schemathesis rounds cut short", 0) + 1
                )

    # ---- looking on

    async def _watch(self) -> None:
        """Memory, health, and counters that only grow.

        A connection that fails is a problem, also one that was idle before: httpx drops those after 5 seconds, and the
        server keeps them for 75, so that none is closed just as it is used again."""
        last: Scrape | None = None
        while not self.over:
            self.outcome.usage.append(self.server.usage())
            self.marks.append(self.lived.seconds)
            try:
                begin = time.perf_counter()
                health = await self.http.get("/health")
                self.outcome.health_ms.append(1e3 * (time.perf_counter() - begin))
                if health.status_code != 200:
                    self.problem(f"/health answered {health.status_code}")
                scrape = Scrape.parse((await self.http.get("/metrics")).text)
            except (TimeoutError, httpx.HTTPError) as error:
                self.problem(f"/health or /metrics did not answer: {type(error).__name__}")
                continue
            for text in [*counters_agree(scrape), *(counters_grow(last, scrape) if last else [])]:
                self.problem(text)
            last = scrape
            await asyncio.sleep(LOOK)
        if not self.server.alive:
            self.problem(f"the server ended with code {self.server.process.returncode}")

    async def _settle(self, first: Usage) -> None:
        """Once the last client has gone, nothing is held."""
        if not self.server.alive:
            return
        end = self.lived.seconds + SETTLE
        while True:
            load = (await self.http.get("/load")).json()["server_load"]
            scrape = Scrape.parse((await self.http.get("/metrics")).text)
            usage = self.server.usage()
            texts = left_behind(load, scrape, usage, first)
            if not texts or self.lived.seconds > end:
                break
            await asyncio.sleep(0.2)
        for text in [*texts, *counters_agree(scrape)]:
            self.problem(text)
        self.outcome.usage.append(usage)
        self.outcome.facts["seconds until all was free"] = round(self.lived.seconds - end + SETTLE, 1)
        self.outcome.facts["generated tokens"] = scrape.total("vllm:generation_tokens_total")
        self.outcome.facts["requests that ended"] = scrape.total("vllm:request_success_total")

    def _memory(self) -> None:
        usage = self.outcome.usage
        if not usage:
            return
        when = self.end * SHARE_BEFORE_BASE
        base = next((u for u, at in zip(usage, self.marks, strict=False) if at >= when), usage[-1]).resident_mib
        end = usage[-1].resident_mib
        allowed = ALLOWED_GROWTH * base
        if self.options.minutes < SHORT_MINUTES:
            allowed += SHORT_SLACK_MIB
        self.outcome.facts["resident MiB"] = {
            "at first": round(usage[0].resident_mib, 1),
            "base": round(base, 1),
            "at the end": round(end, 1),
            "highest": round(max(u.resident_mib for u in usage), 1),
            "end / base": round(end / base, 4),
        }
        if end > allowed:
            self.problem(f"resident memory grew from {base:.0f} to {end:.0f} MiB")


def report(outcome: Outcome, minutes: float) -> dict[str, Any]:
    health = sorted(outcome.health_ms) or [0.0]
    step = max(1, len(outcome.usage) // 30)
    return {
        "minutes": minutes,
        "requests": sum(outcome.requests.values()),
        "by kind": dict(sorted(outcome.requests.items())),
        "by status": dict(sorted(outcome.statuses.items())),
        "schemathesis rounds": outcome.schemathesis_rounds,
        "health ms": {"median": health[len(health) // 2], "p99": health[int(0.99 * len(health))], "most": health[-1]},
        "resident MiB on the way": [round(u.resident_mib) for u in outcome.usage[::step]],
        **outcome.facts,
        "problems": dict(outcome.problems),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--max-requests", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=8, help="at the same time, besides schemathesis")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds after which an answer counts as a hang")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-schemathesis", action="store_true")
    parser.add_argument(
        "--serve", nargs="*", default=[], metavar="OPTION", help="further options of paceline serve, last"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not (options.no_schemathesis or SCHEMATHESIS.exists()):
        print(
            f"{SCHEMATHESIS} is not there: this soak goes without requests made from the server's schema. Install it "
            "(pip install schemathesis, in the version of requirements/full.txt), or say --no-schemathesis",
            file=sys.stderr,
            flush=True,
        )
    with ServerProcess(options.model, options.serve) as server:
        outcome = asyncio.run(Soak(server, options).run())
        code = server.stop()
    if code != 0:
        outcome.problems[f"the server ended with code {code} after SIGTERM"] += 1
    for line in server.complaints():
        outcome.problems[f"its log: {line}"] += 1
    result = report(outcome, options.minutes)
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
