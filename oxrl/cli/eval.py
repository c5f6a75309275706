"""`oxrl eval`: reward, perplexity or preference on held-out rows or episodes, and comparison of two models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from oxrl.cli.base import Json, ModelArgument, RewardParameter, Seed, exit_on_failure, path, rewards


def evaluate(
    model: ModelArgument,
    data: Annotated[
        str | None, typer.Option(help="A file, a hub id, or a name from `oxrl data list`: gsm8k, mbpp:validation.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A name from `oxrl rewards list` or FILE.py:FUNCTION; several: {NAME: WEIGHT, ...}; "
            "default the dataset's or the run's."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="reward, perplexity or pairs; default by the rows, if there is no reward."),
    ] = None,
    param: RewardParameter = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt; several give pass@k.")] = 1,
    k: Annotated[str | None, typer.Option(help="Values of k for pass@k: 1,4,8; default powers of two.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; default 0 (greedy), 0.8 with several samples.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens per completion; default 512, or those of the config of --env."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Another model or run to compare with on the same prompts.")
    ] = None,
    full: Annotated[float, typer.Option(help="Reward at which a completion counts as solved.")] = 1.0,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option(parser=path, help="JSONL file for all completions.")] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Instead of --data: play episodes; the YAML file of a run in an environment, or gym:ID."),
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="With --env: held-out episodes; default 100.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --env: override a key, rollout.env_args.split=held_out.")
    ] = None,
    harness: Annotated[
        str | None, typer.Option(help="Instead of --data: comma-separated tasks of lm-evaluation-harness.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(parser=path, help="Folder with custom --harness tasks.")] = None,
    json_: Json = False,
) -> None:
    """Evaluate a model on held-out rows: mean reward with its confidence interval.

    oxrl eval runs/grpo --data gsm8k --against smollm2-135m

    oxrl eval runs/grpo --data held_out.jsonl --reward number_match --samples 8

    oxrl eval runs/reach --env reach.yaml --episodes 200

    oxrl eval runs/grpo --harness arc_easy,hellaswag --limit 100
    """
    with exit_on_failure("the evaluation"):
        if sum(source is not None for source in (data, harness, env)) != 1:
            raise ValueError("give --data FILE or NAME, --env CONFIG, or --harness TASKS, one of them")
        if harness is not None:
            options: dict[str, Any] = {"reward": reward, "by": by, "param": param, "samples": samples > 1, "k": k}
            options |= {"temperature": temperature, "against": against, "output": output, "max-tokens": max_tokens}
            options |= {"episodes": episodes, "set": set_}
            _refuse(options, "has no effect with --harness: its tasks define it")
            _harness(model, harness, limit, include_path, seed, json_)
            return
        _refuse({"include-path": include_path}, "is for --harness")
        _check_output(output)
        shared: dict[str, Any] = {
            "samples": samples, "k": _numbers(k), "temperature": temperature, "against": against, "full": full,
            "seed": seed, "progress": _progress,
        }  # fmt: skip
        if env is not None:
            _refuse({"reward": reward, "by": by, "param": param, "limit": limit}, "has no effect with --env")
            result = _in_environment(model, env, set_ or [], episodes or 100, max_tokens, shared)
        else:
            _refuse({"episodes": episodes, "set": set_}, "is for --env")
            from oxrl.evaluation.evaluate import evaluate as measure
            from oxrl.run.reward import parse_parameters

            params = parse_parameters(param or [])
            limits: dict[str, Any] = {"limit": limit, "max_tokens": max_tokens or 512}
            result = measure(model, str(data), rewards(reward), params=params, by=_method(by), **limits, **shared)
        if output is not None:
            lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in result.answers())
            output.write_text(lines, encoding="utf-8")
    typer.echo(json.dumps(result.to_dict()) if json_ else str(result))


def _in_environment(
    model: str, env: str, overrides: list[str], episodes: int, max_tokens: int | None, shared: dict[str, Any]
) -> Any:
    from oxrl.config import load_stages
    from oxrl.evaluation.episodes import evaluate_episodes

    if Path(env).suffix.lower() in (".yaml", ".yml"):
        stages = load_stages(env, overrides)
    else:
        named = [f"model.name={json.dumps(model)}", "train.alg_name=grpo", f"rollout.env={json.dumps(env)}"]
        stages = load_stages(None, [*named, *overrides])
    config = stages.get("rl") or next(iter(stages.values()))
    return evaluate_episodes(model, config, episodes=episodes, max_tokens=max_tokens, **shared)


def _method(by: str | None) -> Any:
    if by not in (None, "reward", "perplexity", "pairs"):
        raise ValueError(f"--by is reward, perplexity or pairs, not {by!r}")
    return by


def _refuse(options: dict[str, Any], reason: str) -> None:
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise ValueError(f"--{given[0]} {reason}")


def _harness(model: str, tasks: str, limit: int | None, include_path: Path | None, seed: int, as_json: bool) -> None:
    from oxrl.evaluation.lm_eval import harness

    results = harness(model, tasks.split(","), limit=limit, include_path=include_path, seed=seed)
    if as_json:
        typer.echo(json.dumps(results, default=str))
        return
    for task, numbers in results.items():
        scores = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        typer.echo(f"{task:24} " + "  ".join(f"{name} {value:.4g}" for name, value in scores.items()))


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--k looks like 1,4,8, not {text!r}") from None


def _check_output(output: Path | None) -> None:
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ValueError(f"--output {output} must be a file in a folder that exists")


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar in a terminal, and ten lines in a log."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            typer.echo(f"{title}: {done} of {total} prompts done", err=True)

    yield advance
