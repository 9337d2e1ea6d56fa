"""Random weights in the shape of a Qwen3.5 model."""

from __future__ import annotations

import numpy as np
from models.hybrid import HybridShape, config_of, tensors_of

from paceline.bench.shapes import SHAPES, RandomCheckpoint, tensor_shapes
from paceline.models import TargetModel
from paceline.models.dflash import read_drafter_config
from paceline.models.target import read_config


def test_tensors_are_those_of_the_family() -> None:
    shape = HybridShape(layers=4, full=(3,))
    config = {k: v for k, v in config_of(shape).items() if k != "layer_types"}
    assert tensor_shapes(config) == {name: t.shape for name, t in tensors_of(shape).items()}
    model = TargetModel(RandomCheckpoint("tiny", config), threads=1, max_rows=16)
    logits, _ = model.logits(list(range(10)))
    assert np.isfinite(logits).all() and (logits.std(1) > 0).all()


def test_rows_of_a_random_matrix_differ_and_take_no_memory() -> None:
    checkpoint = RandomCheckpoint("tiny", config_of(HybridShape(layers=4, full=(3,))))
    table = checkpoint.load("model.embed_tokens.weight", "bfloat16")
    assert table.shape == (120, 40) and table.base is not None
    assert len(np.unique(np.ascontiguousarray(table).view(np.uint16), axis=0)) == 120
    assert (checkpoint.load("model.norm.weight", "float32") == 0).all()
    assert (checkpoint.load("model.layers.0.linear_attn.norm.weight", "float32") == 1).all()


def test_the_9b_and_its_drafter() -> None:
    shape = SHAPES["Qwen3.5-9B"]
    target = read_config(RandomCheckpoint("Qwen3.5-9B", shape.target))
    assert shape.drafter is not None
    drafter = read_drafter_config(shape.drafter, "drafter")
    assert (target.num_layers, target.rope.rotary_dim, drafter.decoder.rope.rotary_dim) == (32, 64, 128)
    assert drafter.decoder.windows == (2048,) * 5 + (0,) and drafter.causal == (True,) * 5 + (False,)
    assert sum(np.prod(s) for s in tensor_shapes(shape.target).values()) == 8953803264
