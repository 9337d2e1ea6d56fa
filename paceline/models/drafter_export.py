"""Writing a drafter in another packaging: the same numbers under other names, at the level of files.

`to_speculators` writes the format of the `speculators` package (vLLM's own), `to_native` the ones that the families
were published in: z-lab's for dflash and dflash2, DeepSpec's for dspark. Tensors are copied as they are stored, so that
a drafter drafts the same bits before and after. What the other packaging cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.errors import CheckpointError, ConfigError
from paceline.models.drafter_config import HEAD_ROWS_FILE, DFlashConfig, misfit, read_drafter_config
from paceline.models.drafter_weights import EMBED, HEAD, read_draft_ids, read_head_rows
from paceline.models.layouts import recognise
from paceline.models.target import read_config
from paceline.weights.checkpoint import Checkpoint

DrafterLayout = Literal["speculators", "native"]
W2 = "markov_head.markov_w2.weight"

# Keys of a native config that are not those of its decoder.
_OWN_KEYS = {
    *("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "target_layer_ids"),
    *("mask_token_id", "is_causal", "sample_from_anchor", "projector_type", "draft_vocab_size", "target_hidden_size"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "num_anchors"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "paceline_target", "causal"),
    *("use_swa", "swa_window_size", "use_aux_hidden_state", "speculators_config", "speculators_version"),
    *("speculators_model_type", "sliding_window_non_causal", "aux_hidden_state_layer_ids"),
}


@dataclass(slots=True)
class DrafterFiles:
    """A drafter as files: config.json, tensors by name (loaded when written), and the list of head rows, if any."""

    config: dict[str, Any]
    tensors: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    head_rows: np.ndarray | None = None


def convert_drafter(drafter: Checkpoint, target: Checkpoint, layout: DrafterLayout) -> DrafterFiles:
    """The drafter in another packaging. Raises ConfigError or CheckpointError, for a target that does not fit too."""
    where = str(drafter.path)
    c = read_drafter_config(drafter.config, where)
    if c.packaging == "transformers":
        raise ConfigError(
            f"{where}: {drafter.config.get('model_type')} drafters have no other packaging; use it as it is"
        )
    found = misfit(c, read_config(target))
    if found is not None:
        raise ConfigError(f"{where}: {found[0]} = {found[1]!r} does not fit {target.path}, which has {found[2]!r}")
    return to_speculators(drafter, target, c) if layout == "speculators" else to_native(drafter, target, c)


# ---- to speculators


def to_speculators(drafter: Checkpoint, target: Checkpoint, c: DFlashConfig) -> DrafterFiles:
    """In the format of speculators 0.9; a list of head rows becomes `d2t`, `t2d` and an `lm_head` of these rows."""
    where, fields = str(drafter.path), recognise(drafter.config, str(drafter.path)).fields
    _only_default(where, "speculators", input_embedding_scale=(c.input_embedding_scale, 1.0))
    _only_default(where, "speculators", output_multiplier=(c.output_multiplier, 1.0))
    _only_default(where, "speculators", final_logit_softcapping=(c.final_logit_softcapping, 0.0))
    _only_default(where, "speculators", rope_is_neox_style=(not c.decoder.rope.interleaved, True))
    both_ways = _sliding_both_ways(c, where)
    rows = read_head_rows(drafter.path, c.decoder.vocab_size)
    if rows is not None and c.family == "dflash2":
        raise ConfigError(
            f"{where}: {HEAD_ROWS_FILE} lists {len(rows)} head rows, and a dflash2 drafter in the speculators format "
            "drafts from the whole vocabulary; remove it from a copy of the folder to convert that"
        )
    size = c.draft_vocab_size or (c.decoder.vocab_size if rows is None else len(rows))
    names = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": c.max_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    decoder = {k: v for k, v in fields.items() if k not in _OWN_KEYS}
    config: dict[str, Any] = {
        "architectures": [names[c.family]],
        "speculators_model_type": c.family,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": c.family,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": str(target.config.get("_name_or_path") or target.path.name),
                "architectures": target.config.get("architectures") or [],
            },
        },
        "transformer_layer_config": {**decoder, "model_type": "qwen3"},
        "draft_vocab_size": size,
        "block_size": c.block_size,
        "target_hidden_size": c.target_hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        "sliding_window_non_causal": both_ways,
        "sample_from_anchor": c.anchor_first,
        **_family_fields(c),
        **{k: drafter.config[k] for k in ("paceline_target", "num_target_layers") if k in drafter.config},
    }
    out = DrafterFiles(config, _copies(drafter))
    out.tensors.pop("head_rows", None)
    if rows is not None and c.draft_vocab_size is None:
        _reduce(out, drafter, target, rows, c.decoder.vocab_size)
    return out


def _reduce(out: DrafterFiles, drafter: Checkpoint, target: Checkpoint, rows: np.ndarray, vocab: int) -> None:
    """A head of `rows`: of the drafter's own where it has one, else of the target's."""
    source, name = (drafter, HEAD) if HEAD in drafter else (target, _head_name(target))
    out.tensors[HEAD] = lambda: np.ascontiguousarray(source.load(name)[rows])
    if W2 in drafter:
        out.tensors[W2] = lambda: np.ascontiguousarray(drafter.load(W2)[rows])
    out.tensors["d2t"] = lambda: rows.astype(np.int64) - np.arange(len(rows))
    marked = np.zeros(vocab, np.bool_)
    marked[rows] = True
    out.tensors["t2d"] = lambda: marked


def _sliding_both_ways(c: DFlashConfig, where: str) -> bool:
    """`sliding_window_non_causal`: in this format full layers see the whole block, and sliding ones all alike."""
    windows = c.decoder.windows
    sliding = {causal for causal, window in zip(c.causal, windows, strict=True) if window}
    if any(causal and not window for causal, window in zip(c.causal, windows, strict=True)) or len(sliding) > 1:
        raise ConfigError(
            f"{where}: is_causal: full-attention layers that see only earlier slots cannot be written in the "
            "speculators format"
        )
    return sliding == {False}


# ---- to the packagings that the families came in


def to_native(drafter: Checkpoint, target: Checkpoint, c: DFlashConfig) -> DrafterFiles:
    """In z-lab's packaging (dflash, dflash2) or DeepSpec's (dspark)."""
    where, fields = str(drafter.path), recognise(drafter.config, str(drafter.path)).fields
    decoder = {k: v for k, v in fields.items() if k not in _OWN_KEYS}
    config: dict[str, Any] = {
        **decoder,
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "num_target_layers": read_config(target).num_layers,
        **{k: drafter.config[k] for k in ("paceline_target", "target_hidden_size") if drafter.config.get(k)},
    }
    if set(c.causal) == {False} and any(c.decoder.windows):
        config["is_causal"] = False
    elif any(causal != (window > 0) for causal, window in zip(c.causal, c.decoder.windows, strict=True)):
        config["is_causal"] = c.causal[0]
    pairing = {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)}
    if c.anchor_first != (c.family == "dspark"):
        config["sample_from_anchor"] = c.anchor_first
    if c.family == "dspark":
        config |= {"architectures": ["Qwen3DSparkModel"], "block_size": c.block_size, **pairing, **_family_fields(c)}
    else:
        name = "DFlashDraftModel" if c.family == "dflash" else "DFlash2DraftModel"
        inner = {"block_size": c.block_size, **pairing, **_family_fields(c)}
        config |= {"architectures": [name], "auto_map": {"AutoModel": f"dflash.{name}"}, "dflash_config": inner}
    out = DrafterFiles(config, _copies(drafter), read_head_rows(drafter.path, c.decoder.vocab_size))
    for name in ("d2t", "t2d", "head_rows"):
        out.tensors.pop(name, None)
    if c.draft_vocab_size is not None:
        _restore_head(out, drafter, target, c)
    if c.family == "dspark":  # its packaging carries copies of the target's embedding and head
        out.tensors.setdefault(EMBED, lambda: target.load("model.embed_tokens.weight"))
        out.tensors.setdefault(HEAD, lambda: target.load(_head_name(target)))
        return out
    for name, theirs in ((EMBED, "model.embed_tokens.weight"), (HEAD, _head_name(target))):
        if name in out.tensors:
            if not np.array_equal(drafter.load(name, "float32"), target.load(theirs, "float32")):
                raise ConfigError(f"{where}: {name} is not the target's, and z-lab's packaging has no place for it")
            del out.tensors[name]
    return out


def _restore_head(out: DrafterFiles, drafter: Checkpoint, target: Checkpoint, c: DFlashConfig) -> None:
    """A reduced head whose rows are the target's becomes a list of head rows."""
    where, size = str(drafter.path), c.draft_vocab_size
    assert size is not None
    if c.family == "dspark":
        raise ConfigError(
            f"{where}: draft_vocab_size = {size}: DeepSpec's packaging has Markov weights for the whole "
            "vocabulary alone; keep the speculators format"
        )
    ids = read_draft_ids(drafter, size, c.decoder.vocab_size)
    order = np.argsort(ids)
    if HEAD not in drafter:
        raise CheckpointError(f"{where}: tensor {HEAD} [{size}] is missing; draft_vocab_size needs it")
    theirs = target.load(_head_name(target), "float32")[ids]
    if not np.array_equal(drafter.load(HEAD, "float32"), theirs):
        raise ConfigError(
            f"{where}: the rows of {HEAD} are not the target's, and z-lab's packaging has no place for a head of its "
            "own; keep the speculators format"
        )
    del out.tensors[HEAD]
    out.head_rows = ids[order].astype(np.int32)


