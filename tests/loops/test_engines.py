"""The online loop, unchanged, with an engine that has its own weights: real vLLM in process and over HTTP."""

import pytest

from oxrl.generators.http import VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.rollouts.collect import RolloutSampler
from oxrl.types import GenerationConfig
from tests.loops.test_online import Setting


@pytest.fixture
def over_http(vllm_url, tiny):
    return HTTPGenerator([VLLMEngine(vllm_url)], tiny[1])


@pytest.mark.parametrize(
    ("engine", "loop"),
    [
        pytest.param("vllm_in_process", "asyncio", marks=pytest.mark.engine("vllm_in_process")),
        pytest.param("over_http", "trio", marks=pytest.mark.engine("vllm_url")),
    ],
)
def test_the_loop_learns_with_vllm_and_both_sides_agree_on_every_token(engine, loop, request):
    engine = request.getfixturevalue(engine)
    setting = Setting("grpo")
    setting.sampler = RolloutSampler(engine, setting.render, GenerationConfig(max_new_tokens=4), seed=0)
    history = setting.run(12, setting.manager(batch_size=4), backend=loop, generators=[engine])
    assert engine.version == 12
    assert max(line["logprob_gap"] for line in history) < 1e-4
    assert {line["age"] for line in history} == {0.0}
    assert history[-1]["reward"] > history[0]["reward"] + 0.1
