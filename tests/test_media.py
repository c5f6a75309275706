"""Media are carried from a sample to a batch, and rows share a prompt only if tokens and media are equal."""

import json
from importlib.util import find_spec

import anyio
import numpy as np
import pytest

import oxrl
from oxrl.algorithms import algorithm
from oxrl.algorithms.rows import rows_of
from oxrl.backends.forward import LanguageModel, _share
from oxrl.backends.local import on_device
from oxrl.config import ConfigError, check_config
from oxrl.config.registry import ENGINES, EngineRecord, register_engine
from oxrl.data.buffer import DataBuffer
from oxrl.data.media_features import example
from oxrl.data.pack import collate, computed_tokens, pack
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.run.prepare import prepare_run
from oxrl.testing import ScriptedGenerator, fake_rollout
from oxrl.types import GenerationConfig, Message, Request, Row, Sample
from tests.drawings import png
from tests.rows import write_jsonl
from tests.web import Quiet, serving

CAT, DOG = png("orange", 56, 56), png("brown", 60, 90)
PROMPT = (Message("user", "What is in the picture?"),)
ANSWER, OTHER = (Message("assistant", "A cat."),), (Message("assistant", "A dog."),)
SAMPLES = {
    "sft": Sample("s", (*PROMPT, *ANSWER), media=(CAT, DOG)),
    "cpt": Sample("s", text="A cat <image> and a dog <image>.", media=(CAT, DOG)),
    "dpo": Sample("s", PROMPT, chosen=ANSWER, rejected=OTHER, media=(CAT, DOG)),
    "kto": Sample("s", (*PROMPT, *ANSWER), label=True, media=(CAT, DOG)),
    "grpo": Sample("s", PROMPT, responses=(ANSWER, OTHER), rewards=(1.0, 0.0), media=(CAT, DOG)),
}


@pytest.mark.parametrize("name", list(SAMPLES))
def test_media_are_carried_from_a_sample_to_a_batch(tiny_vlm, name):
    chosen = algorithm(name)
    items = chosen.arrange(chosen.assemble(SAMPLES[name], Renderer(tiny_vlm[1])))
    batch = collate(items)
    assert batch.num_rows >= 1 and batch.media == ((CAT, DOG),) * batch.num_rows
    assert on_device(batch, batch.tokens.device).media == batch.media


def test_media_are_carried_from_a_sample_to_its_requests_and_rollouts(tiny_vlm):
    generator = ScriptedGenerator(tiny_vlm[1], ["A cat.", "A dog."])
    sampler = RolloutSampler(generator, Renderer(tiny_vlm[1]), GenerationConfig())
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, reward_fn=lambda rollout: 1.0)
    source = DataBuffer([Sample("s", PROMPT, media=(CAT,))])
    (group,) = anyio.run(sampling_manager(source, sampler, config).collect).groups
    assert [request.media for request in generator.requests] == [(CAT,)] * 2
    assert [row.media for rollout in group for row in rows_of(rollout)] == [(CAT,)] * 2


def test_a_rollout_with_media_survives_json_and_one_without_has_no_such_key():
    plain = fake_rollout("A cat.")
    assert "media" not in rollout_to_json(plain)["sample"]
    rollout = oxrl.Rollout(SAMPLES["sft"], plain.turns)
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout)))) == rollout


def rows(*media, length=24):
    """Rows with the same prompt of 20 tokens, one for each of `media`."""
    return [
        Row(f"r{index}", [*range(20), *[50 + index] * (length - 20)], np.arange(length) >= 20, media=each)
        for index, each in enumerate(media)
    ]


def packed(*media):
    return _share(collate([(row,) for row in rows(*media)]))


@pytest.mark.parametrize(
    ("media", "prompts"),
    [
        (((), (), ()), 1),
        (((CAT,), (CAT,), (CAT,)), 1),
        (((CAT,), (DOG,), (CAT,)), 2),
        (((CAT,), (), (CAT, CAT)), 3),
        (((CAT,), (CAT._replace(kind="audio"),), (CAT._replace(data="cat.png"),)), 3),
    ],
)
def test_a_prompt_is_shared_only_by_rows_with_equal_media(media, prompts):
    items = [(row,) for row in rows(*media)]
    assert len(_share(collate(items)).tokens) == computed_tokens(items) == 3 * 4 + 20 * prompts


