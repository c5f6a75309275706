"""Inference and rollouts as plain functions for scripts and notebooks, every one with extension points.

Each function takes a model and a tokenizer, blocks, and returns records. Sampling, chat template and tool parser are
replaced by passing another function. Training uses the same functions through `collect`, which samples many prompts
concurrently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np

from oxrl.algorithms import kl
from oxrl.algorithms.kl import KLFn
from oxrl.concurrency import run_blocking
from oxrl.data.parts import checked_content, take_media
from oxrl.data.render import Renderer
from oxrl.data.template import apply_template
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rollouts.batches import group_rollouts
from oxrl.rollouts.envs import GeneratorClient, StopCondition, assistant_message, never, with_tools
from oxrl.rollouts.tool_calls import ToolParser, extract_tool_calls, tool_parser_for
from oxrl.rollouts.tools import Tool, ToolExecutor, ToolTracker, called, count_tool_calls
from oxrl.rollouts.transcript import begin
from oxrl.types import (
    Conversation,
    EnvFn,
    Generation,
    GenerationConfig,
    Generator,
    Media,
    Message,
    Request,
    Rollout,
    Row,
    Sample,
    Turn,
    Weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Chat: TypeAlias = Conversation | Sequence[Message | Mapping[str, Any]]
Prompt: TypeAlias = str | Chat | Sequence[int]
"""A text to continue, a chat, whose parts may have images or audio, or token ids."""
GenerateFn: TypeAlias = Callable[
    ["PreTrainedModel", "PreTrainedTokenizerBase", Sequence[Sequence[int]], GenerationConfig], list[Generation]
]
"""(model, tokenizer, token ids of each prompt, config) -> one generation per prompt.

One that reads images or audio has the argument `media`: a tuple of `Media` per prompt, with placeholders in its ids.
"""
AnyGenerator: TypeAlias = GenerateFn | Generator
"""A function, or an engine: its own weights are used, not those of `model`."""
TemplateFn: TypeAlias = Callable[
    ["PreTrainedTokenizerBase", list[dict[str, Any]], Sequence[Mapping[str, Any]], bool], str
]
"""(tokenizer, messages, tools, add_generation_prompt) -> the prompt as text."""
LogprobExtractor: TypeAlias = Callable[["PreTrainedModel", Sequence[int], Generation], list[float]]


def embedded_generator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    media: Sequence[tuple[Media, ...]] = (),
) -> list[Generation]:
    """Sample from the model in this process; `media` are those of each prompt."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    if isinstance(model, str):
        raise ValueError(f"the model is the text {model!r}; load it: load_model({model!r})")
    return EmbeddedGenerator(model, tokenizer).complete(prompts, config, media=media)


def _is_engine(generator: AnyGenerator) -> TypeGuard[Generator]:
    return hasattr(generator, "generate")


class _RenderedPrompt(NamedTuple):
    """A prompt as generators get it: token ids, and the media of the placeholders in them."""

    ids: list[int]
    media: tuple[Media, ...] = ()


def _completed(
    generator: AnyGenerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[_RenderedPrompt],
    config: GenerationConfig,
) -> list[Generation]:
    """Return one generation per prompt, by a function or by an engine; the seed of a prompt is its index."""
    if _is_engine(generator):
        requests = [Request(tuple(each.ids), seed=index, media=each.media) for index, each in enumerate(prompts)]
        return run_blocking(generator.generate, requests, config)
    function = _with_media(cast("GenerateFn", generator), [each.media for each in prompts])
    return function(model, tokenizer, [each.ids for each in prompts], config)


def _with_media(function: GenerateFn, media: Sequence[tuple[Media, ...]]) -> GenerateFn:
    """The function with its argument `media`, if any prompt has some."""
    if not any(media):
        return function
    if "media" not in (parameters := inspect.signature(function).parameters):
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"a prompt has images or audio, and the generator {name}({', '.join(parameters)}) has no argument media, "
            "which gets a tuple of them per prompt; add it, or use embedded_generator"
        )
    return cast("GenerateFn", partial(cast("Any", function), media=media))


