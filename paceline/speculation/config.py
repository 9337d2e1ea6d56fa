"""`--speculative-config`: vLLM's JSON, read strictly."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.values import as_integer, as_number, shown

METHODS = ("ngram", "dflash", "dflash2", "dspark", "draft_model", "mtp")
ALIASES = {"qwen3_5_mtp": "mtp", "qwen3_next_mtp": "mtp"}  # vLLM's older names, by model
MAX_SPECULATIVE_TOKENS = 128
MAX_LOOKUP = 64
DEFAULT_NGRAM_TOKENS = 7
DEFAULT_LOOKUP = (2, 4)

QUANTIZATIONS = ("none", "int8", "int8_channel", "int4")
DEFAULT_DRAFT_MODEL_TOKENS = 5
DEFAULT_MTP_TOKENS = 5

KNOWN_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
    "confidence_threshold",
    "tree_budget",
)
MAX_TREE_BUDGET = 255
AUTO_TREE_BUDGET = 64  # nodes that "auto" looks at, at most

_GPU = "it steers GPU kernels; remove it"
_PARALLEL = "this engine runs a model on the threads of one process; remove it"
_COUPLED = "draws are coupled to the target's noise; for exact rejection sampling choose the sampler `rejection`"
_ADAPTIVE = "the draft length is chosen each step from measured costs; remove it"
_NOT_USED: dict[str, str] = {
    "tensor_parallel_size": _PARALLEL,
    "draft_tensor_parallel_size": _PARALLEL,
    "moe_backend": _GPU,
    "attention_backend": _GPU,
    "kv_cache_dtype": "the drafter's cache has the target's type; remove it",
    "max_model_len": "the drafter's context follows the target's; remove it",
    "revision": "name a revision in `model` by downloading it first; remove it",
    "code_revision": "no remote code is run; remove it",
    "enforce_eager": _GPU,
    "disable_padded_drafter_batch": _GPU,
    "disable_eagle_block_drop": _GPU,
    "use_local_argmax_reduction": _PARALLEL,
    "use_heterogeneous_vocab": "a drafter must share the target's vocabulary; remove it",
    "parallel_drafting": "dflash, dflash2 and dspark always draft in parallel, draft_model and mtp never; remove it",
    "index_share_for_mtp_iteration": "layers with sparse indices are not supported; remove it",
    "num_speculative_tokens_per_batch_size": _ADAPTIVE,
    "speculative_token_tree": "a fixed tree is not supported; use tree_budget, which grows one for each step",
    "suffix_decoding_max_tree_depth": "suffix decoding is not supported; use the method ngram",
    "suffix_decoding_max_cached_requests": "suffix decoding is not supported; use the method ngram",
    "suffix_decoding_max_spec_factor": "suffix decoding is not supported; use the method ngram",
    "suffix_decoding_min_token_prob": "suffix decoding is not supported; use the method ngram",
    "rejection_sample_method": _COUPLED,
    "synthetic_acceptance_rates": "acceptance is always real; remove it",
    "synthetic_acceptance_length": "acceptance is always real; remove it",
    "draft_sample_method": _COUPLED,
    "enable_adaptive_verification": "dspark always verifies as many drafts as its confidence pays for; remove it",
    "dspark_draft_topk": "dspark drafts over the whole vocabulary; remove it",
}


class SpeculativeConfigError(ConfigError, ValueError):
    """A speculative configuration is not valid JSON, or has an unknown key or a value out of range."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made.

    method: one of METHODS. model: the drafter (path or known name), for all but ngram; for mtp only where the layer is
    not in the target's own folder. num_speculative_tokens: most
    drafts per step; None = what the drafter was trained for. prompt_lookup_min, prompt_lookup_max: n-gram lengths, for
    ngram; with another method they ask for both: prompt lookup where it finds something better, else the drafter.
    quantization: of the drafter's matrices and its rows of the head; None = int8, none beside a target in fp32;
    for a draft_model what its file holds.
    confidence_threshold: for dspark, verify the drafts before the first one whose confidence is below it.
    tree_budget: for dflash, verify a tree of so many drafts; "auto" = as many as pay.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    quantization: str | None = None
    confidence_threshold: float | None = None
    tree_budget: int | Literal["auto"] | None = None

    @classmethod
    def parse(cls, source: Mapping[str, Any] | str | SpeculativeConfig) -> SpeculativeConfig:
        """From a mapping or its JSON text, with vLLM's keys. Raises SpeculativeConfigError."""
        if isinstance(source, SpeculativeConfig):  # made by hand, perhaps: checked and completed alike
            completed = _complete({key: value for key in KNOWN_KEYS if (value := getattr(source, key)) is not None})
            return source if completed == source else completed
        if isinstance(source, str):
            try:
                source = json.loads(source)
            # Besides malformed text: integers of thousands of digits, and nesting without end.
            except (ValueError, RecursionError) as error:
                raise SpeculativeConfigError(
                    f'speculative config {shown(source)}: not valid JSON ({error}); example: {{"method": "ngram"}}'
                ) from None
        if not isinstance(source, Mapping):
            raise SpeculativeConfigError(f"speculative config {shown(source)}: expected a JSON object")
        for key in source:
            _check_key(key)
        return _complete(dict(source))


