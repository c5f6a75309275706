"""Verify that oxRL can train a model: load and probe it, then run two steps each of SFT, DPO and GRPO, and of a LoRA.

Every run uses the public entry point, is resumed from the checkpoint of its first step, and must end with the same
logits as the uninterrupted run. Each row has an image or a sound if the model reads them. The record holds the
measurements, versions, machine and problems. Whether the model learns anything useful is not tested here.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import time
import wave
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from oxrl.config import Config, check_config
from oxrl.models.catalog import Entry, Strategy
from oxrl.models.load import (
    check_model,
    check_tokenizer,
    load_model,
    load_tokenizer,
    media_read_by,
)
from oxrl.rewards.grade import reads
from oxrl.run.checkpoint import environment
from oxrl.run.spec import model_config
from oxrl.run.train import RunResult, train_run
from oxrl.types import ModelConfig, Rollout

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ALGORITHMS = ("sft", "dpo", "grpo")
TRIALS = (*ALGORITHMS, "lora")  # "lora": dpo with an adapter, whose reference is the model without it
PROMPTS = ("Tell me something about the sea.", "Write a sentence about a fox.")
ROWS: dict[str, list[dict[str, str]]] = {
    "sft": [{"prompt": prompt, "response": "It is blue, and it is quick."} for prompt in PROMPTS],
    "dpo": [{"prompt": prompt, "chosen": "Gladly: it is wide.", "rejected": "No."} for prompt in PROMPTS],
    "grpo": [{"prompt": prompt} for prompt in PROMPTS],
}
STEPS = 2
SAMPLE_RATE = 16_000  # of the sound in rows for models that hear
Settings: TypeAlias = Mapping[str, Mapping[str, Any]]
NO_SETTINGS: Settings = MappingProxyType({})


@reads()
def any_difference(rollout: Rollout) -> float:
    """A meaningless reward that differs between any two completions, also those of a random model."""
    tokens = rollout.generation.token_ids
    return sum(token % 101 for token in tokens) / (100 * max(1, len(tokens)))


def verify_entry(entry: Entry, weights: str | None = None) -> dict[str, Any]:
    """Return the record of a catalogue model; `weights` is a path to a local copy, whose identity is checked."""
    record = verify_model(weights or entry.source, entry.strategy, entry.lora_targets, expected=entry, trials=TRIALS)
    command = f"oxrl models verify {entry.name}"
    return {"name": entry.name, "source": entry.source, "command": command, **record, "changes": [], "attempts": []}


def verify_model(
    weights: str,
    strategy: Strategy = "full",
    lora_targets: Sequence[str] = (),
    *,
    expected: Entry | None = None,
    trials: Sequence[str] = ALGORITHMS,
    settings: Settings = NO_SETTINGS,
    stop_at_failure: bool = False,
) -> dict[str, Any]:
    """Return the record of a model; `record["problems"]` is empty if all checks passed.

    `settings` are sections of the config that differ from the usual ones. A failed run is a problem in the record, or
    raised with `stop_at_failure`.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oxrl-verify-") as scratch:
        configs = {
            trial: trial_config(weights, trial, strategy, lora_targets, Path(scratch), settings)
            for trial in trials
            if not (trial == "lora" and strategy == "lora")
        }
        loaded = model_config(next(iter(configs.values())))
        check_model(loaded)
        model, tokenizer = load_model(loaded._replace(gradient_checkpointing=False)), load_tokenizer(loaded)
        check_tokenizer(model, tokenizer)
        record: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "environment": {"oxrl": version("oxrl"), **environment()},
            "architecture": type(model).__name__,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "media": media_read_by(loaded),
            "dtype": str(model.dtype).removeprefix("torch."),
            "strategy": strategy,
            "settings": {section: dict(keys) for section, keys in settings.items()},
        }
        if expected is not None:
            _check_identity(record, expected)
        record |= _probe(model)
        before, exact = _logits(model), model.device.type == "cpu"
        del model
        problems: list[str] = []
        for trial, config in configs.items():
            try:
                record[trial] = _two_steps(config, Path(scratch) / trial, before)
            except (RuntimeError, FloatingPointError) as failure:  # not finite, or sampler and trainer disagree
                if stop_at_failure:
                    raise
                problems.append(f"{trial}: {failure}")
            else:
                problems += [f"{trial}: {each}" for each in _problems(record[trial], record["dtype"], exact)]
            shutil.rmtree(Path(scratch) / trial, ignore_errors=True)  # checkpoints of a large model fill the disk
    return {**record, "seconds": round(time.monotonic() - started, 1), "problems": problems}


def _check_identity(record: dict[str, Any], expected: Entry) -> None:
    """Raise a ValueError if the loaded model is not the expected one."""
    architecture, parameters = record["architecture"], record["parameters"]
    if architecture != expected.architecture or not 0.9 < parameters / (expected.billions * 1e9) < 1.1:
        raise ValueError(
            f"this is not {expected.name}: it is a {architecture} of {parameters:,} parameters, not a "
            f"{expected.architecture} of {expected.billions:g} billion"
        )


