"""A drafter's configuration: one shape for every packaging of the DFlash family, read once and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.models.config import ConfigReader, DecoderConfig, Rope, read_decoder
from paceline.models.layouts import Family, Layout, Packaging, recognise
from paceline.models.target import TargetModel
from paceline.values import shown

HEAD_ROWS_FILE = "head_rows.safetensors"

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """DSpark's sequential head: a low-rank bias on the logits of a slot from the token before it."""

    rank: int
    kind: MarkovKind = "vanilla"


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """DFlash 2: local convolutions of the block, and the selector that walks through `top_k` candidates per slot."""

    kernel: int
    group: int
    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`causal[i]` says whether layer i's block rows see only earlier block rows; windows are in `decoder`.

    anchor_first: slot k predicts the token behind its position, from slot 0 on; else slots 1.. predict the token at
    their own position. draft_vocab_size: rows of the drafter's own, reduced head; None: it proposes any token.
    confidence: None, or the width of the Markov embedding that the confidence head reads beside the hidden state.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    family: Family = "dflash"
    packaging: Packaging = "z-lab"
    evidence: tuple[str, ...] = ()
    anchor_first: bool = False
    draft_vocab_size: int | None = None
    markov: MarkovConfig | None = None
    confidence: int | None = None
    selector: SelectorConfig | None = None

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.anchor_first else self.block_size - 1


def read_drafter_config(config: dict[str, Any], where: str) -> DFlashConfig:
    """Any packaging that `layouts.recognise` knows.

    Raises ConfigError: `target_layer_ids`, `mask_token_id` and `block_size` are never guessed, since a wrong guess
    only costs acceptance and goes unnoticed.
    """
    layout = recognise(config, where)
    reader = ConfigReader(layout.fields, where)
    decoder = _decoder(reader)
    return DFlashConfig(
        decoder=decoder,
        block_size=reader.integer("block_size", least=1 if layout.anchor_first else 2, most=256),
        mask_token_id=reader.integer("mask_token_id", least=0, most=decoder.vocab_size - 1),
        target_layer_ids=_target_layer_ids(reader),
        causal=_causality(reader, decoder.windows),
        num_target_layers=_optional(reader, "num_target_layers"),
        target_hidden_size=_optional(reader, "target_hidden_size"),
        input_embedding_scale=reader.scale("input_embedding_scale", 1.0),
        output_multiplier=reader.scale("output_multiplier", 1.0),
        final_logit_softcapping=_softcap(reader),
        family=layout.family,
        packaging=layout.packaging,
        evidence=layout.evidence,
        anchor_first=layout.anchor_first,
        draft_vocab_size=_draft_vocab(reader, layout, decoder.vocab_size),
        **_heads(reader, layout, decoder.hidden_size),
    )


def _optional(reader: ConfigReader, name: str) -> int | None:
    return None if reader.config.get(name) is None else reader.integer(name)


