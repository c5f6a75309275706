"""The command line: words to function calls, mistakes to one message. Exit codes: 2 wrong input, 1 a failed run."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oxrl.config import Config
    from oxrl.wiring import RunResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train language models, from a laptop to a cluster.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")
app.add_typer(data_app, name="data")
rewards_app = typer.Typer(no_args_is_help=True, help="What answers can be paid for.")
app.add_typer(rewards_app, name="rewards")
models_app = typer.Typer(no_args_is_help=True, help="Models that are known by name, and what was tried with them.")
app.add_typer(models_app, name="models")


def main() -> None:
    # Threads that spin while they wait starve each other as soon as the machine does anything else (measured: a step
    # takes seven times as long beside one busy process, against less than twice with threads that sleep).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log file is no place for bars
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("oxrl").setLevel(logging.INFO)
    app()


@contextmanager
def _mistakes_end_here() -> Iterator[None]:
    """What the user got wrong is answered in words, with exit code 2 and no traceback."""
    try:
        yield
    except ValueError as mistake:
        for line in str(mistake).splitlines():
            typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(2) from None


Model = Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file, smollm2-135m or tiny.")]
Sampling = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; flags are laid over it.")] = None,
    model: Model = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `oxrl algorithms`, or a loss of your own: FILE.py:FUNCTION.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Training rows: JSONL, Parquet, CSV or a hub id.")] = None,
    val: Annotated[str | None, typer.Option(help="Held-out rows for evaluation.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="What an answer is worth: a name from `oxrl rewards list`, or FILE.py:FUNCTION.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per pass, instead of all the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per optimizer step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter instead of all weights.")] = False,
    seed: Annotated[int | None, typer.Option(help="Fixes data order, dropout and new weights.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any config key: --set train.weight_decay=0.1")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model.

    oxrl train config.yaml

    oxrl train --model smollm2-135m --algorithm sft --data rows.jsonl --output runs/first

    oxrl train --model smollm2-135m --algorithm grpo --data prompts.jsonl --reward number_match --output runs/rl

    oxrl train --output runs/first --resume
    """
    flags = {
        "model.name": model,
        "train.alg_name": algorithm,
        "data.train_files_path": data,
        "data.val_files_path": val,
        "reward.reward_func": reward,
        "train.total_number_of_epochs": epochs,
        "train.train_steps_per_epoch": steps,
        "train.train_batch_size_per_gpu": batch_size,
        "train.lr": lr,
        "lora.enabled": True if lora else None,
        "run.seed": seed,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    with _mistakes_end_here():
        stages = _stages(config, output, resume, [*overrides, *(set_ or [])])
        from oxrl.wiring import run_stages  # torch comes with it, and wrong input is answered before that

        run_stages(stages, output, resume=resume, train=lambda prepared: _train_and_tell(prepared, json_))


def _stages(path: Path | None, output: Path | None, resume: bool, overrides: list[str]) -> dict[str, Config]:
    from oxrl.config import load_stages

    if path is not None or not resume:
        return load_stages(path, overrides)
    if output is None:
        raise ValueError("--output names the run to resume")
    if not (output / "stages.yaml").exists() and not (output / "config.yaml").exists():
        raise ValueError(f"there is nothing to resume in {output}")
    from oxrl.runs import recorded_stages

    return recorded_stages(output) or load_stages(output / "config.yaml", overrides)


def _train_and_tell(prepared: Any, as_json: bool) -> RunResult:
    from oxrl.wiring import train_prepared

    try:
        with _mistakes_end_here():
            result = train_prepared(prepared)
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted; go on with: oxrl train --output {prepared.folder} --resume", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except typer.Exit:  # a RuntimeError too, but already told
        raise
    except RuntimeError as failure:
        typer.secho(f"the run failed: {failure}", fg="red", err=True)
        raise typer.Exit(1) from failure
    last = result.history[-1] if result.history else {}
    if as_json:
        typer.echo(json.dumps({"folder": str(result.folder), "checkpoint": str(result.checkpoint), "last": last}))
        return result
    telling = ("step", "reward", "loss", "eval_reward", "eval_loss", "eval_token_accuracy")
    shown = {key: last[key] for key in telling if key in last}
    typer.echo("  ".join(f"{key} {value:.4g}" for key, value in shown.items()) or "nothing was left to do")
    typer.echo(f"model: {result.checkpoint}")
    if prepared.config.train.alg_name != "rm":  # a reward model has nothing to say
        typer.echo(f"talk to it: oxrl chat {result.folder}")
    return result


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A run's folder, or any model.")],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Sampling = 0.7,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends."""
    from oxrl.types import GenerationConfig, Message

    with _mistakes_end_here():
        speaker, render = _open(model)
    history = [Message("system", system)] if system else []
    for turn in range(1_000_000):
        try:
            said = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if not said:
            break
        history.append(Message("user", said))
        sampling = GenerationConfig(max_new_tokens, temperature, seed=seed + turn)
        typer.echo("model> ", nl=False)
        try:
            answer = speaker.complete([render.prompt(history)], sampling, on_token=_Typewriter(speaker.tokenizer))[0]
        except ValueError as mistake:  # something the template cannot say: the talk goes on without it
            typer.secho(str(mistake), fg="red", err=True)
            history.pop()
            continue
        typer.echo("")
        history.append(Message("assistant", answer.text))


class _Typewriter:
    """Shows text as tokens arrive; a character that needs several tokens waits for its last."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids, self.shown = tokenizer, list[int](), ""

    def __call__(self, _prompt: int, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("�"):
            typer.echo(text[len(self.shown) :], nl=False)
            self.shown = text


def _open(model: str) -> tuple[Any, Any]:
    """Generator and renderer of a run's folder or a model."""
    from oxrl.data.render import Renderer
    from oxrl.generators.embedded import EmbeddedGenerator
    from oxrl.models.load import check_model, load_model, load_tokenizer
    from oxrl.runs import resolve_weights
    from oxrl.types import ModelConfig

    place = resolve_weights(model)
    check_model(ModelConfig(place))
    tokenizer = load_tokenizer(place)
    return EmbeddedGenerator(load_model(place), tokenizer), Renderer(tokenizer)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A run's folder, or any model.")],
    prompt: Annotated[list[str] | None, typer.Option(help="What the user says; can be given several times.")] = None,
    data: Annotated[Path | None, typer.Option(help="A file of prompts, in any format that train reads.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Sampling = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of --data.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Answer prompts: oxrl generate smollm2-135m --prompt "What is the capital of Peru?" """
    from oxrl.types import GenerationConfig

    with _mistakes_end_here():
        conversations = _prompts(prompt or [], data, limit)
        speaker, render = _open(model)
        ids = [render.prompt(conversation) for conversation in conversations]
    for start in range(0, len(ids), 16):
        part = slice(start, start + 16)
        sampling = GenerationConfig(max_new_tokens, temperature, seed=seed + start)
        for conversation, answer in zip(conversations[part], speaker.complete(ids[part], sampling), strict=True):
            asked = conversation[-1].content
            if json_:
                typer.echo(json.dumps({"prompt": asked, "text": answer.text, "finish_reason": answer.finish_reason}))
            else:
                typer.echo(f"{typer.style(str(asked), dim=True)}\n{answer.text}\n")


def _prompts(said: list[str], data: Path | None, limit: int | None) -> list[Any]:
    from oxrl.data.sources import load_samples
    from oxrl.types import Message

    if bool(said) == (data is not None):
        raise ValueError("give --prompt TEXT or --data FILE, one of the two")
    if data is None:
        return [[Message("user", text)] for text in said]
    samples = load_samples(str(data), limit=limit).samples
    return [_without_answer(sample.messages, sample.id) for sample in samples]


def _without_answer(messages: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    asked = messages[:-1] if messages and messages[-1].role == "assistant" else messages
    if not asked:
        raise ValueError(f"{place}: there is no prompt to answer")
    return asked


@data_app.command("show")
def data_show(
    file: Annotated[str, typer.Argument(help="Rows: JSONL, Parquet, CSV or a hub id.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template.")] = "smollm2-135m",
    algorithm: Annotated[str, typer.Option(help="For whose rows.")] = "sft",
    rows: Annotated[int, typer.Option(min=0, help="How many to print in full.")] = 3,
    max_len: Annotated[int | None, typer.Option(min=2, help="Longest row that training would keep.")] = 2048,
    column: Annotated[list[str] | None, typer.Option(help="ours=theirs, such as response=answer.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Statistics as JSON.")] = False,
) -> None:
    """Print what would be trained on: trained tokens in colour, lengths, problems."""
    with _mistakes_end_here():
        from oxrl.runs import resolve_weights
        from oxrl.show import inspect_data, print_report

        pairs = [each.partition("=") for each in column or []]
        if wrong := [left for left, equals, right in pairs if not (left and equals and right)]:
            raise ValueError(f"--column looks like response=answer, not {wrong[0]!r}")
        columns = {left: right for left, _, right in pairs}
        report = inspect_data(file, resolve_weights(model), algorithm, max_len, columns)
    if json_:
        typer.echo(json.dumps(report.statistics()))
    else:
        print_report(report, rows)


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="A name from `oxrl data list`, or gym:TASK.")],
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", help="A local copy in the raw format: FILE or SPLIT=FILE; can be given several times."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The dataset's folder; default $OXRL_DATA_DIR/NAME.")] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; with --from FILE, the split that the file is.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Stands behind each question, instead of the dataset's own; may be empty.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Training rows of a gym:TASK.")] = 1000,
    json_: Annotated[bool, typer.Option("--json", help="The card as JSON.")] = False,
) -> None:
    """Fetch a dataset and write it as files that train reads: oxrl data prepare gsm8k"""
    with _mistakes_end_here():
        from oxrl.data.prepare import prepare, read_card

        folder = prepare(name, files=from_ or (), output=output, splits=split or (), instruction=instruction, size=size)
        card = read_card(folder)
    if json_:
        typer.echo(json.dumps({"folder": str(folder), **card}))
        return
    for each, entry in card["splits"].items():
        typer.echo(f"{each:11} {entry['rows']:7} rows  {folder / entry['file']}")
    for left_out in card["skipped"]:
        typer.echo(f"left out {left_out['rows']}: {left_out['reason']} (first {left_out['first']})")
    typer.echo(f"licence {card['licence']}; conversion verified: {card['verified']}; reward {card['reward'] or 'none'}")


