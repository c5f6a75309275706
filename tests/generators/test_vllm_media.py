"""vLLM with images and sounds, beyond the contract: what its log-probs depend on, and placeholders."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.buffer import DataBuffer
from oxrl.data.media import as_media
from oxrl.data.media_features import MediaRow, body_of, media_towers, never_sampled, own_inputs, towers_of
from oxrl.data.processor import processor_of
from oxrl.data.render import Renderer
from oxrl.generators.connection import EngineError
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.engines import EngineRequest, MediaPrompt
from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.types import GenerationConfig, Media, Message, Request, Sample, Weights
from oxrl.weights.checkpoint_names import ModuleWeights
from tests.drawings import tone

pytestmark = pytest.mark.anyio
ENGINES = [
    pytest.param(("vllm_images", "tiny_vlm"), marks=pytest.mark.engine("vllm_images"), id="images"),
    pytest.param(("vllm_sounds", "audio_for_vllm"), marks=pytest.mark.engine("vllm_sounds"), id="sounds"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param[0])


@pytest.fixture
def model(request: pytest.FixtureRequest, engine: Any) -> Any:
    return load_model(request.getfixturevalue(request.node.callspec.params["engine"][1])[0])


def drawn(kind: str, seed: int) -> Media:
    """Media of one size, and thus of equal placeholders."""
    if kind == "image":
        return as_media(np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8), "image")
    return tone(300.0 * 3**seed, rate=44100)


def prompt(engine: Any, model: Any, media: tuple[Media, ...]) -> Request:
    parts = [*({"type": medium.kind} for medium in media), {"type": "text", "text": "?"}]
    ids = Renderer(engine.tokenizer).prompt([Message("user", parts)], media=media)
    return Request(tuple(ids.tolist()), seed=3, media=media)


async def test_log_probs_follow_the_media_and_are_the_trainers(engine: Any, model: Any) -> None:
    (kind,) = media_towers(model).kinds  # type: ignore[union-attr]
    await engine.update_weights(Weights(model, engine.version + 1))
    assert engine.gap < 1e-4
    first, second = drawn(kind, 1), drawn(kind, 2)
    found = {}
    for media in ((first,), (second,), (first, second), (second, first)):
        request = prompt(engine, model, media)
        own = MediaPrompt.of(request.tokens, media, processor_of(engine.tokenizer))  # type: ignore[arg-type]
        found[media] = torch.tensor(await engine.prompt_logprobs(request.tokens, own))
        trainers = torch.tensor(ModuleWeights(model).logprobs(request.tokens, media))
        torch.testing.assert_close(found[media], trainers, rtol=0, atol=1e-4)
    for one, other in (((first,), (second,)), ((first, second), (second, first))):
        assert float((found[one] - found[other]).abs().max()) > 2e-3


async def test_a_placeholder_is_never_sampled_and_log_probs_stay_those_of_the_whole_vocabulary(
    engine: Any, model: Any
) -> None:
    never, head = never_sampled(model), model.get_output_embeddings().weight
    request = prompt(engine, model, (drawn(media_towers(model).kinds[0], 1),))  # type: ignore[union-attr]
    row = MediaRow("r", np.array(request.tokens), request.media)
    with torch.no_grad():
        logits = model(**own_inputs(model, row)).logits[0, -1]
        head[never] = head[logits.argmax()] * 4 / logits.max()
        first = model(**own_inputs(model, row)).logits[0, -1].softmax(-1)
    assert float(first[never].sum()) > 0.03 and int(first.argmax()) in never
    await engine.update_weights(Weights(model, engine.version + 1))
    for temperature in (1.0, 0.0):
        sampling = GenerationConfig(max_new_tokens=12, temperature=temperature)
        requests = [request._replace(seed=seed) for seed in range(8)]
        answers = await engine.generate(requests, sampling)
        assert not {token for answer in answers for token in answer.token_ids} & set(never)
        if temperature == 0:
            (greedy,) = await EmbeddedGenerator(model, engine.tokenizer).generate([request], sampling)
            assert answers[0].token_ids == greedy.token_ids
            continue
        assert len({answer.token_ids for answer in answers}) == 8
        for answer in answers:
            ids = (*request.tokens, *answer.token_ids)
            expected = ModuleWeights(model).logprobs(ids, request.media)[len(request.tokens) - 1 :]
            assert answer.logprobs == pytest.approx(expected, abs=2e-4)
            assert len(answer.token_ids) == 12 or answer.finish_reason == "stop"


async def test_an_adapter_is_sent_alone(request: pytest.FixtureRequest, tiny_vlm: Any) -> None:
    engine = request.getfixturevalue("vllm_images")
    model = attach_lora(load_model(tiny_vlm[0]), LoraSettings(r=4)).eval()
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    await engine.update_weights(Weights(model, engine.version + 1))
    assert engine.gap < 1e-4
    await engine.update_weights(Weights(load_model(tiny_vlm[0]), engine.version + 1))  # as the other tests expect it


test_an_adapter_is_sent_alone = pytest.mark.engine("vllm_images")(test_an_adapter_is_sent_alone)


@pytest.mark.trains
async def test_grpo_samples_with_vllm_and_trains_on_what_it_saw(engine: Any, model: Any) -> None:
    (kind,) = media_towers(model).kinds  # type: ignore[union-attr]
    sampler = RolloutSampler(engine, Renderer(engine.tokenizer), GenerationConfig(max_new_tokens=6))
    rollouts = RolloutConfig(batch_size=2, n_samples_per_prompt=4, reward_fn=lambda rollout: float(rollout.index % 2))
    question = Message("user", [{"type": kind}, {"type": "text", "text": "?"}])
    samples = [Sample(f"s{seed}", (question,), media=(drawn(kind, seed),)) for seed in range(4)]
    manager = sampling_manager(DataBuffer(samples), sampler, rollouts)
    backend, settings = create_pytorch_backend(model, lr=1e-3), OnlineConfig(num_steps=3)
    history = await partial(run_online, backend, algorithm("grpo"), manager, [engine], sampler.render, settings)()
    assert engine.version == len(history)
    assert all(step["logprob_gap"] < 1e-3 and step["grad_norm"] > 0 for step in history), history


def test_the_probe_sequence_has_a_medium_and_verifies_the_towers(tiny_vlm: Any) -> None:
    model, processor = load_model(tiny_vlm[0]), processor_of(tiny_vlm[1])
    before = Probe.of(ModuleWeights(model), None, processor)
    assert before.media is not None and len(before.media.media) == 1
    with torch.no_grad():
        next(tower for tower in towers_of(body_of(model))).patch_embed.proj.weight.mul_(2.0)
    after = Probe.of(ModuleWeights(model), None, processor)
    assert after.tokens == before.tokens
    with pytest.raises(StaleEngineError, match="engine 1 does not have version 2 of the weights"):
        after.check("engine 1", before.logprobs, 2, None)


def test_ids_that_the_engine_expands_otherwise_are_an_error_with_its_name() -> None:
    own = MediaPrompt((1, 262, 2), (drawn("image", 1),))
    own.check_expanded("engine 1", [1, 262, 262, 2], (1, 262, 262, 2))
    with pytest.raises(EngineError, match="engine 1 expands the placeholders of 1 media to 3 prompt tokens, which are"):
        own.check_expanded("engine 1", [1, 262, 2], (1, 262, 262, 2))


def test_a_model_that_writes_placeholders_only_is_an_error() -> None:
    request = EngineRequest((1,), GenerationConfig(), 5, 8, (), None, (262,))
    continued = [request.redraw((7, 8), redraws) for redraws in (1, 2)]
    assert len({each.seed for each in (request, *continued)}) == 3
    assert (continued[0].tokens, continued[0].max_tokens) == ((1, 7, 8), 6)
    with pytest.raises(EngineError, match="placeholders of images or audio were sampled 257 times in one completion"):
        request.redraw((), 257)
