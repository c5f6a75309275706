"""`Trainer(model).train(task=...)`: unset options are chosen for the machine, the model and the task, and logged.

A thin layer: it writes a `Config`, and everything below it is public (`tasks`, `plan_spec`, `fitting_batch`,
`prepare_run`, `train_spec`, `evaluate`, `export_model`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from oxrl.config import Config, ConfigError, check_config, load_config, nearest_key
from oxrl.config.registry import find_backend
from oxrl.data.prepare import DATASETS, data_dir
from oxrl.diagnose.memory import fitting_batch
from oxrl.diagnose.plan import (
    Plan,
    chosen_device,
    framework_bytes,
    heaviest_work,
    model_facts,
    plan_spec,
)
from oxrl.evaluation.evaluate import Evaluation, evaluate
from oxrl.machine.hardware import Hardware, detect_hardware, set_up_process
from oxrl.models.load import resolve_device
from oxrl.names import LIVE, import_path_of
from oxrl.rewards.grade import AnyReward
from oxrl.run.checkpoint import best_checkpoint
from oxrl.run.export import export_model, push_model
from oxrl.run.folder import create_folder
from oxrl.run.launch import join_others, run_ranks
from oxrl.run.placement import ranks_to_start
from oxrl.run.prepare import prepare_run, resolve
from oxrl.run.spec import Choice, RunSpec
from oxrl.run.train import RunResult, last_metrics, open_model, train_spec
from oxrl.tracking.logs import set_up_logging
from oxrl.tracking.metrics import read_metrics
from oxrl.types import GenerationConfig, Message

logger = logging.getLogger(__name__)

ENOUGH_ON_CPU, MOST_ON_CPU = 1024, 2048  # tokens per micro-batch; more are no faster on a CPU
NAMES = {
    "task": "run.task",
    "algorithm": "train.alg_name",
    "data": "data.train_files_path",
    "val": "data.val_files_path",
    "reward": "reward.reward_func",
    "steps": "train.train_steps_per_epoch",
    "epochs": "train.total_number_of_epochs",
}
"""Short names of keys, besides the keys' own names."""

Sections: TypeAlias = dict[str, dict[str, Any]]
Rows: TypeAlias = str | Path | Sequence[Mapping[str, Any]]
RewardLike: TypeAlias = str | Callable[..., Any] | Mapping[str, float]


