"""From options to arms: draft lengths of one engine, servers behind URLs, or configurations written as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import typer

from paceline.cli import options as opt
from paceline.dtypes import KV_CACHE_DTYPES, QUANTIZATIONS
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.backend import Arm, Backend, DraftLength
    from paceline.cli.options import EngineOptions

ENGINE_KEYS = ("model", "dtype", "threads", "speculative_config", "quantization", "kv_cache_dtype")
CHOICES = {
    "dtype": ("auto", "bfloat16", "float32"),
    "quantization": QUANTIZATIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
SERVER_KEYS = ("base_url", "model", "extra_body")
EXAMPLE = '{"label": "lookup", "speculative_config": {"method": "ngram"}}'
KEYS = ("label", "num_speculative_tokens", *ENGINE_KEYS, *SERVER_KEYS[::2])


@dataclass(slots=True)
class Opened:
    """The arms, a line on each of their backends, and which arms must agree bit for bit with which."""

    arms: list[Arm] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    same_bits: dict[str, str] = field(default_factory=dict)  # arm -> what determines its bits; servers are not in it

    def must_agree(self, arm: str, reference: str) -> bool:
        """Whether answers of two arms that differ are a bug rather than two models."""
        return arm in self.same_bits and self.same_bits[arm] == self.same_bits.get(reference)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An `--arm`, read and checked before anything is opened."""

    label: str
    length: DraftLength
    base_url: str | None
    extra_body: dict[str, Any]
    engine: EngineOptions
    model: str | None  # as written