def test_a_row_shares_the_prompt_of_rows_with_equal_media():
    packing = packed((CAT,), (DOG,), (CAT,))
    assert packing.tokens[packing.back].tolist() == collate([(row,) for row in rows((), (), ())]).tokens.tolist()
    first, second, third = packing.back.reshape(3, 24)[:, :20].tolist()
    assert first == third and not set(first) & set(second)


def test_packing_counts_a_prompt_once_for_each_of_its_media():
    assert len(pack([(row,) for row in rows((CAT,), (CAT,))], 28)) == 1
    assert len(pack([(row,) for row in rows((CAT,), (DOG,))], 28)) == 2


def test_components_that_take_only_tokens_refuse_media(tiny, tiny_model):
    with pytest.raises(ValueError, match="row r0 has media"):
        LanguageModel(tiny_model)(collate([(row,) for row in rows((CAT,), ())]))
    with pytest.raises(ValueError, match="row of seed 0 has media"):
        anyio.run(EmbeddedGenerator(tiny_model, tiny[1]).generate, [Request((1, 2), media=(CAT,))], GenerationConfig())


def test_fingerprints_depend_on_media_and_without_them_are_those_of_former_versions():
    def fingerprint(*media):
        return DataBuffer([Sample("s", PROMPT, answer="a cat", media=media)]).state()["fingerprint"]

    assert len({fingerprint(), fingerprint(CAT), fingerprint(DOG)}) == 3
    assert fingerprint() == "c35abc8ef8f9f0f5d76e535f25a4c30e"


def prepare_with_images(tmp_path, **engine):
    (tmp_path / "cat.png").write_bytes(example("image").data)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "What is it?", "image": "cat.png", "answer": "a cat"}])
    settings = {
        "model": {"name": "tiny-vlm"},
        "data": {"train_files_path": str(rows)},
        "train": {"alg_name": "grpo"},
        "reward": {"reward_func": "exact_match"},
        "inference_engine": engine,
    }
    return prepare_run(check_config(settings), tmp_path / "run")


def test_a_run_whose_engine_gets_token_ids_only_refuses_rows_with_images_before_it_loads_weights(tmp_path):
    register_engine("ids only", EngineRecord("my_engine.py:open_engine", "gets token ids"))
    try:
        with pytest.raises(ConfigError, match="rows.jsonl:1 has images or audio, and the engine ids only gets token"):
            prepare_with_images(tmp_path, name="ids only")
    finally:
        del ENGINES["ids only"]


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_vllm_without_torchvision_refuses_rows_with_images(tmp_path):
    with pytest.raises(ConfigError, match="rows.jsonl:1 has images, and the engine vllm reads them with torchvision"):
        prepare_with_images(tmp_path, name="vllm")


class VLLMStandIn(Quiet):
    """What a vLLM server reports of itself before a run."""

    def do_GET(self):
        config = {
            "parallel_config": {"world_size": 1, "data_parallel_size": 1, "worker_extension_cls": ""},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        replies = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "tiny-vlm", "max_model_len": 2048}]},
            "/server_info?config_format=json": {"vllm_config": config},
            "/openapi.json": {"paths": {path: {} for path in self.server.paths}},
        }
        self.reply(200 if self.path in replies else 404, replies.get(self.path, {}))


def test_a_server_that_takes_token_ids_only_is_refused_before_the_run(tmp_path):
    with serving(VLLMStandIn, paths=["/v1/completions"]) as server:
        with pytest.raises(
            ConfigError, match=r"rows.jsonl:1 has images .* token ids only: start vLLM with --enable-sc"
        ):
            prepare_with_images(tmp_path, name="http", urls=[server.url])
        server.paths = ["/v1/completions", "/inference/v1/generate"]
        assert prepare_with_images(tmp_path, name="http", urls=[server.url]).online