def write_record(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _probe(model: PreTrainedModel) -> dict[str, str]:
    """Return the batch layout used in training and the decoder used in generation."""
    import torch

    from oxrl.backends.forward import LanguageModel
    from oxrl.backends.layout import prepare_layout
    from oxrl.generators.embedded.decoders import SlotDecoder, choose_decoder

    probed = prepare_layout(LanguageModel(model))
    with torch.no_grad():
        decoder = choose_decoder(model, 2, "shrinking")
    return {
        "layout": probed.layout,
        "layout_reason": probed.reason,
        "generation": "slots" if isinstance(decoder, SlotDecoder) else "padded waves",
    }


def media_columns(kinds: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Write a small picture or sound, and return the columns of a row that has it."""
    columns: dict[str, list[str]] = {}
    if "image" in kinds:
        from PIL import Image

        Image.linear_gradient("L").resize((32, 32)).convert("RGB").save(folder / "picture.png")
        columns["images"] = [str(folder / "picture.png")]
    if "audio" in kinds:
        with wave.open(str(folder / "sound.wav"), "wb") as sound:
            sound.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
            sound.writeframes(
                b"".join(
                    int(8000 * math.sin(n / 9)).to_bytes(2, "little", signed=True) for n in range(SAMPLE_RATE // 8)
                )
            )
        columns["audio"] = [str(folder / "sound.wav")]
    return columns


def trial_config(
    weights: str, trial: str, strategy: Strategy, lora_targets: Sequence[str], folder: Path, settings: Settings
) -> Config:
    """Return the config of a trial; its few rows are written to `folder`."""
    algorithm = "dpo" if trial == "lora" else trial
    data = folder / f"{trial}.jsonl"
    trusted = bool(settings.get("model", {}).get("trust_remote_code", False))
    media = media_columns(media_read_by(ModelConfig(weights, trust_remote_code=trusted)), folder)
    data.write_text("".join(json.dumps({**row, **media}) + "\n" for row in ROWS[algorithm]), encoding="utf-8")
    usual: dict[str, dict[str, Any]] = {
        "model": {"name": weights},
        "data": {"train_files_path": str(data)},
        "train": {
            "alg_name": algorithm,
            "lr": 1e-4,
            "train_batch_size_per_gpu": len(PROMPTS),
            "train_steps_per_epoch": STEPS,
            "checkpoint_every": 1,
        },
    }
    if "lora" in (strategy, trial):
        usual["lora"] = {"enabled": True, "target_modules": list(lora_targets) or "all-linear"}
    if algorithm == "grpo":
        usual["rollout"] = {"n_samples": 2, "max_tokens": 8, "filter": "check_reward_nonzero_std"}
        usual["reward"] = {"reward_func": f"{__name__}:any_difference"}
    sections = {*usual, *settings} - (set() if algorithm == "grpo" else {"rollout", "inference_engine"})
    return check_config({section: {**usual.get(section, {}), **settings.get(section, {})} for section in sections})


def _two_steps(config: Config, folder: Path, before: Tensor) -> dict[str, Any]:
    """Run two steps, then repeat the second one from the checkpoint of the first."""
    result = train_run(config, folder)
    after = _logits_of(result, config)
    shutil.rmtree(result.checkpoint)
    resumed = _logits_of(train_run(config, folder, resume=True), config)
    numbers = {
        "loss": [line["loss"] for line in result.history],
        "grad_norm": [line["grad_norm"] for line in result.history],
        "logit_change": _largest(after - before),
        "resume_gap": _largest(resumed - after),
    }
    if "logprob_gap" in result.history[0]:
        numbers["logprob_gap"] = [line["logprob_gap"] for line in result.history]
    return numbers


def _problems(numbers: dict[str, Any], dtype: str, exact: bool) -> list[str]:
    gap_allowed = 1e-3 if dtype == "float32" else 0.5
    resume_allowed = 0.0 if exact else 0.05 * numbers["logit_change"]  # GPUs are not bitwise deterministic
    failed = {
        "the loss is not finite": not all(map(math.isfinite, numbers["loss"])),
        "the gradient is zero or not finite": not all(0 < norm < math.inf for norm in numbers["grad_norm"]),
        "training did not change the logits": not 0 < numbers["logit_change"] < math.inf,
        "the resumed run ended with different logits": not numbers["resume_gap"] <= resume_allowed,
        "sampler and trainer disagree": not all(gap <= gap_allowed for gap in numbers.get("logprob_gap", [])),
    }
    return [f"{problem}: {numbers}" for problem, is_failed in failed.items() if is_failed]


def _logits_of(result: RunResult, config: Config) -> Tensor:
    """Return the logits of the last checkpoint, loaded with the settings of its run."""
    assert result.checkpoint.name == f"step_{STEPS:04d}", f"{result.checkpoint} is not the last one"
    settings = model_config(config)._replace(name=str(result.checkpoint), revision=None)
    return _logits(load_model(settings, is_trainable=False))


def _logits(model: PreTrainedModel) -> Tensor:
    """Return the model's logits for fixed tokens."""
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, 12), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0].float().cpu()
    return logits


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
