"""Environments: a sample and a policy to an episode of one turn, tool calls, a dialogue, or the steps of a game.

An environment is an async function of (sample, policy). Each prompt extends the previous prompt and generation (see
`transcript`). A truncated or aborted generation ends the episode: its tool calls and actions are not executed. Only
game environments compute scores; otherwise grading is left to rewards.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio

from oxrl.data.actions import ActionCodec
from oxrl.data.parts import Content, take_media
from oxrl.names import error_text
from oxrl.rollouts.episode import EpisodeError, EpisodeTime
from oxrl.rollouts.game import AnswerReader, Game, call_environment
from oxrl.rollouts.tool_calls import ToolCall, ToolParser, extract_tool_calls, parse_tools, tool_parser_for
from oxrl.rollouts.tools import (
    Tool,
    ToolExecutor,
    ToolResult,
    ToolTracker,
    by_name,
    called,
    count_tool_calls,
    execute_functions,
    execute_with,
    tool_schema,
)
from oxrl.rollouts.transcript import Transcript, begin, opened_by, tool_prompt
from oxrl.seeds import mixed_seed
from oxrl.types import (
    Conversation,
    EnvFn,
    Episode,
    Generation,
    GenerationConfig,
    Generator,
    Media,
    Message,
    PolicyClient,
    Render,
    Request,
    Sample,
    Score,
    Turn,
)

StopCondition: TypeAlias = Callable[[Conversation], bool]
ReplyFn: TypeAlias = Callable[..., Any]
"""The conversation so far, and the sample if it takes two arguments -> the user's reply: a text, a message, several, or
None to end it; sync or async."""

PAUSES = (0.1, 0.2, 0.4)  # seconds before each retry of a failed generation


class _Recording:
    """Recorded generations, replayed as long as the prompts are the same."""

    def __init__(self, recorded: Sequence[Turn]) -> None:
        self._remaining = list(recorded)

    def next(self, prompt_ids: Sequence[int]) -> Generation | None:
        if self._remaining and self._remaining[0].prompt_ids == tuple(prompt_ids):
            return self._remaining.pop(0).generation
        self._remaining.clear()
        return None


class GeneratorClient:
    """`GeneratorClient(generator, render, sampling, seed=7)`: the `PolicyClient` of one rollout.

    `recorded` turns are replayed instead of sampled again, and an aborted generation is resumed. The seed of a turn is
    a function of `seed` and the turn's number. A failed generation is retried after each of `pauses` (seconds). A
    request carries `media`, by default those of the sample. Prompt and generation together have at most `max_tokens`:
    without room a generation is empty, with the finish reason "length". More than `max_turns` generations are an
    EpisodeError. `time` is paused while the model generates.
    """

    def __init__(
        self,
        generator: Generator,
        render: Render,
        sampling: GenerationConfig,
        seed: int,
        recorded: Sequence[Turn] = (),
        *,
        pauses: Sequence[float] = PAUSES,
        media: tuple[Media, ...] = (),
        max_tokens: int | None = None,
        max_turns: int | None = None,
        time: EpisodeTime | None = None,
    ) -> None:
        self.generator, self.sampling, self.seed, self.pauses = generator, sampling, seed, pauses
        self.media, self.max_tokens, self.max_turns, self.time = media, max_tokens, max_turns, time or EpisodeTime()
        self._render = render
        self._recording = _Recording(recorded)
        self.turns = 0
        self.prompt_tokens = 0  # sent to the generator
        self.sampled_tokens = 0  # without replayed ones

    @property
    def render(self) -> Render:
        return self._render

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: GenerationConfig | None = None,
        *,
        media: Sequence[Media] | None = None,
        allowed_tokens: Sequence[int] = (),
    ) -> Generation:
        """Generate with `sampling`, by default the client's; `media` are by default those of the sample."""
        limited = self._within_limit(sampling or self.sampling, len(prompt_ids))
        if allowed_tokens:
            limited = limited._replace(allowed_tokens=tuple(allowed_tokens))
        with self.time.paused():
            return await self._next(prompt_ids, limited, self.media if media is None else tuple(media))

    def _within_limit(self, sampling: GenerationConfig, prompt: int) -> GenerationConfig:
        room = sampling.max_new_tokens if self.max_tokens is None else self.max_tokens - prompt
        return sampling._replace(max_new_tokens=min(room, sampling.max_new_tokens))

    async def _next(
        self, prompt_ids: Sequence[int], sampling: GenerationConfig, media: tuple[Media, ...]
    ) -> Generation:
        number, self.turns = self.turns, self.turns + 1
        if self.max_turns is not None and number >= self.max_turns:
            raise EpisodeError(
                f"the environment asked for more than {self.max_turns} generations in an episode: raise "
                "rollout.max_turns, or end the episode earlier"
            )
        known = self._recording.next(prompt_ids)
        opened = opened_by(self._render, prompt_ids)
        if known is not None and known.finish_reason != "aborted":
            return known._replace(opened=opened)
        if sampling.max_new_tokens < 1:
            return Generation((), (), "length", self.generator.version, opened=opened)
        partial_generation = known if known is not None and known.token_ids else None
        request = Request(tuple(prompt_ids), mixed_seed(self.seed, number), partial_generation, media)
        generation = await self._with_retries(request, sampling)
        if generation.token_ids and generation.allowed_tokens != sampling.allowed_tokens:
            raise ValueError(
                f"{type(self.generator).__name__} does not report the allowed_tokens that it was given: it must sample "
                "only these, normalise log-probs over them, and set Generation.allowed_tokens"
            )
        self.prompt_tokens += len(request.tokens)
        resumed = len(partial_generation.token_ids) if partial_generation else 0
        self.sampled_tokens += len(generation.token_ids) - resumed
        return generation._replace(opened=opened)

    async def say(self, prompt_ids: Sequence[int]) -> Generation:
        """Former name of `generate`."""
        warnings.warn("PolicyClient.say is now PolicyClient.generate", DeprecationWarning, stacklevel=2)
        return await self.generate(prompt_ids)

    async def _with_retries(self, request: Request, sampling: GenerationConfig) -> Generation:
        for pause in self.pauses:
            with suppress(RuntimeError, OSError):
                return await self._generate(request, sampling)
            await anyio.sleep(pause)
        return await self._generate(request, sampling)

    async def _generate(self, request: Request, sampling: GenerationConfig) -> Generation:
        (generation,) = await self.generator.generate([request], sampling)
        return generation