def tokenizer_template(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
) -> str:
    """Apply the tokenizer's chat template."""
    return apply_template(tokenizer, chat, tools, generation_prompt=add_generation_prompt)


def sampled_logprobs(model: PreTrainedModel, prompt_ids: Sequence[int], generation: Generation) -> list[float]:  # noqa: ARG001
    """Return the log-probs that the generator recorded when sampling."""
    return list(generation.logprobs)


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Chat,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    template_fn: TemplateFn = tokenizer_template,
) -> str:
    """Return a conversation as the prompt text."""
    return template_fn(tokenizer, [each.to_dict() for each in _messages(conversation)], tools, add_generation_prompt)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    generator: AnyGenerator = embedded_generator,
    template_fn: TemplateFn = tokenizer_template,
) -> Generation:
    """Generate a completion of one prompt."""
    return batch_generate(model, tokenizer, [prompt], config, generator=generator, template_fn=template_fn)[0]


def batch_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
    *,
    generator: AnyGenerator = embedded_generator,
    template_fn: TemplateFn = tokenizer_template,
) -> list[Generation]:
    """Generate one completion per prompt, batched."""
    rendered = [_rendered_prompt(tokenizer, prompt, template_fn) for prompt in prompts]
    return _completed(generator, model, tokenizer, rendered, config)


def generate_with_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    generator: AnyGenerator = embedded_generator,
    template_fn: TemplateFn = tokenizer_template,
    logprob_extractor: LogprobExtractor = sampled_logprobs,
) -> tuple[Generation, list[float]]:
    """Generate a completion and return it with the log-prob of each token."""
    rendered = _rendered_prompt(tokenizer, prompt, template_fn)
    (generation,) = _completed(generator, model, tokenizer, [rendered], config)
    return generation, logprob_extractor(model, rendered.ids, generation)


def generate_conversation_turn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Chat,
    config: GenerationConfig,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    generator: AnyGenerator = embedded_generator,
    template_fn: TemplateFn = tokenizer_template,
    tool_parser: ToolParser | None = None,
) -> tuple[Conversation, Generation]:
    """Return the conversation with the assistant's next message; `tool_parser` defaults to the chat template's."""
    given = _messages(conversation)
    rendered = _rendered_chat(tokenizer, given, template_fn, tools=tools)
    (generation,) = _completed(generator, model, tokenizer, [rendered], config)
    before = begin(Renderer(tokenizer), given, tools=tools)
    text = before.text_of(generation)
    truncated = generation.finish_reason != "stop"
    calls = [] if truncated else extract_tool_calls(text, tool_parser or tool_parser_for(tokenizer))
    return Conversation((*given, assistant_message(text, calls, before))), generation


def create_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt | Sample,
    gen_config: GenerationConfig,
    *,
    ref_model: PreTrainedModel | None = None,
    reward_fn: AnyReward | None = None,
    tools: Mapping[str, Tool] | Sequence[Tool] = (),
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    generator: AnyGenerator = embedded_generator,
    kl_fn: KLFn = kl.k3,
) -> Rollout:
    """Sample one rollout, graded by `reward_fn`; with `ref_model`, `kl_divergence` is the mean over its tokens.

    A `tool_parser` alone parses calls; with `tools` or a `tool_executor` they are executed. A `Sample` as prompt
    provides the reference answer for the reward, and its images or audio.
    """
    executes = bool(tools) or tool_executor is not None
    if not executes and tool_parser is None:
        return create_batch_rollouts(
            model,
            tokenizer,
            [prompt],
            gen_config,
            ref_model=ref_model,
            reward_fn=reward_fn,
            generator=generator,
            kl_fn=kl_fn,
        )[0]
    return create_multiturn_rollout(
        model,
        tokenizer,
        prompt,
        gen_config,
        tools=tools,
        tool_parser=tool_parser,
        tool_executor=tool_executor,
        max_turns=8 if executes else 1,
        ref_model=ref_model,
        reward_fn=reward_fn,
        generator=generator,
        kl_fn=kl_fn,
    )


