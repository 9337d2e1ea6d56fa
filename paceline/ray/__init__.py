"""Replicas of the engine on a Ray cluster (`pip install "paceline[ray]"`); see docs/distributed.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.ray.deployment import DeployOptions, app, build

__all__ = ["DeployOptions", "app", "build"]


def __getattr__(name: str) -> Any:
    """Ray takes seconds to import: what does without it (cores, routing keys, relaying) stays quick to use."""
    if name in __all__:
        from paceline.ray import deployment

        return getattr(deployment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
