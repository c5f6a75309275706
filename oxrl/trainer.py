"""`Trainer(model).train(task=...)`: unset options are chosen for the machine, the model and the task, and logged.

A thin layer: it writes a `Config`, and everything below it is public (`tasks`, `plan_spec`, `fitting_batch`,
`prepare_run`, `train_spec`, `evaluate`, `export_model`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oxrl.config import Config, ConfigError, check_config, load_config
from oxrl.config.registry import find_backend
from oxrl.diagnose.memory import fitting_batch
from oxrl.diagnose.model_facts import model_facts
from oxrl.diagnose.plan import (
    Plan,
    chosen_device,
    framework_bytes,
    heaviest_work,
    plan_spec,
)
from oxrl.evaluation.evaluate import Evaluation, evaluate
from oxrl.loops.callbacks import Callbacks, as_logger
from oxrl.machine.hardware import Hardware, detect_hardware, set_up_process
from oxrl.machine.out_of_memory import return_freed_memory
from oxrl.models.load import resolve_device
from oxrl.names import LIVE, live_name, renamed_keywords
from oxrl.rewards.grade import AnyReward
from oxrl.run.arguments import RewardsLike, Rows, Sections, by_argument, check_available, log_names, sections_of
from oxrl.run.checkpoint import best_checkpoint
from oxrl.run.export import export_model, push_model
from oxrl.run.folder import create_folder, read_recorded
from oxrl.run.launch import join_others, run_ranks
from oxrl.run.placement import ranks_to_start
from oxrl.run.prepare import prepare_run, resolve
from oxrl.run.reward import configured_reward
from oxrl.run.spec import Choice, RunSpec
from oxrl.run.train import RunResult, last_metrics, open_model, train_spec
from oxrl.tracking.health import HealthWarning, find_warnings
from oxrl.tracking.logs import set_up_logging
from oxrl.tracking.metrics import read_metrics
from oxrl.types import EnvFn, FilterFn, GenerationConfig, Message, MetricsLogger

_log = logging.getLogger(__name__)

ENOUGH_ON_CPU, MOST_ON_CPU = 1024, 2048  # tokens per micro-batch; more are no faster on a CPU


class TrainingResult(NamedTuple):
    """A finished run: `result.evaluate("gsm8k", limit=100)`, `result.generate("2 + 2?")`, `result.save("model")`."""

    folder: Path
    best_checkpoint: Path
    history: list[dict[str, float]]
    config: Config
    choices: tuple[Choice, ...]

    def __repr__(self) -> str:
        warned = f"; {count} warnings, see .warnings" if (count := len(self.warnings)) else ""
        return f"TrainingResult({last_metrics(self.history)}; folder={str(self.folder)!r}{warned})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric that was logged."""
        return {name: value for row in self.history for name, value in row.items()}

    @property
    def warnings(self) -> list[HealthWarning]:
        """What went wrong in training, by its metrics: the loss diverged, all rewards were equal, and so on."""
        return find_warnings(read_metrics(self.folder / "metrics.jsonl"))

    @renamed_keywords(max_new_tokens="max_tokens")
    def generate(
        self, prompts: str | Sequence[str], *, max_tokens: int = 256, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """The trained model's response to each prompt."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        generator, render = open_model(str(self.folder))
        ids = [render.prompt([Message("user", text)]) for text in texts]
        sampling = GenerationConfig(max_tokens, temperature, seed=seed)
        return [generation.text for generation in generator.complete(ids, sampling)]

    def evaluate(
        self, data: Any = None, reward: str | AnyReward | Mapping[Any, float] | None = None, **rest: Any
    ) -> Evaluation:
        """`oxrl.evaluate` of the trained model; by default on the run's held-out rows with the run's reward."""
        if data is None:
            data = next(iter(self.config.data.val_files.values()), None)
            if data is None:
                raise ValueError("the run has no held-out rows: pass data, as in result.evaluate('gsm8k')")
        own = self.config.reward.reward_func
        if reward is None and "by" not in rest and own is not None and (not isinstance(own, str) or ":" in own):
            reward = configured_reward(self.config)  # `evaluate` does not import what a run names
        return evaluate(self.folder, data, reward, **rest)

    def save(self, folder: str | Path, **rest: Any) -> Path:
        """`export_model`: plain weights, tokenizer and a model card, for transformers, vLLM and others."""
        return export_model(str(self.folder), folder, **rest)

    def push(self, repository: str, *, private: bool = True) -> str:
        """Export into the run folder and upload it to the hub; needs HF_TOKEN."""
        folder = self.folder / "export"
        return push_model(folder if folder.exists() else self.save(folder), repository, private=private)


class Trainer:
    """`Trainer("smollm2-135m").train(task="math")`, or `.train(algorithm="dpo", data="pairs.jsonl", lr=1e-6)`.

    Keywords are arguments of `train`, keys of the config, of whichever section (`lr`, `n_samples`, `max_seq_len`), or
    sections (`rollout={"temperature": 0.7}`, `lora=True`); those given to `train` win over those given here.
    """

    def __init__(self, model: str | Path, **overrides: Any) -> None:
        self.model, self.overrides = str(model), overrides

    def train(
        self,
        task: str | None = None,
        *,
        algorithm: str | Callable[..., Any] | None = None,
        data: Rows | None = None,
        val: Rows | None = None,
        reward: RewardsLike | None = None,
        env: str | EnvFn | None = None,
        tools: Sequence[str | Callable[..., Any]] | None = None,
        filter: str | FilterFn | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        output: str | Path | None = None,
        resume: bool = False,
        callbacks: Iterable[Any] | None = None,
        logger: MetricsLogger | Callable[..., None] | None = None,
        **overrides: Any,
    ) -> TrainingResult:
        """Check everything, log what was chosen, train, and return the result.

        `data` and `val` are files, hub ids, names from `oxrl data list`, or rows; `algorithm` a name or a loss;
        `reward` a name, a function, a list of them, or a mapping to weights; `env` an async function of (sample,
        policy), `tools` functions that the model may call, `filter` a function of the rollouts of a prompt.
        `callbacks` are functions of (step, metrics), or objects with any of `on_start`, `on_step`, `on_evaluate`,
        `on_save`, `on_end`; `logger` gets the logged metrics. Without `output` a run goes to a new folder:
        `checkpoints/run`, then `checkpoints/run-2`, ... (`experiment_id` is the name). `resume` continues the run in
        `output` with its own config; keywords given here override it, as far as a running experiment allows.
        """
        set_up_process()
        join_others()
        if not logging.getLogger().handlers:  # a script without logging of its own
            set_up_logging()
        named = {"task": task, "algorithm": algorithm, "data": data, "val": val, "reward": reward, "env": env}
        more = {"tools": tools, "filter": filter, "steps": steps, "epochs": epochs, "batch_size": batch_size}
        observers = {"callbacks": callbacks, "logger": logger}
        wanted, watch = self._watched({**named, **more, **observers, **overrides})
        if resume:
            return self._resume(output, wanted, watch)
        config, backend = self._chosen(wanted, one_process=bool(watch))
        hardware = detect_hardware()
        spec, sizes = choose_sizes(prepare_run(config, output), hardware)
        choices = (_where(spec.config, hardware), *backend, *spec.choices, *sizes)
        for choice in choices:
            if choice not in spec.choices or not choice.value:  # the others are logged by `prepare_run`
                _log.info("%s", choice)
        return _result(_trained(spec, watch), spec.config, choices)

    def plan(self, task: str | None = None, *, output: str | Path | None = None, **wanted: Any) -> Plan:
        """What `train` would do, with its memory and time, for the same arguments; no weight is loaded."""
        config, _ = self._chosen(self._watched({"task": task, **wanted})[0])
        hardware = detect_hardware()
        spec, _ = choose_sizes(resolve(config, output), hardware)
        return plan_spec(spec, hardware)

    def _watched(self, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keywords for the config, and `callbacks` and `logger`, checked; both with those of the trainer."""
        given = {**self.overrides, **{name: value for name, value in wanted.items() if value is not None}}
        watch = {name: given.pop(name) for name in ("callbacks", "logger") if given.get(name) is not None}
        if "callbacks" in watch:
            watch["callbacks"] = list(watch["callbacks"]) if not callable(watch["callbacks"]) else watch["callbacks"]
            Callbacks(watch["callbacks"])
        as_logger(watch.get("logger"))
        return given, watch

    def _resume(self, output: str | Path | None, wanted: Mapping[str, Any], watch: Mapping[str, Any]) -> TrainingResult:
        if output is None:
            raise ValueError("resume=True needs output=, the folder of the run to resume")
        if not (Path(output) / "config.yaml").exists():
            raise ValueError(f"output must name the run to resume; {output} has no config.yaml")
        sections = self._sections(wanted)
        check_available(read_recorded(Path(output) / "config.yaml"), sections)
        overrides = [
            f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()
        ]
        spec = prepare_run(load_config(Path(output) / "config.yaml", overrides), output, resume=True)
        return _result(_trained(spec, watch), spec.config, ())

    def _sections(self, wanted: Mapping[str, Any]) -> Sections:
        sections = sections_of(wanted)
        log_names(wanted)
        sections.setdefault("model", {})["name"] = self.model
        return sections

    def _chosen(self, wanted: Mapping[str, Any], *, one_process: bool = False) -> tuple[Config, tuple[Choice, ...]]:
        sections = self._sections(wanted)
        choices = choose_backend(sections, one_process=one_process)
        for choice in choices:
            section, _, key = choice.key.partition(".")
            sections.setdefault(section, {})[key] = choice.value
        try:
            return check_config(sections), choices
        except ConfigError as error:
            raise ConfigError(by_argument(str(error), wanted)) from None


def choose_backend(sections: Sections, *, one_process: bool = False) -> tuple[Choice, ...]:
    """One process where a function of this script was given: other processes cannot import it."""
    backend = sections.get("run", {}).get("backend", "auto")
    if f'"{LIVE}:' not in json.dumps(sections) and not one_process:
        return ()
    processes = "one" if backend == "auto" else find_backend(backend).processes
    if processes != "one" and live_name(str(sections.get("train", {}).get("alg_name", ""))):
        raise ConfigError(
            f"backend={backend!r} trains in processes that cannot import a loss of a script: put it into a file and "
            "pass algorithm='FILE.py:FUNCTION', or use the backend local"
        )
    if processes == "ranks" and "RANK" not in os.environ:  # those of torchrun all run the script
        raise ConfigError(
            f"backend={backend!r} starts processes that cannot import a function of a script: put it into a file and "
            "pass 'FILE.py:FUNCTION', use the backend local or ray, or start the script with torchrun; callbacks and a "
            "logger need one of the latter"
        )
    if backend != "auto":
        return ()
    reason = "a function of this script, a callback or a logger cannot be imported by other processes"
    return (Choice("run.backend", "local", reason),)


def choose_sizes(spec: RunSpec, hardware: Hardware) -> tuple[RunSpec, tuple[Choice, ...]]:
    """Micro-batch, checkpointing and slots that fit the device by estimate; keys that the user set are not changed."""
    config = spec.config
    device = chosen_device(resolve_device(config.model.device), hardware)
    facts = model_facts(spec.model, spec.lora)
    work = heaviest_work(spec, facts)
    on_cpu = device.device == "cpu"
    fit = fitting_batch(
        facts,
        device.free,
        longest=work.longest,
        kind="cpu" if on_cpu else "cuda",
        framework=framework_bytes(on_cpu),
        others=work.others,
        answers=config.rollout.max_tokens if spec.online else 0,
        slots=config.rollout.slots,
        **({"enough_tokens": ENOUGH_ON_CPU, "most_tokens": MOST_ON_CPU} if on_cpu else {}),
    )
    wanted = [("model", "gradient_checkpointing"), ("train", "micro_batch_tokens"), ("rollout", "slots")]
    chosen = [
        Choice(f"{section}.{key}", getattr(fit, key), why)
        for (section, key), why in zip(wanted, fit.reasons, strict=False)
        if key not in getattr(config, section).model_fields_set
    ]
    if not fit.fits and len(chosen) == len(fit.reasons):
        raise ValueError(f"{config.model.name} does not fit on {device.device}: {fit.reasons[1]}")
    for section, key in (choice.key.split(".") for choice in chosen):
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={key: getattr(fit, key)})}
        )
    return spec.with_config(config), tuple(chosen)


