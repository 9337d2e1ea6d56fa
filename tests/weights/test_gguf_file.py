"""The GGUF container: what a good file reads as, and that every bad one ends in one clear CheckpointError."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.weights.gguf_file import GGUFFile
from weights.builders import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U32,
    U64,
    gguf_bytes,
    gguf_string,
    smollm2_path,
)

ONES = ("ones", (2, 8), 0, np.ones(16, np.float32).tobytes())
HALF = ("half", (3,), 1, np.arange(3, dtype=np.float16).tobytes())
METADATA = [
    ("a.u8", U8, 200),
    ("a.i16", I16, -3),
    ("a.f32", F32, 0.5),
    ("a.f64", F64, 0.1),
    ("a.i64", I64, -(2**40)),
    ("a.u64", U64, 2**63),
    ("a.true", BOOL, 1),
    ("a.text", STRING, "naïve 😀"),
    ("a.words", ARRAY, (STRING, ["x", "", "ÿ"])),
    ("a.numbers", ARRAY, (I32, [1, -2, 3])),
    ("a.flags", ARRAY, (BOOL, [0, 1])),
    ("a.nothing", ARRAY, (F32, [])),
]


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def test_reads_metadata_and_tensors(write):
    file = GGUFFile(write(gguf_bytes(METADATA, [ONES, HALF])))
    assert file.version == 3
    got = dict(file.metadata)
    assert got.pop("a.numbers").tolist() == [1, -2, 3]
    assert got.pop("a.flags").tolist() == [False, True]
    assert got.pop("a.nothing").tolist() == []
    assert got == {
        "a.u8": 200, "a.i16": -3, "a.f32": 0.5, "a.f64": 0.1, "a.i64": -(2**40), "a.u64": 2**63, "a.true": True,
        "a.text": "naïve 😀", "a.words": ["x", "", "ÿ"],
    }  # fmt: skip
    assert file.tensors["ones"].shape == (2, 8)
    assert file.tensors["ones"].dtype == "F32"
    assert (file.raw("ones").view(np.float32) == 1).all()
    assert file.raw("half").view(np.float16).tolist() == [0, 1, 2]


def test_alignment_from_metadata(write):
    file = GGUFFile(write(gguf_bytes([("general.alignment", U32, 64)], [ONES, HALF], alignment=64)))
    assert file.tensors["half"].offset % 64 == 0
    assert file.raw("half").view(np.float16).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_equals_the_gguf_package_on_the_real_model():
    gguf = pytest.importorskip("gguf")
    path = smollm2_path()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.dtype == tensor.tensor_type.name
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_arrays_outlive_the_file(write):
    file = GGUFFile(write(gguf_bytes([], [ONES])))
    values = file.raw("ones").view(np.float32)
    file.close()
    assert values.sum() == 16
    with pytest.raises(CheckpointError, match="closed"):
        file.raw("ones")


def planted(kind: int, value: object, old: bytes, new: bytes) -> bytes:
    """A file with the one entry "k", in which the first `old` behind the key was replaced by `new`."""
    before, key, behind = gguf_bytes([("k", kind, value)], []).partition(gguf_string("k"))
    assert old in behind
    return before + key + behind.replace(old, new, 1)


BAD_FILES = {
    "empty": (b"", "empty"),
    "magic": (gguf_bytes([], [ONES], magic=b"GGML"), "not a GGUF file"),
    "version 1": (gguf_bytes([], [ONES], version=1), "version 1 is not supported"),
    "big-endian": (gguf_bytes([], [ONES], version=3 << 24), "big-endian"),
    "huge tensor count": (gguf_bytes([], [ONES], tensor_count=2**63), "claims 9223372036854775808 tensors"),
    "huge metadata count": (gguf_bytes([], [ONES], kv_count=2**64 - 1), "metadata entries"),
    "one tensor too many": (gguf_bytes([], [ONES], tensor_count=3), "0 dimensions"),
    "duplicate key": (gguf_bytes([("k", U8, 1), ("k", U8, 2)], []), "'k' appears twice"),
    "duplicate tensor": (gguf_bytes([], [ONES, ONES]), "'ones' appears twice"),
    "unknown value type": (planted(U8, 1, b"\x00", b"\x4d"), "unknown value type 77"),
    "nested array": (gguf_bytes([("k", ARRAY, (ARRAY, []))], []), "unsupported value type 9"),
    "huge array": (planted(ARRAY, (I32, []), struct.pack("<Q", 0), struct.pack("<Q", 2**62)), "elements in 'k'"),
    "huge string array": (
        planted(ARRAY, (STRING, []), struct.pack("<Q", 0), struct.pack("<Q", 2**62)),
        "strings in 'k'",
    ),
    "string past the end": (
        planted(ARRAY, (STRING, ["abc"]), struct.pack("<Q", 3), struct.pack("<Q", 2**63)),
        "past the end",
    ),
    "boolean of 2": (gguf_bytes([("k", BOOL, 2)], []), "boolean"),
    "key not UTF-8": (gguf_bytes([("kkk", U8, 1)], []).replace(b"kkk", b"k\xff\xfe"), "UTF-8"),
    "token not UTF-8": (gguf_bytes([("k", ARRAY, (STRING, ["zzz"]))], []).replace(b"zzz", b"z\xff\xfe"), "UTF-8"),
    "five dimensions": (gguf_bytes([], [("t", (1, 1, 1, 1, 1), 0, b"\0" * 4)]), "5 dimensions"),
    "no dimensions": (gguf_bytes([], [("t", (), 0, b"\0" * 4)]), "0 dimensions"),
    "empty shape": (gguf_bytes([], [("t", (4, 0), 0, b"")]), "empty shape"),
    "shape overflows": (gguf_bytes([], [("t", (2**62, 2**62), 0, b"\0" * 64)]), "truncated or corrupt"),
    "unknown tensor type": (gguf_bytes([], [("t", (4,), 99, b"\0" * 16)]), "unknown type 99"),
    "unsupported tensor type": (gguf_bytes([], [("t", (256,), 10, b"\0" * 84)]), "Q2_K, which is not supported"),
    "partial block": (gguf_bytes([], [("t", (48,), 8, b"\0" * 51)]), "blocks of 32"),
    "misaligned": (gguf_bytes([], [ONES], offsets=[4]), "not a multiple of 32"),
    "outside": (gguf_bytes([], [ONES], offsets=[2**40]), "truncated or corrupt"),
    "overlap": (gguf_bytes([], [ONES, HALF], offsets=[0, 32]), "overlap"),
    "alignment of 12": (gguf_bytes([("general.alignment", U32, 12)], [ONES]), "alignment"),
    "alignment of text": (gguf_bytes([("general.alignment", STRING, "x")], [ONES]), "alignment"),
    "split file": (gguf_bytes([("split.count", I16, 3)], [ONES]), "split GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_end_in_one_error_that_names_file_and_fault(write, case):
    data, message = BAD_FILES[case]
    path = write(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_noticed(write):
    data = gguf_bytes(METADATA, [HALF, ONES])
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            GGUFFile(write(data[:length]))


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "nothing.gguf")
