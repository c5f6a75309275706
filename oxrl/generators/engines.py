"""The protocol of an inference engine behind a generator, its records, and their conversion from and to `oxrl.types`.

An engine continues token ids and returns token ids with log-probs. `http` and `ray` implement the protocol, `pool`
makes a `Generator` of one or more engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from oxrl.data.media import Kind, load_audio, load_image
from oxrl.data.processor import MediaProcessor
from oxrl.generators.connection import EngineError
from oxrl.generators.embedded.sampling import stream_key
from oxrl.types import Generation, GenerationConfig, Media, Rendezvous, Request

_MAX_REDRAWS = 256  # of placeholders in one completion: a model that wants to write nothing else
_FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}


class MediaPrompt(NamedTuple):
    """A prompt with media for an engine that expands their placeholders itself, and must arrive at our own ids."""

    tokens: tuple[int, ...]  # with one placeholder for each medium
    media: tuple[Media, ...]
    sampling_rate: int = 0  # of sounds as the model hears them

    @classmethod
    def of(cls, tokens: Sequence[int], media: Sequence[Media], processor: MediaProcessor) -> MediaPrompt:
        """Return the prompt of these expanded ids."""
        rate = processor.sampling_rate if "audio" in processor.placeholders else 0
        return cls(tuple(processor.unexpanded(tokens, media)), tuple(media), rate)

    def decoded(self) -> list[tuple[Kind, Any]]:
        """Decode media as the trainer's are: images upright in RGB, sounds as samples of one channel at the rate."""
        return [
            (medium.kind, load_image(medium) if medium.kind == "image" else load_audio(medium, self.sampling_rate))
            for medium in self.media
        ]

    def check_expanded(self, name: str, expanded: Sequence[int] | None, tokens: Sequence[int]) -> None:
        """Raise unless the engine's ids are ours: log-probs would belong to other tokens."""
        if expanded is None or tuple(expanded) != tuple(tokens):
            found = "no" if expanded is None else str(len(expanded))
            raise EngineError(
                f"{name} expands the placeholders of {len(self.media)} media to {found} prompt tokens, which are not "
                f"the {len(tokens)} of this prompt: its processor and ours differ; sample with the embedded engine "
                "(inference_engine.name: embedded)"
            )


class EngineRequest(NamedTuple):
    """One sequence to continue, in a form that every engine understands."""

    tokens: tuple[int, ...]
    sampling: GenerationConfig
    seed: int  # from 0 to 2**63 - 1
    max_tokens: int
    end_token_ids: tuple[int, ...]
    media: MediaPrompt | None = None
    placeholders: tuple[int, ...] = ()  # of media; one that was sampled is drawn again, see `redraw`
    logit_bias: Mapping[int, float] = {}

    @property
    def stop_token_ids(self) -> list[int]:
        return [*self.end_token_ids, *self.placeholders]

    def redraw(self, sampled: Sequence[int], redraws: int) -> EngineRequest:
        """Return the request that continues after these tokens, with other random numbers than before.

        To draw again until there is no placeholder is to sample from the other tokens only, and leaves the log-probs
        as they are: those over the whole vocabulary, as the trainer's.
        """
        if redraws > _MAX_REDRAWS:
            raise EngineError(
                f"placeholders of images or audio were sampled {redraws} times in one completion: the model writes "
                "hardly anything else; check its weights and its chat template"
            )
        media = self.media and self.media._replace(tokens=(*self.media.tokens, *sampled))
        greedy = self.sampling.temperature == 0  # the likeliest token would be the same again
        return self._replace(
            tokens=(*self.tokens, *sampled),
            seed=stream_key(self.seed, redraws) >> 1,
            max_tokens=self.max_tokens - len(sampled),
            media=media,
            logit_bias=dict.fromkeys(self.placeholders, -100.0) if greedy else {},
        )


class EngineOutput(NamedTuple):
    """The tokens that an engine sampled for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...] = ()  # of the weights that sampled each token; (): the engine does not report them


class Facts(NamedTuple):
    """An engine's limit on the sequence length, and which log-probs it returns."""

    max_length: int  # of prompt and completion together
    logprobs: str  # "full": at the sampling temperature, over all tokens; "processed": over the tokens that cut-offs
    # leave; "raw": at temperature 1, over all tokens
    reads_media: bool = False  # takes media beside token ids


class WeightLoader(Protocol):
    """The least that `sync_weights_to_engines` and `run_rl_training` need of an engine."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]: ...


class InferenceEngine(Protocol):
    """An engine outside of the trainer. A generator can have several."""

    @property
    def name(self) -> str: ...

    @property
    def recoveries(self) -> int:
        """How often it became healthy again after a failure. Requests that failed before can then be retried."""
        ...

    async def recovered(self, error: EngineError) -> None:
        """Wait until the engine is healthy again after this error; raise if it cannot be recovered."""
        ...

    async def facts(self) -> Facts: ...

    async def complete(self, request: EngineRequest) -> EngineOutput: ...

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        """Return the log-prob of each token but the first, at temperature 1."""
        ...

    async def abort(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Free its devices' memory until `wake_up`. No requests are sent to it meanwhile."""
        ...

    async def wake_up(self) -> None: ...

    async def check_health(self) -> None: ...

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """Load the weights of this checkpoint; the result holds the version that the engine has then."""
        ...


