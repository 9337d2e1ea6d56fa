"""Models of the Hugging Face hub, or of a mirror that HF_ENDPOINT names.

Listing and files are plain HTTPS; unlike huggingface_hub's own download, an interrupted file is continued by
the next run, and every file is compared with the hash that the listing announces before it gets its name. A
snapshot that huggingface_hub already has on this machine is used as it is. Pickles and code are never
fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.weights.store_files import (
    CHUNK,
    Progress,
    StoreError,
    cache_dir,
    describe_os_error,
    exclusive,
    hash_file,
)

if TYPE_CHECKING:
    import httpx

WANTED = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_ID = re.compile(
    r"(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]{1,100}))?"
)
_ATTEMPTS = 5
_MANIFEST = "paceline-snapshot.json"


@dataclass(frozen=True, slots=True)
class HubModel:
    """`org/name`, optionally one GGUF file of it (`org/name/file.gguf`), optionally at a revision
    (`@branch-or-commit`).
    """

    repo: str
    file: str | None = None
    revision: str = "main"

    @property
    def folder(self) -> Path:
        name = self.repo.replace("/", "--")
        at = "" if self.revision == "main" else "@" + self.revision.replace("/", "--")
        return cache_dir() / "hub" / (name + at)

    def cached(self) -> Path | None:
        """The snapshot in our own cache, if it was completed."""
        if self.file is not None:
            path = self.folder / self.file
            return path if path.is_file() else None
        return self.folder if (self.folder / _MANIFEST).is_file() else None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of the listing: `sha256` of large files, `git_sha1` (the blob id) of those in git itself."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def parse_hub_id(name: str) -> HubModel | None:
    """None when the name cannot be a hub model."""
    match = _ID.fullmatch(name)
    if match is None or ".." in name:
        return None
    return HubModel(match["repo"], match["file"], match["revision"] or "main")


def offline_by_environment() -> bool:
    """HF_HUB_OFFLINE, read as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def huggingface_snapshot(model: HubModel) -> Path | None:
    """A complete snapshot (or the one GGUF file) in huggingface_hub's cache, without touching the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    # Importing the cache's index is slow, and most names are not in it.
    if not (Path(HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}").is_dir():
        return None
    patterns = [model.file] if model.file else list(WANTED)
    try:
        folder = snapshot_download(model.repo, revision=model.revision, allow_patterns=patterns, local_files_only=True)
    except Exception:  # incomplete, another revision, or an older layout: then it is fetched
        return None
    if model.file:
        path = Path(folder) / model.file
        return path if path.is_file() else None
    return Path(folder) if _has_all_weights(Path(folder)) else None


def _has_all_weights(folder: Path) -> bool:
    """Older releases of huggingface_hub hand out snapshots of interrupted downloads as well."""
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file():
        return False
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    except (ValueError, KeyError, AttributeError, TypeError):
        return False


def fetch_hub_model(model: HubModel, progress: Progress) -> Path:
    """Download what is missing, verify it, and return the folder (or the GGUF file). Raises `StoreError`."""
    try:
        with exclusive(model.folder.name, progress):
            return model.cached() or _fetch(model, progress)
    except OSError as error:
        raise StoreError(describe_os_error(error, model.folder)) from error


def _fetch(model: HubModel, progress: Progress) -> Path:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with httpx.Client(headers=_headers(), follow_redirects=True, timeout=httpx.Timeout(30.0)) as client:
            commit, listing = _list(client, endpoint, model)
            files = _choose(model, listing)
            model.folder.mkdir(parents=True, exist_ok=True)
            total, done = sum(f.size for f in files), 0
            for file in files:
                url = f"{endpoint}/{model.repo}/resolve/{commit}/{quote(file.name)}"
                for count in _download(client, url, file, model.folder / file.name):
                    progress(model.repo, done + count, total)
                done += file.size
    except httpx.InvalidURL as error:
        raise StoreError(f"HF_ENDPOINT {endpoint!r} is not a usable address: {error}") from error
    if model.file:
        return model.folder / model.file
    manifest = {
        "repo": model.repo,
        "revision": model.revision,
        "commit": commit,
        "files": [f.name for f in files],
    }
    staging = model.folder / (_MANIFEST + ".partial")
    staging.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(staging, model.folder / _MANIFEST)
    return model.folder


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    return {"user-agent": "paceline", **({"authorization": f"Bearer {token}"} if token else {})}


def _list(client: httpx.Client, endpoint: str, model: HubModel) -> tuple[str, list[RemoteFile]]:
    """(commit, files) of the revision."""
    url = f"{endpoint}/api/models/{model.repo}/revision/{quote(model.revision, safe='')}?blobs=true"
    response = _request(client, url, model)
    try:
        answer = response.json()
        commit = answer["sha"]
        files = [_remote_file(row) for row in answer["siblings"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{url} did not answer with a model's file list ({error})") from error
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise StoreError(f"{url} did not answer with a commit")
    return commit, files


def _remote_file(row: dict[str, Any]) -> RemoteFile:
    name, size, lfs = row["rfilename"], row["size"], row.get("lfs") or {}
    if not isinstance(name, str) or type(size) is not int or size < 0:
        raise ValueError(f"entry {str(row)[:80]}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name!r}")
    return RemoteFile(name, size, lfs.get("sha256"), None if lfs else row.get("blobId"))


def _request(client: httpx.Client, url: str, model: HubModel) -> httpx.Response:
    import httpx

    try:
        response = client.get(url)
    except httpx.HTTPError as error:
        raise StoreError(f"{url} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code in (401, 403):
        raise StoreError(
            f"{model.repo} does not exist, or is private or gated (HTTP {response.status_code}); set HF_TOKEN, "
            "and accept the model's licence on its page if it asks for that"
        )
    if response.status_code == 404:
        raise StoreError(f"{model.repo} at revision {model.revision!r} does not exist (HTTP 404); check the spelling")
    if response.status_code != 200:
        raise StoreError(f"{url} answered HTTP {response.status_code}")
    return response


def _choose(model: HubModel, listing: list[RemoteFile]) -> list[RemoteFile]:
    """The files to fetch, small ones first, so that a wrong model is noticed before gigabytes have come."""
    names = {file.name for file in listing}
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if model.file:
        if model.file not in names:
            raise StoreError(
                f"{model.repo} has no file {model.file!r}; its GGUF files are {', '.join(ggufs) or 'none'}"
            )
        return [file for file in listing if file.name == model.file]
    chosen = [file for file in listing if any(_matches(file.name, pattern) for pattern in WANTED)]
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        chosen = [f for f in chosen if not f.name.endswith(".safetensors") or f.name.startswith("model")]
    if "config.json" not in names or not any(file.name.endswith(".safetensors") for file in chosen):
        if ggufs:
            raise StoreError(
                f"{model.repo} holds GGUF files; name one, for example {model.repo}/{ggufs[0]} "
                f"(all: {', '.join(ggufs)})"
            )
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        why = "only PyTorch pickles, which are refused because they run code" if pickles else "no safetensors files"
        raise StoreError(f"{model.repo} has {why}; choose a repository with config.json and *.safetensors")
    return sorted(chosen, key=lambda file: file.size)


def _matches(name: str, pattern: str) -> bool:
    """A pattern without a folder matches files of the top folder only."""
    return fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")


def _download(client: httpx.Client, url: str, file: RemoteFile, target: Path) -> Iterator[int]:
    """Fetch one file, continuing what an earlier run left; yields the bytes that are there so far."""
    import httpx

    # An earlier run may have left this file, or the one of an older commit under the same name.
    if target.is_file() and not _fault(target, file):
        yield file.size
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # The hash is in the name: a newer version of the file never continues an older one.
    partial = target.with_name(f"{target.name}.{(file.sha256 or file.git_sha1 or 'x')[:12]}.partial")
    failures = 0
    while (have := partial.stat().st_size if partial.exists() else -1) < file.size:
        try:
            yield from _continue(client, url, partial, max(have, 0), file.size)
            break
        except (httpx.TransportError, httpx.DecodingError, _BusyError) as error:
            grown = partial.exists() and partial.stat().st_size > max(have, 0)
            failures = 1 if grown else failures + 1
            if failures == _ATTEMPTS:
                why = str(error) or type(error).__name__
                raise StoreError(f"{url}: {why}; what came is kept, run again to continue") from error
            time.sleep(min(2 ** (failures - 1), 8) * _BACKOFF)
    if fault := _fault(partial, file):
        partial.unlink()
        raise StoreError(f"{url}: received {fault}; it was deleted, run again to fetch it anew")
    os.replace(partial, target)


_BACKOFF = 1.0  # seconds; tests shorten it


class _BusyError(Exception):
    """The server asks to come back later."""


def _continue(client: httpx.Client, url: str, partial: Path, have: int, size: int) -> Iterator[int]:
    headers = {"accept-encoding": "identity", **({"range": f"bytes={have}-"} if have else {})}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 429 or response.status_code >= 500:
            raise _BusyError(f"HTTP {response.status_code}")
        if response.status_code not in (200, 206):
            raise StoreError(f"{url} answered HTTP {response.status_code}")
        if response.status_code == 200:  # the server sends all of it, whatever was asked
            have = 0
        with partial.open("ab" if have else "wb") as output:
            for chunk in response.iter_bytes(CHUNK):
                output.write(chunk)
                have += len(chunk)
                yield min(have, size)
                if have > size:  # more than was announced: the check that follows refuses it
                    return


def _fault(path: Path, file: RemoteFile) -> str:
    """ "" if the file has the announced size and hash, else what differs."""
    size = path.stat().st_size
    expected, actual = f"{file.size} bytes", f"{size} bytes"
    if size == file.size and file.sha256:
        expected, actual = file.sha256, hash_file(path).hexdigest()
    elif size == file.size and file.git_sha1:
        expected = file.git_sha1
        actual = hash_file(path, hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)).hexdigest()
    return "" if actual == expected else f"{actual}, announced {expected}"
