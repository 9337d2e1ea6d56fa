"""A decoder's configuration: config.json read once, checked, and turned into plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.models.traits import Activation, Traits
from paceline.values import MAX_INT32, as_number, shown

MAX_HEAD_DIM = 256
LLAMA = Traits()
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new"),
}


class ConfigReader:
    """Typed access to a config.json mapping; every complaint names the field, the value and what would do."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    def fail(self, name: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} = {shown(self.config.get(name))}: {remedy}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_INT32) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing; it must be a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(name, f"must be a whole number from {least} to {most}")
        return value

    def number(
        self, name: str, default: float | None = None, *, least: float = -math.inf, most: float = math.inf
    ) -> float:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing; it must be a number")
        number = as_number(value)
        if number is None:
            raise self.fail(name, "must be a finite number")
        if number < least:
            raise self.fail(name, f"must be {least:g} or more")
        if number > most:
            raise self.fail(name, f"must be {most:g} or less")
        return number

    def scale(self, name: str, default: float) -> float:
        """A factor that fp32 activations are multiplied with: above 0 in fp32 as well, and below a million."""
        value = self.number(name, default)
        if not (0 < value < 1e6 and np.float32(value) > 0):
            raise self.fail(name, "must be above 0 and below 1e6")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(name, "must be an object")
        return value


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: fp32 inverse frequencies [rotary_dim / 2], and how pairs are laid out.

    long_inv_freq: those of contexts longer than `short_context` tokens (LongRoPE); None: there is one set for all.
    """

    inv_freq: np.ndarray
    interleaved: bool = False
    scale: float = 1.0
    long_inv_freq: np.ndarray | None = None
    short_context: int = 0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def within(self, context: int) -> Rope:
        """The rope of an engine for texts of up to `context` tokens.

        One set of frequencies for all of them: a text that changed sets on its way would need its cache written anew.
        """
        if self.long_inv_freq is None:
            return self
        chosen = self.long_inv_freq if context > self.short_context else self.inv_freq
        return replace(self, inv_freq=chosen, long_inv_freq=None, short_context=0)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder of the Llama kind. `windows[i]` is layer i's sliding window, 0 for full attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = field(default=())
    traits: Traits = field(default=LLAMA)

    def within(self, context: int) -> DecoderConfig:
        """The configuration for texts of up to `context` tokens; see `Rope.within`."""
        return replace(self, rope=self.rope.within(context))


def read_rope(reader: ConfigReader, head_dim: int) -> Rope:
    """Rope of a config in the old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) style.

    Scaling kinds: default, linear, llama3, yarn, longrope. Others are refused by name: unscaled, they would be silently
    wrong.
    """
    parameters = reader.mapping("rope_parameters") or reader.mapping("rope_scaling")
    if (
        parameters and reader.config.get("original_max_position_embeddings") is not None
    ):  # as Phi-3 has it: at top level
        stated = reader.integer("original_max_position_embeddings", least=2)
        parameters = {**parameters, "original_max_position_embeddings": stated}
    inner = ConfigReader(parameters, f"{reader.where}: rope parameters")
    source = inner if parameters.get("rope_theta") is not None else reader
    theta = source.number("rope_theta", 10000.0)
    if theta <= 0:
        raise source.fail("rope_theta", "must be positive")
    rotary_dim = _rotary_dim(reader, inner, head_dim)
    long_inv_freq, short_context = None, 0
    with np.errstate(all="ignore"):  # what leaves fp32 is refused by name
        exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        powers = np.power(np.float32(theta), exponent).astype(np.float32)
        inv_freq = (1.0 / powers).astype(np.float32)
        _check_inv_freq(inv_freq, source, "rope_theta")
        kind, scale = parameters.get("rope_type", parameters.get("type", "default")), 1.0
        if kind == "linear":
            if inner.number("factor") <= 0:
                raise inner.fail("factor", "must be positive")
            inv_freq = inv_freq / np.float32(inner.number("factor"))
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, inner)
        elif kind == "yarn":
            inv_freq, scale = _yarn(inv_freq, inner, theta)
        elif kind == "longrope":
            short_context = inner.integer("original_max_position_embeddings", least=2)
            long_inv_freq = 1.0 / (_factors(inner, "long_factor", rotary_dim) * powers)
            inv_freq = 1.0 / (_factors(inner, "short_factor", rotary_dim) * powers)
            scale = _longrope_scale(reader, inner, short_context)
            _check_inv_freq(long_inv_freq, inner, "long_factor")
        elif kind != "default":
            raise ConfigError(
                f"{reader.where}: rope_type = {shown(kind)} is not supported; "
                "supported: default, linear, llama3, yarn, longrope"
            )
        inv_freq = np.ascontiguousarray(inv_freq, dtype=np.float32)
        _check_inv_freq(inv_freq, inner, "factor" if long_inv_freq is None else "short_factor")
    return Rope(inv_freq, scale=scale, long_inv_freq=long_inv_freq, short_context=short_context)


def _factors(reader: ConfigReader, name: str, rotary_dim: int) -> np.ndarray:
    """LongRoPE's divisor of each frequency, fp32 [rotary_dim / 2]."""
    values = reader.config.get(name)
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise reader.fail(name, f"must list {rotary_dim // 2} numbers, one for each pair that is rotated")
    factors = [as_number(value) for value in values]
    if any(factor is None or not 1e-6 < factor < 1e9 for factor in factors):
        raise reader.fail(name, "must list positive numbers")
    return np.array(factors, np.float32)


