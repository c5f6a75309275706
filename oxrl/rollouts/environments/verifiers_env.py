"""`verifiers:NAME`: an environment of the verifiers library, with its rows, its rollout and its rewards.

The library calls the model as an OpenAI client; each episode has a recording endpoint of its own, which generates with
the policy of the episode and keeps the sampled tokens. A reward function that raises would count as 0 there: here its
error leaves the episode ungraded. Rewards that compare the completions of a group are refused.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from oxrl.names import error_text, import_object
from oxrl.rollouts.endpoint import recording_endpoint
from oxrl.rollouts.environments.table import HELD_OUT_SEED, Settings
from oxrl.rollouts.envs import GeneratorClient
from oxrl.rollouts.episode import EpisodeError
from oxrl.types import EnvFn, Episode, Message, PolicyClient, Sample, Score

_KEY = "verifiers"  # of a sample's metadata: the row as the library has it
_ID = "episode"
_FAILED: ContextVar[list[str] | None] = ContextVar("failed reward functions of this episode", default=None)


def open_verifiers(name: str, settings: Settings) -> EnvFn:
    environment = _loaded(name, settings)

    async def env(sample: Sample, policy: PolicyClient) -> Episode:
        if _KEY not in sample.metadata:
            raise EpisodeError(f"{sample.id} is no row of verifiers:{name}: leave the data section out")
        assert isinstance(policy, GeneratorClient), "an episode of a run has one"
        endpoint = recording_endpoint(policy.generator, policy.render, policy.sampling, policy=policy)
        async with endpoint as recorded, _client(recorded.base_url(_ID)) as client:
            state = await environment.rollout(dict(sample.metadata[_KEY]), client, "oxrl", {})
            turns = recorded.rollout(_ID, sample).turns if _ID in recorded.ids else ()
        if turns and turns[-1].generation.finish_reason == "aborted":
            return Episode(turns, metadata={"ended": "aborted"})
        ended = str(state.get("stop_condition") or "")
        if _is_empty_completion(state):
            ended = "empty" if turns[-1].generation.token_ids else "length"
            turns = turns if ended == "empty" else turns[:-1]
        elif state["error"] is not None:
            raise EpisodeError(f"verifiers:{name} failed: {_root_cause(state['error'])}")
        score = await _scored(environment, state, name)
        return Episode(turns, score, {"ended": ended}, tuple(map(Message.from_dict, state["prompt"])))

    return env


def verifiers_rows(name: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    """The environment's own rows: those for training, or, from `HELD_OUT_SEED`, those for evaluation."""
    environment = _loaded(name, settings)
    held_out = seed == HELD_OUT_SEED
    if held_out and environment.eval_dataset is None and environment.eval_dataset_source is None:
        raise ValueError(f"verifiers:{name} has no rows for evaluation: set data.env_val_rows to 0")
    rows = environment.get_eval_dataset(size) if held_out else environment.get_dataset(size)
    return [_sample(name, "eval" if held_out else "train", number, row) for number, row in enumerate(rows)]


def _sample(name: str, split: str, number: int, row: Mapping[str, Any]) -> Sample:
    try:
        plain = json.loads(json.dumps(row))
    except TypeError as error:
        raise ValueError(f"row {number} of verifiers:{name} cannot be written as JSON: {error}") from error
    plain["prompt"] = [Message.from_dict(message).to_dict() for message in plain["prompt"]]
    messages = tuple(map(Message.from_dict, plain["prompt"]))
    return Sample(f"{name}:{split}:{number}", messages, answer=plain.get("answer"), metadata={_KEY: plain})


def _loaded(name: str, settings: Settings) -> Any:
    return _load(name, json.dumps(settings.args, sort_keys=True), settings.max_turns)


@functools.lru_cache(maxsize=8)
def _load(name: str, arguments: str, max_turns: int) -> Any:
    with _signal_handlers_kept():
        load: Callable[..., Any]
        if name.endswith(".py"):
            load = import_object(f"{name}:load_environment")
        else:
            load = functools.partial(import_module("verifiers").load_environment, name)
        try:
            environment = load(**json.loads(arguments))
        except Exception as error:  # an environment may raise anything
            raise ValueError(f"rollout.env: verifiers:{name} cannot be loaded: {error_text(error)}") from error
    if environment.message_type != "chat":
        raise ValueError(f"verifiers:{name} is of the type {environment.message_type!r}; only chats are supported")
    for each in (environment, *getattr(environment, "envs", ())):
        _limit_turns(each, max_turns)
    for rubric in _rubrics(environment.rubric):
        if compared := [each.__name__ for each in rubric.funcs if rubric._is_group_func(each)]:
            raise ValueError(f"{compared[0]} of verifiers:{name} compares the completions of a group: not supported")
        rubric.funcs = [_noting_errors(each) for each in rubric.funcs]
    return environment


def _limit_turns(environment: Any, most: int) -> None:
    """The lower of the two bounds; the library's default is none."""
    own = getattr(environment, "max_turns", None)
    if isinstance(own, int):
        environment.max_turns = min(own, most) if own > 0 else most


def _is_empty_completion(state: Any) -> bool:
    """Whether a completion without text ended the episode after earlier turns, which is an error in the library."""
    return type(state["error"]).__name__ == "EmptyModelResponseError" and bool(state["trajectory"])


def _rubrics(rubric: Any) -> list[Any]:
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [each for one in inner for each in _rubrics(one)]


def _noting_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function, which notes what it raises; its signature decides what it is called with."""

    @functools.wraps(function)
    async def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await value if hasattr(value, "__await__") else value
        except Exception as error:
            if (failed := _FAILED.get()) is not None:
                failed.append(f"{function.__name__}: {error_text(error)}")
            raise

    return noted


async def _scored(environment: Any, state: Any, name: str) -> Score:
    failed: list[str] = []
    token = _FAILED.set(failed)
    try:
        await environment.rubric.score_group([state])
    finally:
        _FAILED.reset(token)
    if failed:
        raise EpisodeError(f"a reward of verifiers:{name} failed, {failed[0]}")
    return Score(float(state["reward"]), {key: float(value) for key, value in (state["metrics"] or {}).items()})


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return error_text(error)


def _client(url: str) -> Any:
    openai = import_module("openai")
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The library installs its own handlers of interrupts, which would end a run without a checkpoint."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
