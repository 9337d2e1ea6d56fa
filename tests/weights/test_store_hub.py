"""The hub path against a small server that speaks the two endpoints: listing and files, with ranges and faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from paceline.weights import store_hub
from paceline.weights.store import StoreError, resolve_model
from paceline.weights.store_hub import huggingface_snapshot, parse_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BIG = bytes(range(256)) * 20_000  # five chunks
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": BIG,
    "README.md": b"# no",
    "pytorch_model.bin": b"\x80\x02pickle",
    "modeling.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"other",
    "consolidated.safetensors": b"other",
}


class Hub:
    """`files` of one repository org/name; switches plant faults; `requests` records (path, range header)."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.lie_about: dict[str, bytes] = {}  # served instead of the announced content
        self.break_after: int | None = None  # close the connection after so many bytes of a body, once
        self.ignore_range = False
        self.status: int | None = None
        self.busy = 0  # so many file requests are answered with 503
        self.listing: Any = None
        self.requests: list[tuple[str, str | None]] = []
        self.authorization: str | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        self.requests.append((path, request.headers.get("range")))
        self.authorization = request.headers.get("authorization")
        if self.status is not None:
            return self.send(request, self.status, b"no")
        if path in ("/api/models/org/name/revision/main", "/api/models/org/name/revision/v2"):
            assert parse_qs(parts.query) == {"blobs": ["true"]}
            listing = self.listing if self.listing is not None else {"sha": COMMIT, "siblings": self.rows()}
            return self.send(request, 200, json.dumps(listing).encode())
        prefix = f"/org/name/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in self.files:
            name = path.removeprefix(prefix)
            if self.busy > 0:
                self.busy -= 1
                return self.send(request, 503, b"later")
            return self.send(request, 200, self.lie_about.get(name, self.files[name]), ranged=True)
        return self.send(request, 404, b"not found")

    def rows(self) -> list[dict]:
        rows = []
        for name, data in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data)}
            if name.endswith((".safetensors", ".bin", ".gguf")):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            row["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            rows.append(row)
        return rows

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, ranged: bool = False) -> None:
        wanted = request.headers.get("range")
        if ranged and wanted and not self.ignore_range:
            body, status = body[int(wanted.removeprefix("bytes=").rstrip("-")) :], 206
        request.send_response(status)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        if ranged and self.break_after is not None and len(body) > self.break_after:
            body, self.break_after = body[: self.break_after], None
            request.close_connection = True
        request.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(store_hub, "_BACKOFF", 0.0)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def fetched_files(hub: Hub) -> list[str]:
    return [path.rpartition(COMMIT + "/")[2] for path, _ in hub.requests if "/resolve/" in path]


