"""vLLM as a `generator=` of the primitives: one engine in this process, with the weights of the model that is passed.

Engines that are built once and passed as objects are in `oxrl.generators`.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from oxrl.concurrency import run_blocking
from oxrl.data.processor import save_tokenizer
from oxrl.generators.vllm.engine import VLLMRolloutEngine, create_vllm_engine
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import end_tokens, find_model
from oxrl.types import Generation, GenerationConfig, ModelConfig, Request, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Running(NamedTuple):
    """The engine of this process, and what it was started for: model, tokenizer, options."""

    started_for: tuple[Any, ...]
    engine: VLLMRolloutEngine


_running: list[_Running] = []  # at most one: vLLM in a process shares global state and a device
_lock = threading.Lock()


@overload
def vllm_generator(model: str | Path, tokenizer: Any, **options: Any) -> Coroutine[Any, Any, VLLMRolloutEngine]: ...


@overload
def vllm_generator(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    **options: Any,
) -> list[Generation]: ...


def vllm_generator(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]] | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Coroutine[Any, Any, VLLMRolloutEngine] | list[Generation]:
    """Sample by vLLM in this process: `generate(model, tokenizer, prompt, config, generator=vllm_generator)`.

    `model` is a loaded model, whose current weights are sent to the engine at each call, or a name or a folder. The
    engine is started at the first call, which takes many seconds, replaced if another model is passed, and ended by
    `oxrl.primitives.engines.close_vllm`. `options` go to vLLM: `generator=partial(vllm_generator, max_model_len=512)`.
    For many calls, build it once: `engine = await vllm_generator(folder, tokenizer)`, and pass `generator=engine`.
    """
    if prompts is None or config is None:
        if not isinstance(model, str | Path):
            raise ValueError(f"vLLM is built from a name or a folder, not from a {type(model).__name__}")
        return create_vllm_engine(_folder_of(model), tokenizer, **options)
    with _lock:
        engine = _engine_for(model, tokenizer, options)
        if not isinstance(model, str | Path):
            run_blocking(engine.update_weights, Weights(model, 0))
        requests = [Request(tuple(prompt), seed=index) for index, prompt in enumerate(prompts)]
        return run_blocking(engine.generate, requests, config)


def close_vllm() -> None:
    """End the engine that `vllm_generator` started, if any."""
    while _running:
        run_blocking(_running.pop().engine.close)


def _engine_for(model: Any, tokenizer: Any, options: dict[str, Any]) -> VLLMRolloutEngine:
    wanted = (model, tokenizer.name_or_path, options)
    if _running and _running[0].started_for == wanted:
        return _running[0].engine
    close_vllm()
    start = _start_from_files if isinstance(model, str | Path) else _start_without_weights
    engine = start(model, tokenizer, options)
    _running.append(_Running(wanted, engine))
    return engine


def _start_from_files(model: str | Path, tokenizer: Any, options: dict[str, Any]) -> VLLMRolloutEngine:
    ends = end_tokens(ModelConfig(str(model)))
    return run_blocking(partial(create_vllm_engine, _folder_of(model), tokenizer, end_token_ids=ends, **options))


def _start_without_weights(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> VLLMRolloutEngine:
    """From the config alone: weights are sent before each call."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    given = {
        "end_token_ids": () if eos is None else [eos] if isinstance(eos, int) else eos,
        "load_format": "dummy",
        "dtype": str(model.dtype).removeprefix("torch."),
        "enforce_eager": model.device.type == "cpu",  # compiling takes minutes there
        **options,
    }
    with tempfile.TemporaryDirectory(prefix="oxrl-vllm-") as folder:
        model.config.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        return run_blocking(partial(create_vllm_engine, folder, tokenizer, **given))


def _folder_of(model: str | Path) -> str:
    """Return what vLLM loads: the folder of a built-in model, or a folder or a hub id as given."""
    source = find_model(str(model))
    return str(prepare_builtin(source.where)) if source.kind == "builtin" else source.where
