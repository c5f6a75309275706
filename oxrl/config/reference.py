"""Generated: two complete example files, the page `docs/configuration.md`, a JSON schema, and the list of algorithms.

`python -m oxrl.config.reference` writes the files that are kept in the repository.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from oxrl.algorithms.describe import families
from oxrl.config.load import EXAMPLES, STAGES
from oxrl.config.schema import Choices, Config

ROOT = Path(__file__).parents[2]
SECTIONS = (
    "run",
    "train",
    "model",
    "lora",
    "data",
    "reward",
    "rollout",
    "deepspeed",
    "deepspeed_ref",
    "inference_engine",
)
SAMPLING = ("reward", "rollout", "inference_engine")
WIDTH = 46  # of a key and its value, before the comment


def rl_args() -> str:
    """Return `examples/rl_args.yaml`: every key, for reinforcement learning."""
    head = "# Every key for an online run (reinforcement learning), with its default: oxrl train rl_args.yaml"
    return _args(head, {"data": {"dataset": "gsm8k"}, "reward": {"reward_func": "gsm8k_reward_func"}}, SECTIONS)


def sl_args() -> str:
    """Return `examples/sl_args.yaml`: every key, for training on dataset rows."""
    head = "# Every key for an offline run (SFT, preferences), with its default: oxrl train sl_args.yaml"
    sections = tuple(section for section in SECTIONS if section not in SAMPLING)
    return _args(head, {"train": {"alg_name": "sft"}, "data": {"dataset": "dolly"}}, sections)


def _args(head: str, given: Mapping[str, Mapping[str, Any]], sections: tuple[str, ...]) -> str:
    values = {"model": {"name": "smollm2-135m"}, **given}
    config = Config.model_validate(values)
    comments = {(section, key): field.description or "" for section, key, field in fields()}
    return (
        "\n".join(
            [
                head,
                "# Generated from the schema by `python -m oxrl.config.reference`.",
                *as_lines(config, comments, sections),
            ]
        )
        + "\n"
    )


def as_lines(
    config: Config, comments: Mapping[tuple[str, str], str], sections: tuple[str, ...] = SECTIONS
) -> Iterator[str]:
    """Yield a config as lines of YAML that load to the same config, with a comment per key where there is one."""
    for section in sections:
        values = getattr(config, section).model_dump(mode="json")
        yield f"\n{section}:{'' if values else ' {}'}"
        for key, value in values.items():
            line = f"  {key}: {_flow(value)}"
            comment = comments.get((section, key), "")
            yield f"{line:{WIDTH}}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """Return `value` as one line of YAML."""
    written: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return written.removesuffix("\n").removesuffix("\n...").strip()


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) in the order of the page."""
    for section in SECTIONS:
        for key, field in section_class(section).model_fields.items():
            yield section, key, field


def section_class(section: str) -> type[BaseModel]:
    found = Config.model_fields[section].annotation
    assert isinstance(found, type), f"{section} is a section"
    assert issubclass(found, BaseModel), f"{section} is a section"
    return found


def document() -> str:
    """Return the page `docs/configuration.md`."""
    lines = [OPENING]
    for section in SECTIONS:
        owner = section_class(section)
        lines += [f"## {section}", "", inspect.cleandoc(owner.__doc__ or ""), ""]
        if owner.model_fields:
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in owner.model_fields.items():
            default = "(required)" if field.is_required() else f"`{_flow(field.default)}`"
            cells = [f"`{key}`", f"`{_type_of(field)}`", default, field.description or ""]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _type_of(field: FieldInfo) -> str:
    for each in field.metadata:
        if isinstance(each, Choices):
            return f"one of {list(each.names)} or FILE.py:RECORD"
    annotation = field.annotation
    name = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    for prefix in ("typing.", "oxrl.config.schema."):
        name = name.replace(prefix, "")
    if "Annotated" in name:
        return "list[float]"
    return name.replace(" | None", " or null").replace("Literal[", "one of [")


OPENING = """\
# Configuration

Generated from the schema by `python -m oxrl.config.reference`. Required are `model.name` and a dataset
(`data.dataset` or `data.train_files_path`); every other key has a default.

```bash
oxrl config show config.yaml       # the resolved config, with the origin of each value
oxrl config validate config.yaml   # lists all errors with their lines; reads neither data nor models
oxrl config diff a.yaml b.yaml     # keys that differ
oxrl config schema > schema.json   # JSON schema for editors
oxrl train config.yaml --set train.lr=1e-4 --set lora.enabled=true
```

Two complete files come with the package, `oxrl/config/examples/rl_args.yaml` and `sl_args.yaml`; one small file per
algorithm is in `registry/examples/`. `python main_rl.py --config-file FILE` and `python main_sl.py --config-file FILE`
are `oxrl train FILE`.

- **No key is ignored.** An unknown key is an error with its line and the nearest key; so is a duplicate key. Settings
  of DeepSpeed (`deepspeed`) and vLLM (`inference_engine`) are validated when a run starts, before a model is loaded.
  Keys that contradict each other are an error with a remedy. A key that has no effect is reported in a warning.
- **`run.task`** (or `--task`) sets defaults for algorithm, dataset, learning rate and lengths.
- **Without `reward`** an algorithm that samples uses the reward of its dataset, else that of its task, else one
  inferred from the rows (numbers, letters, formulas, tests, short texts), and logs which.
- **A custom reward** is `FILE.py:FUNCTION`. A bare name that is not built in is searched in
  `rewards/compute_score.py` and `rewards.py` next to the config.
- **Stages**: the sections `sft:` and `rl:` hold config sections that override those at the top level; RL starts from
  the last checkpoint of SFT. A `reward` at the top level applies to `rl`.

| variable | meaning |
|---|---|
| `OXRL_DATA_DIR` | folder of prepared datasets; default `./data` |
| `OXRL_CHECKPOINT_DIR` | output root of runs without `--output`; default `./checkpoints` |
| `HF_TOKEN` | access token for gated models and datasets |
"""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file; no section is required, because tasks and stages can provide it."""
    schema = Config.model_json_schema()
    schema["title"] = "oxRL config"
    del schema["required"]
    sections = dict(schema["properties"])
    for stage in STAGES:
        schema["properties"][stage] = {"type": "object", "properties": sections, "additionalProperties": False}
    return schema


def generated() -> dict[Path, str]:
    """Return the content of each generated file."""
    return {
        ROOT / "docs" / "configuration.md": document(),
        EXAMPLES / "rl_args.yaml": rl_args(),
        EXAMPLES / "sl_args.yaml": sl_args(),
        ROOT / "registry" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
        ROOT / "oxrl" / "algorithms" / "summaries.toml": _summaries(),
    }


def _summaries() -> str:
    """The algorithms with one line each, for what may not import torch, such as the completion of a shell."""
    lines = [f"{name} = {json.dumps(text)}" for names in families().values() for name, text in names.items()]
    return "\n".join(["# Generated by `python -m oxrl.config.reference`.", *lines, ""])


if __name__ == "__main__":
    for file, text in generated().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