def create_batch_rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | Sample],
    gen_config: GenerationConfig,
    *,
    n_samples_per_prompt: int = 1,
    ref_model: PreTrainedModel | None = None,
    reward_fn: AnyReward | None = None,
    generator: AnyGenerator = embedded_generator,
    kl_fn: KLFn = kl.k3,
) -> list[Rollout]:
    """Sample `n_samples_per_prompt` rollouts of each prompt, in prompt order; `group` is the prompt's number."""
    samples = [_sample(prompt, number) for number, prompt in enumerate(prompts)]
    rendered = [
        _rendered_prompt(tokenizer, sample if sample.media else prompt, tokenizer_template, chat=True)
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    opened = [Renderer(tokenizer).opened(each.ids) for each in rendered]
    pending = [
        Rollout(sample, group=number, index=index)
        for number, sample in enumerate(samples)
        for index in range(n_samples_per_prompt)
    ]
    sampled = _completed(generator, model, tokenizer, [rendered[rollout.group] for rollout in pending], gen_config)
    generations = [
        generation._replace(opened=opened[rollout.group]) for rollout, generation in zip(pending, sampled, strict=True)
    ]
    rollouts = [
        replace(
            rollout,
            turns=(Turn(tuple(rendered[rollout.group].ids), generation, (Message("assistant", generation.text),)),),
        )
        for rollout, generation in zip(pending, generations, strict=True)
    ]
    return _finished(rollouts, model, ref_model, reward_fn, kl_fn)


def create_multiturn_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Prompt | Sample,
    gen_config: GenerationConfig,
    *,
    tools: Mapping[str, Tool] | Sequence[Tool] = (),
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    tool_tracker: ToolTracker = count_tool_calls,
    stop_condition: StopCondition = never,
    max_turns: int = 8,
    ref_model: PreTrainedModel | None = None,
    reward_fn: AnyReward | None = None,
    generator: AnyGenerator = embedded_generator,
    kl_fn: KLFn = kl.k3,
    env: EnvFn | None = None,
) -> Rollout:
    """Run one episode: with tools, or in another `env`, until it ends or `stop_condition` holds."""
    environment = env or with_tools(
        tools,
        max_turns=max_turns,
        tool_parser=tool_parser,
        tool_executor=tool_executor,
        tool_tracker=tool_tracker,
        stop_condition=stop_condition,
    )
    engine = generator if _is_engine(generator) else _FunctionGenerator(model, tokenizer, cast("GenerateFn", generator))
    sample = _sample(conversation, 0)
    rollout = run_blocking(_run_episode, environment, sample, Renderer(tokenizer), engine, gen_config)
    return _finished([rollout], model, ref_model, reward_fn, kl_fn)[0]


class _FunctionGenerator:
    """Adapter from a generate function to a `Generator`, one request at a time."""

    version = 0

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, function: GenerateFn) -> None:
        self.model, self.tokenizer, self.function = model, tokenizer, function

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        generations: list[Generation] = []
        for request in requests:
            config = sampling._replace(seed=request.seed)
            function = _with_media(self.function, [request.media])
            generations += await called(function, self.model, self.tokenizer, [request.tokens], config)
        return generations

    async def abort(self) -> None: ...

    async def update_weights(self, weights: Weights) -> None: ...

    async def close(self) -> None: ...


async def _run_episode(
    env: EnvFn, sample: Sample, render: Renderer, generator: Generator, sampling: GenerationConfig
) -> Rollout:
    client = GeneratorClient(generator, render, sampling, sampling.seed, pauses=(), media=sample.media)
    episode = await env(sample, client)
    return Rollout(
        sample,
        episode.turns,
        score=episode.score,
        metadata=dict(episode.metadata),
        prompt_messages=episode.prompt_messages,
    )


