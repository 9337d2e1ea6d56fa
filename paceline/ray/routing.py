"""What the router looks at: the beginning of a request's prompt as text, whatever route it came by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

KEY_LIMIT = 16_384  # characters; a longer prefix tells no more about where to go

# By module path, as Ray wants it. Its documented address, `ray.serve.llm.request_router`, is the same class but imports
# what `ray[llm]` installs, vLLM with CUDA among it. The module of the class itself needs `ray[serve]` alone.
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"


def routing_key(path: str, body: bytes) -> str:
    """Text whose common beginnings mean common prefixes of the prompt; never empty.

    Requests without a prompt that can be read get a key of their path: the replica answers or refuses them.
    """
    try:
        request = json.loads(body) if body else None
    except (ValueError, RecursionError):
        request = None
    text = ""
    if isinstance(request, dict):
        pieces: list[str] = []
        size = 0
        for piece in _pieces(request):
            pieces.append(piece)
            size += len(piece)
            if size >= KEY_LIMIT:
                break
        text = "".join(pieces)[:KEY_LIMIT]
    return text or path


def _pieces(request: dict[str, Any]) -> Iterator[str]:
    """Prompt text in the order in which a chat template would put it."""
    for name in ("instructions", "system"):  # of /v1/responses and /v1/messages
        yield from _texts(request.get(name))
    tools = request.get("tools")
    if tools:
        yield json.dumps(tools, sort_keys=True)
    for name in ("messages", "input", "prompt"):
        yield from _texts(request.get(name))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            # token ids: one character for each, equal ids equal characters, surrogates left out
            yield "".join(chr(0x10000 + item % 0x100000) for item in value[:KEY_LIMIT])
            return
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        role = value.get("role")
        if isinstance(role, str):
            yield f"\n{role}\n"
        for name in ("text", "content"):
            yield from _texts(value.get(name))
