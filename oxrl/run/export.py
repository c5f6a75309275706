"""Export a run or a model to a folder: plain weights, tokenizer, and a model card.

The folder gets its name only when it is complete. Optimizer, random states and data are not exported.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oxrl
from oxrl.data.processor import save_tokenizer
from oxrl.machine.hub import offline_if_unreachable
from oxrl.models.builtin import prepare_builtin
from oxrl.models.catalog import find_entry
from oxrl.models.load import check_model, find_model, load_model, load_tokenizer, name_public_base
from oxrl.models.lora import save_adapter, save_merged
from oxrl.models.reward_model import HEADS
from oxrl.parsing import read_json, read_yaml
from oxrl.run.folder import resolve_weights
from oxrl.tracking.metrics import read_metrics
from oxrl.types import ModelConfig
from oxrl.weights.integrity import apply_umask


def merge_run(source: str, output: str | Path, *, dtype: str = "auto") -> Path:
    """Merge a LoRA adapter (a run folder, or an adapter folder) into its base: plain weights in `output`."""
    if find_model(resolve_weights(source)).kind != "adapter":
        raise ValueError(f"{source} has no adapter to merge; `oxrl export` writes its weights")
    return export_model(source, output, dtype=dtype)


def export_model(source: str, output: str | Path, *, adapter: bool = False, dtype: str = "auto") -> Path:
    """A run's best checkpoint, or any model, as a folder that transformers, vLLM and others load.

    An adapter is merged into its base, unless it is to stay an `adapter`.
    """
    from safetensors import SafetensorError

    weights, folder = resolve_weights(source), Path(output)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise ValueError(f"{folder} is not empty: choose another folder")
    kind = find_model(weights).kind
    if adapter and kind != "adapter":
        raise ValueError(f"{source} has no adapter: export its weights, without adapter")
    _check_links(Path(weights))
    settings = ModelConfig(weights, dtype=_stored_dtype(weights) if dtype == "auto" else dtype, device="cpu")
    check_model(settings)
    draft = folder.with_name(f".unfinished-{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        _write_model(settings, draft, as_adapter=adapter)
        (draft / "README.md").write_text(_card(source, weights), encoding="utf-8")
        apply_umask(draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    except SafetensorError as error:  # of a full disk: safetensors raises no OSError
        raise RuntimeError(f"{folder} could not be written: {error}; free disk space, then export again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_model(settings: ModelConfig, draft: Path, *, as_adapter: bool) -> None:
    model = load_model(settings, is_trainable=False)
    if as_adapter:
        save_adapter(model, draft)
        name_public_base(draft)
    elif find_model(settings.name).kind == "adapter":
        save_merged(model, draft)
    else:
        model.save_pretrained(draft)
    save_tokenizer(load_tokenizer(settings.name), draft)
    if (heads := Path(settings.name) / HEADS).exists():
        shutil.copy(heads, draft / HEADS)


def _check_links(folder: Path) -> None:
    """Refuse links to files outside of the folder, whose content would be exported, and perhaps uploaded, with it."""
    home = folder.resolve()
    allowed = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)  # the hub's cache
    for file in folder.rglob("*"):
        target = file.resolve()
        if not any(target.is_relative_to(each) for each in allowed):
            raise ValueError(
                f"{file} is a link to {target}, outside of the folder: if it belongs to the model, replace it by a copy"
            )


def push_model(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload a folder that `export_model` wrote; needs HF_TOKEN. Returns the URL of the commit."""
    import httpx
    from huggingface_hub import HfApi, errors, get_token

    if get_token() is None:
        raise ValueError("to push a model, set HF_TOKEN to a token that may write (or run `hf auth login`)")
    api = HfApi()
    try:
        with offline_if_unreachable():
            api.create_repo(repository, private=private, exist_ok=True)
            message = "Upload by oxrl export"
            return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message))
    except errors.HFValidationError as error:
        raise ValueError(f"{repository!r} is not a repository name: use owner/name") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        raise ValueError(f"{repository} could not be written: {str(error).splitlines()[0]}") from error


def fetch_model(name: str) -> Path:
    """Download a model by its catalogue name or hub id and return its folder. Pickled weights are not downloaded."""
    import httpx
    from huggingface_hub import errors, snapshot_download

    source = find_model(_hub_id(name))
    if source.kind == "builtin":
        return prepare_builtin(source.where)
    if source.kind != "hub":
        return Path(source.where)
    check_model(ModelConfig(source.where))
    try:
        return Path(snapshot_download(source.where, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.jinja"]))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError) as error:
        raise ValueError(f"{source.where} could not be downloaded: {str(error).splitlines()[0]}") from error


def _hub_id(name: str) -> str:
    try:
        return find_entry(name).source
    except ValueError:
        if "/" not in name:
            raise
        return name


def _stored_dtype(weights: str) -> str:
    """The precision of the stored weights; an adapter uses that of its base."""
    if not (file := Path(weights) / "config.json").is_file():
        return "auto"
    stored = read_json(file)
    return str(stored.get("dtype") or stored.get("torch_dtype") or "auto")


def _card(source: str, weights: str) -> str:
    """The model card: how the model was trained, as far as the run recorded it."""
    home = Path(weights).parents[1] if Path(weights).parent.name == "checkpoints" else None
    lines = [f"# {Path(source).name}", "", f"Exported by oxRL {oxrl.__version__}."]
    if home is not None and (home / "config.yaml").is_file():
        facts = _facts(read_yaml(home / "config.yaml"))
        facts |= {"checkpoint": Path(weights).name, **_last_metrics(home / "metrics.jsonl", Path(weights).name)}
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value)]
    return "\n".join([*lines, ""])


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    train, data, reward, lora = (config[section] for section in ("train", "data", "reward", "lora"))
    rows = data.get("dataset") or data.get("train_files_path")
    return {
        "base model": config["model"]["name"],
        "algorithm": f"{train['alg_name']} {train['alg_params'] or ''}".strip(),
        "trained on": ", ".join(rows.values()) if isinstance(rows, dict) else rows,
        "reward": reward["reward_func"] or reward["model"] or reward["judge"],
        "LoRA": f"rank {lora['r']}" if lora["enabled"] else None,
    }


def _last_metrics(file: Path, checkpoint: str) -> dict[str, str]:
    """The last metrics up to that checkpoint."""
    step = int(checkpoint.removeprefix("step_"))
    rows = [row for row in read_metrics(file) if row["step"] <= step]
    return {name: f"{row[name]:.4g}" for row in rows for name in ("reward", "eval_reward", "eval_loss") if name in row}