def _where(config: Config, hardware: Hardware) -> Choice:
    device = chosen_device(resolve_device(config.model.device), hardware)
    why = f"{device.name or 'the CPU'} with {device.free / 2**30:.0f} GiB free"
    if config.processes != "one":
        share = "all of them" if device.device == "cpu" else "each"  # they share one CPU
        return Choice("run.backend", config.run.backend, f"{config.ranks} processes train, {share} on {why}")
    others = len(hardware.gpus) - 1
    return Choice("model.device", device.device, why + (f"; {others} more GPUs stay unused" if others > 0 else ""))


def _trained(spec: RunSpec, watch: Mapping[str, Any]) -> RunResult:
    """Train; an interrupt has the call that resumes the run as its message."""
    try:
        return _trained_somewhere(spec, watch)
    except KeyboardInterrupt:
        if not (spec.folder / "config.yaml").exists():
            raise KeyboardInterrupt("interrupted before the first step; no run was written") from None
        call = f"Trainer({spec.config.model.name!r}).train(output={str(spec.folder)!r}, resume=True)"
        raise KeyboardInterrupt(f"interrupted; resume with: {call}") from None


def _trained_somewhere(spec: RunSpec, watch: Mapping[str, Any]) -> RunResult:
    """In this process; or, with several ranks, by `oxrl train` of the same config in each of them."""
    ranks = ranks_to_start(spec.config)
    if not ranks:
        return train_spec(spec, **watch)
    folder = spec.folder
    create_folder(spec.config, folder)
    file = folder / "ranks.yaml"
    file.write_text(yaml.safe_dump(spec.config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    command = ["train", str(file), "--output", str(folder)]
    resume = ["--resume"] if spec.resume_from is not None else []
    code = run_ranks([*command, *resume], ranks, max_restarts=spec.config.run.max_restarts)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"the run in {folder} failed: see the output of its processes above")
    checkpoint = best_checkpoint(folder / "checkpoints")
    assert checkpoint is not None, "a finished run has at least its last checkpoint"
    return RunResult(folder, checkpoint, read_metrics(folder / "metrics.jsonl"))


def _result(run: RunResult, config: Config, choices: Sequence[Choice]) -> TrainingResult:
    return_freed_memory()
    history = run.history or read_metrics(run.folder / "metrics.jsonl")  # a finished run had no step left
    return TrainingResult(run.folder, run.checkpoint, history, config, tuple(choices))
