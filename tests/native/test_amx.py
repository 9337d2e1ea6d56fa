"""The tile unit: every tile shape gives the bits of one row, int sums those of the byte dot product; who may use it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native

from . import quant_reference as ref
from .paths import Path, buffer, epilogue, normal, run_rows, runs_here, same_bits

needs_amx = pytest.mark.skipif(not runs_here("amx"), reason="this processor, system or build has no AMX")


def product(x: np.ndarray, weight: _native.Packed, n: int, *, isa: str = "amx", threads: int = 1) -> np.ndarray:
    plan = Path(isa, f32=False, threads=threads).plan(max_rows=max(64, len(x)))
    plan.linear(buffer(plan, "INPUT", weight.k), buffer(plan, "LOGITS", n), weight, convert=True, selected=True)
    return run_rows(plan, x, n)


@needs_amx
@settings(max_examples=40, deadline=None)
@given(
    k=st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 127, 192]),
    n=st.integers(1, 200),
    rows=st.integers(1, 100),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
def test_a_row_has_its_bits_in_every_tile_shape(k, n, rows, threads, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    weight = Path("amx", f32=False).pack(rng.normal(size=(n, k)).astype(np.float32))
    together = product(x, weight, n, threads=threads)
    for row in {0, rows - 1, *rng.integers(0, rows, 3).tolist()}:
        assert same_bits(together[row : row + 1], product(x[row : row + 1], weight, n)), f"row {row}"
    x[rng.integers(rows)] = np.nan
    clean = ~np.isnan(x[:, 0])
    assert same_bits(product(x, weight, n, threads=threads)[clean], together[clean])


@needs_amx
@pytest.mark.parametrize("rows", [16, 17, 33, 34, 47, 49, 61, 100])
def test_rows_that_two_tiles_share_are_added_once(rows):
    """Tiles of one product are of one height, so that the last ones overlap."""
    k, n = 64, 70
    path = Path("amx", f32=False)
    x, first, second = normal(20, rows, k), path.pack(normal(21, n, k)), path.pack(normal(22, n, k))

    def run(x: np.ndarray) -> np.ndarray:
        plan = path.plan(max_rows=128)
        source, sums, taps = buffer(plan, "INPUT", k), buffer(plan, "F32", n), buffer(plan, "TAPS", n)
        plan.linear(source, sums, first, convert=True)
        plan.linear(source, sums, second, convert=True, epilogue=epilogue("ADD"))
        plan.copy(sums, taps, n, 0)
        out = np.empty((len(x), n), np.float32)
        plan.forward(None, np.arange(len(x), dtype=np.int32), np.array([0, len(x)], np.int32), input=x, taps=out)
        return out

    assert same_bits(run(x), np.concatenate([run(x[i : i + 1]) for i in range(rows)]))


def extreme(name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Stored rows whose codes are the smallest and the largest there are, column by column alike."""
    rows = ref.random_stored(name, n, k, rng)
    kinds = rng.integers(0, 3, n)
    low, high = (0x80, 0x7F) if name.startswith("INT8") else (0x00, 0xFF)
    blocks = 1 if name == "INT8_CHANNEL" else k // ref.GROUP
    head = 2 if name in ("INT8", "INT4") else 4  # bytes before the codes of a block
    view = rows.reshape(n, blocks, -1)[:, :, head:]
    view[kinds == 0], view[kinds == 1] = low, high
    return rows


@needs_amx
@pytest.mark.parametrize("name", ref.FORMATS)
@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(1, 9),
    n=st.integers(1, 100),
    rows=st.integers(20, 110),
    threads=st.integers(1, 3),
    extremes=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_integer_tiles_have_the_bits_of_the_byte_dot_product(name, groups, n, rows, threads, extremes, seed):
    rng, k = np.random.default_rng(seed), groups * ref.GROUP
    x = rng.normal(size=(rows, k)).astype(np.float32)
    stored = ref.random_stored(name, n, k, rng)
    if extremes:
        x = np.where(rng.integers(0, 2, (rows, 1)), np.sign(x), 1).astype(np.float32)
        stored = extreme(name, n, k, rng)
    weight = ref.pack(name, stored, k=k)
    got = product(x, weight, n, threads=threads)
    assert same_bits(got, product(x, weight, n, isa="avx512_bf16"))
    assert same_bits(got, ref.product(x, name, stored))


@needs_amx
@pytest.mark.parametrize("quantised", [False, True])
def test_threads_and_children_of_any_age_may_use_tiles(quantised):
    x = normal(30, 40, 96)
    path = Path("amx", f32=False)
    weight = (
        ref.pack("INT8", ref.stored("INT8", normal(31, 64, 96)), k=96) if quantised else path.pack(normal(31, 64, 96))
    )
    want = product(x, weight, 64)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(product(x, weight, 64, threads=4)))
    thread.start()
    thread.join()
    assert same_bits(found[0], want)
    child = os.fork()
    if child == 0:
        os._exit(0 if same_bits(product(x, weight, 64, threads=2), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(product(x, weight, 64, threads=2), want)


# The system says no to the one request for tiles (arch_prctl 0x1023): a filter for this process and what it starts.
FORBID = """
import ctypes, struct
def forbid_tiles():
    rules = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (0x06, 0, 0, 0x50001),
             (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()
forbid_tiles()
"""
REFUSED = "the processor has AMX, but the system does not let this process use it"


@needs_amx
def test_a_process_without_permission_takes_the_next_path_and_says_so():
    script = f"""{FORBID}
from paceline import _native
from paceline.cli.engine import kernels_text
from paceline.errors import ConfigError
from paceline.runtime import choose_isa
assert choose_isa() == "avx512_bf16" and _native.amx_refused() == {REFUSED!r}
print(kernels_text({{"isa": choose_isa(), "threads": 2}}))
try:
    choose_isa("amx")
except ConfigError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_ISA"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shown, error = ran.stdout.splitlines()
    assert shown == f"avx512_bf16 ({REFUSED}), 2 threads"
    assert error.startswith(
        f"isa: 'amx' is not a path this processor can run: {REFUSED}; the best here is 'avx512_bf16'"
    )


@needs_amx
def test_the_peak_is_that_of_the_tile_unit():
    pool = _native.ThreadPool(1)
    best = {isa: max(_native.measure_peak(pool, isa, False, 2000) for _ in range(20)) for isa in ("amx", "avx512_bf16")}
    assert best["amx"] > 2 * best["avx512_bf16"]


def test_a_path_that_is_not_there_is_a_clear_error():
    from paceline.errors import ConfigError
    from paceline.runtime import choose_isa

    if runs_here("amx"):
        assert choose_isa("amx") == "amx" and _native.amx_refused() is None
        return
    with pytest.raises(ConfigError, match="'amx' is not a path this processor can run"):
        choose_isa("amx")
