"""The configuration: its schema, how a YAML file becomes a checked `Config`, and what is said about it."""

from oxrl.config.load import (
    STAGES,
    ConfigError,
    Stage,
    check_config,
    load_config,
    load_stages,
    nearest_key,
    trace_stages,
)
from oxrl.config.schema import Config

__all__ = [
    "STAGES",
    "Config",
    "ConfigError",
    "Stage",
    "check_config",
    "load_config",
    "load_stages",
    "nearest_key",
    "trace_stages",
]