def test_fetches_weights_and_settings_but_no_pickles_and_no_code(hub, tmp_path):
    calls = []
    folder = resolve_model("org/name", progress=lambda *call: calls.append(call))
    got = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.name != "paceline-snapshot.json"}
    assert got == {name: FILES[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    total = sum(map(len, got.values()))
    assert calls[-1] == ("org/name", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert fetched_files(hub)[-1] == "model.safetensors"  # small files first


def test_the_second_time_nothing_is_asked(hub):
    folder = resolve_model("org/name")
    hub.requests.clear()
    assert resolve_model("org/name") == folder
    assert resolve_model("org/name", offline=True) == folder
    assert hub.requests == []


def test_a_broken_connection_is_continued_at_once(hub):
    hub.break_after = 3_000_000
    folder = resolve_model("org/name")
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert any(r and int(r.removeprefix("bytes=").rstrip("-")) > 0 for _, r in hub.requests)


def test_an_interrupted_run_is_continued_by_the_next(hub):
    hub.break_after = 3_000_000

    def interrupt(what: str, done: int, total: int | None) -> None:
        if done > 2_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("org/name", progress=interrupt)
    hub.break_after = None
    hub.requests.clear()
    folder = resolve_model("org/name")
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert fetched_files(hub) == ["model.safetensors"]
    (start,) = [r for path, r in hub.requests if path.endswith("model.safetensors")]
    assert start is not None
    assert int(start.removeprefix("bytes=").rstrip("-")) > 1_000_000
    assert not list(folder.glob("*.partial"))


def test_a_server_that_ignores_ranges(hub):
    hub.break_after, hub.ignore_range = 3_000_000, True
    assert (resolve_model("org/name") / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_hash_that_differs(hub, name):
    hub.lie_about[name] = b"X" + FILES[name][1:]
    with pytest.raises(StoreError, match=rf"{name}: received .* announced .* deleted"):
        resolve_model("org/name")
    folder = parse_hub_id("org/name").folder
    assert not (folder / name).exists()
    assert not list(folder.glob(f"{name}*"))
    hub.lie_about.clear()
    assert (resolve_model("org/name") / name).read_bytes() == FILES[name]


@pytest.mark.parametrize("extra", [b"x", BIG * 4])
def test_a_file_longer_than_announced_is_not_read_to_its_end(hub, extra):
    hub.lie_about["config.json"] = FILES["config.json"] + extra
    with pytest.raises(StoreError, match=r"received (\d+) bytes, announced 23 bytes") as caught:
        resolve_model("org/name")
    received = int(re.search(r"received (\d+)", str(caught.value))[1])
    assert received <= 23 + max(2 << 20, len(extra) // 4)


def test_a_file_of_an_older_commit_is_replaced(hub):
    """The run that fetched config.json was interrupted, then the repository moved on."""

    def interrupt(what: str, done: int, total: int | None) -> None:
        if done > 2_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("org/name", progress=interrupt)
    hub.files["config.json"] = b'{"model_type": "qwen3"}'
    assert len(hub.files["config.json"]) == len(FILES["config.json"])
    folder = resolve_model("org/name")
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]


def test_a_busy_server_is_asked_again(hub):
    hub.busy = 3
    assert (resolve_model("org/name") / "model.safetensors").read_bytes() == BIG
    hub.busy = 1000
    with pytest.raises(StoreError, match="HTTP 503; what came is kept"):
        resolve_model("org/name@v2")


def test_an_empty_file(hub):
    hub.files["tokenizer.json"] = b""
    assert (resolve_model("org/name") / "tokenizer.json").read_bytes() == b""


def test_one_gguf_file(hub):
    hub.files = {"a-q4.gguf": b"GGUF1", "a-q8.gguf": b"GGUF2", "config.json": b"{}"}
    path = resolve_model("org/name/a-q8.gguf")
    assert path.read_bytes() == b"GGUF2"
    assert fetched_files(hub) == ["a-q8.gguf"]
    assert resolve_model("org/name/a-q8.gguf", offline=True) == path
    with pytest.raises(StoreError, match=r"org/name/a-q4\.gguf \(all: a-q4\.gguf, a-q8\.gguf\)"):
        resolve_model("org/name")
    with pytest.raises(StoreError, match=r"no file 'b\.gguf'; its GGUF files are a-q4\.gguf, a-q8\.gguf"):
        resolve_model("org/name/b.gguf")


def test_a_revision(hub):
    folder = resolve_model("org/name@v2")
    assert folder.name == "org--name@v2"
    assert folder != parse_hub_id("org/name").folder


def test_shards_with_an_index(hub):
    index = json.dumps({"weight_map": {}}).encode()
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": index, "model-00001-of-00002.safetensors": b"1",
                 "model-00002-of-00002.safetensors": b"2", "consolidated.safetensors": b"no"}  # fmt: skip
    folder = resolve_model("org/name")
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]  # fmt: skip


def test_only_pickles(hub):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(StoreError, match="only PyTorch pickles"):
        resolve_model("org/name")


def test_hostile_listings(hub):
    for bad in ("../../evil.safetensors", "/etc/evil.safetensors", "a\\..\\b.safetensors"):
        hub.listing = {"sha": COMMIT, "siblings": [{"rfilename": bad, "size": 1}]}
        with pytest.raises(StoreError, match="file name"):
            resolve_model("org/name")
    for listing in ({}, [], {"sha": 3, "siblings": []}, {"sha": "../x", "siblings": []},
                    {"sha": COMMIT, "siblings": [{"rfilename": "x", "size": -1}]}):  # fmt: skip
        hub.listing = listing
        with pytest.raises(StoreError, match="did not answer with"):
            resolve_model("org/name")


@pytest.mark.parametrize(("status", "message"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "check the spelling"),
                                                 (500, "HTTP 500")])  # fmt: skip
def test_http_errors(hub, status, message):
    hub.status = status
    with pytest.raises(StoreError, match=rf"(?s)3\. Hugging Face hub .*{message}"):
        resolve_model("org/name")


def test_the_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_model("org/name")
    assert hub.authorization == "Bearer hf_secret"


def test_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StoreError, match="not asked: offline"):
        resolve_model("org/name")
    assert hub.requests == []


def test_an_endpoint_that_cannot_be_reached(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="cannot be reached"):
        resolve_model("org/name")


def test_a_snapshot_of_huggingface_hub_is_used(hub, tmp_path):
    """Written as huggingface_hub lays it out, with its listing, so that it counts as complete."""
    base = tmp_path / "hf" / "models--org--name"
    snapshot = base / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    found = resolve_model("org/name")
    assert Path(found).resolve() == snapshot.resolve()
    assert hub.requests == []


def test_an_incomplete_snapshot_of_huggingface_hub_is_not_used(hub, tmp_path, monkeypatch):
    """Whatever the installed release of huggingface_hub says about it."""
    snapshot = tmp_path / "hf" / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    ours = parse_hub_id("org/name")
    assert huggingface_snapshot(ours) is None
    (snapshot / "config.json").write_bytes(b"{}")
    assert huggingface_snapshot(ours) is None
    (snapshot / "a.safetensors").write_bytes(b"x")
    assert huggingface_snapshot(ours) == snapshot
    for broken in (
        json.dumps({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}),
        "{",
        "[]",
        '{"weight_map": 3}',
    ):
        (snapshot / "model.safetensors.index.json").write_text(broken)
        assert huggingface_snapshot(ours) is None


@pytest.mark.parametrize("name", ["a", "a/b/c", "a/../b", "/a/b", "a/b@", "a b/c", "-/x\n", "org/name/../../x.gguf"])
def test_what_is_no_hub_id(name):
    assert parse_hub_id(name) is None