def _longrope_scale(reader: ConfigReader, inner: ConfigReader, original: int) -> float:
    """LongRoPE's factor on cos and sin (arXiv 2402.13753): of the ratio of the contexts, whichever set is used."""
    ratio = inner.number("factor", reader.integer("max_position_embeddings", 2048) / original, least=0)
    scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return inner.number("attention_factor", scale, least=1e-3, most=1e3)


def _rotary_dim(reader: ConfigReader, inner: ConfigReader, head_dim: int) -> int:
    source = inner if inner.config.get("partial_rotary_factor") is not None else reader
    factor = source.number("partial_rotary_factor", 1.0)
    if not 0 < factor <= 1:
        raise source.fail("partial_rotary_factor", "must be above 0 and at most 1")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not rotary_dim:
        raise source.fail("partial_rotary_factor", f"gives {rotary_dim} rotated dimensions of {head_dim}")
    return rotary_dim


def _check_inv_freq(inv_freq: np.ndarray, reader: ConfigReader, name: str) -> None:
    """Angles, position * inv_freq, must be fp32 numbers at every position there can be."""
    if not ((inv_freq > 0) & np.isfinite(inv_freq * np.float32(MAX_INT32))).all():
        raise reader.fail(name, "gives rotary frequencies that fp32 cannot hold (0, infinite or not a number)")


def _llama3(inv_freq: np.ndarray, reader: ConfigReader) -> np.ndarray:
    """Llama 3.1's frequency-dependent scaling: long waves divided by `factor`, short ones kept, a ramp between."""
    factor = reader.number("factor")
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    original = reader.number("original_max_position_embeddings")
    for name, value in (("factor", factor), ("low_freq_factor", low), ("original_max_position_embeddings", original)):
        if value <= 0:
            raise reader.fail(name, "must be above 0 for llama3 scaling")
    if high <= low:
        raise reader.fail("high_freq_factor", f"must be above low_freq_factor = {low:g}")
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(between, ramp, scaled).astype(np.float32)