async def single_turn(sample: Sample, policy: PolicyClient) -> Episode:
    """One completion of the prompt."""
    start = begin(policy.render, _prompt_of(sample), tools=sample.tools, media=sample.media)
    generation = await _generate(policy, start)
    return Episode((Turn(start.prompt_ids, generation, (Message("assistant", generation.text),), start.media),))


async def _generate(policy: PolicyClient, before: Transcript, allowed_tokens: Sequence[int] = ()) -> Generation:
    """Other implementations of `PolicyClient` may not know media and restrictions."""
    given: dict[str, Any] = {"media": before.media} if before.media else {}
    if allowed_tokens:
        given["allowed_tokens"] = allowed_tokens
    return await policy.generate(before.prompt_ids, **given)


class _Reaction(NamedTuple):
    """Reaction to a generation: its message form, the replies, and why the episode ended, if it did."""

    message: Message
    replies: Sequence[Message] = ()
    ended: str = ""
    unused: int = 0  # last tokens of the generation that had no effect
    restart: Transcript | None = None  # the next prompt, where it does not extend the conversation


ReactFn: TypeAlias = Callable[[Generation, Transcript, bool], Awaitable[_Reaction]]
"""(the generation, the conversation before it, whether it was the last turn) -> the reaction."""


async def _converse(
    transcript: Transcript, policy: PolicyClient, react: ReactFn, max_turns: int, allowed_tokens: Sequence[int] = ()
) -> Episode:
    turns: list[Turn] = []
    for left in reversed(range(max_turns)):
        generation = await _generate(policy, transcript, allowed_tokens)
        if turns and not generation.token_ids and generation.finish_reason == "length":  # no room for another turn
            reaction = _Reaction(Message("assistant", ""), ended="length")
            break
        if generation.finish_reason == "stop":
            reaction = await react(generation, transcript, left == 0)
        else:
            reaction = _Reaction(Message("assistant", generation.text), ended=generation.finish_reason)
        replies, added = take_media(reaction.replies)
        messages = (reaction.message, *replies)
        turns.append(Turn(transcript.prompt_ids, generation, messages, transcript.media, reaction.unused))
        if reaction.ended:
            break
        transcript = reaction.restart or transcript.extend(generation, reaction.message, replies, added)
    return Episode(tuple(turns), metadata={"ended": reaction.ended, "rewritten": transcript.rewritten})


def never(conversation: Conversation) -> bool:  # noqa: ARG001 - the signature of a stop condition
    return False


