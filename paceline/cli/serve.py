"""`paceline serve`: an HTTP server with OpenAI's interface and vLLM's flag names."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as opt
from paceline.cli import web_options as web
from paceline.cli.engine import kernels_text

if TYPE_CHECKING:
    from paceline.llm import LLM

SERVER_PANEL = "Server"
LIMITS_PANEL = "Limits"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """`--config`: the file's values stand in for options that are not on the command line."""
    if path is None:
        return None
    import yaml

    from paceline.errors import ConfigError

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {str(error)[:300]}") from None
    if values is None:
        return path
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected 'name: value' lines")
    known = {}
    for parameter in context.command.params:
        for spelled in (parameter.name or "", *(o.lstrip("-") for o in parameter.opts)):
            known[spelled.replace("-", "_")] = parameter.name
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = known.get(str(key).replace("-", "_"))
        if name in (None, "config", "help"):
            raise ConfigError(f"--config {path}: {str(key)[:60]!r} is no option of serve; see paceline serve --help")
        if isinstance(value, list) and not all(isinstance(item, str | int | float) for item in value):
            raise ConfigError(f"--config {path}: {str(key)[:60]}: a list of plain values, or one value")
        defaults[str(name)] = json.dumps(value) if isinstance(value, dict) else value
        if name in ("served_model_name", "api_key", *web.LISTS) and not isinstance(value, list):
            defaults[str(name)] = [value]
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=opt.MODEL_HELP)] = opt.DEFAULT_MODEL,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
            help="YAML file of options ('port: 8000'); the command line wins.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="0.0.0.0 lets others in.", rich_help_panel=SERVER_PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port.", rich_help_panel=SERVER_PANEL)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model; may be given several times. Default: MODEL.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Ask clients for this key; may be given several times. Also PACELINE_API_KEY, which other users "
            "of the machine cannot see.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="FILE",
            help="Jinja template, a file or the text itself, in place of the model's own.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            "--tool-call-parser",
            metavar="NAME",
            help="How it writes tool calls: hermes, llama3_json, mistral, pythonic, none; auto: by its template.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
            help="Accepted: tools are always served.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = True,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            "--reasoning-parser",
            metavar="NAME",
            help="How the model marks reasoning: qwen3, deepseek_r1, mistral, seed_oss, none; auto: by its template.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = "auto",
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary"],
        typer.Option(
            "--per-request-spec-decode-metrics",
            help="What answers carry as metrics.speculative_decoding.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = "summary",
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    cpus: Annotated[
        str | None,
        typer.Option(
            "--cpus", metavar="LIST", help="Processors to keep to: 0-15 or 0,2,4.", rich_help_panel=opt.MODEL_PANEL
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Accepted; no remote code is ever run.", rich_help_panel=opt.MODEL_PANEL
        ),
    ] = False,
    max_model_len: opt.MaxModelLenOption = None,
    kv_cache_space: Annotated[
        float | None,
        typer.Option(
            "--kv-cache-space",
            metavar="GIB",
            help="For the KV cache; also VLLM_CPU_KVCACHE_SPACE. Default: up to 4, at most 40 % of free memory.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            "--max-num-seqs", min=1, metavar="N", help="Most choices in a pass.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 32,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            "--max-num-batched-tokens", min=1, metavar="N", help="Most rows of a pass.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 512,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Take what prompts have in common with earlier ones from the cache.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = True,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting",
            min=0,
            metavar="N",
            help="Most choices that wait; beyond them clients get 429.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = 256,
    max_logprobs: Annotated[
        int,
        typer.Option(
            "--max-logprobs", min=0, metavar="N", help="Most alternatives per token.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 20,
    max_body_mib: Annotated[
        float,
        typer.Option("--max-body-mib", min=0.001, metavar="MIB", help="Largest request.", rich_help_panel=LIMITS_PANEL),
    ] = 10.0,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections", min=1, metavar="N", help="Beyond them clients get 503.", rich_help_panel=LIMITS_PANEL
        ),
    ] = 1024,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            "--request-timeout",
            min=0.001,
            metavar="SECONDS",
            help="Longest a request may take, waiting included. Default: no limit.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            "--shutdown-timeout",
            min=0,
            metavar="SECONDS",
            help="How long requests in flight may go on after a signal.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = 30,
    speculative_config: opt.SpeculativeConfigOption = None,
    num_speculative_tokens: opt.NumSpeculativeTokensOption = None,
    no_speculation: opt.NoSpeculationOption = False,
    allow_longer_drafts: Annotated[
        bool,
        typer.Option(
            "--allow-longer-drafts",
            help="Let drafts be longer than the drafter was trained for.",
            rich_help_panel=opt.SPECULATION_PANEL,
        ),
    ] = False,
    allowed_origins: web.OriginsOption = None,
    allowed_methods: web.MethodsOption = None,
    allowed_headers: web.HeadersOption = None,
    allow_credentials: web.CredentialsOption = False,
    ssl_certfile: web.CertificateOption = None,
    ssl_keyfile: web.KeyOption = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A log line per HTTP request.", rich_help_panel=SERVER_PANEL)
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--log-level", help="On standard error.", rich_help_panel=SERVER_PANEL),
    ] = "info",
) -> None:
    """Serve a model over HTTP: OpenAI's interface, SSE streams, Prometheus metrics.

    Speculation changes no token of any answer. docs/server.md says how to run it, docs/api.md what it answers.
    """
    begin = time.perf_counter()
    opt.check_speculation(no_speculation, num_speculative_tokens, speculative_config)
    speculation = opt.parse_speculative_config(speculative_config)
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    if trust_remote_code:
        print("Note: --trust-remote-code changes nothing: no remote code is ever run.", file=sys.stderr)
    from paceline.errors import ConfigError
    from paceline.server import plan

    keys = _keys(api_key)
    if "" in (served_model_name or []):
        raise ConfigError("--served-model-name: empty; give a name, or leave it out")
    if cpus is not None:
        plan.bind_cpus(cpus)
    template = _template(chat_template)
    from paceline.server.features import ModelFeatures, check_parsers

    check_parsers(tool_call_parser, reasoning_parser)
    from paceline.server.run import end_process, take_port
    from paceline.server.run import serve as run_server

    origins = web.origins(allowed_origins)
    methods, headers = (
        web.several("--allowed-methods", allowed_methods),
        web.several("--allowed-headers", allowed_headers),
    )
    web.check_certificate(ssl_certfile, ssl_keyfile)
    from paceline.cli.progress import download_progress
    from paceline.weights.store import resolve_model

    space = plan.kv_cache_space(kv_cache_space)
    here = plan.on_disk(model)
    if here is not None:
        plan.check_context(here, max_model_len)
        plan.check_memory(here, dtype, space, quantization)
    listening = take_port(host, port)
    if here is None:
        with download_progress() as progress:
            fetched = resolve_model(model, progress=progress)
        plan.check_context(fetched, max_model_len)
        plan.check_memory(fetched, dtype, space, quantization)
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM
    from paceline.server.settings import MIB, ServerSettings

    llm = LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=None if no_speculation else speculation or "auto",
        threads=threads,
        max_model_len=max_model_len,
        kv_cache_space=space,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        allow_longer_drafts=allow_longer_drafts,
    )
    if template is not None:
        llm.tokenizer.templates["default"] = template
    _check_drafts(llm, num_speculative_tokens, allow_longer_drafts)
    ModelFeatures(llm.tokenizer, llm.info()["architecture"], tool_call_parser, reasoning_parser)  # do they fit?
    settings = ServerSettings(
        model_names=tuple(served_model_name or [model]),
        api_keys=keys,
        max_body_bytes=int(max_body_mib * MIB),
        request_timeout=request_timeout,
        num_speculative_tokens=num_speculative_tokens,
        allow_longer_drafts=allow_longer_drafts,
        spec_metrics=per_request_spec_decode_metrics,
        max_logprobs=max_logprobs,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        allowed_origins=origins,
        allowed_methods=methods or ("*",),
        allowed_headers=headers or ("*",),
        allow_credentials=allow_credentials,
    )
    for line in start_lines(llm, num_speculative_tokens):
        print(line, file=sys.stderr)
    _warm_up(llm)
    shown = f"[{host}]" if ":" in host else host
    where = f"http{'' if ssl_certfile is None else 's'}://{shown}:{listening.getsockname()[1]}"

    def ready() -> None:
        seconds = time.perf_counter() - begin
        print(f"{where} is ready after {seconds:.1f} s (model {settings.model_names[0]})", file=sys.stderr, flush=True)

    engine = AsyncLLM(llm, max_waiting=max_waiting)
    code = run_server(
        engine,
        settings,
        listening,
        shutdown_timeout=shutdown_timeout,
        max_connections=max_connections,
        access_log=access_log,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        on_ready=ready,
    )
    end_process(code)


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """API keys from the command line and the environment, without the line end that a file of secrets ends with.
    Raises ConfigError for an empty one, which would lock nobody out."""
    from paceline.errors import ConfigError

    named = [("--api-key", key) for key in given or []]
    if os.environ.get("PACELINE_API_KEY"):
        named.append(("PACELINE_API_KEY", os.environ["PACELINE_API_KEY"]))
    for name, key in named:
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(f"{name}: the key is empty; give one, or leave it out to let everybody in")
    return tuple(key.strip() for _, key in named)