def parse_arm(text: str, base: EngineOptions) -> ArmSpec:
    """`{"label": "ngram", "speculative_config": {"method": "ngram"}, "num_speculative_tokens": "auto"}`: what is left
    out is as the command's own options say."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{text!r} is not JSON ({error}); example: {EXAMPLE}") from None
    if not isinstance(values, dict):
        raise _bad(f"{text!r} is not a JSON object; example: {EXAMPLE}")
    unknown = [key for key in values if key not in KEYS]
    if unknown:
        raise _bad(f"unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    url = values.get("base_url")
    misplaced = [key for key in values if key in (ENGINE_KEYS[1:] if url else SERVER_KEYS[2:])]
    if misplaced:
        raise _bad(f"{misplaced[0]!r} belongs to {'an engine in this process' if url else 'an arm with base_url'}")
    for key, kind in (("label", str), ("base_url", str), ("model", str), ("extra_body", dict), ("threads", int)):
        if key in values and (not isinstance(values[key], kind) or not values[key]):
            raise _bad(f"{key}={values[key]!r} is no {'text' if kind is str else kind.__name__}")
    for key, known in CHOICES.items():
        if key in values and values[key] not in known:
            raise _bad(f"{key}={values[key]!r}: use {', '.join(known[:-1])} or {known[-1]}")
    length = values.get("num_speculative_tokens", None if url else "auto")
    if length != "auto" and not (length is None and url):
        length = opt.parse_ints(str(length), "--arm num_speculative_tokens", least=0)[0]
    config = values.get("speculative_config")
    if config is not None:
        opt.parse_speculative_config(json.dumps(config))
    engine = replace(
        base,
        **{key: values[key] for key in ENGINE_KEYS if key in values},
        speculation=length != 0,
    )
    return ArmSpec(values.get("label", ""), length, url, values.get("extra_body", {}), engine, values.get("model"))


def open_specs(specs: Sequence[ArmSpec]) -> Opened:
    """Open what the specs name; engines and servers with equal options are shared. The first arm is the baseline."""
    from paceline.bench.backend import Arm
    from paceline.cli.engine import summary

    opened = Opened()
    backends: dict[str, Backend] = {}
    for i, spec in enumerate(specs):
        label = spec.label or f"arm {i + 1}"
        if spec.base_url is not None:
            key = repr((spec.base_url, spec.model, spec.extra_body))
            if key not in backends:
                backends[key] = _server(spec.base_url, spec.model, spec.extra_body)
            opened.lines.append(f"{label}: {spec.base_url}, {getattr(backends[key], 'model', '')}")
        else:
            key = repr(spec.engine)
            if key not in backends:
                backends[key] = local_backend(spec.engine)
            llm: Any = getattr(backends[key], "llm", None)
            opened.lines.append(f"{label}: {summary(llm, [spec.length if isinstance(spec.length, int) else None])}")
            opened.same_bits[label] = repr((spec.engine.model, *(getattr(spec.engine, key) for key in CHOICES)))
        opened.arms.append(Arm(backends[key], spec.length, label, baseline=i == 0))
    names = [arm.name for arm in opened.arms]
    if len(set(names)) < len(names):
        raise _bad("two arms have one label; give each its own")
    return opened


def open_lengths(engine: EngineOptions, lengths: Sequence[DraftLength]) -> Opened:
    """One engine in this process, an arm per draft length."""
    from paceline.bench.backend import Arm
    from paceline.cli.engine import note_long_drafts, summary

    backend = local_backend(engine)
    llm = backend.llm
    note_long_drafts(llm, max(length for length in (0, *lengths) if isinstance(length, int)))
    arms = [Arm(backend, length) for length in lengths]
    line = summary(llm, [length if isinstance(length, int) else None for length in lengths])
    return Opened(arms, [line], {arm.name: "one engine" for arm in arms})


def open_servers(urls: Sequence[str], model: str | None, lengths: Sequence[DraftLength] | None) -> Opened:
    """Arms of one server or several; lengths: sent with the requests, None = as the servers are set up."""
    from paceline.bench.backend import Arm

    opened = Opened()
    for url in urls:
        backend = _server(url, model, {})
        name = urlsplit(url if "://" in url else f"//{url}").netloc or url
        opened.lines.append(f"{url}: {backend.model}")
        for length in lengths or [None]:
            plain = Arm(backend, length)
            label = f"{name} {plain.name}" if lengths and len(urls) > 1 else name if len(urls) > 1 else ""
            opened.arms.append(Arm(backend, length, label, baseline=not opened.arms and not lengths and len(urls) > 1))
    return opened


def open_random_weights(
    name: str, survival: Sequence[float], engine: EngineOptions, lengths: Sequence[DraftLength]
) -> Opened:
    """An engine of random weights, drafts of the given survival: SYNTHETIC, and said so in every line."""
    from paceline.bench.backend import Arm
    from paceline.bench.shapes import find_shape
    from paceline.bench.synthetic import NAME, open_synthetic
    from paceline.cli.engine import note, summary

    shape = find_shape(name)
    if any(lengths) and shape.drafter is None:
        raise typer.BadParameter(
            f"{name} has no known drafter, so only -k 0 can be measured", param_hint="--random-weights"
        )
    with note(f"Making random weights of {name} ..."):
        backend = open_synthetic(
            name,
            shape,
            survival if any(lengths) else (),
            dtype=engine.dtype,
            quantization=engine.quantization,
            kv_cache_dtype=engine.kv_cache_dtype,
            threads=engine.threads,
            max_model_len=4096,
            max_num_seqs=engine.max_num_seqs or 1,
            max_num_batched_tokens=128,
        )
    most = backend.llm.info()["num_speculative_tokens"]
    too_long = [length for length in lengths if isinstance(length, int) and length > most]
    if too_long:
        raise typer.BadParameter(f"{too_long[0]} is more than this drafter's {most}", param_hint="-k")
    line = summary(backend.llm, [length if isinstance(length, int) else None for length in lengths])
    opened = Opened(
        [Arm(backend, length) for length in lengths], [f"{NAME}: random weights, made-up acceptance. {line}"]
    )
    if shape.assumed:
        opened.lines.append(f"{NAME}: {shape.assumed}")
    opened.same_bits = {arm.name: NAME for arm in opened.arms}
    return opened


def local_backend(engine: EngineOptions) -> Any:
    """A `LocalBackend` over the model that the options name."""
    from paceline.bench.local import LocalBackend
    from paceline.cli.engine import open_llm

    return LocalBackend(open_llm(engine))


def _server(url: str, model: str | None, extra_body: dict[str, Any]) -> Any:
    from paceline.bench.remote import RemoteBackend

    return RemoteBackend(url, model=model, api_key=os.environ.get("OPENAI_API_KEY"), extra_body=extra_body)


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--arm")


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft lengths and concurrency that were asked for; best_only: above concurrency 1 only the fastest length."""

    lengths: list[int | Literal["auto"]]
    concurrency: list[int]
    best_only: bool = False

    @classmethod
    def of(cls, lengths: str | None, concurrency: str | None, full: bool, grid_by_default: bool) -> Plan:
        from paceline.bench import grid

        if full and (lengths is not None or concurrency is not None):
            raise typer.BadParameter(
                "stands for lists of its own; drop it, or -k and --concurrency", param_hint="--full"
            )
        if full:
            return cls(list(grid.FULL_LENGTHS), list(grid.FULL_CONCURRENCY))
        if grid_by_default and lengths is None and concurrency is None:
            return cls(list(grid.GRID_LENGTHS), list(grid.GRID_CONCURRENCY), best_only=True)
        return cls(
            list(grid.GRID_LENGTHS) if lengths is None else opt.parse_lengths(lengths, "--num-speculative-tokens"),
            [1] if concurrency is None else opt.parse_ints(concurrency, "--concurrency", least=1),
        )


def parse_survival(text: str) -> list[float]:
    """`--synthetic-acceptance`, checked."""
    if text == "article":
        from paceline.bench.survival import article

        return list(article())
    from paceline.bench.survival import check_survival

    shares = opt.parse_shares(text, "--synthetic-acceptance")
    try:
        check_survival(shares)
    except PacelineError as error:
        raise typer.BadParameter(str(error), param_hint="--synthetic-acceptance") from None
    return shares