def with_tools(
    tools: Mapping[str, Tool] | Sequence[Tool],
    *,
    max_turns: int = 8,
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    tool_tracker: ToolTracker = count_tool_calls,
    time_limit: float = 30.0,
    stop_condition: StopCondition = never,
) -> EnvFn:
    """Return an environment with tool calls; the episode ends with the first turn without a call.

    `tool_parser` defaults to the one of the chat template; `time_limit` is in seconds per call, and a custom
    `tool_executor` applies its own. `stop_condition` is checked after each generation and after its results; calls in
    the last of `max_turns` are not executed. If the template does not support tools, a system message describes them;
    if it has no tool role, results are user messages. A sample's `tools` replace the schemas of the functions.
    """
    _at_least_one(max_turns, "max_turns")
    known = by_name(tools)
    schemas = [tool_schema(tool, name) for name, tool in known.items()]
    executor = tool_executor or partial(execute_functions, time_limit=time_limit)

    async def env(sample: Sample, policy: PolicyClient) -> Episode:
        prompt = tool_prompt(policy.render, _prompt_of(sample), sample.tools or schemas, sample.media)
        parse = tool_parser or (tool_parser_for(policy.render) if prompt.by_template else parse_tools)
        all_results: list[ToolResult] = []

        async def react(generation: Generation, before: Transcript, last: bool) -> _Reaction:
            text = before.text_of(generation)
            calls = extract_tool_calls(text, parse)
            message = assistant_message(text, calls, before)
            if stop_condition(Conversation((*before.messages, message))):
                return _Reaction(message, ended="stop_condition")
            if not calls or last:
                return _Reaction(message, ended="max_turns" if calls else "answered")
            results = await execute_with(executor, calls, known)
            all_results.extend(results)
            replies = prompt.results([result.to_message() for result in results])
            done = stop_condition(Conversation((*before.messages, message, *replies)))
            return _Reaction(message, replies, "stop_condition" if done else "")

        start = begin(policy.render, prompt.messages, tools=prompt.tools, media=sample.media)
        episode = await _converse(start, policy, react, max_turns)
        return episode._replace(metadata={**tool_tracker(all_results), **episode.metadata})

    return _named(env, f"with_tools({','.join(known)})", max_turns)


def assistant_message(text: str, calls: Sequence[ToolCall], before: Transcript) -> Message:
    """Return generated text as a message: valid calls in `tool_calls`, malformed ones left in the content."""
    valid = [call for call in calls if call.error is None]
    for call in valid:
        text = text.replace(call.written, "")
    extra = {"tool_calls": [call.to_dict() for call in valid]} if valid else {}
    return Message("assistant", before.plain(text).strip() if valid else before.plain(text), extra)


def dialogue(reply: ReplyFn, *, max_turns: int = 8, stop_condition: StopCondition = never) -> EnvFn:
    """Return an environment in which the model and a simulated user alternate; `reply` returns None to end it.

    `reply` is a function of the conversation, or of (conversation, sample). `stop_condition` is checked after each
    message. A truncated turn ends the dialogue without a reply.
    """
    _at_least_one(max_turns, "max_turns")
    takes_sample = _takes_sample(reply)

    async def react(sample: Sample, generation: Generation, before: Transcript, last: bool) -> _Reaction:
        message = Message("assistant", before.plain(before.text_of(generation)))
        conversation = Conversation((*before.messages, message))
        if stop_condition(conversation):
            return _Reaction(message, ended="stop_condition")
        if last:
            return _Reaction(message, ended="max_turns")
        replies = _as_messages(await called(reply, conversation, *([sample] if takes_sample else [])))
        if not replies:
            return _Reaction(message, ended="user left")
        done = stop_condition(Conversation((*conversation.messages, *replies)))
        return _Reaction(message, replies, "stop_condition" if done else "")

    async def env(sample: Sample, policy: PolicyClient) -> Episode:
        start = begin(policy.render, _prompt_of(sample), tools=sample.tools, media=sample.media)
        return await _converse(start, policy, partial(react, sample), max_turns)

    return _named(env, f"dialogue({_name_of(reply)})", max_turns)


def _takes_sample(reply: ReplyFn) -> bool:
    """Whether `reply` takes (conversation, sample): a second argument without a default, or one called sample."""
    try:
        parameters = list(inspect.signature(reply).parameters.values())
    except ValueError:  # not a Python function
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "sample")


def _named(env: EnvFn, name: str, max_turns: int) -> EnvFn:
    """Set the name of an environment that was built from functions, which the config records, and its bound."""
    env.__qualname__ = name
    env.__dict__["max_turns"] = max_turns
    return env


def own_turns(env: EnvFn) -> int:
    """The bound on turns that an environment was built with; 0 if it has none."""
    own = getattr(env, "max_turns", 0)
    return own if isinstance(own, int) else 0


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _as_messages(replied: Any) -> list[Message]:
    if replied is None:
        return []
    if isinstance(replied, str):
        return [Message("user", replied)]
    return [replied] if isinstance(replied, Message) else list(replied)