def start_lines(llm: LLM, num_speculative_tokens: int | None) -> list[str]:
    """Path, threads and the memory plan."""
    facts = llm.info()
    drafts = "none"
    if facts["speculation"] and num_speculative_tokens != 0:
        length = f"up to {opt.count(facts['num_speculative_tokens'], 'token')}, as many as pay"
        if num_speculative_tokens is not None:
            length = f"{opt.count(num_speculative_tokens, 'token')}, fixed"
        drafts = f"{facts['speculation']}, {length}"
    weights, cache = facts["weights_bytes"] / 2**20, facts["kv_cache_bytes"] / 2**20
    return [
        f"Path: {kernels_text(facts)}",
        f"Memory: {weights:,.0f} MiB of {facts['weight_type']} weights, KV cache up to {cache:,.0f} MiB "
        f"({facts['kv_cache_tokens']:,} tokens of {facts['kv_bytes_per_token'] / 1024:.1f} KiB)",
        f"Context: {facts['max_model_len']:,} tokens; {opt.count(llm.engine.max_num_seqs, 'choice')} at a time; "
        f"drafts: {drafts}",
    ]


def _warm_up(llm: LLM) -> None:
    """A few tokens, so that the first client does not pay for plans and first touches of memory."""
    from paceline.cache import PrefixCacheStats
    from paceline.engine import RoundSeconds
    from paceline.sampling_params import SamplingParams
    from paceline.speculation.stats import SpecDecodeStats

    llm.generate(
        [[0, 0]], SamplingParams(temperature=0.0, max_tokens=min(6, llm.max_model_len - 2) or 1, ignore_eos=True)
    )
    llm.engine.stats, llm.engine.scheduler.stats = SpecDecodeStats(), PrefixCacheStats()  # nobody asked for these
    llm.engine.round_seconds = RoundSeconds()


def _template(given: str | None) -> str | None:
    """A file's text, or the template itself."""
    if given is None:
        return None
    from paceline.errors import ConfigError

    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: {getattr(error, 'strerror', None) or error}") from None


def _check_drafts(llm: LLM, wanted: int | None, longer: bool) -> None:
    from paceline.errors import ConfigError

    most = llm.info()["num_speculative_tokens"]
    if wanted is not None and wanted > most and not longer and llm.info()["speculation"]:
        raise ConfigError(
            f"--num-speculative-tokens {wanted} is more than the {most} of this drafter; "
            "lower it or add --allow-longer-drafts"
        )
