"""Some episodes of a config with its model before training: what is asked, answered and earned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oxrl.concurrency import run_blocking
from oxrl.config import Config, ConfigError
from oxrl.data.parts import PARTS
from oxrl.run.environment import check_tool_servers
from oxrl.run.episodes import play
from oxrl.run.prepare import resolve
from oxrl.run.spec import sampling_config
from oxrl.types import Message, Rollout


def play_episodes(config: Config, count: int) -> list[Rollout]:
    """One episode of each of the first `count` prompts that the run would draw, graded as in the run."""
    spec = resolve(config)
    if not spec.online:
        raise ConfigError(f"{config.train.alg_name} plays no episodes: set train.alg_name to one that samples")
    check_tool_servers(spec.config)
    return run_blocking(partial(play, spec, spec.source.get_prompts(count), sampling_config(spec.config)))


def episode_fields(rollout: Rollout) -> dict[str, Any]:
    """An episode as JSON: messages, reward, tokens, how it ended, its error."""
    score = rollout.score
    return {
        "id": rollout.sample.id,
        "messages": [message.to_dict() for message in rollout.messages],
        "reward": rollout.reward,
        "per_turn": list(score.per_turn) if score is not None and score.per_turn is not None else None,
        "parts": dict(score.parts) if score is not None else {},
        "turns": len(rollout.turns),
        "sampled_tokens": int(sum(rollout.loss_mask)),
        "tokens": len(rollout.tokens),
        "ended": rollout.metadata.get("ended") or (rollout.generation.finish_reason if rollout.turns else None),
        "error": rollout.error,
    }


def episode_lines(rollout: Rollout) -> Iterator[str]:
    found = episode_fields(rollout)
    yield f"{found['id']}: {found['turns']} turns, {found['sampled_tokens']} sampled of {found['tokens']} tokens"
    for message in rollout.messages:
        yield f"  {message.role}: {_shown(message)!r}"
    reward = "ungraded" if found["reward"] is None else f"reward {found['reward']:g}"
    yield f"  {reward}; ended: {found['ended']}" + (f"; {found['error']}" if found["error"] else "")


def _shown(message: Message) -> str:
    """The text of a message, with `[image]` and `[audio]` where it has these."""
    if isinstance(message.content, str):
        return message.content
    kinds = ((PARTS.get(part["type"]), str(part.get("text") or "")) for part in message.content)
    return "".join(f"[{kind}]" if kind else text for kind, text in kinds)
