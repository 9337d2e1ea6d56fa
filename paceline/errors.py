"""Errors that a user can cause and mend. Each message names the field, the value and the remedy."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose; the command line prints it without a traceback."""


class ConfigError(PacelineError):
    """A configuration value (argument, config.json field, speculative config) is missing, unknown or out of range."""


class ArgumentError(ConfigError, TypeError):
    """A call was given an argument that it does not have."""


class CheckpointError(PacelineError):
    """A model file is truncated, corrupt, hostile, of an unknown kind, or does not match its own configuration."""


class CapacityError(PacelineError):
    """The request or the model does not fit the memory or the context that was planned for it."""


class EngineError(PacelineError):
    """A step could not be carried out: output that is not finite, or a call where the engine cannot run."""


class QueueFullError(PacelineError):
    """As many requests wait as may: try again later."""


class EngineDeadError(EngineError):
    """A step failed, or the engine was closed: this engine serves no request any more."""
