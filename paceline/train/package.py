"""What a run on another machine needs, in parts small enough to carry: the target's file, and prompts as ids."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import TrainError

MIB = 1 << 20
LIST = "parts.json"


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Prompts as token ids, with their domains: what a machine without a tokenizer can train on."""

    domains: list[str]
    tokens: list[list[int]]

    def save(self, path: Path) -> None:
        """Write compressed; ids below 65536 take two bytes."""
        flat = np.array([t for ids in self.tokens for t in ids], np.int64)
        kind = np.uint16 if not len(flat) or flat.max() < 1 << 16 else np.uint32
        names = sorted(set(self.domains))
        np.savez_compressed(
            path,
            tokens=flat.astype(kind),
            lengths=np.array([len(ids) for ids in self.tokens], np.uint32),
            domains=np.array([names.index(d) for d in self.domains], np.uint16),
            names=np.array(names),
        )

    @classmethod
    def load(cls, path: Path) -> PackedPrompts:
        """Raises TrainError for a file that is not what ``save`` writes."""
        try:
            with np.load(path, allow_pickle=False) as file:
                ends = np.cumsum(file["lengths"].astype(np.int64))
                tokens = [part.tolist() for part in np.split(file["tokens"].astype(np.int64), ends[:-1])]
                names = [str(n) for n in file["names"]]
                return cls([names[i] for i in file["domains"]], tokens)
        except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
            raise TrainError(f"{path}: not a file of packed prompts ({error})") from None


def split_bundle(files: Sequence[tuple[str, Path]], out: Path, part_bytes: int) -> list[Path]:
    """A tar of ``(name, path)`` cut into files of at most ``part_bytes``, each in a folder of its own:
    ``out/part-0/bundle.0`` and so on. Every folder also holds the list of all parts."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, path in files:
            tar.add(path, name)
    data = stream.getbuffer()
    names = [f"bundle.{i}" for i in range(-(-len(data) // part_bytes))]
    sizes = [min(part_bytes, len(data) - i * part_bytes) for i in range(len(names))]
    folders = []
    for i, name in enumerate(names):
        folder = out / f"part-{i}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data[i * part_bytes : i * part_bytes + sizes[i]])
        (folder / LIST).write_text(json.dumps(dict(zip(names, sizes, strict=True))))
        folders.append(folder)
    return folders


def join_bundle(parts: Sequence[Path], out: Path) -> None:
    """Unpack what ``split_bundle`` cut; ``parts`` are the folders that hold its files, in any order.

    Raises TrainError naming parts that are missing or cut off.
    """
    lists = [json.loads((p / LIST).read_text()) for p in parts if (p / LIST).exists()]
    if not lists:
        raise TrainError(f"no {LIST} in {', '.join(map(str, parts)) or 'nothing'}: these are no parts of a bundle")
    sizes: dict[str, int] = lists[0]
    pieces = []
    for name, size in sizes.items():
        found = [p / name for p in parts if (p / name).exists()]
        if not found:
            raise TrainError(f"{name} of {len(sizes)} parts is missing: bring its folder, too")
        if found[0].stat().st_size != size:
            raise TrainError(f"{found[0]}: {found[0].stat().st_size} bytes, {size} expected: copy it again")
        pieces.append(found[0].read_bytes())
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        tar.extractall(out, filter="data")
