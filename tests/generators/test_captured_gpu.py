"""Captured decoding on a GPU: `CUDA_VISIBLE_DEVICES=0 python -m pytest tests/generators/test_captured_gpu.py`."""

import pytest
import torch

from oxrl.generators.embedded.captured import Capture, CapturedDecoder
from oxrl.generators.embedded.engine import Engine
from oxrl.types import GenerationConfig, Request
from tests.generators.test_decoders import SLOTTED, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU only")
CAPTURED, COMPILED = (Capture(capture=True, compiles=compiles) for compiles in (False, True))
SAMPLINGS = [GenerationConfig(max_new_tokens=150, seed=1), GenerationConfig(max_new_tokens=40, temperature=0)]


def sampled(engine, sampling, count=40):
    jobs = [engine.submit(Request(tuple(range(5, 8 + 4 * (i // 4))), seed=i), sampling) for i in range(count)]
    while any(job.result is None for job in jobs):
        engine.step()
    return [job.result for job in jobs]


@pytest.mark.parametrize("capture", [CAPTURED, COMPILED], ids=["captured", "compiled"])
@pytest.mark.parametrize("shape", SLOTTED)
def test_a_graph_samples_the_same_tokens_as_eager_steps(tiny, shape, capture):
    model = build(*SLOTTED[shape]).cuda()
    eager = Engine(model, tiny[1], 16, "shrinking", Capture(capture=False))
    graph = Engine(model, tiny[1], 16, "shrinking", capture)
    for sampling in SAMPLINGS:
        expected, found = sampled(eager, sampling), sampled(graph, sampling)
        assert isinstance(graph._decoder, CapturedDecoder)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_graphs_use_weights_that_change_in_their_memory_and_are_renewed_if_they_move(tiny):
    model = build(*SLOTTED["llama"]).cuda()
    eager = Engine(model, tiny[1], 16, "shrinking", Capture(capture=False))
    graph = Engine(model, tiny[1], 16, "shrinking", CAPTURED)
    before = sampled(graph, SAMPLINGS[0])
    captured = dict(graph._decoder.graphs)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    graph.change_version(1)
    changed = sampled(graph, SAMPLINGS[0])
    assert [one.token_ids for one in changed] == [one.token_ids for one in sampled(eager, SAMPLINGS[0])]
    assert [one.token_ids for one in changed] != [one.token_ids for one in before]
    assert all(graph._decoder.graphs[key] is value for key, value in captured.items())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    graph.change_version(2)
    assert [one.token_ids for one in sampled(graph, SAMPLINGS[0])] == [
        one.token_ids for one in sampled(eager, SAMPLINGS[0])
    ]
    assert not any(graph._decoder.graphs.get(key) is value for key, value in captured.items())
