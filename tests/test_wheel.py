"""The wheel can be installed, alone in an empty environment."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(names):
    """The installed distributions of these names and of all that they need."""
    found = {}
    while names:
        name = canonicalize_name(names.pop())
        if name not in found:
            found[name] = distribution(name)
            wanted = [Requirement(each) for each in found[name].requires or []]
            names += [each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]
    return found.values()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment that has the wheel, and of its dependencies only what the command line needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(ROOT / "oxrl", source / "oxrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    (wheel,) = folder.glob("oxrl-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    for dependency in needed(["typer", "numpy", "pydantic", "pyyaml", "rich"]):
        for top in {file.parts[0] for file in dependency.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(dependency.locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    return python, folder


def test_the_wheel_contains_the_package_and_its_command(installed):
    python, folder = installed
    where = run(python, "-c", "import oxrl; print(oxrl.__file__, oxrl.__version__)", cwd=folder)
    assert str(folder / "env") in where
    assert "train" in run(python.parent / "oxrl", "--help", cwd=folder)
    assert Path(where.split()[0]).with_name("py.typed").exists()


def test_invalid_input_is_reported_where_torch_is_not_installed(installed):
    python, folder = installed
    command = [python.parent / "oxrl", "train", "--model", "tiny", "--data", "x.jsonl", "--set", "train.lrr=1"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    assert "did you mean lr?" in done.stderr


def test_the_wheel_contains_the_page_of_oxrl_view(installed, tmp_path):
    python, folder = installed
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    run(python.parent / "oxrl", "view", tmp_path / "run", "--export", tmp_path / "page.html", cwd=folder)
    assert "<script>" in (tmp_path / "page.html").read_text()


def test_the_wheel_contains_the_catalogue_and_its_records(installed):
    python, folder = installed
    listed = run(python.parent / "oxrl", "models", "list", cwd=folder).splitlines()
    assert {line.split()[0] for line in listed if " verified" in line} >= {"tiny", "smollm2-135m"}


def test_every_module_of_the_package_is_in_the_wheel(installed):
    python, _ = installed
    home = Path(run(python, "-c", "import oxrl; print(oxrl.__path__[0])", cwd=os.sep).strip())
    inside, outside = ({path.relative_to(root) for path in root.rglob("*.py")} for root in (home, ROOT / "oxrl"))
    assert inside == outside
