"""Networks: one file per family, described as plans for the native core."""

from paceline.models.target import TargetModel, load_model, read_config

__all__ = ["TargetModel", "load_model", "read_config"]