def _finished(
    rollouts: Sequence[Rollout],
    model: PreTrainedModel,
    ref_model: PreTrainedModel | None,
    reward_fn: AnyReward | None,
    kl_fn: KLFn,
) -> list[Rollout]:
    if ref_model is not None:
        rollouts = [replace(each, kl_divergence=_mean_kl(each, model, ref_model, kl_fn)) for each in rollouts]
    if reward_fn is None:
        return list(rollouts)
    return [graded for group in group_rollouts(rollouts) for graded in run_blocking(grade, group, reward_fn)]


def _mean_kl(rollout: Rollout, model: PreTrainedModel, ref_model: PreTrainedModel, kl_fn: KLFn) -> float:
    """Return the mean over all sampled tokens, each turn in its own context, at temperature 1."""
    import torch

    from oxrl.primitives.algorithms import get_reference_logprobs, kl_of

    rows = []
    for turn in rollout.turns:
        tokens = [*turn.prompt_ids, *turn.generation.token_ids]
        mask = np.arange(len(tokens)) >= len(turn.prompt_ids)
        media, allowed = turn.media or rollout.sample.media, turn.generation.allowed_tokens
        rows.append(Row(rollout.id, np.array(tokens), mask, media=media, allowed_tokens=allowed))
    was_training = model.training, ref_model.training
    own, ref = (torch.cat(get_reference_logprobs(each, rows)) for each in (model, ref_model))
    model.train(was_training[0])
    ref_model.train(was_training[1])
    return float(kl_of(own, ref, kl_fn).mean())


def _messages(chat: Chat) -> tuple[Message, ...]:
    given = chat.messages if isinstance(chat, Conversation) else chat
    return tuple(each if isinstance(each, Message) else Message.from_dict(each) for each in given)


def _sample(prompt: Any, number: int) -> Sample:
    if isinstance(prompt, Sample):
        return prompt
    if isinstance(prompt, str):
        return Sample(f"prompt:{number}", messages=(Message("user", prompt),))
    messages, media = ((), ()) if _are_ids(prompt) else _media_taken(_messages(prompt))
    return Sample(f"prompt:{number}", messages=messages, media=media)


def _media_taken(
    messages: Sequence[Message], media: Sequence[Media] = ()
) -> tuple[tuple[Message, ...], tuple[Media, ...]]:
    """Return the messages with bare parts for their media, and these media with those given beside the messages."""
    return take_media([each._replace(content=checked_content(each.content)) for each in messages], media)


def _rendered_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, template_fn: TemplateFn, *, chat: bool = False
) -> _RenderedPrompt:
    """Return a prompt as token ids; with `chat`, a text is a user message if there is a chat template."""
    media: tuple[Media, ...] = ()
    if isinstance(prompt, Sample):
        prompt, media = prompt.messages, prompt.media
    if isinstance(prompt, str):
        if not (chat and tokenizer.chat_template):
            return _RenderedPrompt(_ids(tokenizer, prompt))
        prompt = [Message("user", prompt)]
    if _are_ids(prompt):
        return _RenderedPrompt([int(token) for token in prompt])
    return _rendered_chat(tokenizer, _messages(prompt), template_fn, media)


def _rendered_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_fn: TemplateFn,
    media: Sequence[Media] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> _RenderedPrompt:
    placed, found = _media_taken(messages, media)
    text = apply_chat_template(tokenizer, placed, tools=tools, template_fn=template_fn)
    return _RenderedPrompt(_ids(tokenizer, Renderer(tokenizer).expanded(text, found, "the prompt")), found)


def _are_ids(prompt: Any) -> bool:
    return not isinstance(prompt, Conversation) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise with the beginning-of-text token of the tokenizer, unless the text starts with it."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return ids
