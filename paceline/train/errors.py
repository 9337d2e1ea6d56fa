"""What a user of the trainer can get wrong."""

from __future__ import annotations

from paceline.errors import PacelineError


class TrainError(PacelineError):
    """A prompts file, a feature folder, a checkpoint or an option of the trainer does not fit."""