def _yarn(inv_freq: np.ndarray, reader: ConfigReader, theta: float) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): dimensions that turn often in the original context are kept, those that turn seldom are
    slowed down by `factor`, with a ramp over the dimensions between. Returns the frequencies and the factor on cos and
    sin that keeps attention's entropy."""
    factor, original = reader.number("factor"), reader.number("original_max_position_embeddings")
    fast, slow = reader.number("beta_fast", 32.0), reader.number("beta_slow", 1.0)
    for name, value in (("original_max_position_embeddings", original), ("beta_slow", slow)):
        if value <= 0:
            raise reader.fail(name, "must be above 0 for yarn scaling")
    if factor < 1:
        raise reader.fail("factor", "must be 1 or more for yarn scaling")
    if fast < slow:
        raise reader.fail("beta_fast", f"must be beta_slow = {slow:g} or more")
    if theta <= 1:
        raise reader.fail("rope_theta", "must be above 1 for yarn scaling")
    for name in ("mscale", "mscale_all_dim"):
        if reader.config.get(name) is not None:
            raise reader.fail(name, "is not supported; give attention_factor")
    half = len(inv_freq)

    def dimension(turns: float) -> float:  # whose wave turns so often within the original context
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(fast), dimension(slow)
    if reader.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = max(high, low + 0.001)
    keep = 1 - np.clip((np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled = inv_freq / np.float32(factor) * (1 - keep) + inv_freq * keep
    return scaled, reader.number("attention_factor", 0.1 * math.log(factor) + 1.0, least=1e-3, most=1e3)


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer from `layer_types` or, without it, `use_sliding_window` and `max_window_layers`
    (28 where a Qwen config does not say, as in transformers)."""
    # Read whether or not they are used: a config with a wrong type in it is not what its author meant.
    window = reader.config.get("sliding_window")
    if window is not None and window is not False and (isinstance(window, bool) or not isinstance(window, int)):
        raise reader.fail("sliding_window", "must be a whole number or null")
    use = reader.flag("use_sliding_window", reader.config.get("model_type") == "mistral")
    qwen = str(reader.config.get("model_type")).startswith("qwen")
    first = reader.integer("max_window_layers", 28 if qwen else 0, least=0)
    types = reader.config.get("layer_types")
    if types is None:
        if window is None or window is False or not use:
            return (0,) * num_layers
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = ["full_attention", "sliding_attention"]
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        raise reader.fail("layer_types", f"must list {num_layers} of {known}")
    if "sliding_attention" not in types:
        return (0,) * num_layers
    width = reader.integer("sliding_window")
    return tuple(width if t == "sliding_attention" else 0 for t in types)


def _refuse_quantised(reader: ConfigReader) -> None:
    """Tensors of GPTQ, AWQ, FP8, bitsandbytes, ... checkpoints are codes and scales, not weights."""
    for name in ("quantization_config", "compression_config"):
        value = reader.config.get(name)
        if value is None:
            continue
        method = value.get("quant_method") if isinstance(value, dict) else None
        kind = f"quant_method {shown(method)}" if method is not None else shown(value)
        raise ConfigError(
            f"{reader.where}: {name} = {kind}: this checkpoint is quantised in a way that is not supported; "
            "use the model's unquantised checkpoint, or a GGUF file of it"
        )


def read_activation(reader: ConfigReader, activation: Activation) -> Activation:
    """The one activation that a family has; its field is `hidden_activation` or `hidden_act`."""
    for name in ("hidden_activation", "hidden_act"):
        if name in reader.config and reader.config[name] not in ACTIVATIONS[activation]:
            raise reader.fail(name, f"only {ACTIVATIONS[activation][0]} is supported for this family")
    return activation


def read_decoder(
    config: dict[str, Any], *, where: str = "config.json", traits: Traits = LLAMA, **family: Any
) -> DecoderConfig:
    """The fields every family shares; `family` gives the ones a model file decides (biases, qk_norm, ...).

    Raises ConfigError naming the field, its value and what would do.
    """
    reader = ConfigReader(config, where)
    _refuse_quantised(reader)
    hidden = reader.integer("hidden_size", most=1 << 20)
    heads = reader.integer("num_attention_heads", most=4096)
    kv_heads = reader.integer("num_key_value_heads", heads, most=4096)
    if heads % kv_heads:
        raise reader.fail("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise reader.fail("hidden_size", f"is not a multiple of num_attention_heads = {heads}; give head_dim")
    head_dim = reader.integer("head_dim", hidden // heads, least=2, most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise reader.fail("head_dim", "must be even")
    read_activation(reader, traits.activation)
    layers = reader.integer("num_hidden_layers", most=4096)
    return DecoderConfig(
        model_type=str(config.get("model_type")),
        vocab_size=reader.integer("vocab_size", most=1 << 24),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", most=1 << 22),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, least=0, most=1),
        max_position_embeddings=reader.integer("max_position_embeddings", 2048),
        rope=read_rope(reader, head_dim),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        windows=read_windows(reader, layers),
        traits=traits,
        **family,
    )
