"""Advice on installing packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.machine.packages import install_command
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]


def test_no_text_advises_to_install_the_project_of_the_same_name_on_the_package_index():
    files = [
        file for folder in ("oxrl", "docs") for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")
    ]
    advice = re.compile(r"""pip install ['"]?oxrl\b(?!` does not)""")
    found = {str(file.relative_to(ROOT)): match[0] for file in files if (match := advice.search(file.read_text()))}
    assert not found
    assert (install_command(), install_command("ray")) == ("pip install -e .", "pip install -e '.[ray]'")


@pytest.mark.engine
@pytest.mark.parametrize("options", [[], ["--set", "run.training_gpus=2", "--set", "run.backend=deepspeed"]])
def test_a_deepspeed_that_cannot_be_imported_is_one_message_before_anything_is_loaded(tmp_path, options):
    """Also without ranks: transformers imports it when it saves a model, after the last step."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('CUDA_HOME does not exist')")
    rows = ROOT / "registry" / "examples" / "data" / "chats.jsonl"
    arguments = ["train", "--model", "tiny", "--algorithm", "sft", "--data", rows, "--output", tmp_path / "run"]
    ran = subprocess.run(
        [sys.executable, "-m", "oxrl", *arguments, "--steps", "1", *options],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert (
        ran.stderr.count("DeepSpeed is installed, but its import fails (RuntimeError: CUDA_HOME does not exist)") == 1
    )
    assert "pip install -e '.[deepspeed]'" in ran.stderr and "pip uninstall deepspeed" in ran.stderr
    assert not list(tmp_path.glob("run/**/*.safetensors"))
