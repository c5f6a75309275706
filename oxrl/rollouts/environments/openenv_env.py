"""`openenv:URL`: a server with reset and step. One session per episode, with the messages of OpenEnv.

The session is a WebSocket at `/ws`, since a server of OpenEnv forgets its state between two HTTP requests; a server
without `/ws` gets POST requests to `/reset` and `/step` with the `episode_id` in each of them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any

import anyio
import httpx

from oxrl.names import error_text, import_object
from oxrl.rollouts.environments.observations import observation_text
from oxrl.rollouts.environments.table import Settings
from oxrl.rollouts.envs import GeneratorClient, gym_env
from oxrl.rollouts.episode import EpisodeError
from oxrl.types import EnvFn, Episode, Message, PolicyClient, Sample

OWN = ("prompt", "action_key", "observation", "illegal_reward", "sessions")
"""Keys of `rollout.env_args` that are read here; the others are arguments of `reset`."""

_SECONDS = 60.0  # of one answer of the server
_MOST_BYTES = 4 * 2**20  # of one answer
_WITHOUT = ("reward", "done", "metadata")  # fields of an observation that are not shown


def open_openenv(url: str, settings: Settings) -> EnvFn:
    own, arguments = settings.split(OWN)
    key = own.get("action_key") or _action_key(url)
    shown: Callable[[Any], str] = import_object(own["observation"]) if "observation" in own else _shown
    game = gym_env(
        partial(_session, url, arguments),
        to_text=shown,
        to_action=partial(_action, key),
        max_steps=settings.max_turns,
        illegal_reward=float(own.get("illegal_reward", 0.0)),
    )
    most = int(own.get("sessions", 8))
    limiters: list[anyio.CapacityLimiter] = []  # made inside of the event loop

    async def env(sample: Sample, policy: PolicyClient) -> Episode:
        if not limiters:
            limiters.append(anyio.CapacityLimiter(most))
        waiting = policy.time.paused() if isinstance(policy, GeneratorClient) else nullcontext()
        with waiting:  # the seconds of an episode count from the start of its session
            await limiters[0].acquire_on_behalf_of(policy)
        try:
            return await game(sample, policy)
        finally:
            limiters[0].release_on_behalf_of(policy)

    return env


def _session(url: str, arguments: Mapping[str, Any], sample: Sample) -> _Session:  # noqa: ARG001 - its seed comes later
    return _Session(url, arguments)


def openenv_rows(url: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    prompt = str(settings.args.get("prompt") or "You act in an environment. Answer with your action alone.")
    return [
        Sample(f"openenv:{url}:{number}", (Message("user", prompt),), metadata={"seed": number})
        for number in range(seed, seed + size)
    ]


def _action_key(url: str) -> str | None:
    """The only text of an action by the server's schema; None if an action has other fields."""
    try:
        response = httpx.get(f"{url.rstrip('/')}/schema", timeout=_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"rollout.env: no server at {url}: {error_text(error)}; start it, or correct the URL"
        ) from error
    fields = response.json().get("action", {}) if response.status_code == 200 else {}
    properties = {name: about for name, about in fields.get("properties", {}).items() if name not in _WITHOUT}
    texts = [name for name, about in properties.items() if about.get("type") == "string"]
    return texts[0] if len(texts) == len(properties) == 1 else None


def _action(key: str | None, answer: str) -> Mapping[str, Any]:
    """`{key: answer}`; without a key the JSON object that the answer is."""
    if key is not None:
        return {key: answer}
    try:
        action = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"That is no action. Answer with a JSON object: {error}") from error
    if not isinstance(action, dict):
        raise ValueError("That is no action. Answer with a JSON object.")
    return action


def _shown(observation: Any) -> str:
    """The only field of an observation, or one line per field."""
    fields = {key: value for key, value in dict(observation).items() if key not in _WITHOUT and value is not None}
    return observation_text(next(iter(fields.values())) if len(fields) == 1 else fields)


class _Session:
    """One episode on the server, with the interface of Gymnasium; its calls block."""

    def __init__(self, url: str, arguments: Mapping[str, Any]) -> None:
        self.url, self.arguments, self.id = url.rstrip("/"), arguments, uuid.uuid4().hex
        self._socket = self._connect()

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        return self._ask("reset", {**self.arguments, "seed": seed, "episode_id": self.id})[0], {}

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done = self._ask("step", action)
        return observation, reward, done, False, {}

    def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # it may be closed already
                self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _connect(self) -> Any:
        """A WebSocket; None for a server without one."""
        client, exceptions = import_module("websockets.sync.client"), import_module("websockets.exceptions")
        address = f"ws{self.url.removeprefix('http')}/ws"
        try:
            return client.connect(address, open_timeout=_SECONDS, max_size=_MOST_BYTES, close_timeout=1)
        except exceptions.InvalidStatus as refused:
            if refused.response.status_code in (403, 404, 405):
                return None
            raise EpisodeError(f"the server {self.url} refuses a session: {refused}") from refused
        except exceptions.InvalidMessage:  # plain HTTP
            return None
        except (OSError, exceptions.WebSocketException) as error:
            raise EpisodeError(f"the server {self.url} cannot be reached: {error_text(error)}") from error

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, float, bool]:
        try:
            answer = self._by_http(kind, data) if self._socket is None else self._by_socket(kind, data)
        except Exception as error:  # the errors of two libraries
            raise EpisodeError(f"the server {self.url} failed in {kind}: {error_text(error)}") from error
        if not isinstance(answer, dict) or "observation" not in answer:
            raise EpisodeError(f"the server {self.url} answered {kind} without an observation: {str(answer)[:200]}")
        return answer["observation"], float(answer.get("reward") or 0.0), bool(answer.get("done"))

    def _by_socket(self, kind: str, data: Mapping[str, Any]) -> Any:
        self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(self._socket.recv(timeout=_SECONDS))
        if answer.get("type") == "error":
            raise ValueError(str(answer.get("data"))[:500])
        return answer.get("data")

    def _by_http(self, kind: str, data: Mapping[str, Any]) -> Any:
        body = dict(data) if kind == "reset" else {"action": dict(data), "episode_id": self.id}
        response = httpx.post(f"{self.url}/{kind}", json=body, timeout=_SECONDS)
        response.raise_for_status()
        return response.json()
