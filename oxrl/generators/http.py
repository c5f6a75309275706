"""vLLM and SGLang servers as `InferenceEngine`s: their endpoints, and their weights from files or over the network.

vLLM is tested against real servers. SGLang is written from its documentation and tested against a stand-in that was
written from the same documentation, not against SGLang itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from oxrl.concurrency import in_thread
from oxrl.data.media import as_media, data_url
from oxrl.generators.connection import Connection, EngineError
from oxrl.generators.engines import EngineOutput, EngineRequest, Facts, MediaPrompt
from oxrl.generators.probe import StaleEngineError
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.types import Rendezvous

_HEALTH_LIMIT = 10.0
_TOKENS = "/inference/v1/generate"


class _Server:
    """The part that servers of all kinds share."""

    kind = ""

    def __init__(self, url: str, *, time_limit: float = 600.0, retries: int = 4, backoff: float = 0.5) -> None:
        self._connection = Connection(url, time_limit, retries, backoff).checked()

    @property
    def name(self) -> str:
        return f"the {self.kind} server at {self._connection.url}"

    @property
    def recoveries(self) -> int:
        return 0

    async def recovered(self, error: EngineError) -> None:
        """Raise the error: external servers are retried, never restarted."""
        raise error

    @property
    def host(self) -> str:
        return self._connection.host

    async def check_health(self) -> None:
        """Try at most twice: servers that are down are checked at every sync."""
        connection = self._connection._replace(retries=min(1, self._connection.retries))
        await connection.get("/health", time_limit=_HEALTH_LIMIT)

    async def sleep(self) -> None:
        raise ValueError(f"{self.name} does not support sleep: give it separate devices")

    async def wake_up(self) -> None:
        """Do nothing: it never sleeps."""


class VLLMEngine(_Server):
    """`VLLMEngine("http://127.0.0.1:8000")`: a vLLM server (0.32) that was started with `VLLM_SERVER_DEV_MODE=1`.

    Weights can be updated while requests are in flight: they are paused, and continue with the new weights after a
    fresh prefill. Servers with `--enable-scale-out` report the version that sampled each token; with others the whole
    completion gets the older version. On a CPU, models with tied weights need `--worker-extension-cls` (see
    `vllm.worker`). `vllm.server` starts servers with these options.
    """

    kind = "vLLM"
    _model = ""  # set by `facts`, as the next four are
    _workers = _copies = 1
    _extended = False
    _reports_versions = False

    async def facts(self) -> Facts:
        (model, *_) = (await self._connection.get("/v1/models"))["data"]
        self._model = model["id"]
        info = await self._connection.get("/server_info?config_format=json")
        parallel = info["vllm_config"]["parallel_config"]
        self._workers, self._copies = int(parallel["world_size"]), int(parallel["data_parallel_size"])
        self._extended = parallel["worker_extension_cls"] == EXTENSION
        self._reports_versions = await self._has(_TOKENS)
        mode = str(info["vllm_config"]["model_config"]["logprobs_mode"])
        if not mode.endswith("_logprobs"):
            raise ValueError(f"{self.name} returns {mode}: start it with --logprobs-mode processed_logprobs")
        return Facts(int(model["max_model_len"]), mode.removesuffix("_logprobs"), self._reports_versions)

    async def complete(self, request: EngineRequest) -> EngineOutput:
        tokens: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        versions: tuple[int, ...] = ()
        for redraws in count():
            output = await self._complete(request.redraw(tokens, redraws) if redraws else request)
            sampled = not set(output.token_ids[-1:]) & set(request.placeholders)
            end = len(output.token_ids) - (not sampled)
            tokens += output.token_ids[:end]
            logprobs += output.logprobs[:end]
            versions += output.versions[:end]
            if sampled:
                break
        return EngineOutput(tokens, logprobs, output.finish_reason, versions)

    async def _complete(self, request: EngineRequest) -> EngineOutput:
        model, sampling = await self._model_name(), request.sampling
        parameters = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # Override the model's generation_config.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "stop_token_ids": request.stop_token_ids,
            "seed": request.seed,
            "logprobs": 0,
            **({"logit_bias": request.logit_bias} if request.logit_bias else {}),
            **({"allowed_token_ids": list(sampling.allowed_tokens)} if sampling.allowed_tokens else {}),
        }
        if self._reports_versions:
            return await self._complete_with_versions(request, {"model": model, "sampling_params": parameters})
        body = {"model": model, "prompt": list(request.tokens), "return_token_ids": True, **parameters}
        (choice,) = (await self._connection.post("/v1/completions", body))["choices"]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
        return EngineOutput(tuple(choice["token_ids"]), tuple(logprobs), str(choice["finish_reason"]))

    async def _complete_with_versions(self, request: EngineRequest, body: Mapping[str, Any]) -> EngineOutput:
        """Use the endpoint that also returns the version of the weights for each token, and takes media."""
        (choice,) = (await self._post_tokens(request.tokens, request.media, body))["choices"]
        sampled = (choice["logprobs"] or {}).get("content") or ()
        spans = choice["weight_versions"] or ()
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        known = all(version.isdecimal() for version in versions)  # before the first update it is not a number
        return EngineOutput(
            tuple(choice["token_ids"] or ()),
            tuple(each["logprob"] for each in sampled),
            str(choice["finish_reason"]),
            tuple(map(int, versions)) if known else (),
        )

    async def _post_tokens(
        self, tokens: Sequence[int], media: MediaPrompt | None, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The server expands the placeholders of media itself; raise unless it arrives at these tokens."""
        if media is None:
            response: Mapping[str, Any] = await self._connection.post(_TOKENS, {"token_ids": list(tokens), **body})
            return response
        parts = await in_thread(partial(_content_parts, media))
        prompt = {"token_ids": list(media.tokens), "content_parts": parts, "return_token_ids": True}
        response = await self._connection.post(_TOKENS, {**prompt, **body})
        media.check_expanded(self.name, response["prompt_token_ids"], tokens)
        return response

    async def _has(self, path: str) -> bool:
        try:
            return path in (await self._connection.get("/openapi.json"))["paths"]
        except EngineError:  # a server may be started without its description
            return False

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        model, parameters = await self._model_name(), {"max_tokens": 1, "prompt_logprobs": 0}
        if media is None:
            body = {"model": model, "prompt": list(tokens), **parameters}
            (reported,) = (await self._connection.post("/v1/completions", body))["choices"]
        else:
            reported = await self._post_tokens(tokens, media, {"model": model, "sampling_params": parameters})
        logprobs = reported["prompt_logprobs"][1:]
        return tuple(float(each[str(token)]["logprob"]) for each, token in zip(logprobs, tokens[1:], strict=True))

    async def abort(self) -> None:
        await self._connection.post("/abort_requests")

    async def pause(self) -> None:
        """Hold all requests in flight until `resume`."""
        await self._connection.post("/pause", query={"mode": "keep"})

    async def resume(self) -> None:
        await self._connection.post("/resume")

    async def sleep(self) -> None:
        """On a GPU the server needs `--enable-sleep-mode`; on a CPU it only pauses, and frees no memory."""
        await self._connection.post("/sleep", query={"level": "1"})

    async def wake_up(self) -> None:
        await self._connection.post("/wake_up")

    async def reset_prefix_cache(self) -> None:
        """Drop what was computed with other weights, also for requests in flight."""
        reply = await self._connection.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
        if not reply["success"]:
            raise EngineError(f"{self.name} did not reset its prefix cache, which belongs to older weights")
        await self._connection.post("/reset_encoder_cache")

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        await self._model_name()
        if self._extended:
            return await self._change_weights({"method": "take_weights", "args": [str(checkpoint_path)]}, version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint_path)}}
        return await self._change_weights(body, version)

    async def receivers(self) -> int:
        await self._model_name()
        if not self._extended:
            raise ValueError(f"{self.name} cannot receive weights: start it with --worker-extension-cls {EXTENSION}")
        if self._copies > 1:
            raise ValueError(f"{self.name} has {self._copies} copies of the model: start a server for each instead")
        return self._workers

    async def receive_weights(self, rendezvous: Rendezvous, first: int, version: int | None = None) -> dict[str, Any]:
        return await self._change_weights({"method": "receive_weights", "args": [list(rendezvous), first]}, version)

    async def _change_weights(self, body: Mapping[str, Any], version: int | None) -> dict[str, Any]:
        """Update through `/collective_rpc`. If this fails the engine stays paused, and must be restarted."""
        started = time.monotonic()
        await self.pause()
        await self._connection.post("/collective_rpc", body, once=True)
        await self.reset_prefix_cache()
        if version is not None:
            await self._connection.post("/update_weight_version", {"new_version": str(version)})
        await self.resume()
        reported = (await self._connection.get("/weight_info"))["weight_version"]
        return _check_version(self.name, reported, version, started)

    async def _model_name(self) -> str:
        if not self._model:
            await self.facts()
        return self._model


