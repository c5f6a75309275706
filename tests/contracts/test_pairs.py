"""Every backend with every engine that makes sense beside it: losses as in one process, and equal log-probs."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.contracts import together
from tests.contracts.pairs import ENGINES, RANKS, another, first, run_all
from tests.engines import need

NEEDS = {"local": ("vllm",), "fsdp": ("vllm",), "deepspeed": ("vllm", "deepspeed"), "ray": ("vllm", "ray", "deepspeed")}
PAIRS = [(backend, engine) for backend in RANKS for engine in ENGINES[backend]]


@pytest.fixture(scope="module")
def logged(forks, vllm_url, tmp_path_factory):
    """What one backend logged in all of its runs, which are made once."""

    @cache
    def of(backend):
        for package in NEEDS[backend]:
            need(package)
        home = tmp_path_factory.mktemp(backend)
        if backend == "local":
            return run_all(backend, home, vllm_url)
        ranks = 1 if backend == "ray" else RANKS[backend]  # under Ray one driver starts them
        mains = [(first, (backend, home, vllm_url)), *((another, (rank,)) for rank in range(1, ranks))]
        run = forks.start(mains, RAY_AUTH_MODE="disabled", **(together.settings(home, ranks) if ranks > 1 else {}))
        assert run.end() == [0] * ranks, forks.log.read_text()[-5000:]
        return json.loads((home / f"{backend}.json").read_text())

    return of


def same(found, expected, *keys):
    for one, other in zip(found, expected, strict=True):
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("backend", [backend for backend in RANKS if backend != "local"])
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_it_trains_as_one_process_does(logged, backend, algorithm):
    same(logged(backend)[algorithm], logged("local")[algorithm], "loss", "grad_norm")


@pytest.mark.parametrize(("backend", "engine"), PAIRS)
def test_engine_and_trainer_agree_on_what_was_sampled(logged, backend, engine):
    steps = logged(backend)[f"grpo {engine}"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["logprob_gap"] < 1e-4 and step["age"] == 0 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    if engine == "embedded":
        same(steps, logged("local")["grpo embedded"], "reward", "grad_norm")
    if engine == "vllm adapter colocated":
        assert steps[-1]["reward_other_places"] == 0, "the engine has no places but the trainer's"
        free = [steps[-1][f"reward_free_{place}"] for place in range(2)]
        assert free == [0.0, 0.5], "and on the first, the half that is left"
