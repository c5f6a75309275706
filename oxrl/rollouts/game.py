"""One episode of an environment with Gymnasium's `reset` and `step`, and generations of a model as its actions.

Any exception of an environment is an error of its episode. The conversation around it is `envs.gym_env`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from oxrl.data.actions import ActionCodec, ActionTokens, UndecodableAction
from oxrl.data.parts import Content
from oxrl.data.render import Renderer
from oxrl.names import error_text
from oxrl.rollouts.episode import EpisodeError
from oxrl.rollouts.tools import called
from oxrl.rollouts.transcript import Transcript
from oxrl.types import Generation, Message, Render

_SUCCESS = ("is_success", "success")  # of an info; the first is that of most environments, the second ManiSkill's


class Answer(NamedTuple):
    """The actions of a generation, or why it has none."""

    message: Message
    actions: Sequence[Any] = ()
    error: str = ""


class Outcome(NamedTuple):
    """What the actions of an answer led to: their rewards, what is shown next, how many were taken, how it ended."""

    reward: float
    shown: Content
    taken: int = 0
    ended: str = ""


class AnswerReader:
    """Generations to actions: by `to_action` from their text, or with a codec from their tokens."""

    def __init__(self, render: Render, codec: ActionCodec | None, to_action: Callable[[Any], Any]) -> None:
        self._codec, self._to_action = codec, to_action
        self._render = None if codec is None else _with_codec(render, codec)

    @property
    def allowed_tokens(self) -> tuple[int, ...]:
        """Those of the codec and the end of a turn; () without a codec."""
        return () if self._render is None else self._render.allowed_tokens

    def read(self, generation: Generation, before: Transcript) -> Answer:
        text = before.plain(before.text_of(generation))
        if self._codec is None or self._render is None:
            return self._parsed(Message("assistant", text), [text])
        try:
            decoded = self._codec.decode(generation.token_ids, self._render.tokenizer)
        except UndecodableAction as error:
            return Answer(Message("assistant", text), error=str(error))
        return self._parsed(Message("assistant", self._codec.text(decoded)), list(decoded))

    def _parsed(self, message: Message, actions: Sequence[Any]) -> Answer:
        try:
            with as_episode_error(self._to_action, ValueError):
                return Answer(message, [self._to_action(each) for each in actions])
        except ValueError as error:
            return Answer(message, error=str(error))

    def unused(self, generation: Generation, taken: int) -> int:
        """Last tokens of a chunk whose actions were not taken any more, and those that follow them."""
        codec = self._codec
        if not isinstance(codec, ActionTokens) or codec.chunk <= taken:
            return 0
        return len(generation.token_ids) - taken * codec.size

    def check_length(self, generation: Generation) -> None:
        """Raise a ValueError if an answer was cut off before it could be complete."""
        if self._codec is None or self._render is None or generation.finish_reason != "length":
            return
        needed = self._codec.most_tokens(self._render.tokenizer) + 1
        if 0 < len(generation.token_ids) < needed:
            raise ValueError(
                f"an answer of actions has {needed} tokens with the end of the turn, and was cut off after "
                f"{len(generation.token_ids)}: raise rollout.max_tokens (max_new_tokens) to {needed}, or "
                "data.max_seq_len if the prompt is long"
            )


def _with_codec(render: Render, codec: ActionCodec) -> Renderer:
    if not isinstance(render, Renderer):
        raise ValueError(f"actions need the tokenizer of a Renderer, not a {type(render).__name__}")
    return _renderer_with_codec(render, codec)


@lru_cache(maxsize=8)
def _renderer_with_codec(render: Renderer, codec: ActionCodec) -> Renderer:
    return render if render.actions == codec else replace(render, actions=codec)


class Game:
    """One episode: `await game.reset(seed)`, then `await game.play(actions)` until it reports how it ended."""

    def __init__(
        self, env: Any, to_content: Callable[[Any], Content], illegal_reward: float, until_success: bool
    ) -> None:
        self._env, self._to_content = env, to_content
        self._illegal_reward, self._until_success = illegal_reward, until_success
        self._success: bool | None = None  # not reported
        self.shown: Content = ""  # the latest observation

    @property
    def parts(self) -> Mapping[str, float]:
        """`{"success": 1.0}` if the environment reports success, at any step."""
        return {} if self._success is None else {"success": float(self._success)}

    async def reset(self, seed: int) -> None:
        self._observe(*reset_values(await call_environment(self._env.reset, seed=seed)))

    async def play(self, answer: Answer) -> Outcome:
        """Take the actions of an answer one by one, up to the end of the episode."""
        if answer.error:
            return Outcome(self._illegal_reward, answer.error)
        total, ended, taken = 0.0, "", 0
        for action in answer.actions:
            observation, reward, terminated, truncated, info = step_values(
                await call_environment(self._env.step, action)
            )
            total, taken = total + reward, taken + 1
            success = self._observe(observation, info)
            ended = "terminated" if terminated else "truncated" if truncated else ""
            ended = ended or ("success" if success and self._until_success else "")
            if ended:
                break
        return Outcome(total, self.shown, taken, ended)

    def close(self) -> None:
        close_environment(self._env)

    def _observe(self, observation: Any, info: Any) -> bool:
        with as_episode_error(self._to_content):
            self.shown = self._to_content(observation)
        reported = reported_success(info)
        if reported is not None:
            self._success = reported or bool(self._success)
        return bool(reported)


def close_environment(env: Any) -> None:
    """Other classes than those of gymnasium may have nothing to close."""
    if hasattr(env, "close"):
        env.close()


def reset_values(result: Any) -> tuple[Any, Any]:
    """(observation, info)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise EpisodeError(
            f"the environment's reset returned {_kind_of(result)}; it returns a tuple (observation, info)"
        )
    return result


def step_values(result: Any) -> tuple[Any, float, bool, bool, Any]:
    """(observation, reward, terminated, truncated, info)."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise EpisodeError(
            f"the environment's step returned {_kind_of(result)}; it returns a tuple (observation, reward, terminated, "
            "truncated, info). For the 4 values of the older Gym add the wrapper "
            "oxrl.rollouts.environments.layouts:FourValues"
        )
    observation, reward, terminated, truncated, info = result
    try:
        return observation, float(reward), bool(terminated), bool(truncated), info
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"the environment's step returned the reward {reward!r:.50}; it is a number") from error


def _kind_of(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"one {type(result).__name__}"


def reported_success(info: Any) -> bool | None:
    """What the info of a step reports; None if it reports nothing about success."""
    found = next((info[key] for key in _SUCCESS if key in info), None) if isinstance(info, Mapping) else None
    return None if found is None else bool(found)


async def call_environment(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with as_episode_error(function):
        return await called(function, *args, **kwargs)


@contextmanager
def as_episode_error(function: Callable[..., Any], *expected: type[Exception]) -> Iterator[None]:
    """Any exception of an environment is an error of its episode, unless it is `expected`."""
    try:
        yield
    except EpisodeError:
        raise
    except expected:
        raise
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise EpisodeError(f"the environment failed in {name}: {error_text(error)}") from error
