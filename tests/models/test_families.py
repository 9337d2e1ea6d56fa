"""Families beyond Llama's: equal to `transformers`, the same bits in any pass, and the same text with speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.models import TargetModel, load_model

from .families import CONFIGS, WINDOW, tensors, text, write_family
from .family_reference import FamilyReference
from .test_networks import paths

LENGTH = 8 * WINDOW + 7


def ids_for(c: dict[str, Any], length: int = LENGTH) -> list[int]:
    return np.random.default_rng(0).integers(0, text(c)["vocab_size"] - 8, length).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_family(tmp_path_factory.mktemp("family"), c) for name, c in CONFIGS.items()}


def piecewise(model: TargetModel, ids: list[int], pieces: list[int]) -> np.ndarray:
    """Logits of all rows, given in passes of these lengths."""
    cache, blocks = model.new_cache(32), 32
    table = np.arange(blocks, dtype=np.int32)[::-1].copy()[None]
    out, start = np.empty((len(ids), model.vocab_size), np.float32), 0
    for n in pieces:
        model.plan().forward(
            cache,
            np.arange(start, start + n, dtype=np.int32),
            np.array([0, n], np.int32),
            tokens=np.asarray(ids[start : start + n], np.int32),
            block_tables=table,
            select=np.arange(n, dtype=np.int32),
            logits=out[start : start + n],
        )
        start += n
    assert start == len(ids)
    return out


PIECES = [1, 17, 40, 2, 1, 1, 30, 8, 64, 1, 1, 1, 1, 1, 1, 1, 3, 25]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_same_bits_in_any_pass(folders, name, dtype):
    """A whole text at once, in pieces, and token by token, on one thread and three, on every path of this machine."""
    ids = ids_for(CONFIGS[name])
    assert sum(PIECES) == len(ids)
    for isa in paths():
        model = load_model(folders[name], dtype=dtype, isa=isa, threads=1)
        whole, _ = model.logits(ids)
        assert np.isfinite(whole).all() and whole.std() > 0.1
        other = load_model(folders[name], dtype=dtype, isa=isa, threads=3)
        for got in (piecewise(other, ids, PIECES), piecewise(model, ids[:70], [1] * 70)):
            assert (got.view(np.uint32) == whole[: len(got)].view(np.uint32)).all(), isa


CAPPED = {**CONFIGS["gemma3"], "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}


@pytest.mark.parametrize("name", [*CONFIGS, "gemma3 with capped scores"])
def test_logits_follow_the_definition(folders, tmp_path, name):
    """fp32 against fp64, on every path."""
    c = CONFIGS.get(name, CAPPED)
    folder = folders[name] if name in CONFIGS else write_family(tmp_path, c)
    ids = ids_for(c, 3 * WINDOW)
    want = FamilyReference(c, tensors(c)).logits(ids)
    for isa in paths():
        got, _ = load_model(folder, dtype="float32", isa=isa, threads=2).logits(ids)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    half, _ = load_model(folder, dtype="bfloat16", threads=2).logits(ids)
    assert np.sqrt(((half - want) ** 2).mean()) < 0.03 * np.abs(want).max()


# ---- transformers


def reference(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits [n, V] in fp32 of the whole text at once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    kind = transformers.AutoModelForCausalLM
    if "muse" in (folder / "config.json").read_text():
        kind = transformers.MuseGlimmerForConditionalGeneration
    model: Any = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_families_equal_transformers(folders, name):
    """fp32, prefill and decode, texts of 1, 2 and 8 windows: far below the 1e-3 that is promised."""
    ids, c = ids_for(CONFIGS[name]), CONFIGS[name]
    for length in (WINDOW, 2 * WINDOW + 1, LENGTH):
        limit = min(length, 64) if "original_max_position_embeddings" in c and length <= 64 else None
        model = load_model(folders[name], dtype="float32", threads=1, max_model_len=limit)
        want = reference(folders[name], ids[:length])
        got, _ = model.logits(ids[:length])
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)
        pieces = [length // 2, *[1] * (length - length // 2)]
        np.testing.assert_allclose(piecewise(model, ids[:length], pieces), want, rtol=3e-5, atol=3e-5)