class SGLangEngine(_Server):
    """`SGLangEngine("http://127.0.0.1:30000")`: an SGLang server, by its native protocol.

    Written from its documentation, and not yet run against SGLang itself. Seeds have an effect only where the server
    was started with `--enable-deterministic-inference`. Its log-probs are those at the sampling temperature, over all
    tokens. It does not report which tokens were sampled after an update: the whole completion gets the older version.
    """

    kind = "SGLang"

    async def facts(self) -> Facts:
        info = await self._connection.get("/get_server_info")
        max_length = info.get("context_length") or info.get("max_total_num_tokens")
        if max_length is None:
            raise EngineError(f"{self.name} reports neither context_length nor max_total_num_tokens")
        return Facts(int(max_length), "full")

    async def complete(self, request: EngineRequest) -> EngineOutput:
        sampling = request.sampling
        parameters = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": request.stop_token_ids,
            "sampling_seed": request.seed,
        }
        body = {"input_ids": list(request.tokens), "sampling_params": parameters, "return_logprob": True}
        info = (await self._connection.post("/generate", body))["meta_info"]
        sampled = info.get("output_token_logprobs") or ()
        reason = (info["finish_reason"] or {}).get("type", "none")
        return EngineOutput(tuple(token for _, token, *_ in sampled), tuple(logprob for logprob, *_ in sampled), reason)

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        if media is not None:
            raise ValueError(f"{self.name} gets token ids only, and this prompt has images or audio")
        parameters = {"max_new_tokens": 1, "temperature": 1.0}
        body = {
            "input_ids": list(tokens),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        logprobs = (await self._connection.post("/generate", body))["meta_info"]["input_token_logprobs"]
        return tuple(float(logprob) for logprob, *_ in logprobs[1:])

    async def abort(self) -> None:
        await self._connection.post("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self) -> None:
        """Hold all requests in flight until `resume`, which continues them after a fresh prefill."""
        await self._connection.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._connection.post("/continue_generation", {})

    async def reset_prefix_cache(self) -> None:
        await self._connection.post("/flush_cache")

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        started = time.monotonic()
        await self.pause()
        body: dict[str, Any] = {"model_path": str(checkpoint_path), "flush_cache": True}
        if version is not None:
            body["weight_version"] = str(version)
        reply = await self._connection.post("/update_weights_from_disk", body, once=True)
        if not reply.get("success"):
            raise EngineError(f"{self.name} did not load the weights: {reply.get('message')}")
        await self.reset_prefix_cache()
        await self.resume()
        reported = (await self._connection.get("/get_weight_version"))["weight_version"]
        return _check_version(self.name, reported, version, started)


def _content_parts(prompt: MediaPrompt) -> list[dict[str, str]]:
    """Media as data URLs, without loss."""
    parts: list[dict[str, str]] = []
    for kind, value in prompt.decoded():
        plain = as_media(value if kind == "image" else (value, prompt.sampling_rate), kind)
        parts.append({"type": f"{kind}_url", "url": data_url(plain)})
    return parts


def _check_version(name: str, reported: object, version: int | None, started: float) -> dict[str, Any]:
    if version is not None and str(reported) != str(version):
        raise StaleEngineError(f"{name} reports version {reported} of the weights, expected {version}")
    return {"engine": name, "version": reported, "seconds": time.monotonic() - started}
