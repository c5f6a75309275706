"""Inference and rollouts as plain functions for scripts and notebooks, every one with extension points.

Each function takes a model and a tokenizer, blocks, and returns records. Sampling, chat template and tool parser are
replaced by passing another function. Training uses the same functions through `collect`, which samples many prompts
concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np

from oxrl.algorithms import kl
from oxrl.algorithms.kl import KLFn
from oxrl.concurrency import run_blocking
from oxrl.data.render import Renderer
from oxrl.data.template import apply_template
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rollouts.batches import group_rollouts
from oxrl.rollouts.envs import GeneratorClient, StopCondition, assistant_message, never, with_tools
from oxrl.rollouts.tools import (
    Tool,
    ToolExecutor,
    ToolParser,
    ToolTracker,
    called,
    count_tool_calls,
    extract_tool_calls,
    tool_parser_for,
)
from oxrl.rollouts.transcript import begin
from oxrl.types import (
    Conversation,
    EnvFn,
    Generation,
    GenerationConfig,
    Generator,
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
"""A text to continue, a chat, or token ids."""
GenerateFn: TypeAlias = Callable[
    ["PreTrainedModel", "PreTrainedTokenizerBase", Sequence[Sequence[int]], GenerationConfig], list[Generation]
]
"""(model, tokenizer, token ids of each prompt, config) -> one generation per prompt."""
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
) -> list[Generation]:
    """Sample from the model in this process."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    if isinstance(model, str):
        raise ValueError(f"the model is the text {model!r}; load it: load_model({model!r})")
    return EmbeddedGenerator(model, tokenizer).complete(prompts, config)


def _is_engine(generator: AnyGenerator) -> TypeGuard[Generator]:
    return hasattr(generator, "generate")


def _completed(
    generator: AnyGenerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
) -> list[Generation]:
    """Return one generation per prompt, by a function or by an engine; the seed of a prompt is its index."""
    if _is_engine(generator):
        requests = [Request(tuple(prompt), seed=index) for index, prompt in enumerate(prompts)]
        return run_blocking(generator.generate, requests, config)
    return cast("GenerateFn", generator)(model, tokenizer, prompts, config)


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
    ids = [_prompt_ids(tokenizer, prompt, template_fn) for prompt in prompts]
    return _completed(generator, model, tokenizer, ids, config)


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
    ids = _prompt_ids(tokenizer, prompt, template_fn)
    (generation,) = _completed(generator, model, tokenizer, [ids], config)
    return generation, logprob_extractor(model, ids, generation)


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
    ids = _ids(tokenizer, apply_chat_template(tokenizer, given, tools=tools, template_fn=template_fn))
    (generation,) = _completed(generator, model, tokenizer, [ids], config)
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
    provides the reference answer for the reward.
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
    pending = [
        Rollout(_sample(prompt, number), group=number, index=index)
        for number, prompt in enumerate(prompts)
        for index in range(n_samples_per_prompt)
    ]
    ids = [_prompt_ids(tokenizer, prompt, tokenizer_template, chat=True) for prompt in prompts]
    opened = [Renderer(tokenizer).opened(each) for each in ids]
    prompt_ids_of = [ids[rollout.group] for rollout in pending]
    sampled = _completed(generator, model, tokenizer, prompt_ids_of, gen_config)
    generations = [
        generation._replace(opened=opened[rollout.group]) for rollout, generation in zip(pending, sampled, strict=True)
    ]
    rollouts = [
        replace(rollout, turns=(Turn(tuple(prompt_ids), generation, (Message("assistant", generation.text),)),))
        for rollout, prompt_ids, generation in zip(pending, prompt_ids_of, generations, strict=True)
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
            generations += await called(self.function, self.model, self.tokenizer, [request.tokens], config)
        return generations

    async def abort(self) -> None: ...

    async def update_weights(self, weights: Weights) -> None: ...

    async def close(self) -> None: ...


async def _run_episode(
    env: EnvFn, sample: Sample, render: Renderer, generator: Generator, sampling: GenerationConfig
) -> Rollout:
    episode = await env(sample, GeneratorClient(generator, render, sampling, sampling.seed, pauses=()))
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
        rows.append(Row(rollout.id, np.array(tokens), np.arange(len(tokens)) >= len(turn.prompt_ids)))
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
        if prompt.media:
            raise ValueError(f"sample {prompt.id} has media, and generate functions get token ids only")
        return prompt
    if isinstance(prompt, str):
        return Sample(f"prompt:{number}", messages=(Message("user", prompt),))
    return Sample(f"prompt:{number}", messages=() if _are_ids(prompt) else _messages(prompt))


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, template_fn: TemplateFn, *, chat: bool = False
) -> list[int]:
    """Return the token ids of a prompt; with `chat`, a text is a user message if there is a chat template."""
    if isinstance(prompt, Sample):
        prompt = prompt.messages
    if isinstance(prompt, str):
        if not (chat and tokenizer.chat_template):
            return _ids(tokenizer, prompt)
        prompt = [Message("user", prompt)]
    if _are_ids(prompt):
        return [int(token) for token in prompt]
    return _ids(tokenizer, apply_chat_template(tokenizer, prompt, template_fn=template_fn))


def _are_ids(prompt: Any) -> bool:
    return not isinstance(prompt, Conversation) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise with the beginning-of-text token of the tokenizer, unless the text starts with it."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return ids
