"""Imports go up the layers only, heavy packages are imported when needed, and `import oxrl` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [  # each imports from those above it; packages of one line may import each other, except the INDEPENDENT ones
    {"types", "names", "parsing", "concurrency", "seeds"},
    {"tensors"},
    {"machine"},
    {"weights"},
    {"algorithms"},
    {"rewards"},
    {"data"},
    {"models", "generators", "backends"},
    {"tracking"},
    {"rollouts"},
    {"guard"},
    {"loops"},
    {"config"},
    {"run"},
    {"evaluation", "diagnose", "primitives", "testing", "view", "onboarding"},
    {"trainer"},
    {"cli"},
    {"__main__"},
]
INDEPENDENT = [
    ("models", "generators"),
    ("models", "backends"),
    ("generators", "backends"),
    *(("rollouts", holder) for holder in ("models", "generators", "backends")),
]
FILES = sorted((ROOT / "oxrl").rglob("*.py"))


def part_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "oxrl")
    return inside.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("oxrl"):
            names |= {node.module} if node.module != "oxrl" else {f"oxrl.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("oxrl.")}
    return {name.split(".")[1] for name in names}


def layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) != "__init__"], ids=lambda p: str(p.name))
def test_imports_go_up_the_layers_only(path):
    own = part_of(path)
    for other in imported_parts(path):
        assert layer(other) <= layer(own), f"{own} must not import {other}"
        assert (own, other) not in INDEPENDENT and (other, own) not in INDEPENDENT, (
            f"{own} and {other} must not import each other"
        )


def test_only_config_uses_pydantic():
    users = {part_of(path) for path in FILES if "pydantic" in path.read_text()}
    assert users == {"config"}


COMPLETION = """
import inspect
from oxrl.cli import completion
for name, function in inspect.getmembers(completion, inspect.isfunction):
    assert name.startswith("_") or function()
"""


@pytest.mark.parametrize(
    "code", ["import oxrl", "from oxrl.cli import app; app(['--help'], standalone_mode=False)", COMPLETION]
)
def test_importing_oxrl_printing_help_and_completing_values_do_not_import_torch(code):
    check = f"{code}\nimport sys; heavy = {{'torch', 'transformers', 'datasets', 'peft'}} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", check + "assert not heavy, heavy"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported():
    import oxrl

    for name in oxrl.__all__:
        assert getattr(oxrl, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        oxrl.no_such_name  # noqa: B018
