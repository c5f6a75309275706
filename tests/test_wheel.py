"""What is built is what can be installed: a wheel, alone in an empty environment."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment that has the wheel, and of its dependencies only what the front door needs."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("oxrl-*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    constraints = ["--constraint", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", "--quiet", *constraints, "typer", "numpy", "pydantic", "pyyaml", "rich")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    return python, folder


def test_the_wheel_brings_the_package_and_its_command(installed):
    python, folder = installed
    where = run(python, "-c", "import oxrl; print(oxrl.__file__, oxrl.__version__)", cwd=folder)
    assert str(folder / "env") in where
    assert "train" in run(python.parent / "oxrl", "--help", cwd=folder)
    typed = run(python, "-c", "import oxrl, pathlib; print((pathlib.Path(oxrl.__file__).parent/'py.typed').exists())")
    assert typed.strip() == "True"


def test_wrong_input_is_answered_without_torch_being_there_at_all(installed):
    python, folder = installed
    command = [python.parent / "oxrl", "train", "--model", "tiny", "--data", "x.jsonl", "--set", "train.lrr=1"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    assert "did you mean lr?" in done.stderr


def test_the_wheel_brings_the_catalogue_and_its_records(installed):
    python, folder = installed
    listed = run(python.parent / "oxrl", "models", "list", cwd=folder).splitlines()
    assert {line.split()[0] for line in listed if line.endswith(" verified")} >= {"tiny", "smollm2-135m"}


def test_every_module_of_the_package_is_in_the_wheel(installed):
    python, _ = installed
    home = Path(run(python, "-c", "import oxrl; print(oxrl.__path__[0])", cwd=os.sep).strip())
    inside, outside = ({path.relative_to(root) for path in root.rglob("*.py")} for root in (home, ROOT / "oxrl"))
    assert inside == outside
