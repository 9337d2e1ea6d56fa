"""`pip wheel .` builds a wheel that installs and runs in a second environment, away from the checkout."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from golden.tokenizer import add_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "vendored" / "H" / "llama"

# The first recorded prompt through the installed package alone, plain and speculative.
GENERATE = """
import json, sys
from pathlib import Path
import paceline
from paceline import LLM, SamplingParams
(prompt, *_) = json.loads(Path(sys.argv[1]).read_text())["prompts"]
params = SamplingParams(temperature=0.0, max_tokens=len(prompt["ar"]), ignore_eos=True)
llm = LLM(sys.argv[2], dtype="float32", speculative_config={"method": "ngram"})
for speculation in (False, True):
    (output,) = llm.generate([prompt["ids"]], params, speculation=speculation)
    assert output.outputs[0].token_ids == prompt["ar"], (speculation, output.outputs[0].token_ids)
print(Path(paceline.__file__).parent)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that succeeds, run with nothing of this environment on Python's path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, "--config-settings", f"build-dir={folder / 'build'}", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds the wheel and the pinned runtime dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-r", ROOT / "requirements" / "runtime.txt", wheel, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    return python


def test_wheel_holds_the_package_and_nothing_of_its_making(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"paceline", f"paceline-{version('paceline')}.dist-info"}
    assert [name for name in names if name.endswith((".cpp", ".h", ".inl", ".inc", ".a", "CMakeLists.txt"))] == []
    assert len([name for name in names if name.startswith("paceline/_native.") and name.endswith(".so")]) == 1
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "paceline").rglob("*.py")}
    assert sources <= set(names)
    assert "paceline/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_installed_command_names_its_version(python: Path, tmp_path: Path) -> None:
    output = run(python.parent / "paceline", "--version", cwd=tmp_path)
    assert version("paceline") in output


def test_installed_package_generates_the_golden_answer(python: Path, tmp_path: Path) -> None:
    model = add_tokenizer(GOLDEN / "target", tmp_path)
    where = run(python, "-c", GENERATE, GOLDEN / "expected.json", model, cwd=tmp_path).splitlines()[-1]
    assert Path(where).is_relative_to(python.parents[1])


@pytest.mark.parametrize(("processor", "isa"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_installed_package_runs_on_older_processors(python: Path, tmp_path: Path, processor: str, isa: str) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs qemu-x86_64 (Debian: apt-get install qemu-user) on x86-64")
    model = add_tokenizer(GOLDEN / "target", tmp_path)
    script = f"{GENERATE}\nassert llm.info()['isa'] == {isa!r}, llm.info()['isa']"
    arguments = [emulator, "-cpu", processor, python, "-c", script, GOLDEN / "expected.json", model]
    # OpenBLAS must not use instructions that the emulated processor lacks, whatever the environment asks for.
    run("env", "-u", "PACELINE_ISA", f"OPENBLAS_CORETYPE={processor}", *arguments, cwd=tmp_path)


def test_inference_needs_no_training_framework(python: Path, tmp_path: Path) -> None:
    script = "import paceline, paceline.llm, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    run(python, "-c", script, cwd=tmp_path)
