"""The schema in words: two complete example files, the page `docs/configuration.md`, and a JSON schema for editors.

`python -m oxrl.config.reference` writes what is kept in the repository; nothing about a key is written down twice.
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

from oxrl.config.load import STAGES
from oxrl.config.schema import Config

ROOT = Path(__file__).parents[2]
ARGS = Path(__file__).parent / "examples"
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
WIDTH = 46  # of a key and its value, before what is said about it


def rl_args() -> str:
    """`configs/rl_args.yaml`: every key, as it is for reinforcement learning."""
    head = "# Every key for a run that learns from its own answers, with its default: oxrl train rl_args.yaml"
    return _args(head, {"data": {"dataset": "gsm8k"}, "reward": {"reward_func": "gsm8k_reward_func"}}, SECTIONS)


def sl_args() -> str:
    """`configs/sl_args.yaml`: every key for a run that learns from rows as they are."""
    head = "# Every key for a run that learns from rows as they are, with its default: oxrl train sl_args.yaml"
    sections = tuple(section for section in SECTIONS if section not in SAMPLING)
    return _args(head, {"train": {"alg_name": "sft"}, "data": {"dataset": "dolly"}}, sections)


def _args(head: str, given: Mapping[str, Mapping[str, Any]], sections: tuple[str, ...]) -> str:
    values = {"model": {"name": "smollm2-135m"}, **given}
    config = Config.model_validate(values)
    said = {(section, key): field.description or "" for section, key, field in fields()}
    return (
        "\n".join(
            [
                head,
                "# Generated from the schema by `python -m oxrl.config.reference`.",
                *as_lines(config, said, sections),
            ]
        )
        + "\n"
    )


def as_lines(
    config: Config, said: Mapping[tuple[str, str], str], sections: tuple[str, ...] = SECTIONS
) -> Iterator[str]:
    """A config as YAML that loads to the same, each key with a comment where there is something to say."""
    for section in sections:
        values = getattr(config, section).model_dump(mode="json")
        yield f"\n{section}:{'' if values else ' {}'}"
        for key, value in values.items():
            line = f"  {key}: {_flow(value)}"
            comment = said.get((section, key), "")
            yield f"{line:{WIDTH}}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """`value` on one line, as our loader reads it back."""
    written: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return written.removesuffix("\n").removesuffix("\n...").strip()


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, key, what is known about it), in the order of the page."""
    for section in SECTIONS:
        for key, field in section_class(section).model_fields.items():
            yield section, key, field


def section_class(section: str) -> type[BaseModel]:
    found = Config.model_fields[section].annotation
    assert isinstance(found, type), f"{section} is a section"
    assert issubclass(found, BaseModel), f"{section} is a section"
    return found


def document() -> str:
    """The page `docs/configuration.md`."""
    lines = [OPENING]
    for section in SECTIONS:
        owner = section_class(section)
        lines += [f"## {section}", "", inspect.cleandoc(owner.__doc__ or ""), ""]
        if owner.model_fields:
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in owner.model_fields.items():
            default = "(needed)" if field.is_required() else f"`{_flow(field.default)}`"
            cells = [f"`{key}`", f"`{_type_of(field)}`", default, field.description or ""]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _type_of(field: FieldInfo) -> str:
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

Generated from the schema by `python -m oxrl.config.reference`. Every key has a default but `model.name` and the rows
(`data.dataset` or `data.train_files_path`); a file needs only what is different.

```bash
oxrl config show config.yaml       # everything that a run would use, and who said so
oxrl config validate config.yaml   # all mistakes at once, with their lines; reads neither files nor models
oxrl config diff a.yaml b.yaml     # what is different
oxrl config schema > schema.json   # for an editor that completes and checks YAML
oxrl train config.yaml --set train.lr=1e-4 --set lora.enabled=true
```

Two complete files come with the package, `oxrl/config/examples/rl_args.yaml` and `sl_args.yaml`; one small file per
algorithm is in `registry/examples/`. `python main_rl.py --config-file FILE` and `python main_sl.py --config-file FILE`
are `oxrl train FILE`.

- **Nothing is ignored.** A key that does not exist is an error with its line and the nearest one, and so is a key
  that is there twice; those of other programs (`deepspeed`, vLLM's in `inference_engine`) are held against them when a
  run begins, before it loads a model. Keys that contradict each other are an error that says what to change. A key that
  has no effect in this run is named in a warning.
- **`run.task`** (or `--task`) fills in what the file does not say: algorithm, dataset, learning rate, lengths.
- **Without `reward`** an algorithm that samples takes the reward of its dataset, else that of its task, else the one
  that all rows agree on (numbers, letters, formulas, tests, short texts), and says which.
- **A reward of your own** is `FILE.py:FUNCTION`. A bare name that no table knows is looked for in
  `rewards/compute_score.py` and `rewards.py` beside the config.
- **Stages**: sections `sft:` and `rl:` hold sections of their own, laid over those of the whole file; RL goes on from
  the last checkpoint of SFT. A `reward` for the whole file is that of `rl`.

| variable | meaning |
|---|---|
| `OXRL_DATA_DIR` | where prepared datasets lie; default `./data` |
| `OXRL_CHECKPOINT_DIR` | where runs go without `--output`; default `./checkpoints` |
| `HF_TOKEN` | for models and datasets that the hub gives only to those who agreed to their terms |
"""


def json_schema() -> dict[str, Any]:
    """Of a config file: a task may bring the rows and a stage may hold the sections, so neither is asked for on top."""
    schema = Config.model_json_schema()
    schema["title"] = "oxRL config"
    del schema["required"]
    sections = dict(schema["properties"])
    for stage in STAGES:
        schema["properties"][stage] = {"type": "object", "properties": sections, "additionalProperties": False}
    return schema


def generated() -> dict[Path, str]:
    """File -> what it must hold."""
    return {
        ROOT / "docs" / "configuration.md": document(),
        ARGS / "rl_args.yaml": rl_args(),
        ARGS / "sl_args.yaml": sl_args(),
        ROOT / "registry" / "schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for file, text in generated().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
