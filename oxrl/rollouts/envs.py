"""A sample and a model to talk to become an episode: one answer, tools, a dialogue, or the steps of a game.

An environment is an async function of (sample, talk). The next prompt is always what was seen and sampled so far, and
more (see `transcript`). A generation that was cut off or aborted ends the episode: nothing in it is acted upon.
Scores are given here by game environments only; grading is left to rewards.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio

from oxrl.rollouts.tools import (
    Tool,
    ToolCall,
    ToolExecutor,
    ToolParser,
    ToolResult,
    ToolTracker,
    by_name,
    called,
    count_tool_calls,
    execute_functions,
    execute_with,
    extract_tool_calls,
    parse_tools,
    tool_parser_for,
    tool_schema,
)
from oxrl.rollouts.transcript import Transcript, begin, tell_tools
from oxrl.seeds import mixed_seed
from oxrl.types import (
    Conversation,
    EnvFn,
    Episode,
    Generation,
    GenerationConfig,
    Generator,
    Message,
    PolicyClient,
    Render,
    Request,
    Sample,
    Score,
    Turn,
)

StopCondition: TypeAlias = Callable[[Conversation], bool]
ReplyFn: TypeAlias = Callable[[Conversation], Any]
"""The conversation so far to what the user says: a text, a message, several, or None to end it; at once or awaited."""

PAUSES = (0.1, 0.2, 0.4)  # seconds, before a failed generation is tried again


class _Recording:
    """What was said before, given out again as long as it answers the same prompts."""

    def __init__(self, recorded: Sequence[Turn]) -> None:
        self._left = list(recorded)

    def next(self, prompt_ids: Sequence[int]) -> Generation | None:
        if self._left and self._left[0].prompt_ids == tuple(prompt_ids):
            return self._left.pop(0).generation
        self._left.clear()
        return None


class GeneratorClient:
    """`GeneratorClient(generator, render, sampling, seed=7)`: the `PolicyClient` of one rollout.

    With `recorded` turns, what was said before is not sampled again, and a generation that was aborted goes on where
    it was. The seed of a turn is a function of `seed` and the turn's number. A generation that fails is tried again
    after each of `pauses` (seconds).
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
    ) -> None:
        self.generator, self.sampling, self.seed, self.pauses = generator, sampling, seed, pauses
        self._render = render
        self._recording = _Recording(recorded)
        self.turns = 0
        self.prompt_tokens = 0  # of what was asked of the generator
        self.sampled_tokens = 0  # of what it drew; what was recorded before does not count

    @property
    def render(self) -> Render:
        return self._render

    async def say(self, prompt_ids: Sequence[int]) -> Generation:
        number, self.turns = self.turns, self.turns + 1
        known = self._recording.next(prompt_ids)
        if known is not None and known.finish_reason != "aborted":
            return known
        begun = known if known is not None and known.token_ids else None
        request = Request(tuple(prompt_ids), mixed_seed(self.seed, number), begun)
        generation = await self._with_retries(request)
        self.prompt_tokens += len(request.tokens)
        self.sampled_tokens += len(generation.token_ids) - (len(begun.token_ids) if begun else 0)
        return generation

    async def _with_retries(self, request: Request) -> Generation:
        for pause in self.pauses:
            with suppress(RuntimeError, OSError):
                return await self._generate(request)
            await anyio.sleep(pause)
        return await self._generate(request)

    async def _generate(self, request: Request) -> Generation:
        (generation,) = await self.generator.generate([request], self.sampling)
        return generation


class _Replaying:
    """Any `PolicyClient` behind a recording; it has no way to go on with an aborted generation, which is said anew."""

    def __init__(self, talk: PolicyClient, recorded: Sequence[Turn]) -> None:
        self._talk, self._recording = talk, _Recording(recorded)

    @property
    def render(self) -> Render:
        return self._talk.render

    async def say(self, prompt_ids: Sequence[int]) -> Generation:
        known = self._recording.next(prompt_ids)
        return await self._talk.say(prompt_ids) if known is None or known.finish_reason == "aborted" else known