class TrainingResult(NamedTuple):
    """A finished run: `result.evaluate("gsm8k", limit=100)`, `result.generate("2 + 2?")`, `result.save("model")`."""

    folder: Path
    best_checkpoint: Path
    history: list[dict[str, float]]
    config: Config
    choices: tuple[Choice, ...]

    def __repr__(self) -> str:
        return f"TrainingResult({last_metrics(self.history)}; folder={str(self.folder)!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric that was logged."""
        return {name: value for row in self.history for name, value in row.items()}

    def generate(
        self, prompts: str | Sequence[str], *, max_new_tokens: int = 256, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """The trained model's response to each prompt."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        generator, render = open_model(str(self.folder))
        ids = [render.prompt([Message("user", text)]) for text in texts]
        sampling = GenerationConfig(max_new_tokens, temperature, seed=seed)
        return [generation.text for generation in generator.complete(ids, sampling)]

    def evaluate(self, data: Any = None, reward: str | AnyReward | None = None, **rest: Any) -> Evaluation:
        """`oxrl.evaluate` of the trained model; by default on the run's held-out rows with the run's reward."""
        if data is None:
            data = next(iter(self.config.data.val_files.values()), None)
            if data is None:
                raise ValueError("the run has no held-out rows: pass data, as in result.evaluate('gsm8k')")
            own = self.config.reward
            if reward is None and isinstance(own.reward_func, str):
                reward, rest = own.reward_func, {"params": own.params, **rest}
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

    Keywords are keys of the config, of whichever section (`lr`, `n_samples`, `max_seq_len`), or sections
    (`rollout={"temperature": 0.7}`, `lora=True`); those given to `train` win over those given here.
    """

    def __init__(self, model: str | Path, **overrides: Any) -> None:
        self.model, self.overrides = str(model), overrides

    def train(
        self,
        task: str | None = None,
        *,
        algorithm: str | None = None,
        data: Rows | None = None,
        val: Rows | None = None,
        reward: RewardLike | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        output: str | Path | None = None,
        resume: bool = False,
        **overrides: Any,
    ) -> TrainingResult:
        """Check everything, log what was chosen, train, and return the result.

        `data` and `val` are files, hub ids, names from `oxrl data list`, or rows; `reward` a name, a function, or
        several with weights. Without `output` a run goes to a new folder: `checkpoints/run`, then `checkpoints/run-2`,
        ... (`experiment_id` is the name). `resume` continues the run in `output` with its own config; keywords given
        here override it, as far as a running experiment allows.
        """
        set_up_process()
        join_others()
        if not logging.getLogger().handlers:  # a script without logging of its own
            set_up_logging()
        named = {"task": task, "algorithm": algorithm, "data": data, "val": val, "reward": reward}
        wanted = {**named, "steps": steps, "epochs": epochs, **overrides}
        if resume:
            return self._resume(output, wanted)
        config, backend = self._chosen(wanted)
        hardware = detect_hardware()
        spec, sizes = choose_sizes(prepare_run(config, output), hardware)
        choices = (_where(spec.config, hardware), *backend, *spec.choices, *sizes)
        for choice in choices:
            if choice not in spec.choices or not choice.value:  # the others are logged by `prepare_run`
                logger.info("%s", choice)
        return _result(_trained(spec), spec.config, choices)

    def plan(self, task: str | None = None, *, output: str | Path | None = None, **wanted: Any) -> Plan:
        """What `train` would do, with its memory and time, for the same arguments; no weight is loaded."""
        config, _ = self._chosen({"task": task, **wanted})
        hardware = detect_hardware()
        spec, _ = choose_sizes(resolve(config, output), hardware)
        return plan_spec(spec, hardware)

    def _resume(self, output: str | Path | None, wanted: Mapping[str, Any]) -> TrainingResult:
        if output is None:
            raise ValueError("resume=True needs output=, the folder of the run to resume")
        if not (Path(output) / "config.yaml").exists():
            raise ValueError(f"output must name the run to resume; {output} has no config.yaml")
        sections = self._sections(wanted)
        overrides = [
            f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()
        ]
        spec = prepare_run(load_config(Path(output) / "config.yaml", overrides), output, resume=True)
        return _result(_trained(spec), spec.config, ())

    def _sections(self, wanted: Mapping[str, Any]) -> Sections:
        given = {**self.overrides, **{name: value for name, value in wanted.items() if value is not None}}
        sections = sections_of(given)
        sections.setdefault("model", {})["name"] = self.model
        return sections

    def _chosen(self, wanted: Mapping[str, Any]) -> tuple[Config, tuple[Choice, ...]]:
        sections = self._sections(wanted)
        choices = choose_backend(sections)
        for choice in choices:
            section, _, key = choice.key.partition(".")
            sections.setdefault(section, {})[key] = choice.value
        return check_config(sections), choices


def sections_of(keywords: Mapping[str, Any]) -> Sections:
    """`sections_of({"lr": 1e-4, "lora": True}) == {"train": {"lr": 1e-4}, "lora": {"enabled": True}}`."""
    sections: Sections = {}
    for name, value in keywords.items():
        for section, key, given in _placed(name, value):
            sections.setdefault(section, {})[key] = given
    return sections


def _placed(name: str, value: Any) -> list[tuple[str, str, Any]]:
    """Section, key and value of one keyword."""
    schema = {section: set(field.annotation.model_fields) for section, field in _schema().items()}
    if name in schema and isinstance(value, Mapping) and (name != "reward" or set(value) <= schema[name]):
        return [(name, key, each) for key, each in value.items()]
    if name == "lora" and isinstance(value, bool):
        return [("lora", "enabled", value)]
    if name in NAMES:
        section, _, key = NAMES[name].partition(".")
        return [_plain(section, key, value)]
    if name in schema:
        raise ValueError(f"{name} is a section of the config: give it as {name}={{...}}, not {value!r}")
    homes = [section for section, keys in schema.items() if name in keys]
    if len(homes) != 1:
        raise ValueError(_which(name, homes, {key for keys in schema.values() for key in keys}))
    return [_plain(homes[0], name, value)]


def _schema() -> dict[str, Any]:
    """The sections that list their keys; open ones are passed as a whole."""
    return {name: field for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")}


def _which(name: str, homes: Sequence[str], keys: set[str]) -> str:
    if homes:
        return f"{name} is a key of {' and '.join(homes)}: name the section, as in {homes[0]}={{{name!r}: ...}}"
    near = nearest_key(name, [*keys, *NAMES])
    return f"no key of the config is called {name}" + (f"; did you mean {near}?" if near else "; docs/configuration.md")


def _plain(section: str, key: str, value: Any) -> tuple[str, str, Any]:
    """As a config can hold it: functions by import path, rows as a file, prepared datasets by their key."""
    if isinstance(value, Path):
        value = str(value)
    elif key == "reward_func" and callable(value):
        value = import_path_of(value)
    elif key in ("train_files_path", "val_files_path") and not isinstance(value, str | Mapping):
        value = str(_file_of(_rows(value)))
    elif key == "train_files_path" and value in DATASETS and not Path(value).exists():
        key = "dataset"
    return section, key, value


def _rows(given: Any) -> list[Mapping[str, Any]]:
    """A list of rows, a `datasets.Dataset` or a data frame."""
    rows = given.to_dict("records") if hasattr(given, "iterrows") else given
    rows = list(rows) if isinstance(rows, Iterable) else [rows]
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"data is a file, a dataset's name or a list of rows (dicts), not {type(given).__name__}")
    return rows


def _file_of(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows given in Python to a file named by their digest, so that the run can be repeated."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file = data_dir() / "given" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def choose_backend(sections: Sections) -> tuple[Choice, ...]:
    """One process where a function of this script was given: other processes cannot import it."""
    backend = sections.get("run", {}).get("backend", "auto")
    if f'"{LIVE}:' not in json.dumps(sections):
        return ()
    launched = backend != "auto" and find_backend(backend).processes == "ranks"
    if launched and "RANK" not in os.environ:  # those of torchrun all run the script
        raise ConfigError(
            f"run.backend: {backend} starts processes that cannot import a function of a script: put it into a "
            "file and pass 'FILE.py:FUNCTION', or use the backend local or ray"
        )
    if backend != "auto":
        return ()
    return (
        Choice(
            "run.backend", "local", "a function of this script cannot be imported by other processes; one in a file can"
        ),
    )


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


def _trained(spec: RunSpec) -> RunResult:
    """Train; an interrupt has the call that resumes the run as its message."""
    try:
        return _trained_somewhere(spec)
    except KeyboardInterrupt:
        if not (spec.folder / "config.yaml").exists():
            raise KeyboardInterrupt("interrupted before the first step; no run was written") from None
        call = f"Trainer({spec.config.model.name!r}).train(output={str(spec.folder)!r}, resume=True)"
        raise KeyboardInterrupt(f"interrupted; resume with: {call}") from None


def _trained_somewhere(spec: RunSpec) -> RunResult:
    """In this process; or, with several ranks, by `oxrl train` of the same config in each of them."""
    ranks = ranks_to_start(spec.config)
    if not ranks:
        return train_spec(spec)
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
    history = run.history or read_metrics(run.folder / "metrics.jsonl")  # a finished run had no step left
    return TrainingResult(run.folder, run.checkpoint, history, config, tuple(choices))
