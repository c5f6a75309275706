"""Captured decoding on a GPU: `CUDA_VISIBLE_DEVICES=0 python -m pytest tests/generators/test_captured_gpu.py`."""

import pytest
import torch

from oxrl import Trainer
from oxrl.generators.embedded.captured import Capture, CapturedDecoder
from oxrl.generators.embedded.engine import Engine
from oxrl.models.lora import LoraSettings, attach_lora
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


def test_log_probs_do_not_drift_over_2000_tokens(tiny):
    model = build("Qwen2Config", {"max_position_embeddings": 2100}).cuda()
    sampling = GenerationConfig(max_new_tokens=2000, seed=1)
    (found,) = sampled(Engine(model, tiny[1], 4, "shrinking", COMPILED), sampling, count=1)
    tokens = torch.tensor([[5, 6, 7, *found.token_ids]], device="cuda")
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, 3:, None])[:, 0]
    gaps = (expected.cpu() - torch.tensor(found.logprobs)).abs()
    assert len(gaps) == 2000 and float(gaps.max()) < 1e-4


def test_an_adapter_samples_the_same_tokens_in_a_graph(tiny):
    model = attach_lora(build(*SLOTTED["qwen2"]), LoraSettings(r=4), seed=1).cuda()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    eager, graph = (Engine(model, tiny[1], 16, "shrinking", each) for each in (Capture(capture=False), COMPILED))
    assert [one.token_ids for one in sampled(graph, SAMPLINGS[0])] == [
        one.token_ids for one in sampled(eager, SAMPLINGS[0])
    ]


def test_a_run_learns_the_same_with_and_without_graphs(tmp_path):
    share = "sum('A' <= c <= 'Z' for c in rollout.response) / max(1, len(rollout.response))"
    (tmp_path / "reward.py").write_text(f"def capitals(rollout):\n    return {share}\n")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {word}."}}\n' for word in ("hi", "yes", "no")))
    rewards = []
    for engine in ({"capture": False}, {"capture": True, "compile": False}, {"capture": True, "compile": True}):
        trained = Trainer("tiny").train(
            algorithm="grpo", data=tmp_path / "rows.jsonl", reward=f"{tmp_path}/reward.py:capitals", steps=15,
            batch_size=3, lr=5e-3, seed=1, dtype="float32", device="cuda", inference_engine=engine,
            rollout={"max_tokens": 8, "n_samples": 8}, output=tmp_path / str(len(rewards)),
        )  # fmt: skip
        rewards.append([line["reward"] for line in trained.history if "reward" in line])
    assert rewards[0][-1] > rewards[0][0] + 0.3
    assert rewards[1] == pytest.approx(rewards[0], abs=0.05) and rewards[2] == pytest.approx(rewards[0], abs=0.05)


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
