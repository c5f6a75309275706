"""Run tasks of lm-evaluation-harness on a run or a model, with the harness's own prompts and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oxrl.machine.packages import install_command
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.run.folder import resolve_weights


def harness(
    model: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    include_path: str | Path | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the results of lm-evaluation-harness tasks: `{task: {"acc,none": 0.25, "acc_stderr,none": ...}}`.

    `include_path` is a folder with custom task files.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"lm-evaluation-harness cannot be imported ({error}): {install_command('harness')}") from error

    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"there is no folder {include_path} with task files")
    path = resolve_weights(str(model))
    check_model(path)
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(f"lm-evaluation-harness has no task {unknown[0]!r}; `lm-eval ls tasks` lists them")
    loaded = load_model(path, is_trainable=False)
    wrapped = HFLM(
        pretrained=loaded.get_base_model() if hasattr(loaded, "peft_config") else loaded,
        tokenizer=load_tokenizer(path),
        batch_size=batch_size,
    )
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)
    try:
        output = simple_evaluate(
            wrapped,
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
            **seeds,
        )
    except OSError as error:
        raise RuntimeError(f"the data of the tasks could not be loaded: {error}") from error
    results: dict[str, Any] = output["results"]
    return results
