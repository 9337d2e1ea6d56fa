"""Options of a deployment: mistakes are named before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray.serve")

from pydantic import ValidationError

from paceline.errors import ConfigError
from paceline.ray import DeployOptions
from paceline.ray.deployment import _check_router, load_factory


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("replicas", 0),
        ("cores", -1),
        ("routing", "round-robin"),
        ("max_ongoing_requests", 0),
        ("max_body_bytes", 0),
        ("repicas", 2),
    ],
)
def test_a_wrong_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        DeployOptions(**{"model": "m", field: value})


def test_the_command_line_gives_texts() -> None:
    options = DeployOptions.model_validate({"model": "m", "replicas": "2", "cores": "4"})
    assert (options.replicas, options.cores) == (2, 4)


@pytest.mark.parametrize("path", ["nowhere:app", "paceline.errors:nothing", "paceline.errors:__doc__", "", ":x"])
def test_factories_that_are_none(path: str) -> None:
    with pytest.raises(ConfigError, match="application"):
        load_factory(path)


def test_the_prefix_router_is_where_it_is_expected() -> None:
    _check_router()