@runtime_checkable
class Receiver(Protocol):
    """An engine that can also receive weights from a trainer over the network (`oxrl.weights.broadcast`)."""

    @property
    def host(self) -> str: ...

    async def receivers(self) -> int:
        """Return the number of its processes that receive weights, each for its shard of the model."""
        ...

    async def receive_weights(self, rendezvous: Rendezvous, first: int, version: int | None = None) -> dict[str, Any]:
        """Load the weights that are broadcast there; its processes have the ranks from `first` on."""
        ...


def as_engine_request(
    request: Request,
    sampling: GenerationConfig,
    facts: Facts,
    end_token_ids: Sequence[int],
    processor: MediaProcessor | None = None,
) -> EngineRequest:
    """Convert a request for an engine; raise ValueError if the engine cannot serve it.

    `processor` is that of a model which reads media.
    """
    partial = request.partial.token_ids if request.partial is not None else ()
    if request.partial is not None and request.partial.finish_reason != "aborted":
        raise ValueError(
            f"only an aborted generation can be resumed, not one with finish_reason {request.partial.finish_reason}"
        )
    if request.media and (processor is None or not facts.reads_media):
        raise ValueError(
            "the request has media, and this engine gets token ids only: sample with the embedded engine "
            "(inference_engine.name: embedded)"
        )
    tokens = (*map(int, request.tokens), *partial)
    if not request.tokens:
        raise ValueError("the prompt is empty: every prompt needs at least one token")
    if len(request.tokens) >= facts.max_length:
        raise ValueError(
            f"the prompt has {len(request.tokens)} tokens; prompt and completion together may have {facts.max_length}"
        )
    check_logprobs(sampling, facts)
    check_allowed_tokens(sampling, facts)
    max_tokens = min(sampling.max_new_tokens, facts.max_length - len(request.tokens)) - len(partial)
    # An engine counts its random numbers from the first token that it samples itself.
    seed = stream_key(stream_key(sampling.seed, request.seed), len(partial)) >> 1
    ends, media = (*end_token_ids, *sampling.stop_token_ids), None
    if processor is not None and request.media:
        media = MediaPrompt.of(request.tokens, request.media, processor)
        media = media._replace(tokens=(*media.tokens, *partial))
    placeholders = () if processor is None else tuple(sorted(processor.placeholder_ids))
    return EngineRequest(tokens, sampling, seed, max_tokens, ends, media, placeholders)


def check_logprobs(sampling: GenerationConfig, facts: Facts) -> None:
    """Require log-probs of the full softmax at the sampling temperature; importance ratios are wrong with others."""
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if sampling.temperature == 0 or facts.logprobs == "full":
        return
    if facts.logprobs == "processed" and cuts:
        raise ValueError(
            "the engine's log-probs would be those after top_p, top_k and min_p, not the policy's: "
            "remove the cut-offs, or use temperature 1 and start the engine with --logprobs-mode raw_logprobs"
        )
    if facts.logprobs == "raw" and sampling.temperature != 1:
        raise ValueError(
            f"the engine's log-probs would be those at temperature 1, not {sampling.temperature:g}: "
            "start it with --logprobs-mode processed_logprobs"
        )


def check_allowed_tokens(sampling: GenerationConfig, facts: Facts) -> None:
    """Require log-probs that are normalised over the allowed tokens, as those of the trainer are."""
    if sampling.allowed_tokens and facts.logprobs != "processed":
        raise ValueError(
            "sampling.allowed_tokens is set, and this engine's log-probs are over the whole vocabulary, not over these "
            "tokens: use the embedded engine (inference_engine.name: embedded), or start vLLM with --logprobs-mode "
            "processed_logprobs"
        )


def as_generation(
    name: str,
    partial: Generation | None,
    output: EngineOutput,
    version: int,
    decode: Any,
    allowed_tokens: tuple[int, ...] = (),
) -> Generation:
    """Return the partial generation and the engine's output as one generation; raise if the output is not valid.

    `version` is that of the weights when the request was sent. It is used for all tokens of an engine that does not
    report versions.
    """
    partial = partial or Generation((), (), "aborted", version)
    if output.finish_reason not in _FINISH_REASONS:
        raise EngineError(f"{name} returned the unknown finish reason {output.finish_reason!r}")
    valid = all(isinstance(each, float | int) and -9999 < each <= 1e-3 for each in output.logprobs)
    if len(output.token_ids) != len(output.logprobs) or not valid:
        raise EngineError(f"{name} returned {len(output.token_ids)} tokens whose log-probs are missing or not finite")
    if allowed_tokens and (others := set(output.token_ids) - set(allowed_tokens)):
        raise EngineError(f"{name} sampled token {min(others)}, which is not one of allowed_tokens")
    ids, logprobs = (*partial.token_ids, *output.token_ids), (*partial.logprobs, *output.logprobs)
    reason: Any = _FINISH_REASONS[output.finish_reason]
    if output.versions and len(output.versions) != len(output.token_ids):
        raise EngineError(f"{name} returned {len(output.token_ids)} tokens, but versions of {len(output.versions)}")
    versions = (*partial.token_versions, *(output.versions or (version,) * len(output.token_ids)))
    generation = Generation(ids, logprobs, reason, version, decode(ids), allowed_tokens=allowed_tokens)
    return generation.with_versions(versions)