# ---- both


def _family_fields(c: DFlashConfig) -> dict[str, Any]:
    if c.selector is not None:
        s = c.selector
        return {
            "conv_kernel_size": s.kernel,
            "conv_group_size": s.group,
            "selector_rank": s.rank,
            "selector_top_k": s.top_k,
        }
    if c.family != "dspark":
        return {}
    return {
        "markov_rank": 0 if c.markov is None else c.markov.rank,
        "markov_head_type": "vanilla" if c.markov is None else c.markov.kind,
        "enable_confidence_head": c.confidence is not None,
        "confidence_head_with_markov": bool(c.confidence),
    }


def _copies(drafter: Checkpoint) -> dict[str, Callable[[], np.ndarray]]:
    def copy(name: str) -> Callable[[], np.ndarray]:
        return lambda: drafter.load(name)

    return {name: copy(name) for name in drafter.names()}


def _head_name(target: Checkpoint) -> str:
    return "lm_head.weight" if "lm_head.weight" in target else "model.embed_tokens.weight"


def _only_default(where: str, layout: str, **values: tuple[Any, Any]) -> None:
    for name, (value, default) in values.items():
        if value != default:
            raise ConfigError(f"{where}: {name} = {value!r} cannot be written in the {layout} format")


def write_drafter(files: DrafterFiles, folder: Path) -> None:
    """config.json, model.safetensors and, where there is one, the list of head rows, into an existing folder.

    Beside such a list stands an index: loaders that do not know the list would take every *.safetensors for weights.
    """
    from paceline.weights.convert import write_json
    from paceline.weights.hf_folder import INDEX
    from paceline.weights.safetensors_file import write_safetensors

    write_json(folder / "config.json", files.config)
    # wide types first: every tensor then starts at a multiple of its item size
    names = sorted(files.tensors, key=lambda name: (name == "t2d", name != "d2t", name))
    rows = [(name, array.dtype, array.shape) for name in names for array in [files.tensors[name]()]]
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, rows, (files.tensors[name]() for name in names))
    if files.head_rows is None:
        return
    head_rows = ("head_rows", files.head_rows.dtype, files.head_rows.shape)
    with (folder / HEAD_ROWS_FILE).open("wb") as file:
        write_safetensors(file, [head_rows], iter([files.head_rows]))
    size = sum(int(np.prod(shape)) * dtype.itemsize for _, dtype, shape in rows)
    weight_map = dict.fromkeys(sorted(names), "model.safetensors")
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
