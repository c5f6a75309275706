"""Every backend with every engine that makes sense beside it: losses as in one process, and equal log-probs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from oxrl.launch import run_ranks
from tests.contracts.pairs import ENGINES, RANKS, run_all
from tests.engines import need

PROGRAM = [sys.executable, "-m", "tests.contracts.pairs"]
NEEDS = {"local": ("vllm",), "fsdp": ("vllm",), "deepspeed": ("vllm", "deepspeed"), "ray": ("vllm", "ray", "deepspeed")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with the embedded engine: what the others are held against."""
    folder = tmp_path_factory.mktemp("alone")
    kept, ENGINES["local"] = ENGINES["local"], ("embedded",)
    try:
        return run_all("local", folder, "")
    finally:
        ENGINES["local"] = kept


@pytest.mark.parametrize("backend", RANKS)
def test_it_trains_as_one_process_does_whoever_samples(backend, alone, vllm_url, tmp_path, monkeypatch):
    for package in NEEDS[backend]:
        need(package)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    arguments = [backend, str(tmp_path), vllm_url]
    if backend in ("local", "ray"):  # one driver, whatever it starts
        assert subprocess.run([*PROGRAM, *arguments], check=False, timeout=500).returncode == 0
    else:
        assert run_ranks(arguments, RANKS[backend], max_restarts=0, program=PROGRAM) == 0
    logged = json.loads((tmp_path / f"{backend}.json").read_text())
    for name in ("sft", "dpo"):
        for found, expected in zip(logged[name], alone[name], strict=True):
            assert [found[key] for key in ("loss", "grad_norm")] == pytest.approx(
                [expected[key] for key in ("loss", "grad_norm")], rel=1e-4, abs=1e-5
            )
    for engine in ENGINES[backend]:
        steps = logged[f"grpo {engine}"]
        assert [step["step"] for step in steps] == [1, 2]
        assert all(step["logprob_gap"] < 1e-4 and step["age"] == 0 for step in steps), "engine and trainer agree"
        assert any(step["grad_norm"] > 0 for step in steps)
    if backend == "ray":
        last = logged["grpo vllm adapter colocated"][-1]
        assert last["reward_other_places"] == 0, "the engine has no places but the trainer's"
        assert (last["reward_free_0"], last["reward_free_1"]) == (0.0, 0.5), "and on the first, the half that is left"
    if "embedded" in ENGINES[backend]:
        for found, expected in zip(logged["grpo embedded"], alone["grpo embedded"], strict=True):
            assert found["reward"] == expected["reward"], "the same answers were drawn"
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
