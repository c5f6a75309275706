"""Evaluate a model in the environment of a config: success rate and return over held-out episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from oxrl.concurrency import run_until_interrupted
from oxrl.config import Config, ConfigError
from oxrl.evaluation.evaluate import (
    SAMPLING_TEMPERATURE,
    Progress,
    Result,
    SampledEvaluation,
    Scores,
    check_choices,
    compare_results,
    scores_of,
    silent,
    summarize,
)
from oxrl.run.environment import check_tool_servers
from oxrl.run.episodes import play
from oxrl.run.folder import resolve_weights
from oxrl.run.prepare import resolve
from oxrl.run.spec import RunSpec, sampling_config
from oxrl.types import GenerationConfig, Rollout


def evaluate_episodes(
    model: str | Path,
    config: Config,
    *,
    episodes: int = 100,
    samples: int = 1,
    k: Sequence[int] | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    against: str | Path | None = None,
    full: float = 1.0,
    seed: int = 0,
    progress: Progress = silent,
) -> SampledEvaluation:
    """`evaluate_episodes("runs/reach", load_config("reach.yaml"), episodes=200)`: episodes from held-out rows.

    `config` is that of a run in the environment; its model is replaced. An environment that makes its rows makes
    `episodes` held-out ones, with the same seeds for every model; otherwise they are the first of
    `data.val_files_path`. Success is what the environment reports, or a return of at least `full`. The temperature is
    `rollout.eval_temperature` by default.
    """
    ks = check_choices(samples, k, temperature, against, model)
    names = [str(name) for name in (model, against) if name is not None]
    specs = [_spec(name, config, episodes) for name in names]
    sampling = _sampling(specs[0], samples, temperature, max_tokens, seed)
    results = []
    for name, spec in zip(names, specs, strict=True):
        rows = spec.held_out[:episodes]
        with progress(name, len(rows)) as advance:
            played = run_until_interrupted(partial(play, spec, rows, sampling, n=samples, on_prompt_done=advance))
        results.append(_result(name, played, samples, ks, full))
    variants = results[0].scores.keys() if against is not None else ()
    return SampledEvaluation(
        data=config.rollout.env,
        rows=len(specs[0].held_out[:episodes]),
        results=tuple(results),
        comparisons={name: compare_results(results, name, seed) for name in variants},
        reward="the environment" if config.has_custom_env else str(specs[0].config.reward.reward_func),
        samples=samples,
        sampling=sampling,
    )


def _spec(model: str, config: Config, episodes: int) -> RunSpec:
    """The run of the config, with another model and held-out rows."""
    data = config.data
    if config.makes_rows:
        data = data.model_copy(update={"env_val_rows": episodes})
    elif not data.val_files:
        raise ConfigError(f"{config.rollout.env} makes no rows: set data.val_files_path to held-out ones")
    named = config.model.model_copy(update={"name": resolve_weights(model), "revision": None})
    spec = resolve(config.model_copy(update={"model": named, "data": data}))
    if not spec.online:
        raise ConfigError(
            f"{config.train.alg_name} plays no episodes: give the config of a run in the environment, or set "
            "train.alg_name to an algorithm that samples, such as grpo"
        )
    check_tool_servers(spec.config)
    return spec


def _sampling(
    spec: RunSpec, samples: int, temperature: float | None, max_tokens: int | None, seed: int
) -> GenerationConfig:
    own = sampling_config(spec.config)
    default = spec.config.rollout.eval_temperature if samples == 1 else SAMPLING_TEMPERATURE
    return own._replace(
        temperature=default if temperature is None else temperature,
        max_new_tokens=max_tokens or own.max_new_tokens,
        seed=seed,
    )


def _result(name: str, played: Sequence[Rollout], samples: int, ks: Sequence[int], full: float) -> Result:
    scores = _variants(scores_of(played, samples), _successes(played, samples))
    marks = {kind: summarize(each, ks if kind != "return" else (), full, name, played) for kind, each in scores.items()}
    return Result(name, tuple(played), scores, marks)


def _variants(returns: Scores, successes: Scores | None) -> Mapping[str, Scores]:
    """Success where the environment reports it, and the return where it is another number."""
    if successes is None:
        return {"return": returns}
    return {"success": successes} if successes == returns else {"success": successes, "return": returns}


def _successes(played: Sequence[Rollout], samples: int) -> Scores | None:
    reported = [None if each.score is None else each.score.parts.get("success") for each in played]
    graded = [value for value, each in zip(reported, played, strict=True) if each.score is not None]
    if not graded or None in graded:
        return None
    return tuple(tuple(reported[start : start + samples]) for start in range(0, len(reported), samples))
