"""`oxrl env ...`: play episodes of an environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_failure

app = typer.Typer(no_args_is_help=True, help="Try the environment of a config.")


@app.command("try")
def env_try(
    config: Annotated[Path, typer.Argument(help="The YAML file of a run.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play, each of another prompt.")] = 3,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key: rollout.max_turns=4.")] = None,
    json_: Json = False,
) -> None:
    """Play some episodes with the model and print them, before anything is trained.

    oxrl env try config.yaml --episodes 3
    """
    with exit_on_failure("the trial"):
        from oxrl.config import load_stages
        from oxrl.diagnose.episodes import episode_fields, episode_lines, play_episodes

        stages = load_stages(config, set_ or [])
        played = play_episodes(stages.get("rl") or next(iter(stages.values())), episodes)
    if json_:
        typer.echo(json.dumps([episode_fields(rollout) for rollout in played]))
    else:
        for line in (line for rollout in played for line in episode_lines(rollout)):
            typer.echo(line)
    if all(rollout.reward is None for rollout in played):
        typer.secho("no episode was graded", fg="red", err=True)
        raise typer.Exit(1)


@app.command("record")
def env_record(
    config: Annotated[Path, typer.Argument(help="The YAML file of a run in a gym: environment.")],
    output: Annotated[Path, typer.Option(help="Folder of the recorded episodes; must not exist.")],
    episodes: Annotated[int, typer.Option(min=1, help="Successful episodes to record.")] = 100,
    expert: Annotated[
        str | None, typer.Option(help="FILE.py:FUNCTION or module:function; default the environment's own `expert`.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key: rollout.env_args.squares=3.")] = None,
    json_: Json = False,
) -> None:
    """Record an expert in the environment of a config: steps with pictures, instruction and action, to imitate.

    oxrl env record reach.yaml --episodes 300 --output episodes/reach

    oxrl train --model tiny-vlm --algorithm sft --data episodes/reach --set 'data.actions={low: [-1, -1], high: [1, 1]}'
    """
    with exit_on_failure("the recording", lambda: "; nothing was recorded"):
        from oxrl.config import load_stages
        from oxrl.run.record_expert import record_expert

        stages = load_stages(config, set_ or [])
        recorded = record_expert(stages.get("rl") or next(iter(stages.values())), output, episodes, expert, seed)
    if json_:
        typer.echo(json.dumps({"folder": str(output), "episodes": episodes, "steps": recorded}))
        return
    typer.echo(f"{output}: {episodes} episodes, {recorded} steps")