def replaying(talk: PolicyClient, recorded: Sequence[Turn]) -> PolicyClient:
    """Replay recorded turns, then sample; a `GeneratorClient` also continues an aborted generation."""
    if isinstance(talk, GeneratorClient):
        return GeneratorClient(talk.generator, talk.render, talk.sampling, talk.seed, recorded, pauses=talk.pauses)
    return _Replaying(talk, recorded)


async def single_turn(sample: Sample, talk: PolicyClient) -> Episode:
    """One answer."""
    prompt_ids = begin(talk.render, _asked(sample), tools=sample.tools).prompt_ids
    generation = await talk.say(prompt_ids)
    return Episode((Turn(prompt_ids, generation, (Message("assistant", generation.text),)),))


class _Reaction(NamedTuple):
    """How an environment takes what was said: as which message, what it answers, and, if that was all, why."""

    said: Message
    answers: Sequence[Message] = ()
    ended: str = ""


ReactFn: TypeAlias = Callable[[str, Transcript, bool], Awaitable[_Reaction]]
"""(what was said, the conversation before it, whether it was the last turn)."""


async def _converse(transcript: Transcript, talk: PolicyClient, react: ReactFn, max_turns: int) -> Episode:
    turns: list[Turn] = []
    for left in reversed(range(max_turns)):
        generation = await talk.say(transcript.prompt_ids)
        if generation.finish_reason == "stop":
            reaction = await react(transcript.said(generation), transcript, left == 0)
        else:
            reaction = _Reaction(Message("assistant", generation.text), ended=generation.finish_reason)
        turns.append(Turn(transcript.prompt_ids, generation, (reaction.said, *reaction.answers)))
        if reaction.ended:
            break
        transcript = transcript.go_on(generation, reaction.said, reaction.answers)
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
    """The model may call functions, sees what they return, and is done when it calls none.

    `tool_parser` is the one of the chat template unless given; a `tool_executor` of one's own keeps its own
    `time_limit` (seconds per call). `stop_condition` is asked after what the model said and after the results; calls
    in the last of `max_turns` are not executed. Where the template does not write tools, a system message tells of
    them, and if it has no role for tools, results come from the user. A sample's own `tools` are told instead.
    """
    _at_least_one(max_turns, "max_turns")
    known = by_name(tools)
    schemas = [tool_schema(tool, name) for name, tool in known.items()]
    executor = tool_executor or partial(execute_functions, time_limit=time_limit)

    async def env(sample: Sample, talk: PolicyClient) -> Episode:
        told = tell_tools(talk.render, _asked(sample), sample.tools or schemas)
        parse = tool_parser or (tool_parser_for(talk.render) if told.by_template else parse_tools)
        all_results: list[ToolResult] = []

        async def react(words: str, before: Transcript, last: bool) -> _Reaction:
            calls = extract_tool_calls(words, parse)
            said = said_message(words, calls, before)
            if stop_condition(Conversation((*before.messages, said))):
                return _Reaction(said, ended="stop_condition")
            if not calls or last:
                return _Reaction(said, ended="max_turns" if calls else "answered")
            results = await execute_with(executor, calls, known)
            all_results.extend(results)
            answers = told.answers([result.to_message() for result in results])
            done = stop_condition(Conversation((*before.messages, said, *answers)))
            return _Reaction(said, answers, "stop_condition" if done else "")

        episode = await _converse(begin(talk.render, told.messages, tools=told.tools), talk, react, max_turns)
        return episode._replace(metadata={**tool_tracker(all_results), **episode.metadata})

    return env


def said_message(words: str, calls: Sequence[ToolCall], before: Transcript) -> Message:
    """What was said as a message: readable calls apart from the text around them, others left in it."""
    readable = [call for call in calls if call.error is None]
    for call in readable:
        words = words.replace(call.written, "")
    extra = {"tool_calls": [call.to_dict() for call in readable]} if readable else {}
    return Message("assistant", before.plain(words).strip() if readable else before.plain(words), extra)