def _target_layer_ids(reader: ConfigReader) -> tuple[int, ...]:
    ids = reader.config.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(
            f"{reader.where}: target_layer_ids = {shown(ids)}: must list the target layers whose outputs are tapped"
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{reader.where}: target_layer_ids = {shown(ids)}: names a layer twice; list each once")
    return tuple(ids)


def _decoder(reader: ConfigReader) -> DecoderConfig:
    """The drafter's layers: those of Qwen3, whatever else the config was copied from."""
    fields, where = reader.config, reader.where
    bias = reader.flag("attention_bias", False)
    own = {**fields, "tie_word_embeddings": False, "partial_rotary_factor": None}
    if isinstance(fields.get("rope_parameters"), dict):
        # drafters rotate whole heads; a factor copied from a hybrid target's config means nothing here
        own["rope_parameters"] = {k: v for k, v in fields["rope_parameters"].items() if k != "partial_rotary_factor"}
    for name in ("rope_parameters", "rope_scaling"):
        scaling = reader.mapping(name)
        if scaling.get("rope_type", scaling.get("type")) == "longrope":
            raise ConfigError(f"{where}: {name}: rope_type = 'longrope' is not supported in a drafter")
    decoder = read_decoder(own, where=where, qkv_bias=bias, output_bias=bias, qk_norm=True)
    if reader.flag("use_swa", False) and reader.integer("swa_window_size", 0, least=0) not in (0, *decoder.windows):
        raise reader.fail("swa_window_size", f"differs from the windows of layer_types, {list(decoder.windows)}")
    if not reader.flag("rope_is_neox_style", reader.flag("is_neox_style", True)):
        rope = Rope(decoder.rope.inv_freq, interleaved=True, scale=decoder.rope.scale)
        decoder = dataclasses.replace(decoder, rope=rope)
    return decoder


def _draft_vocab(reader: ConfigReader, layout: Layout, vocab_size: int) -> int | None:
    size = reader.integer("draft_vocab_size", vocab_size)
    if size == vocab_size:
        return None
    if layout.packaging != "speculators":
        raise reader.fail("draft_vocab_size", f"must be vocab_size = {vocab_size}; use {HEAD_ROWS_FILE}")
    if size > vocab_size:
        raise reader.fail("draft_vocab_size", f"must be at most vocab_size = {vocab_size}")
    if layout.family == "dflash2":
        raise reader.fail("draft_vocab_size", f"must be vocab_size = {vocab_size}: DFlash 2 needs the whole head")
    return size


def _softcap(reader: ConfigReader) -> float:
    """0 or null: none."""
    value = reader.number("final_logit_softcapping", 0.0)
    return reader.scale("final_logit_softcapping", 0.0) if value else 0.0


def _causality(reader: ConfigReader, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """As stated for all layers, else sliding layers are causal and full ones are not."""
    stated = reader.config.get("is_causal")
    return tuple(w > 0 for w in windows) if stated is None else (bool(stated),) * len(windows)


def _heads(reader: ConfigReader, layout: Layout, hidden: int) -> dict[str, Any]:
    """What a family has beyond the DFlash network. DSpark's confidence head needs its Markov head only where it says
    that it reads its embedding."""
    if layout.family == "dflash2":
        group = reader.integer("conv_group_size")
        if hidden % group:
            raise reader.fail("conv_group_size", f"must divide hidden_size = {hidden}")
        selector = SelectorConfig(
            kernel=reader.integer("conv_kernel_size", most=64),
            group=group,
            rank=reader.integer("selector_rank", most=1 << 16),
            top_k=reader.integer("selector_top_k", most=min(1024, reader.integer("vocab_size"))),
        )
        return {"selector": selector}
    if layout.family != "dspark":
        return {}
    speculators = layout.packaging == "speculators"  # its own defaults are part of the format
    rank = reader.integer("markov_rank", 256 if speculators else None, least=0, most=1 << 16)
    stated = reader.config.get("markov_head_type")
    stated = "vanilla" if stated is None and (speculators or not rank) else stated
    kind = next((kind for kind in MARKOV_KINDS if kind == stated), None)
    if rank and kind is None:
        raise reader.fail("markov_head_type", f"must be one of {', '.join(MARKOV_KINDS)}")
    confidence = None
    if reader.flag("enable_confidence_head", speculators):
        with_markov = reader.flag("confidence_head_with_markov", speculators)
        if with_markov and not rank:
            raise reader.fail("confidence_head_with_markov", "needs a Markov head; markov_rank is 0")
        confidence = rank if with_markov else 0
    return {"markov": MarkovConfig(rank, kind) if rank and kind else None, "confidence": confidence}


def misfit(c: DFlashConfig, t: DecoderConfig) -> tuple[str, Any, Any] | None:
    """(field, its value, what the target has) of the first thing that does not fit; None if the drafter fits."""
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden_size", c.decoder.hidden_size, t.hidden_size),
        ("target_hidden_size", c.target_hidden_size, t.hidden_size),
        ("vocab_size", None if c.packaging == "transformers" else c.decoder.vocab_size, t.vocab_size),
        ("num_target_layers", c.num_target_layers, t.num_layers),
    ]
    for name, value, expected in pairs:
        if value not in (None, expected):
            return name, value, expected
    if c.mask_token_id >= t.vocab_size:
        return "mask_token_id", c.mask_token_id, f"tokens 0..{t.vocab_size - 1}"
    for layer in c.target_layer_ids:
        if not -1 <= layer < t.num_layers:
            if c.packaging == "speculators":
                return "aux_hidden_state_layer_ids", layer + 1, f"states 0..{t.num_layers}"
            return "target_layer_ids", layer, f"layers 0..{t.num_layers - 1}"
    return None


def check_pairing(c: DFlashConfig, target: TargetModel, where: str) -> None:
    """Refuse a drafter that was made for another target. Raises ConfigError naming the field."""
    found = misfit(c, target.config)
    if found is None:
        return
    name, value, expected = found
    raise ConfigError(
        f"{where}: {name} = {shown(value)} does not fit the target {target.path}, which has {expected!r}; "
        "this drafter was trained for another model"
    )
