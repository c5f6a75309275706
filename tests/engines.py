"""Engines for tests: real vLLM as a server, in process and as a Ray actor; ranks as actors; a stand-in for SGLang."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file

import oxrl.generators.http
import oxrl.generators.pool
import oxrl.generators.ray
from oxrl.concurrency import run_blocking
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.builtin import BUILTIN_MODELS, prepare_builtin
from oxrl.models.load import load_tokenizer
from oxrl.run.engines import media_settings
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import trainer_logprobs
from tests.holding import SCHEDULER
from tests.waiting import HANG
from tests.web import Quiet, serving

ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32", "--scheduler-cls", SCHEDULER]
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engine and worker are one, and the server is ready sooner
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 32, "scheduler_cls": SCHEDULER}

# No engine counts as lost because the machine is slow.
oxrl.generators.http._HEALTH_LIMIT = oxrl.generators.pool._ABORT_LIMIT = oxrl.generators.ray._HEALTH_LIMIT = HANG


def need(package: str) -> None:
    """Skip where an engine is missing; fail instead where engines are required."""
    if find_spec(package) is not None:
        return
    if os.environ.get("OXRL_REQUIRE_ENGINES") == "1":
        pytest.fail(f"{package} is not installed, and OXRL_REQUIRE_ENGINES=1 requires it")
    pytest.skip(f"{package} is not installed")


def need_vllm(model: str = "tiny") -> None:
    need("vllm")
    if model == "tiny-vlm" and find_spec("torchvision") is None:
        pytest.skip("vLLM loads Qwen2-VL only with torchvision; docs/testing.md has the commands")


@contextmanager
def vllm_server(log: Path, model: str = "tiny") -> Iterator[str]:
    """Start a server and yield its address."""
    need_vllm(model)
    from oxrl.generators.vllm.server import start_vllm_server, until_ready

    server = start_vllm_server(prepare_builtin(model), arguments=ARGUMENTS, log=log, environment=ONE_PROCESS)
    try:
        run_blocking(until_ready, server, HANG)
        yield server.url
    finally:
        server.stop()


@contextmanager
def vllm_here(model: str = "tiny", lora: int = 8) -> Iterator[Any]:
    need_vllm(model)
    from oxrl.generators.vllm.engine import VLLMRolloutEngine

    folder = prepare_builtin(model) if model in BUILTIN_MODELS else model
    tokenizer = load_tokenizer(model)
    own = (
        OPTIONS if model == "tiny" else {**OPTIONS, **media_settings(tokenizer), "load_format": "dummy"}
    )  # as in a run
    engine = VLLMRolloutEngine(folder, tokenizer, lora=lora, time_limit=HANG, **own)
    yield engine
    run_blocking(engine.close)


@contextmanager
def local_cluster() -> Iterator[None]:
    need("ray")
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or it writes a token into the home folder
    importlib.import_module("ray")  # as vLLM and scripts do, before the settings of a local cluster are made
    from oxrl.machine.ray_cluster import ray_cluster

    with ray_cluster(processes=6, object_store_memory=200 * 2**20):
        yield


@contextmanager
def two_actors() -> Iterator[Any]:
    from oxrl.backends.distributed.ray import RayRanks

    ranks = RayRanks(2, time_limit=HANG, call_limit=HANG)
    yield ranks
    ranks.stop()


@contextmanager
def one_replica(model: str = "tiny") -> Iterator[Any]:
    need_vllm(model)
    limits = {"time_limit": HANG, "start_limit": HANG}
    make = oxrl.generators.ray.ray_generator
    folder, tokenizer = prepare_builtin(model), load_tokenizer(model)
    generator = run_blocking(partial(make, folder, tokenizer, lora=8, engine_options=OPTIONS, **limits))
    yield generator
    run_blocking(generator.close)


class SGLangStandIn(Quiet):
    """SGLang's native endpoints as its documentation describes them, served by the embedded generator.

    It shows that our side of the protocol is consistent, not that SGLang is as documented.
    """

    def do_GET(self):
        server = self.server
        known = {
            "/health": {},
            "/get_server_info": {"context_length": server.generator.model.config.max_position_embeddings},
            "/get_weight_version": {"weight_version": server.weight_version},
        }
        self.reply(200 if self.path in known else 404, known.get(self.path, {}))

    def do_POST(self):
        raw = self.read()
        body = json.loads(raw) if raw else {}
        self.server.seen.append((self.path, body))
        getattr(self, self.path.removeprefix("/"))(body)

    def generate(self, body):
        server, parameters = self.server, body["sampling_params"]
        ids = body["input_ids"]
        if any(not 0 <= token < server.generator.model.config.vocab_size for token in ids):
            return self.reply(400, {"error": {"message": "a token id is out of vocabulary"}})
        sampling = GenerationConfig(
            max_new_tokens=parameters["max_new_tokens"],
            temperature=parameters["temperature"],
            top_p=parameters.get("top_p", 1.0),
            top_k=max(parameters.get("top_k", -1), 0),
            min_p=parameters.get("min_p", 0.0),
            stop=tuple(parameters.get("stop", ())),
            stop_token_ids=tuple(parameters.get("stop_token_ids", ())),
        )
        request = Request(tuple(ids), seed=parameters.get("sampling_seed", 0))
        (generation,) = server.portal.call(server.generator.generate, [request], sampling)
        reason = {"aborted": "abort"}.get(generation.finish_reason, generation.finish_reason)
        drawn = [
            [logprob, token, None] for logprob, token in zip(generation.logprobs, generation.token_ids, strict=True)
        ]
        about = {"finish_reason": {"type": reason}, "output_token_logprobs": drawn}
        about["weight_version"] = server.weight_version
        if "logprob_start_len" in body:
            prompt = server.portal.call(trainer_logprobs, server.generator.model, ids)
            prompt_logprobs = zip((None, *prompt), ids, strict=True)
            about["input_token_logprobs"] = [[logprob, token, None] for logprob, token in prompt_logprobs]
        return self.reply(200, {"text": generation.text, "output_ids": list(generation.token_ids), "meta_info": about})

    def update_weights_from_disk(self, body):
        server = self.server
        if server.refuses_updates:
            return self.reply(200, {"success": False, "message": "no room"})
        if not server.ignores_updates:
            server.portal.call(self.load, load_file(f"{body['model_path']}/model.safetensors"))
        server.weight_version = body.get("weight_version", server.weight_version)
        return self.reply(
            200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def load(self, weights):
        generator = self.server.generator
        with torch.no_grad():
            for name, parameter in generator.model.named_parameters():
                parameter.copy_(weights[name])
        await generator.update_weights(Weights(generator.model, 0))

    def abort_request(self, body):
        assert body["abort_all"]
        self.server.portal.call(self.server.generator.abort)
        self.reply(200)

    def pause_generation(self, _body):
        self.reply(200, {"status": "ok"})

    continue_generation = flush_cache = pause_generation


@contextmanager
def sglang_stand_in(model, tokenizer):
    """Yield the server: `.url`, and `.seen` with the requests.

    `.ignores_updates` makes it accept an update without loading it, `.refuses_updates` makes it report a failure.
    """
    facts = {"weight_version": "default", "ignores_updates": False, "refuses_updates": False, "seen": []}
    with (
        start_blocking_portal() as portal,
        serving(SGLangStandIn, portal=portal, generator=EmbeddedGenerator(model, tokenizer), **facts) as server,
    ):
        yield server


class EmbeddedHold:
    """As `holding`, for an embedded generator; longer sequences continue until all have so many tokens."""

    def __init__(self, generator: EmbeddedGenerator, tokens: int) -> None:
        self._engine, self._tokens = generator._engine, tokens
        self._step, self._change_version = self._engine.step, self._engine.change_version

    @property
    def reached(self) -> int:
        return sum(len(job.tokens) >= self._tokens for job in self._engine._unfinished())

    def step(self) -> None:
        if self.reached < len(self._engine._unfinished()):
            self._step()
        else:
            time.sleep(0.001)  # the event loop calls this repeatedly

    def change_version(self, version: int) -> None:
        self.release()
        self._change_version(version)

    def release(self) -> None:
        self._engine.step, self._engine.change_version = self._step, self._change_version


@contextmanager
def holding_embedded(generator: EmbeddedGenerator, tokens: int) -> Iterator[EmbeddedHold]:
    hold = EmbeddedHold(generator, tokens)
    engine: Any = generator._engine
    engine.step, engine.change_version = hold.step, hold.change_version
    try:
        yield hold
    finally:
        hold.release()
