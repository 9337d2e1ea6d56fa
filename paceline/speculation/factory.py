"""From a speculative configuration to a drafter that fits the target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.dtypes import DEFAULT_QUANTIZATION
from paceline.errors import ConfigError
from paceline.models.config import DecoderConfig
from paceline.models.target import TargetModel, read_config
from paceline.sampling import SamplerMode
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.dflash import DFlashProposer
from paceline.speculation.draft_model import DraftModelProposer
from paceline.speculation.drafting import Drafter
from paceline.speculation.hybrid import HybridProposer
from paceline.speculation.mtp import MTPProposer
from paceline.speculation.ngram import NgramProposer
from paceline.values import shown
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.quantise import check_quantization

log = logging.getLogger(__name__)

LOOKUP_TOO = {"prompt_lookup_min": 3, "prompt_lookup_max": 5}  # beside a drafter; shorter matches were slower
SHIPPED = Path(__file__).parent.parent / "drafters"


def shipped_drafter(target: TargetModel) -> Path | None:
    """The drafter in this package that was trained for this target."""
    return shipped_for(target.config)


def shipped_for(t: DecoderConfig) -> Path | None:
    """The drafter in this package for targets of this configuration: family, layers, widths, vocabulary."""
    import json

    for folder in sorted(SHIPPED.glob("*")) if SHIPPED.is_dir() else []:
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            continue
        pair = config.get("paceline_target") or {}
        if (
            pair.get("model_type") == t.model_type
            and config.get("num_target_layers") == t.num_layers
            and config.get("hidden_size") == t.hidden_size
            and config.get("vocab_size") == t.vocab_size
        ):
            return folder
    return None


def make_drafter(
    config: Mapping[str, Any] | str | SpeculativeConfig | None,
    target: TargetModel,
    sampler: SamplerMode,
    *,
    allow_longer_drafts: bool = True,
) -> tuple[SpeculativeConfig | None, Drafter | None]:
    """The parsed configuration and its drafter; (None, None) for plain decoding.

    "auto": the drafter that ships for this target beside prompt lookup, else prompt lookup alone. More drafts than a
    drafter was trained for are worth a warning, or with allow_longer_drafts=False an error. Raises ConfigError.
    """
    if config is None:
        return None, None
    if config == "auto":
        folder = shipped_drafter(target)
        parsed = SpeculativeConfig.parse(
            {"method": "dflash", "model": str(folder), **LOOKUP_TOO} if folder else {"method": "ngram"}
        )
    else:
        parsed = SpeculativeConfig.parse(config)
    if parsed.method == "ngram":
        assert parsed.num_speculative_tokens is not None
        return parsed, _lookup(parsed, parsed.num_speculative_tokens, sampler)
    makers: dict[str, Any] = {"draft_model": _draft_model, "mtp": _predictor}
    drafter: Drafter = makers.get(parsed.method, _block_drafter)(parsed, target, sampler, allow_longer_drafts)
    if parsed.prompt_lookup_min is None:
        return parsed, drafter
    return parsed, HybridProposer(_lookup(parsed, drafter.max_drafts, sampler), drafter, sampler)


def _lookup(parsed: SpeculativeConfig, length: int, sampler: SamplerMode) -> NgramProposer:
    low, high = parsed.prompt_lookup_min, parsed.prompt_lookup_max
    assert low is not None and high is not None
    return NgramProposer(low, high, length, sampler)


def _draft_model(
    parsed: SpeculativeConfig, target: TargetModel, sampler: SamplerMode, allow_longer: bool
) -> DraftModelProposer:
    """A smaller model with the target's tokenizer."""
    from paceline.models.layouts import is_drafter, recognise
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    assert parsed.model is not None and parsed.num_speculative_tokens is not None
    checkpoint = open_checkpoint(resolve_model(parsed.model))
    if is_drafter(checkpoint.config):
        family = recognise(checkpoint.config, str(checkpoint.path)).family
        raise ConfigError(
            f"speculative config: method='draft_model': {checkpoint.path} is no model of its own but a {family} "
            f"drafter; set the method to {family!r}"
        )
    check_vocabulary(checkpoint, target)
    if read_config(checkpoint).model_type.startswith("qwen3_5"):
        raise ConfigError(
            f"speculative config: model={str(checkpoint.path)!r}: a model with recurrent layers cannot be a draft "
            "model in this version; use one with attention layers only, or a block drafter"
        )
    model = TargetModel(
        checkpoint,
        dtype=target.dtype,
        quantization=check_quantization(parsed.quantization or DEFAULT_QUANTIZATION),
        threads=target.threads,
        isa=target.isa,
        max_rows=target.max_rows,
        max_model_len=target.max_model_len,
    )
    return DraftModelProposer(model, target.vocab_size, parsed.num_speculative_tokens, sampler)


