"""The configuration: schema, loading of YAML files, and checks across keys."""

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
