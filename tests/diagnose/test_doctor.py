"""`findings` from facts, and the command on the machine that runs the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.diagnose.doctor import (
    GIB,
    Availability,
    Facts,
    Folder,
    can_train,
    find_data_locally,
    find_model_locally,
    findings,
)
from oxrl.machine.hardware import Device, Hardware
from oxrl.machine.inventory import Driver, Environment, Package, Torch, as_json, gather_environment
from tests.rows import sums, write_jsonl

CPU = Device("cpu", "a processor", 64 * GIB, 60 * GIB, bf16=False)
GPU = Device("cuda:0", "a GPU", 80 * GIB, 79 * GIB, bf16=True)
GOOD = Environment(
    python="3.11.7",
    platform="Linux",
    requires_python=">=3.11",
    requirements=("torch<2.14,>=2.11", "numpy>=2.0", 'vllm>=0.26; extra == "vllm"', 'ruff>=0.11; extra == "dev"'),
    packages={"torch": Package("2.13.0+cpu"), "numpy": Package("2.3.5"), "vllm": Package("0.32.0", ("torch>=2.0",))},
    torch=Torch("2.13.0", threads=8),
    hardware=Hardware((CPU,), 8, 64 * GIB, 60 * GIB),
    driver=None,
    nvcc=None,
    variables={},
)
GPUS = GOOD._replace(
    torch=Torch("2.13.0", cuda="12.8", sees_cuda=True, threads=8),
    driver=Driver("570.86", "12.8"),
    hardware=Hardware((GPU, GPU._replace(device="cuda:1")), 8, 64 * GIB, 60 * GIB),
)
ROOM = Folder("runs", "/checkpoints", 100 * GIB, writable=True)
FACTS = Facts(GOOD, (ROOM,), shm=8 * GIB, has_hf_token=True, sandbox="bubblewrap")


def with_package(name: str, version: str, *requires: str) -> Environment:
    return GOOD._replace(packages={**GOOD.packages, name: Package(version, requires)})


def test_a_healthy_machine_has_only_ok_findings():
    for environment in (GOOD, GPUS):
        found = findings(FACTS._replace(environment=environment))
        assert {finding.level for finding in found} == {"ok"}, found
        assert can_train(found)


PROBLEMS = {
    "python": (GOOD._replace(python="3.10.2"), "problem", "3.10.2 is installed, >=3.11 is required"),
    "no torch": (
        GOOD._replace(torch=Torch(None, error="OSError: libcudart.so.12"), hardware=None),
        "problem",
        "libcudart.so.12",
    ),
    "a GPU that failed": (
        GPUS._replace(torch=GPUS.torch._replace(error="CUDA error"), hardware=None),
        "problem",
        "CUDA error",
    ),
    "too old": (with_package("torch", "2.10.0"), "problem", "torch 2.10.0 is outside of the tested range <2.14,>=2.11"),
    "too new": (with_package("torch", "2.14.0"), "warning", "torch 2.14.0"),
    "an extra too old": (with_package("vllm", "0.9.0"), "warning", "vllm 0.9.0"),
    "a package is missing": (GOOD._replace(packages={"torch": Package("2.13.0")}), "problem", "numpy is not installed"),
    "two that do not fit": (
        with_package("vllm", "0.32.0", "torch==2.11.0"),
        "warning",
        "vllm 0.32.0 requires torch==2.11.0, but 2.13.0+cpu is installed",
    ),
    "torch for the CPU": (GOOD._replace(driver=Driver("570.86", "12.8")), "warning", "built for the CPU"),
    "an old driver": (
        GOOD._replace(torch=GPUS.torch._replace(sees_cuda=False), driver=Driver("470.1", "11.4")),
        "warning",
        "driver 470.1 supports CUDA up to 11.4, but torch is built for 12.8",
    ),
    "hidden GPUs": (
        GOOD._replace(
            torch=GPUS.torch._replace(sees_cuda=False), driver=GPUS.driver, variables={"CUDA_VISIBLE_DEVICES": ""}
        ),
        "warning",
        "hides every GPU",
    ),
    "a GPU in use": (
        GPUS._replace(hardware=GPUS.hardware._replace(devices=(GPU._replace(free=20 * GIB),))),
        "warning",
        "20.0 GiB of 80.0 GiB free: another process is using it",
    ),
    "no bf16": (
        GPUS._replace(hardware=GPUS.hardware._replace(devices=(GPU._replace(bf16=False),))),
        "warning",
        "bfloat16",
    ),
    "another toolkit": (
        GPUS._replace(nvcc="11.8", packages={**GOOD.packages, "deepspeed": Package("0.19.8")}),
        "warning",
        "nvcc is for CUDA 11.8 and torch for 12.8",
    ),
    "little memory": (GOOD._replace(hardware=GOOD.hardware._replace(free=2 * GIB)), "warning", "small models only"),
    "no memory": (GOOD._replace(hardware=GOOD.hardware._replace(free=GIB // 2)), "problem", "0.5 GiB of 64.0 GiB"),
    "one thread": (GOOD._replace(torch=Torch("2.13.0", threads=1)), "warning", "use 1 of 8 cores"),
    "many threads": (GOOD._replace(torch=Torch("2.13.0", threads=64)), "warning", "64 threads on 8 cores"),
    "threads that spin": (GOOD._replace(variables={"OMP_WAIT_POLICY": "ACTIVE"}), "warning", "spin"),
    "torchvision": (GOOD._replace(torchvision_error="no operator"), "problem", "torchvision cannot be imported"),
    "not installed": (GOOD._replace(requires_python="", requirements=()), "warning", "not installed"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_found_with_its_level_and_a_fix(name):
    environment, level, what = PROBLEMS[name]
    found = [finding for finding in findings(FACTS._replace(environment=environment)) if finding.level != "ok"]
    (finding,) = found
    assert (finding.level, what in finding.what, bool(finding.fix)) == (level, True, True), finding
    assert can_train(found) == (level != "problem")


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        ({"folders": (ROOM._replace(writable=False),)}, "problem", "not writable"),
        ({"folders": (ROOM._replace(purpose="data", writable=False),)}, "warning", "not writable"),
        ({"folders": (ROOM._replace(free=GIB // 2),)}, "problem", "too little for a checkpoint"),
        ({"folders": (ROOM._replace(free=5 * GIB),)}, "warning", "5.0 GiB free"),
        ({"environment": GPUS, "shm": GIB // 16}, "warning", "0.1 GiB free"),
        ({"sandbox": "none", "sandbox_missing": {"bubblewrap": "no bwrap"}}, "warning", "(bubblewrap: no bwrap)"),
        ({"model": Availability("a/b", "missing", "is not there", "hf download a/b")}, "problem", "a/b is not there"),
        ({"data": Availability("gsm8k", "remote", "is prepared then", "oxrl data prepare")}, "warning", "gsm8k"),
    ],
)  # fmt: skip
def test_folders_memory_sandbox_model_and_data_are_checked_too(change, level, what):
    (finding,) = [finding for finding in findings(FACTS._replace(**change)) if finding.level != "ok"]
    assert (finding.level, what in finding.what, bool(finding.fix)) == (level, True, True), finding


def test_models_are_looked_up_on_the_disk_only(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path / "cache"))
    assert find_model_locally("tiny").state == "local"
    assert find_model_locally("smollm2-135m").state == "remote"
    assert find_model_locally("tinny") == find_model_locally("tinny")._replace(state="missing")
    assert "did you mean 'tiny'" in find_model_locally("tinny").what
    unfinished = tmp_path / "model"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{}")
    found = find_model_locally(str(unfinished))
    assert (found.state, found.what) == ("missing", "is a folder without *.safetensors, a tokenizer")
    assert find_model_locally("qwen3-0.6b").name == "Qwen/Qwen3-0.6B"
    assert find_model_locally("no-such-owner/no-such-model").state == "missing", "the tests run with HF_HUB_OFFLINE"


def test_data_is_checked_by_reading_one_row(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path))
    good = write_jsonl(tmp_path / "rows.jsonl", sums(2))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    assert find_data_locally(str(good)).state == "local"
    assert find_data_locally(str(bad)).state == "missing"
    assert find_data_locally(str(tmp_path / "none.jsonl")).state == "missing"
    assert find_data_locally("gsm8k").state == "remote"
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "card.json").write_text("{}")
    assert find_data_locally("gsm8k").state == "local"


def doctor(*arguments, cwd, **variables):
    code = "from oxrl.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
    )


def test_the_json_output_has_all_topics_and_no_file_is_left_behind(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(2))
    token = "hf_" + "x" * 30
    done = doctor("tiny", "--data", rows, "--json", cwd=tmp_path, HF_TOKEN=token, WANDB_API_KEY="k" * 40)
    output = json.loads(done.stdout)
    assert done.returncode == 0 and output["can_train"] and output["schema"] == 1
    assert {tuple(finding) for finding in output["findings"]} == {("level", "topic", "what", "fix")}
    topics = {finding["topic"] for finding in output["findings"]}
    assert {"python", "torch", "packages", "gpu", "memory", "disk", "sandbox", "token", "model", "data"} <= topics
    assert output["environment"]["packages"]["torch"].startswith("2.")
    assert token not in done.stdout + done.stderr and "k" * 40 not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    roots = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = doctor("tiny", cwd=tmp_path, PYTHONPATH=roots)
    assert done.returncode == 1
    assert "libcudart.so.12" in done.stdout and "training cannot start" in done.stdout
    assert "fix: pip install --force-reinstall" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_torchvision_of_another_torch_is_named_before_transformers_fails(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    roots = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = doctor("tiny", cwd=tmp_path, PYTHONPATH=roots)
    assert (done.returncode, done.stderr) == (1, "")
    assert "torchvision cannot be imported (RuntimeError: operator torchvision::nms is missing)" in done.stdout
    assert "fix: pip uninstall torchvision" in done.stdout and "training cannot start" in done.stdout
    code = "import oxrl\nfor load in (oxrl.load_tokenizer, oxrl.load_model):\n"
    code += "    try: load('tiny')\n    except ValueError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": roots}
    )
    assert done.stdout.count("torchvision is installed and cannot be imported") == 2, done.stderr


def test_the_environment_is_plain_json_without_secret_variables(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret value")
    monkeypatch.setenv("OXRL_DATA_DIR", "/data")
    output = json.dumps(as_json(gather_environment()))
    assert "a secret value" not in output and '"OXRL_DATA_DIR": "/data"' in output


def test_driver_and_toolkit_versions_are_parsed_from_nvidia_smi_and_nvcc(tmp_path, monkeypatch):
    outputs = {
        "nvidia-smi": "| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8  |",
        "nvcc": "Cuda compilation tools, release 12.6, V12.6.85",
    }
    for name, line in outputs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{line}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = gather_environment()
    assert (found.driver, found.nvcc) == (Driver("570.86.15", "12.8"), "12.6")
