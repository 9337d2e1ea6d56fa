"""What other engines call an option or a command, and what stands for it here."""

from __future__ import annotations

from paceline.other_names import PROCESSOR, WITH_MODEL

_MODEL = "the model is an argument: paceline {command} MODEL"
_PROMPT = "the prompt is an argument: paceline generate TEXT"
_MEMORY = "leave it out: memory is taken as it is needed"
_FILES = "leave it out: it follows from the files"
_LOGGED = "leave it out: a line per request is logged (serve --log-level warning: none)"
_ONE_BACKEND = "leave it out: there is one backend"
_REQUESTS = "leave it out: a request gives its own, else OpenAI's defaults hold"
_PROCESSES = "leave it out: one process serves; for replicas see docs/distributed.md"
_NO_ADAPTERS = "leave it out: there are no adapters"
_TEXT = "leave it out: models here generate text"
_GRAMMAR = "there is none here; requests to paceline serve have structured_outputs, and so have SamplingParams"
_CHUNKS = "leave it out: prompts are always computed in chunks (--max-num-batched-tokens)"
_CLIENTS = "there is none; let a proxy check the certificates of clients"
_ALWAYS = "leave it out: it is always on"
_NOTHING = "leave it out: there is nothing of the kind"

DRAFTS = ("--num-speculative-tokens",)
DRAFTER = ("--speculative-config",)
CONTEXT = ("--max-model-len",)
LENGTH = ("--max-tokens", "--output-len")
CHOICES = ("--max-num-seqs", "--concurrency")
THREADS = ("--threads",)
ROWS = ("--max-num-batched-tokens",)
CACHE = ("--kv-cache-space",)
CACHE_TYPE = ("--kv-cache-dtype",)

# option of another engine -> (the options here that do it, the first that a command has is named; else what to say)
OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "--alias": (("--served-model-name",), ""),
    "--api-key-file": ((), "set the environment variable PACELINE_API_KEY"),
    "--api-server-count": ((), _PROCESSES),
    "--batch-size": (ROWS, ""),
    "--block-size": ((), "leave it out: blocks of the cache have one size"),
    "--cache-type-k": (CACHE_TYPE, ""),
    "--cache-type-v": (CACHE_TYPE, ""),
    "--cont-batching": ((), _ALWAYS),
    "--ctx-size": (CONTEXT, ""),
    "--data-parallel-size": ((), _PROCESSES),
    "--dataset-name": (("--dataset",), ""),
    "--dataset-path": (("--dataset",), ""),
    "--device": ((), PROCESSOR),
    "--disable-log-requests": ((), _LOGGED),
    "--disable-log-stats": ((), "leave it out: a server that has something to do logs figures every ten seconds"),
    "--distributed-executor-backend": ((), _PROCESSES),
    "--download-dir": ((), "set the environment variable PACELINE_CACHE"),
    "--draft": (DRAFTS, ""),
    "--draft-max": (DRAFTS, ""),
    "--embedding": ((), _TEXT),
    "--embeddings": ((), _TEXT),
    "--enable-chunked-prefill": ((), _CHUNKS),
    "--enable-log-requests": ((), _LOGGED),
    "--enable-lora": ((), _NO_ADAPTERS),
    "--enable-reasoning": (("--reasoning-parser",), ""),
    "--enforce-eager": ((), "leave it out: there is nothing to compile"),
    "--flash-attn": ((), _NOTHING),
    "--generation-config": ((), _REQUESTS),
    "--gpu-memory-utilization": (CACHE, _MEMORY),
    "--grammar": ((), _GRAMMAR),
    "--grammar-file": ((), _GRAMMAR),
    "--guided-decoding-backend": ((), _ONE_BACKEND),
    "--hf-file": ((), _MODEL),
    "--hf-repo": ((), _MODEL),
    "--hf-token": ((), "set the environment variable HF_TOKEN"),
    "--jinja": ((), "leave it out: chat templates are Jinja in any case"),
    "--json-schema": ((), _GRAMMAR),
    "--load-format": ((), _FILES),
    "--lora": ((), _NO_ADAPTERS),
    "--lora-modules": ((), _NO_ADAPTERS),
    "--max-concurrency": (("--concurrency",), ""),
    "--max-new-tokens": (LENGTH, ""),
    "--metrics": ((), "leave it out: a server always has /metrics"),
    "--mlock": ((), _NOTHING),
    "--model": ((), _MODEL),
    "--model-draft": (DRAFTER, ""),
    "--n-gpu-layers": ((), PROCESSOR),
    "--n-predict": (LENGTH, ""),
    "--no-enable-chunked-prefill": ((), _CHUNKS),
    "--no-enable-log-requests": ((), _LOGGED),
    "--no-mmap": ((), _NOTHING),
    "--no-webui": ((), "leave it out: the page at / is small, and asks for the key of --api-key"),
    "--override-generation-config": ((), _REQUESTS),
    "--parallel": (CHOICES, ""),
    "--pipeline-parallel-size": (THREADS, ""),
    "--predict": (LENGTH, ""),
    "--prompt": ((), _PROMPT),
    "--props": ((), "leave it out: a server always has /server_info"),
    "--reasoning-format": (("--reasoning-parser",), ""),
    "--repeat-penalty": (("--repetition-penalty",), ""),
    "--response-role": ((), "leave it out: the role of answers is assistant"),
    "--revision": ((), "write it behind the model's name: org/name@REVISION"),
    "--root-path": ((), "leave it out: let the proxy take its prefix off the path"),
    "--runner": ((), _TEXT),
    "--seed": ((), "leave it out: a request brings its own seed, else one is drawn"),
    "--slots": ((), "leave it out: a server always has /load and /metrics"),
    "--speculative-model": (DRAFTER, ""),
    "--ssl-ca-certs": ((), _CLIENTS),
    "--ssl-cert-reqs": ((), _CLIENTS),
    "--structured-outputs-config": ((), _ONE_BACKEND),
    "--swap-space": (CACHE, _MEMORY),
    "--task": ((), _TEXT),
    "--temp": (("--temperature",), ""),
    "--tensor-parallel-size": (THREADS, ""),
    "--timeout": (("--request-timeout",), ""),
    "--tokenizer": ((), WITH_MODEL),
    "--tokenizer-mode": ((), WITH_MODEL),
    "--ubatch-size": (ROWS, ""),
    "--uvicorn-log-level": (("--log-level",), ""),
    "-b": (ROWS, ""),
    "-c": (CONTEXT, ""),
    "-cb": ((), _ALWAYS),
    "-ctk": (CACHE_TYPE, ""),
    "-ctv": (CACHE_TYPE, ""),
    "-fa": ((), _NOTHING),
    "-hf": ((), _MODEL),
    "-m": ((), _MODEL),
    "-md": (DRAFTER, ""),
    "-ngl": ((), PROCESSOR),
    "-np": (CHOICES, "leave it out: one answer at a time"),
    "-p": ((), _PROMPT),
    "-t": (THREADS, ""),
    "-tb": (THREADS, ""),
    "-tp": (THREADS, ""),
    "-ub": (ROWS, ""),
}
COMMANDS = {
    "benchmark": "bench",
    "complete": "generate",
    "completion": "generate",
    "download": "pull",
    "list": "drafters",
    "ls": "drafters",
    "models": "drafters",
    "run": "generate",
    "server": "serve",
    "show": "info",
}