def _predictor(parsed: SpeculativeConfig, target: TargetModel, sampler: SamplerMode, allow_longer: bool) -> MTPProposer:
    """The multi-token-prediction layer of the target's own folder, or of another one."""
    from paceline.models.mtp import Predictor
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    assert parsed.num_speculative_tokens is not None
    checkpoint = target.checkpoint if parsed.model is None else open_checkpoint(resolve_model(parsed.model))
    predictor = Predictor(checkpoint, target, quantization=parsed.quantization)
    return MTPProposer(predictor, parsed.num_speculative_tokens, sampler)


def check_vocabulary(checkpoint: Checkpoint, target: TargetModel) -> None:
    """Refuse a draft model whose token ids mean something else. Raises ConfigError.

    Models of a family differ in how far they pad their vocabulary; ids that both tokenizers know must be the same
    tokens.
    """
    from paceline.tokenizer import load_tokenizer

    mine, theirs = load_tokenizer(checkpoint).backend, load_tokenizer(target.checkpoint).backend
    tokens = {i: token for token, i in theirs.get_vocab(with_added_tokens=True).items()}
    known = {i: token for token, i in mine.get_vocab(with_added_tokens=True).items()}
    wrong = min((i for i, token in known.items() if tokens.get(i, token) != token), default=None)
    if wrong is not None:
        raise ConfigError(
            f"speculative config: model={str(checkpoint.path)!r}: token {wrong} is {shown(known[wrong])} there and "
            f"{shown(tokens[wrong])} in {target.path}; a draft model must have the target's tokenizer"
        )
    common = len(known.keys() & tokens.keys())
    if 2 * common < len(tokens):
        raise ConfigError(
            f"speculative config: model={str(checkpoint.path)!r}: its tokenizer has {common} of the target's "
            f"{len(tokens)} tokens; a draft model must have the target's tokenizer"
        )


def _block_drafter(
    parsed: SpeculativeConfig, target: TargetModel, sampler: SamplerMode, allow_longer: bool
) -> DFlashProposer:
    """A drafter of the DFlash family; the checkpoint says of which kind, and the method must agree."""
    from paceline.models.dflash import load_drafter
    from paceline.models.dflash2 import DFlash2Drafter
    from paceline.models.dspark import DSparkDrafter
    from paceline.speculation.dflash2 import DFlash2Proposer
    from paceline.speculation.dspark import DSparkProposer
    from paceline.weights.store import resolve_model

    if parsed.model is None:
        folder = shipped_drafter(target) if parsed.method == "dflash" else None
        if folder is None:
            raise ConfigError(
                f"speculative config: method {parsed.method} needs model: no drafter ships for {target.path}"
            )
    else:
        folder = resolve_model(parsed.model)
    drafter = load_drafter(folder, target, quantization=parsed.quantization)
    c = drafter.config
    # dflash checkpoints of DeepSpec are of the dspark class with its heads off
    plain = c.family == "dspark" and c.markov is None and c.confidence is None
    if parsed.method != c.family and not (plain and parsed.method == "dflash"):
        raise ConfigError(
            f"speculative config: method={parsed.method!r}: {folder} is a {c.family} drafter "
            f"({', '.join(c.evidence)}); set the method to {c.family!r}"
        )
    trained = c.max_drafts
    length = parsed.num_speculative_tokens or trained
    if length > trained:
        message = (
            f"num_speculative_tokens = {length} is more than the {trained} drafts this drafter was trained for "
            f"(block_size {c.block_size}); positions beyond them are rarely accepted"
        )
        if not allow_longer:
            raise ConfigError(f"{message}; lower it or allow longer drafts")
        log.warning("%s", message)
    if parsed.tree_budget is not None and target.recurrent:
        raise ConfigError(
            f"speculative config: tree_budget={parsed.tree_budget}: {target.path} has recurrent layers, whose state "
            "follows one text; remove it"
        )
    if parsed.tree_budget is not None and sampler == "rejection":
        raise ConfigError(
            f"speculative config: tree_budget={parsed.tree_budget}: the sampler 'rejection' keeps or drops drafts in a "
            "row; use the sampler 'coupled', or remove it"
        )
    proposer: DFlashProposer
    if isinstance(drafter, DSparkDrafter):
        proposer = DSparkProposer(drafter, length, sampler, parsed.confidence_threshold)
    elif isinstance(drafter, DFlash2Drafter):
        proposer = DFlash2Proposer(drafter, length, sampler)
    else:
        proposer = DFlashProposer(drafter, length, sampler)
    proposer.tree_budget = parsed.tree_budget
    return proposer