def gym_env(
    make_env: Callable[[Sample], Any],
    *,
    to_text: Callable[[Any], Content] = str,
    to_action: Callable[[str], Any] = str,
    max_steps: int = 32,
    illegal_reward: float = 0.0,
    actions: ActionCodec | None = None,
    history: bool = True,
    until_success: bool = False,
) -> EnvFn:
    """Return an environment that runs an object with Gymnasium's `reset` and `step`; rewards are scored per turn.

    All rollouts of one sample start in the same state: `reset` gets `sample.metadata["seed"]`, or a hash of the
    sample's id. Observations become user messages by `to_text`, which returns a text, or parts with images such as
    `[{"type": "image", "image": array}]`; `Rollout.messages` has the first one, too. The text of a ValueError of
    `to_action` is the reply to the model, and the step earns `illegal_reward`. The score is the sum of the game's
    rewards: the reward function is not called. A truncated turn ends the episode without a step: raise
    `max_new_tokens`, or set a stop text.

    With `actions`, only their tokens are sampled, and an answer is all steps of a chunk; `to_action` then gets one
    decoded action. Without `history`, the prompt of a step has the latest observation alone. `until_success` ends the
    episode with the first step whose info reports success (`is_success` or `success`), a part of the score.
    """
    _at_least_one(max_steps, "max_steps")

    async def env(sample: Sample, policy: PolicyClient) -> Episode:
        game = Game(await call_environment(make_env, sample), to_text, illegal_reward, until_success)
        answers = AnswerReader(policy.render, actions, to_action)
        rewards: list[float] = []

        def prompt() -> Transcript:
            return begin(policy.render, with_user(sample.messages, game.shown), media=sample.media)

        async def react(generation: Generation, before: Transcript, last: bool) -> _Reaction:
            answer = answers.read(generation, before)
            outcome = await game.play(answer)
            rewards.append(outcome.reward)
            ended = outcome.ended or ("max_steps" if last else "")
            unused = answers.unused(generation, outcome.taken) if outcome.taken else 0
            restart = None if history or ended else prompt()
            return _Reaction(answer.message, (Message("user", outcome.shown),), ended, unused, restart)

        try:
            await game.reset(sample.metadata.get("seed", zlib.crc32(sample.id.encode())))
            first, start = game.shown, prompt()
            episode = await _converse(start, policy, react, max_steps, answers.allowed_tokens)
        finally:
            game.close()
        answers.check_length(episode.turns[0].generation)
        metadata = {**episode.metadata, "first_observation": Message("user", first).text}
        if episode.metadata["ended"] == "aborted":
            return episode._replace(metadata=metadata, prompt_messages=start.messages)
        per_turn = (*rewards, *[0.0] * (len(episode.turns) - len(rewards)))  # a truncated turn takes no step
        turns = episode.turns if actions is None else tuple(map(_with_action_as_text, episode.turns))
        return Episode(turns, Score(sum(per_turn), game.parts, per_turn), metadata, start.messages)

    return _named(env, f"gym_env({_name_of(make_env)})", max_steps)


def guarded(env: EnvFn) -> EnvFn:
    """The same environment, whose exceptions are errors of their episodes."""

    async def guard(sample: Sample, policy: PolicyClient) -> Episode:
        try:
            value = env(sample, policy)
            return await value if inspect.isawaitable(value) else value
        except (RuntimeError, OSError):  # of the engine, or an `EpisodeError`
            raise
        except Exception as error:
            raise EpisodeError(f"the environment failed: {error_text(error)}") from error

    return _named(guard, str(getattr(env, "__qualname__", type(env).__name__)), own_turns(env))


def _with_action_as_text(turn: Turn) -> Turn:
    """The tokens of actions are no text: what people read of the generation is that of its message."""
    return turn._replace(generation=turn.generation._replace(text=turn.messages[0].text))


def with_user(messages: Sequence[Message], shown: Content) -> tuple[Message, ...]:
    """Append to a user's last message: many templates require alternating roles."""
    if messages and messages[-1].role == "user" and isinstance(messages[-1].content, str):
        if not messages[-1].content:
            return (*messages[:-1], messages[-1]._replace(content=shown))
        before = f"{messages[-1].content}\n\n"
        both = before + shown if isinstance(shown, str) else [{"type": "text", "text": before}, *shown]
        return (*messages[:-1], messages[-1]._replace(content=both))
    return (*messages, Message("user", shown))


def _prompt_of(sample: Sample) -> tuple[Message, ...]:
    if not sample.messages:
        raise ValueError(f"sample {sample.id} has no messages; a rollout needs a prompt")
    return sample.messages


def _at_least_one(count: int, name: str) -> None:
    if count < 1:
        raise ValueError(f"{name} is {count}; give 1 or more")
