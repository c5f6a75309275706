"""Every backend with the engines it supports: losses as in one process, equal log-probs, and the checks that passed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from tests.contracts import together
from tests.contracts.pairs import ENGINES, RANKS, another, first, run_on_ray
from tests.engines import ONE_PROCESS, need

NEEDS = {"deepspeed": ("deepspeed",), "ray": ("ray", "deepspeed")}


def on_its_engine(backend, name):
    """As parameters, with the mark of the engine that others share."""
    shared = ["ray_here"] if backend == "ray" else ["vllm_url"] if "http" in name else []
    return pytest.param(backend, name, marks=pytest.mark.engine(*shared))


class Trained(NamedTuple):
    steps: list[dict[str, float]]
    folder: Path


@pytest.fixture(scope="module")
def trained(forks, request, tmp_path_factory):
    """What a run logged, and its folder; each run is trained once."""

    @cache
    def of(backend, name):
        for package in NEEDS.get(backend, ()):
            need(package)
        if "vllm" in name:
            need("vllm")
        home = tmp_path_factory.mktemp(backend)
        if backend == "ray":
            request.getfixturevalue("ray_here")
            return Trained(run_on_ray(name, home), home / "run")
        url = request.getfixturevalue("vllm_url") if "http" in name else ""
        ranks = RANKS[backend]
        mains = [(first, (backend, name, home, url)), *((another, (rank,)) for rank in range(1, ranks))]
        started = forks.start(mains, **ONE_PROCESS, **(together.settings(home, ranks) if ranks > 1 else {}))
        assert started.end() == [0] * ranks, forks.log.read_text()[-5000:]
        return Trained(json.loads((home / "logged.json").read_text()), home / "run")

    return of


@pytest.fixture(scope="module")
def logged(trained):
    return lambda backend, name: trained(backend, name).steps


def same(found, expected, *keys):
    for one, other in zip(found, expected, strict=True):
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-4, abs=1e-5)


OFFLINE = [("fsdp", "sft"), ("fsdp", "dpo"), ("deepspeed", "sft"), ("deepspeed", "dpo")]
ONLINE = [(backend, f"grpo {engine}") for backend in RANKS for engine in ENGINES[backend]]


@pytest.mark.parametrize(("backend", "name"), [on_its_engine(*pair) for pair in OFFLINE])
def test_it_trains_as_one_process_does(logged, backend, name):
    same(logged(backend, name), logged("local", name), "loss", "grad_norm")


@pytest.mark.parametrize(("backend", "name"), [on_its_engine(*pair) for pair in ONLINE])
def test_engine_and_trainer_agree_on_what_was_sampled(logged, backend, name):
    steps = logged(backend, name)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["logprob_gap"] < 1e-4 and step["age"] == 0 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    if "embedded" in name:
        same(steps, logged("local", name), "reward", "grad_norm")
    if "colocated" in name:
        assert steps[-1]["reward_other_groups"] == 0, "the engine has no separate placement group"
        free = [steps[-1][f"reward_free_{index}"] for index in range(2)]
        assert free == [0.0, 0.5], "and on the first, the half that is left"


ALWAYS = {"tokens", "mask", "advantages", "packed_rows", "loss_split", "finite", "logprob_gap", "reward_errors"}


@pytest.mark.parametrize(("backend", "name"), [on_its_engine(*pair) for pair in ONLINE])
def test_the_checks_of_a_run_pass_or_name_why_they_cannot_be_made(trained, backend, name):
    shown = CliRunner().invoke(app, ["check", str(trained(backend, name).folder), "--json"])
    checks = {each["check"]: each for each in json.loads(shown.stdout)["checks"]}
    passed = {check for check, each in checks.items() if each["state"] == "passed"}
    assert shown.exit_code == 0 and not [each for each in checks.values() if each["state"] in ("warned", "failed")]
    assert passed >= ALWAYS and ("sampler_adapter" in passed) == ("adapter" in name)
    parameters = checks["trained_parameters"]
    here = parameters["state"] == "passed"
    assert here or (backend != "local" and parameters["message"] == "the weights are not in this process")
