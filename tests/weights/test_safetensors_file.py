"""safetensors files against the reference package, and hostile ones."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.weights.safetensors_file import SafetensorsFile, write_safetensors

ARRAYS = {
    "f32": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "f16": np.array([1.5, -2.25, 65504], np.float16),
    "bf16": np.array([[1.0, -3.0]], ml_dtypes.bfloat16),
    "f64": np.array([0.1, 1e300]),
    "i64": np.array([-(2**60), 5]),
    "bool": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        return path

    return write


def written(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    write_safetensors(file, [(n, a.dtype, a.shape) for n, a in arrays.items()], iter(arrays.values()))
    return file.getvalue()


def test_round_trip(write):
    file = SafetensorsFile(write(written(ARRAYS)))
    assert {name: e.shape for name, e in file.entries.items()} == {name: a.shape for name, a in ARRAYS.items()}
    for name, array in ARRAYS.items():
        got = file.load(name)
        with np.errstate(over="ignore"):
            expected = array.astype(np.float32) if array.dtype in (np.float16, np.float64) else array
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_reads_what_the_reference_writes_and_the_other_way_round(tmp_path):
    reference = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in ARRAYS.items() if name not in ("bf16", "scalar")}
    reference.save_file(plain, tmp_path / "theirs.safetensors")
    file = SafetensorsFile(tmp_path / "theirs.safetensors")
    for name in plain:
        got = file.load(name)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, plain[name].astype(got.dtype))
    (tmp_path / "ours.safetensors").write_bytes(written(plain))
    back = reference.load_file(tmp_path / "ours.safetensors")
    assert back.keys() == plain.keys()
    for name in plain:
        np.testing.assert_array_equal(back[name], plain[name])


def test_bfloat16_is_a_view_of_the_file(write):
    file = SafetensorsFile(write(written({"w": np.ones((64, 64), ml_dtypes.bfloat16)})))
    got = file.load("w")
    assert not got.flags.owndata
    assert not got.flags.writeable
    file.close()
    assert got.astype(np.float32).sum() == 64 * 64  # the mapping lives on
    with pytest.raises(CheckpointError, match="closed"):
        file.load("w")


def test_requested_dtypes(write):
    file = SafetensorsFile(write(written(ARRAYS)))
    for name in ("f32", "f16", "bf16", "f64"):
        assert file.load(name, "float32").dtype == np.float32
        half = file.load(name, "bfloat16")
        assert half.dtype == ml_dtypes.bfloat16
        with np.errstate(over="ignore"):
            expected = ARRAYS[name].astype(np.float32).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(half.view(np.uint16), expected.view(np.uint16))
    with pytest.raises(CheckpointError, match="stored as I64"):
        file.load("i64", "float32")


def test_unaligned_tensors(write):
    header = {"a": entry("U8", [3], [0, 3]), "b": entry("F32", [2], [3, 11])}
    file = SafetensorsFile(write(safetensors_bytes(header, b"abc" + np.array([1, 2], np.float32).tobytes())))
    got = file.load("b")
    assert got.tolist() == [1, 2]
    assert got.flags.aligned


D8 = b"\0" * 8
BAD_FILES = {
    "empty": (b"", "empty"),
    "short": (b"\0\0", "not safetensors"),
    "header past the end": (safetensors_bytes({}, length=2**40), "not safetensors"),
    "huge header": (safetensors_bytes({}, length=2**64 - 1), "not safetensors"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "pickle"),
    "pickle": (b"\x80\x02}q\x00X\x05\x00\x00\x00", "pickle"),
    "not JSON": (safetensors_bytes(b"{nope"), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (safetensors_bytes(b"[" * 200_000), "not valid JSON"),
    "long number": (safetensors_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "a list": (safetensors_bytes([]), "not a JSON object"),
    "duplicate": (safetensors_bytes(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'), "appears twice"),
    "entry is no object": (safetensors_bytes({"a": 3}), "header entry"),
    "entry lacks a field": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, D8), "header entry"),
    "unknown dtype": (safetensors_bytes({"a": entry("F8_E4M3", [8])}, D8), "F8_E4M3"),
    "dtype of a wrong type": (safetensors_bytes({"a": entry([], [8])}, D8), "has the type"),
    "negative shape": (safetensors_bytes({"a": entry(shape=[-2])}, D8), "shape"),
    "boolean shape": (safetensors_bytes({"a": entry(shape=[True, 2])}, D8), "shape"),
    "float shape": (safetensors_bytes({"a": entry(shape=[2.0])}, D8), "shape"),
    "overflowing shape": (safetensors_bytes({"a": entry(shape=[2**62, 2**62])}, D8), "does not take 8 bytes"),
    "shape unlike the size": (safetensors_bytes({"a": entry(shape=[3])}, D8), "does not take 8 bytes"),
    "offsets reversed": (safetensors_bytes({"a": entry(offsets=[8, 0])}, D8), "offsets"),
    "offsets outside": (safetensors_bytes({"a": entry(offsets=[0, 2**50])}, D8), "outside the 8 bytes"),
    "overlap": (safetensors_bytes({"a": entry(), "b": entry(shape=[1], offsets=[4, 8])}, D8), "overlaps"),
    "gap": (safetensors_bytes({"a": entry(offsets=[8, 16])}, D8 * 2), "no tensor owns"),
    "rest": (safetensors_bytes({"a": entry()}, D8 * 2), "8 bytes at the end"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_end_in_one_error_that_names_file_and_fault(write, case):
    data, message = BAD_FILES[case]
    path = write(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_noticed(write):
    data = written({"a": ARRAYS["f32"], "b": ARRAYS["bf16"]})
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            SafetensorsFile(write(data[:length]))


def test_bool_bytes_other_than_zero_and_one(write):
    file = SafetensorsFile(write(safetensors_bytes({"a": entry("BOOL", [3], [0, 3])}, b"\0\x02\xff")))
    assert file.load("a").tolist() == [False, True, True]


def test_writer_refuses_what_was_not_announced():
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(io.BytesIO(), [("a", np.dtype(np.float32), (2,))], iter([np.zeros(3, np.float32)]))