def dialogue(reply: ReplyFn, *, max_turns: int = 8, stop_condition: StopCondition = never) -> EnvFn:
    """The model and a user in turn; the user is the function `reply`, and leaves by answering None.

    `stop_condition` is asked after each of them. A turn that was cut off ends it too: nobody answers half a sentence.
    """
    _at_least_one(max_turns, "max_turns")

    async def react(words: str, before: Transcript, last: bool) -> _Reaction:
        said = Message("assistant", before.plain(words))
        conversation = Conversation((*before.messages, said))
        if stop_condition(conversation):
            return _Reaction(said, ended="stop_condition")
        if last:
            return _Reaction(said, ended="max_turns")
        answers = _as_messages(await called(reply, conversation))
        if not answers:
            return _Reaction(said, ended="user left")
        done = stop_condition(Conversation((*conversation.messages, *answers)))
        return _Reaction(said, answers, "stop_condition" if done else "")

    async def env(sample: Sample, talk: PolicyClient) -> Episode:
        return await _converse(begin(talk.render, _asked(sample), tools=sample.tools), talk, react, max_turns)

    return env


def _as_messages(replied: Any) -> list[Message]:
    if replied is None:
        return []
    if isinstance(replied, str):
        return [Message("user", replied)]
    return [replied] if isinstance(replied, Message) else list(replied)


def gym_env(
    make_env: Callable[[Sample], Any],
    *,
    to_text: Callable[[Any], str] = str,
    to_action: Callable[[str], Any] = str,
    max_steps: int = 32,
    illegal_reward: float = 0.0,
) -> EnvFn:
    """The steps of an object with Gymnasium's `reset` and `step`; rewards are scored per turn.

    All answers to one sample begin in the same state: `reset` gets `sample.metadata["seed"]`, or a number made from
    the sample's id. Observations become user messages by `to_text`. What `to_action` refuses with a ValueError is told
    to the model and costs a step with `illegal_reward`. The score is the game's: a reward function is not asked. A turn
    that was cut off ends the episode without a step: leave room in `max_new_tokens`, or give a stop text.
    """
    _at_least_one(max_steps, "max_steps")

    async def env(sample: Sample, talk: PolicyClient) -> Episode:
        game = await called(make_env, sample)
        rewards: list[float] = []

        async def react(words: str, before: Transcript, last: bool) -> _Reaction:
            said = Message("assistant", before.plain(words))
            try:
                action = to_action(str(said.content))
            except ValueError as error:
                rewards.append(illegal_reward)
                return _Reaction(said, (Message("user", str(error)),), "max_steps" if last else "")
            observation, reward, terminated, truncated, _ = await called(game.step, action)
            rewards.append(float(reward))
            over = "terminated" if terminated else "truncated" if truncated else "max_steps" if last else ""
            return _Reaction(said, (Message("user", to_text(observation)),), over)

        try:
            seed = sample.metadata.get("seed", zlib.crc32(sample.id.encode()))
            observation, _ = await called(game.reset, seed=seed)
            first = to_text(observation)
            episode = await _converse(begin(talk.render, _with_user(sample.messages, first)), talk, react, max_steps)
        finally:
            if hasattr(game, "close"):
                game.close()
        metadata = {**episode.metadata, "first_observation": first}
        if episode.metadata["ended"] == "aborted":
            return episode._replace(metadata=metadata)
        per_turn = (*rewards, *[0.0] * (len(episode.turns) - len(rewards)))  # what was cut off moved nothing
        return Episode(episode.turns, Score(sum(per_turn), per_turn=per_turn), metadata)

    return env


def _with_user(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Many templates want roles in turn, so that a user's last message is continued."""
    if messages and messages[-1].role == "user" and isinstance(messages[-1].content, str):
        return (*messages[:-1], messages[-1]._replace(content=f"{messages[-1].content}\n\n{text}"))
    return (*messages, Message("user", text))


def _asked(sample: Sample) -> tuple[Message, ...]:
    if not sample.messages:
        raise ValueError(f"{sample.id}: there is nothing to answer; a sample to roll out needs messages")
    return sample.messages


def _at_least_one(count: int, name: str) -> None:
    if count < 1:
        raise ValueError(f"{name} is {count}; give 1 or more")
