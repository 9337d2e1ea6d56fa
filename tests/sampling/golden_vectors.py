"""Comparison with golden vectors of kind "sampling": a reference's warps and rejections with given uniforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline import _native

TOLERANCE = 2e-6


def check(expected: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Assert that warped distributions, accepted counts and residuals equal the vectors'.

    expected: the case's expected.json. tensors: name -> array of its safetensors file.
    """
    logits = np.ascontiguousarray(tensors["warp.logits"])
    for warp in expected["warps"]:
        arguments = {name: warp[name] for name in ("temperature", "top_p", "top_k")}
        states = [_native.SamplingState(logits.shape[1], [], **arguments) for _ in logits]
        probs = _native.probs_rows(logits, states)
        want = tensors[f"{warp['name']}.probs"]
        assert ((probs > 1e-30) == (want > 1e-30)).all(), f"{warp['name']}: other ids survive"
        np.testing.assert_allclose(probs, want, rtol=1e-4, atol=TOLERANCE, err_msg=warp["name"])
    for case in expected["rejections"]:
        name = case["name"]
        indices = tensors.get(f"{name}.draft_indices")
        kept, next_probs = _native.reject_block(
            np.ascontiguousarray(tensors[f"{name}.target_probs"]),
            case["draft_tokens"],
            tensors[f"{name}.uniforms"].tolist(),
            np.ascontiguousarray(tensors[f"{name}.draft_probs"]),
            None if indices is None else np.ascontiguousarray(indices.astype(np.int32)),
        )
        assert kept == case["num_accepted"], f"{name}: accepted {kept}"
        want = tensors[f"{name}.next_token_probs"]
        np.testing.assert_allclose(next_probs, want, rtol=1e-4, atol=TOLERANCE, err_msg=name)
