"""The environments that a config can name: `gym:CartPole-v1` to an `EnvFn` and the rows that it starts from.

One record per scheme; its functions are imported when they are first needed, and the library that they use inside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oxrl.machine.packages import is_installed, missing_message
from oxrl.names import did_you_mean, import_object
from oxrl.types import EnvFn, Sample

HELD_OUT_SEED = 10**9  # of the first held-out row; rows for training count from `run.seed`


class Settings(NamedTuple):
    """What an environment gets from a config: `rollout.env_args`, `max_turns` and `tool_seconds`."""

    args: Mapping[str, Any] = {}
    max_turns: int = 8
    tool_seconds: float = 30.0

    def split(self, own: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments that an adapter reads itself, and those for the library."""
        return (
            {key: value for key, value in self.args.items() if key in own},
            {key: value for key, value in self.args.items() if key not in own},
        )


class EnvironmentKind(NamedTuple):
    """A scheme, what follows it, and the functions that open an environment and make its rows."""

    scheme: str
    argument: str
    about: str
    package: str
    extra: str
    open: str  # module:function of (name, settings) -> EnvFn
    rows: str  # module:function of (name, settings, size, seed) -> samples
    reward: str | None = None  # that grades its episodes; None: the environment does

    def require(self) -> None:
        """Raise a ValueError with the command that installs its library, unless it is installed."""
        if not is_installed(self.package):
            raise ValueError(missing_message(self.package, self.extra))


_HOME = "oxrl.rollouts.environments"
KINDS = (
    EnvironmentKind(
        "gym", "ID", "a Gymnasium environment with texts or numbers as observations", "gymnasium", "gymnasium",
        f"{_HOME}.gymnasium_env:open_gym", f"{_HOME}.gymnasium_env:gym_rows",
    ),
    EnvironmentKind(
        "reasoning_gym", "TASK", "a task of reasoning-gym, with its prompts and its scorer", "reasoning_gym", "gym",
        f"{_HOME}.reasoning_gym_env:open_reasoning_gym", f"{_HOME}.reasoning_gym_env:reasoning_gym_rows",
        reward="reasoning_gym_score",
    ),
    EnvironmentKind(
        "verifiers", "NAME", "an environment of the verifiers library, by its module or FILE.py", "verifiers",
        "verifiers", f"{_HOME}.verifiers_env:open_verifiers", f"{_HOME}.verifiers_env:verifiers_rows",
    ),
    EnvironmentKind(
        "openenv", "URL", "a server with reset and step, with the messages of OpenEnv", "websockets", "openenv",
        f"{_HOME}.openenv_env:open_openenv", f"{_HOME}.openenv_env:openenv_rows",
    ),
)  # fmt: skip
_BY_SCHEME = {kind.scheme: kind for kind in KINDS}


def find_kind(env: str) -> EnvironmentKind | None:
    """The record of `gym:ID`; None for other environments, `FILE.py:FUNCTION` among them."""
    scheme, _, name = env.partition(":")
    kind = _BY_SCHEME.get(scheme)
    if kind is not None and not name:
        raise ValueError(f"{env} names no environment: write {kind.scheme}:{kind.argument}")
    return kind


def suggestion(env: str) -> str:
    """`suggestion("gymm:CartPole-v1")`: the nearest scheme, if there is one."""
    scheme = env.partition(":")[0]
    longer = next((known for known in _BY_SCHEME if scheme.startswith(known)), scheme)  # gymnasium:
    return did_you_mean(longer, _BY_SCHEME)


def open_named(env: str, settings: Settings) -> EnvFn:
    """Open an environment by its name; a ValueError says what is wrong with the name or its arguments."""
    kind = _kind_of(env)
    opened: EnvFn = import_object(kind.open)(env.partition(":")[2], settings)
    return opened


def named_rows(env: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    """`size` rows that the environment makes; the same seed gives the same rows."""
    kind = _kind_of(env)
    rows: list[Sample] = import_object(kind.rows)(env.partition(":")[2], settings, size, seed)
    return rows


def _kind_of(env: str) -> EnvironmentKind:
    kind = find_kind(env)
    if kind is None:
        raise ValueError(f"{env} has no scheme of {', '.join(_BY_SCHEME)}")
    kind.require()
    return kind


def known_names() -> tuple[str, ...]:
    """`("gym:ID", "reasoning_gym:TASK", ...)`."""
    return tuple(f"{kind.scheme}:{kind.argument}" for kind in KINDS)