def _check_key(key: str) -> None:
    if key in KNOWN_KEYS:
        return
    if key in _NOT_USED:
        raise SpeculativeConfigError(f"speculative config: the vLLM key '{key}' has no use here: {_NOT_USED[key]}")
    key = str(key)
    near = difflib.get_close_matches(key[:80], KNOWN_KEYS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise SpeculativeConfigError(
        f"speculative config: unknown key {shown(key)}{hint} Known keys: {', '.join(KNOWN_KEYS)}"
    )


def _complete(values: dict[str, Any]) -> SpeculativeConfig:
    """Check the values and fill in what follows from others."""
    model = values.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise SpeculativeConfigError(f"speculative config: model={shown(model)}: use a path or name of a drafter")
    method = _method(values.get("method"), model, values)
    tokens = _integer(values, "num_speculative_tokens", MAX_SPECULATIVE_TOKENS)
    quantization = values.get("quantization")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise SpeculativeConfigError(
            f"speculative config: quantization={shown(quantization)}: use one of {', '.join(QUANTIZATIONS)}"
        )
    low, high = (_integer(values, key, MAX_LOOKUP) for key in ("prompt_lookup_min", "prompt_lookup_max"))
    if method == "ngram":
        if model not in (None, "ngram", "[ngram]"):
            raise SpeculativeConfigError(
                f"speculative config: model={shown(model)}: ngram needs no model; remove it, or set the method"
            )
        if low is None and high is None:
            low, high = DEFAULT_LOOKUP
        if quantization is not None:
            raise SpeculativeConfigError(
                f"speculative config: quantization={shown(quantization)}: ngram has no weights; remove it"
            )
        model, tokens = None, tokens or DEFAULT_NGRAM_TOKENS
    elif method == "draft_model":
        if model is None:
            raise SpeculativeConfigError(
                "speculative config: method draft_model needs model: a smaller model with the same tokenizer"
            )
        tokens = tokens or DEFAULT_DRAFT_MODEL_TOKENS
    elif method == "mtp":
        tokens = tokens or DEFAULT_MTP_TOKENS
    low = high if low is None else low  # vLLM's rule: one of them alone stands for both
    high = low if high is None else high
    if low is not None and high is not None and low > high:
        raise SpeculativeConfigError(
            f"speculative config: prompt_lookup_min={low}: must not exceed prompt_lookup_max={high}"
        )
    threshold, budget = _threshold(values, method), _tree_budget(values, method)
    return SpeculativeConfig(method, model, tokens, high, low, quantization, threshold, budget)


def _tree_budget(values: dict[str, Any], method: str) -> int | Literal["auto"] | None:
    value = values.get("tree_budget")
    if value is None:
        return None
    if method != "dflash":
        raise SpeculativeConfigError(
            f"speculative config: tree_budget={shown(value)}: belongs to the method dflash, not {method}; remove it"
        )
    return "auto" if value == "auto" else _integer(values, "tree_budget", MAX_TREE_BUDGET)


def _threshold(values: dict[str, Any], method: str) -> float | None:
    value = values.get("confidence_threshold")
    if value is None:
        return None
    number = as_number(value)
    if number is None or not 0 <= number <= 1:
        raise SpeculativeConfigError(
            f"speculative config: confidence_threshold={shown(value)}: use a number from 0 to 1"
        )
    if method != "dspark":
        raise SpeculativeConfigError(
            f"speculative config: confidence_threshold={shown(value)}: belongs to the method dspark, not {method}; "
            "remove it"
        )
    return number


def _integer(values: dict[str, Any], key: str, most: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    number = as_integer(value)
    if number is None or number < 1:
        raise SpeculativeConfigError(f"speculative config: {key}={shown(value)}: use an integer of 1 or more")
    if number > most:
        raise SpeculativeConfigError(f"speculative config: {key}={shown(value)}: at most {most}")
    return number


def _method(method: Any, model: str | None, values: dict[str, Any]) -> str:
    """The method, inferred as vLLM does where it is absent."""
    if method is None:
        if model in ("ngram", "[ngram]"):
            return "ngram"
        if model is not None:
            plain = model.lower().replace("-", "").replace("_", "")
            return next((name for name in ("dspark", "dflash2", "dflash") if name in plain), "draft_model")
        if "prompt_lookup_max" in values or "prompt_lookup_min" in values:
            return "ngram"
    method = ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        raise SpeculativeConfigError(
            f"speculative config: method={shown(method)}: not supported; use one of {', '.join(METHODS)}"
        )
    return method
