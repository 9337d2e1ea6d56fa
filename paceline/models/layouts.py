"""Which drafter a config.json describes: its family and its packaging, from its fields alone.

Checkpoints of the DFlash family come in several packagings that differ in where fields stand, in what a layer number
counts, and in which slot of a block predicts which token. A wrong reading loads, runs and only costs acceptance, so
nothing is guessed: what no rule below covers is refused, with a list of what was seen. docs/drafters.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.models.config import ConfigReader
from paceline.values import shown

Family = Literal["dflash", "dflash2", "dspark"]
Packaging = Literal["z-lab", "DeepSpec", "SpecForge", "LiquidAI", "speculators", "transformers"]

# architectures -> family and packaging of checkpoints that are not in the speculators format
ARCHITECTURES: dict[str, tuple[Family, Packaging]] = {
    "DFlashDraftModel": ("dflash", "z-lab"),
    "DFlash2DraftModel": ("dflash2", "z-lab"),
    "Qwen3DSparkModel": ("dspark", "DeepSpec"),
    "DSparkDraftModel": ("dspark", "SpecForge"),
    "Lfm2DSparkDraftModel": ("dspark", "LiquidAI"),
    "MuseGlimmerAssistantModel": ("dflash", "transformers"),
}
SPECULATORS: tuple[Family, ...] = ("dflash", "dflash2", "dspark")

# Fields that tell what a config is; an error lists those that were seen.
TELLTALE = (
    "architectures",
    "model_type",
    "speculators_model_type",
    "dflash_config",
    "projector_type",
    "markov_rank",
    "selector_rank",
    "sample_from_anchor",
)

# Fields of relatives that no packaging here supports, and the values that mean "not used". Anything else is another
# network, which would load, run and be wrong in silence.
RELATIVES: dict[str, tuple[Any, ...]] = {
    "shift_label": (None, False),
    "causal_head": (None, False),
    "dflash_query_causal": (None, False),
    "attention_sink_bias": (None, False),
    "log_snr_conditioning": (None, False),
    "has_lm_head": (None, False),
    "logit_scale": (None, 1),
    "xpress_rank": (None, 0),
}
# Fields that belong to one family; any other must not have them.
OWN: dict[str, Family] = {
    "markov_rank": "dspark",
    "conv_kernel_size": "dflash2",
    "selector_rank": "dflash2",
    "selector_top_k": "dflash2",
}

# What transformers' Qwen3Config takes where a key is absent: speculators writes only what differs from these.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What was recognised.

    evidence: the fields that decided, as "name = value". fields: the configuration in z-lab's terms, everything at top
    level (`target_layer_ids` count outputs of decoder layers from 0). anchor_first: slot 0, the anchor's, already
    predicts: slot k stands for the token behind its own position; else slots 1.. predict the token at their own.
    """

    family: Family
    packaging: Packaging
    evidence: tuple[str, ...]
    anchor_first: bool
    fields: dict[str, Any]


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a drafter, of this version's families or another."""
    names = config.get("architectures")
    named = [a for a in names if isinstance(a, str)] if isinstance(names, list) else []
    return (
        any(key in config for key in ("speculators_model_type", "dflash_config", "markov_rank"))
        or any(name in ARCHITECTURES for name in named)
        or any(part in name for name in named for part in ("DFlash", "DSpark", "Speculator", "Eagle"))
    )


def recognise(config: dict[str, Any], where: str) -> Layout:
    """Family and packaging of a drafter's config.json. Raises ConfigError with what was seen."""
    if config.get("speculators_model_type") is not None:
        return _speculators(config, where)
    names = config.get("architectures")
    stated = names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []
    known = [name for name in stated if name in ARCHITECTURES]
    if len(known) != 1:
        raise ConfigError(
            f"{where}: architectures = {shown(names)} is not a drafter this version loads; seen: {_seen(config)}; "
            f"supported: one of {', '.join(ARCHITECTURES)}, or speculators_model_type of {', '.join(SPECULATORS)}"
        )
    family, packaging = ARCHITECTURES[known[0]]
    top = ConfigReader(config, where)
    inner = top.mapping("dflash_config")
    fields = {**config, **{k: v for k, v in inner.items() if v is not None}}
    if packaging == "transformers":
        fields = _assistant_fields(config, where)
    fields["is_causal"] = _stated_causality(top, ConfigReader(inner, f"{where}: dflash_config"))
    evidence = [f"architectures = {shown(known[0])}"]
    evidence += [f"dflash_config.{k} = {shown(inner[k])}" for k in ("projector_type",) if inner.get(k) is not None]
    _check_family(family, fields, where)
    return Layout(family, packaging, *_slots(family, packaging, config, fields, evidence, where), fields)


