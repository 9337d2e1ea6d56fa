"""Paths that users of other servers try, and what serves them here: for the messages of 404."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_CHAT = "use POST /v1/chat/completions"
_NO_RANKS = "there are no embeddings, scores or ranks here: models generate text"
_TEXT = "models here read and write text"
_NOTHING_STORED = "nothing is stored here, neither files nor conversations"
# A path -> what to do; it stands for all paths below it.
OTHERS: dict[str, str] = {
    "/api/chat": f"that is Ollama's; {_CHAT}",
    "/api/generate": "that is Ollama's; use POST /v1/completions, or /v1/chat/completions",
    "/api/ps": "that is Ollama's; use GET /v1/models",
    "/api/show": "that is Ollama's; use GET /server_info",
    "/api/tags": "that is Ollama's; use GET /v1/models",
    "/api/version": "that is Ollama's; use GET /version",
    "/apply-template": "that is llama.cpp's; POST /tokenize with messages applies the chat template",
    "/completion": "that is llama.cpp's; use POST /v1/completions",
    "/docs": "use GET /openapi.json",
    "/generate": "use POST /v1/completions",
    "/infill": "there is no fill-in-the-middle endpoint; use POST /v1/completions with the model's own marks",
    "/invocations": _CHAT,
    "/props": "that is llama.cpp's; use GET /server_info",
    "/redoc": "use GET /openapi.json",
    "/slots": "that is llama.cpp's; use GET /load, or /metrics",
    "/tokenizer_info": "use GET /server_info, or POST /tokenize",
    "/v1/chat/completions": f"{_NOTHING_STORED}; {_CHAT}",
    "/v1/messages": f"{_NOTHING_STORED}; use POST /v1/messages",
    "/v1/responses": f"{_NOTHING_STORED}; use POST /v1/responses with the whole conversation",
    **dict.fromkeys(("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "there are no adapters"),
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos"), _TEXT),
    **dict.fromkeys(
        ("/v1/files", "/v1/batches", "/v1/conversations", "/v1/assistants", "/v1/threads"), _NOTHING_STORED
    ),
    **dict.fromkeys(("/api/embed", "/api/embeddings", "/embedding", "/embeddings", "/v1/embeddings"), _NO_RANKS),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/score", "/v1/score"), _NO_RANKS),
    **dict.fromkeys(("/classify", "/pooling", "/v1/moderations"), _NO_RANKS),
}


def remedy(path: str, served: Iterable[str]) -> str:
    """What to use in place of a path that is not served. served: the paths that are."""
    there = {known for known in served if "{" not in known}
    short = path.rstrip("/")
    if short in there:
        return f"use {short}, without the slash at the end"
    if short.startswith("/v1/v1/") and short[3:] in there:
        return f"use {short[3:]}: the client adds /v1 to a base URL that ends with it"
    for spelled in (f"/v1{short}", short.removeprefix("/v1"), short[short.rfind("/v1/") :]):
        if spelled in there and spelled != "/":
            return f"use {spelled}"
    here = short
    while here:
        if here in OTHERS:
            return OTHERS[here]
        here = here.rpartition("/")[0]
    near = get_close_matches(path[:80], sorted(there), 1, 0.8)
    return f"did you mean {near[0]}?" if near else "GET /openapi.json lists what is served"
