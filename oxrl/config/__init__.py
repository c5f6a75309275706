"""The configuration: its schema, how a YAML file becomes a checked `Config`, and what is said about it."""

from oxrl.config.load import ConfigError, Stage, check_config, load_config, load_stages, trace_stages
from oxrl.config.schema import Config

__all__ = ["Config", "ConfigError", "Stage", "check_config", "load_config", "load_stages", "trace_stages"]