def _assistant_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A model's own DFlash assistant, as transformers saves it: all layers bidirectional, a window that counts one
    position more, and no vocabulary of its own."""
    reader = ConfigReader(config, where)
    layers, mask = reader.integer("num_hidden_layers", most=4096), reader.integer("mask_token_id", least=0)
    fields: dict[str, Any] = {"rope_theta": 500000.0, "layer_types": ["sliding_attention"] * layers, **config}
    if config.get("rope_parameters"):
        fields["rope_theta"] = None
    if "sliding_attention" in (fields["layer_types"] or ()):
        fields["sliding_window"] = reader.integer("sliding_window", most=1 << 30) + 1  # |q - k| <= window there
    return {**fields, "vocab_size": mask + 1}  # at least; the target's is the one that counts


def _stated_causality(top: ConfigReader, inner: ConfigReader) -> bool | None:
    """Top-level `is_causal`, else `dflash_config.causal`; None where neither is given."""
    if top.config.get("model_type") == "muse_glimmer_assistant":
        return False
    for reader, name in ((top, "is_causal"), (inner, "causal")):
        if reader.config.get(name) is not None:
            return reader.flag(name, False)
    return None


def _slots(
    family: Family,
    packaging: Packaging,
    config: dict[str, Any],
    fields: dict[str, Any],
    evidence: list[str],
    where: str,
) -> tuple[tuple[str, ...], bool]:
    """(evidence, anchor first?): `sample_from_anchor`, else `speculative_tokens`, else what the family does."""
    reader = ConfigReader(fields, where)
    if fields.get("sample_from_anchor") is not None:
        stated = reader.flag("sample_from_anchor", False)
        if family == "dflash2" and stated:
            raise reader.fail("sample_from_anchor", "a DFlash 2 drafter predicts from its mask slots; must be false")
        return (*evidence, f"sample_from_anchor = {shown(stated)}"), stated
    count = _speculative_tokens(config, where) if packaging == "speculators" else None
    if count is not None:
        block = reader.integer("block_size", least=1, most=256)
        if count not in (block, block - 1):
            raise ConfigError(
                f"{where}: speculative_tokens = {count}: must be block_size = {block} (slot 0 predicts) or "
                f"{block - 1} (it does not); give sample_from_anchor"
            )
        return (*evidence, f"speculative_tokens = {count} of block_size {block}"), count == block
    return (*evidence, f"slots as {family} has them"), family == "dspark"


def _check_family(family: Family, fields: dict[str, Any], where: str) -> None:
    """Refuse fields that make another network of it."""
    reader = ConfigReader(fields, where)
    if fields.get("projector_type") not in (None, family):
        raise reader.fail("projector_type", f"is not supported in a {family} drafter; remove it or fetch the right one")
    for name, unused in RELATIVES.items():
        if fields.get(name) not in unused:
            raise reader.fail(name, f"is not supported: this is not a plain {family} drafter")
    for name, owner in OWN.items():
        if owner != family and fields.get(name) not in (None, 0):
            raise reader.fail(name, f"is not supported: it belongs to {owner}, this says it is a {family} drafter")


def _seen(config: dict[str, Any]) -> str:
    seen = [f"{name} = {shown(config[name])}" for name in TELLTALE if name in config]
    return ", ".join(seen) or f"none of {', '.join(TELLTALE)}"


# ---- speculators


def _speculators(config: dict[str, Any], where: str) -> Layout:
    """The `speculators` format: a nested decoder config, layer numbers one higher, other names for the mask."""
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        raise ConfigError(
            f"{where}: speculators_model_type = {shown(kind)} is not a drafter this version loads; "
            f"seen: {_seen(config)}; supported: {', '.join(SPECULATORS)}"
        )
    family: Family = kind
    reader = ConfigReader(config, where)
    decoder = reader.mapping("transformer_layer_config")
    if not decoder:
        raise ConfigError(f"{where}: transformer_layer_config is missing; it must describe the drafter's layers")
    if decoder.get("model_type") not in (None, "qwen3"):
        raise ConfigError(
            f"{where}: transformer_layer_config.model_type = {shown(decoder.get('model_type'))}: only layers of the "
            "kind qwen3 are supported"
        )
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(
            f"{where}: aux_hidden_state_layer_ids = {shown(ids)}: must list the target's hidden states that are "
            "tapped (0 = embedding, i = output of layer i - 1)"
        )
    own = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "architectures", "auto_map")}
    # this flag speaks of sliding layers alone: full ones see the whole block either way
    both_ways = reader.flag("sliding_window_non_causal", family == "dflash2")
    fields = {
        **_QWEN3_DEFAULTS,
        **decoder,
        **own,
        "model_type": "qwen3",
        "target_layer_ids": [i - 1 for i in ids],  # an aux id counts states before layers, the embedding being 0
        "is_causal": False if both_ways else None,
    }
    _check_family(family, fields, where)
    evidence = [f"speculators_model_type = {shown(kind)}"]
    if fields.get("sample_from_anchor") is None and _speculative_tokens(config, where) is None:
        fields["sample_from_anchor"] = family == "dspark"  # the format's own default
    return Layout(family, "speculators", *_slots(family, "speculators", config, fields, evidence, where), fields)


def _speculative_tokens(config: dict[str, Any], where: str) -> int | None:
    """`speculators_config.proposal_methods[0].speculative_tokens`, if it is there."""
    methods = ConfigReader(config, where).mapping("speculators_config").get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    inner = ConfigReader(methods[0], f"{where}: proposal_methods")
    return None if methods[0].get("speculative_tokens") is None else inner.integer("speculative_tokens", most=256)