@data_app.command("list")
def data_list(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the datasets that are known by name."""
    from oxrl.data.prepare import DATASETS

    if json_:
        told = {
            each.name: {
                "summary": each.summary, "licence": each.licence, "hub": each.hub, "reward": each.reward,
                "evaluation_only": each.evaluation_only, "seen_real_rows": each.seen_real_rows,
            }
            for each in DATASETS.values()
        }  # fmt: skip
        typer.echo(json.dumps(told))
        return
    for each in DATASETS.values():
        notes = [each.licence, *(["evaluation only"] if each.evaluation_only else []), each.reward or ""]
        typer.echo(f"{each.name:20} {each.summary} ({', '.join(filter(None, notes))})")
    typer.echo(f"{'gym:TASK':20} any task of reasoning-gym, made on the spot (reasoning_gym_score)")


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Which one to explain.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the algorithms, or explain one: formula, parameters, what it needs, an example."""
    with _mistakes_end_here():
        from oxrl.explain import explain, summaries

        if name is None:
            rows = summaries()
            lines = [f"{each:14} {summary}" for each, summary in rows.items()]
            typer.echo(json.dumps(rows) if json_ else "\n".join(lines))
        else:
            card = explain(name)
            typer.echo(json.dumps(card._asdict()) if json_ else str(card))


@rewards_app.command("list")
def rewards_list(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the reward functions: what each pays for, what it reads of a row, its parameters."""
    from oxrl.rewards import describe_rewards

    cards = describe_rewards()
    if json_:
        told = {
            card.name: {"explanation": card.explanation, "reads": card.reads, "parameters": _written(card.parameters)}
            for card in cards.values()
        }
        typer.echo(json.dumps(told))
        return
    for card in cards.values():
        typer.echo(f"{card.name:20} {card.explanation.splitlines()[0]}")
        if card.parameters:
            typer.echo(f"{'':20} " + ", ".join(f"{each} {value}" for each, value in _written(card.parameters).items()))


@rewards_app.command("test")
def rewards_test(
    name: Annotated[str, typer.Argument(help="A name from `oxrl rewards list`, or FILE.py:FUNCTION.")],
    data: Annotated[str, typer.Option(help="Rows with an answer: JSONL, Parquet, CSV or a hub id.")],
    limit: Annotated[int, typer.Option(min=1, help="Only the first rows.")] = 200,
    param: Annotated[list[str] | None, typer.Option(help="A parameter of the reward: --param strict=true")] = None,
    pays_for: Annotated[
        str | None, typer.Option(help="answer, form or opinion; default told from what the reward reads.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the full reward that a cheat may earn on average.")
    ] = 0.05,
    workers: Annotated[int, typer.Option(min=1, help="Answers graded at a time, for judges.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Try a reward on real rows: right answers, wrong ones, cheats. Exit code 1 if it can be gamed."""
    with _mistakes_end_here():
        from oxrl.inputs import trial_of

        report = trial_of(name, data, param or [], limit=limit, pays_for=pays_for, threshold=threshold, workers=workers)
    typer.echo(json.dumps(report.to_dict()) if json_ else str(report))
    if report.problems:
        raise typer.Exit(1)


def _written(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "(needed)" if default is ... else default for name, default in parameters.items()}


@models_app.command("list")
def models_list(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the catalogue: size, architecture, task, strategy and whether the model was verified."""
    from oxrl.models.catalog import catalog

    entries = catalog().values()
    if json_:
        typer.echo(json.dumps({entry.name: _card(entry) for entry in entries}))
        return
    for entry in entries:
        about = f"{entry.size:18} {entry.architecture:35} {', '.join(entry.tasks):10} {entry.strategy:5}"
        typer.echo(f"{entry.name:29} {about} {entry.status}")


ModelName = Annotated[str, typer.Argument(metavar="NAME", help="From `oxrl models list`, or its hub id.")]


@models_app.command("show")
def models_show(name: ModelName, json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Tell all that is known of a model, and what its verification measured."""
    with _mistakes_end_here():
        from oxrl.models.catalog import find_entry, record_of

        entry = find_entry(name)
        card = {**_card(entry), "record": record_of(entry.name)}
    if json_:
        typer.echo(json.dumps(card))
        return
    for key, value in card.items():
        if value is not None:
            said = ", ".join(value) if isinstance(value, list) else value
            typer.echo(f"{key:16} {json.dumps(said, indent=1) if isinstance(said, dict) else said}")


def _card(entry: Any) -> dict[str, Any]:
    derived = {each: getattr(entry, each) for each in ("source", "strategy", "reason", "status")}
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in entry._asdict().items()}
    return {**stated, **derived}


@models_app.command("config")
def models_config(name: ModelName) -> None:
    """Print a config to begin with: oxrl models config qwen3-0.6b > config.yaml"""
    with _mistakes_end_here():
        from oxrl.config import check_config
        from oxrl.models.catalog import as_yaml, example_config, find_entry

        entry = find_entry(name)
        config = example_config(entry)
        check_config(config)
    if entry.not_yet is not None:
        typer.secho(f"{entry.name} cannot be trained yet: {entry.not_yet}", fg="yellow", err=True)
    typer.echo(as_yaml(config), nl=False)


@models_app.command("verify")
def models_verify(
    name: ModelName,
    model: Annotated[str | None, typer.Option(help="A local copy of it; default what its name loads.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the record goes; default NAME.json.")] = None,
) -> None:
    """Train the model for two steps each of SFT, DPO and GRPO, check what can be checked, and write a record."""
    with _mistakes_end_here():
        from oxrl.models.catalog import find_entry
        from oxrl.verify import verify_entry, write_record

        entry = find_entry(name)
        if entry.not_yet is not None:
            raise ValueError(f"{entry.name} cannot be verified yet: {entry.not_yet}")
        place = output or Path(f"{entry.name}.json")
        record = verify_entry(entry, model)
        write_record(record, place)
    for problem in record["problems"]:
        typer.secho(problem, fg="red", err=True)
    typer.echo(f"{entry.name}: {'all is well' if not record['problems'] else 'there are problems'}; {place}")
    if record["problems"]:
        raise typer.Exit(1)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[Path | None, typer.Option(help="PNG file; default RUN/curves.png.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Which curves; default the telling ones.")] = None,
) -> None:
    """Draw a run's curves in the terminal and to a PNG."""
    with _mistakes_end_here():
        from oxrl.plot import plot_run

        plot_run(run, output or run / "curves.png", metric or [])


if __name__ == "__main__":
    main()
