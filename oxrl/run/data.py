"""The data section of a config to the rows or prompts of a run: loaded, rendered, checked, and mixed by ratio."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from oxrl.config import Config, ConfigError
from oxrl.data.actions import ActionCodec, ActionTokens, action_codec
from oxrl.data.assemble import assemble
from oxrl.data.buffer import DataBuffer, MixedBuffer
from oxrl.data.prepare import check_trainable, split_file
from oxrl.data.prompts import as_prompt
from oxrl.data.solve_rate import SolveRateBuffer
from oxrl.data.sources import Loaded, load_samples
from oxrl.rewards import check_samples
from oxrl.run.environment import environment_rows
from oxrl.run.reward import check_references, configured_reward
from oxrl.run.spec import RunSpec, first_algorithm, renderer
from oxrl.types import Algorithm, DataSource, Item, Sample

logger = logging.getLogger(__name__)

ROWS_NAMED = 5  # in a warning


class RunData(NamedTuple):
    """What a run trains on: `Sample`s for an online run, else `Item`s."""

    source: DataSource[Any]
    rows: list[Any]  # all that `source` draws from
    held_out: list[Any]
    left_out: int  # rows that could not be read, or are too long


def load_train_files(config: Config) -> dict[str, Loaded]:
    """Samples by dataset name. A named dataset is prepared on first use; one for evaluation only is refused."""
    data = config.data
    if config.makes_rows:
        return {config.rollout.env: environment_rows(config)}
    files = data.train_files if data.dataset is None else {data.dataset: str(split_file(data.dataset))}
    for path in files.values():
        check_trainable(path)
    return {name: _load(config, path) for name, path in files.items()}


def _load(config: Config, path: str) -> Loaded:
    data = config.data
    codec = action_codec(data.actions)
    return load_samples(
        path,
        columns=data.columns,
        template=data.template,
        format=data.format,
        bad_rows=data.bad_rows,
        chunk=1 if codec is None else codec.chunk,
    )


def is_online(algorithm: Algorithm, samples: Sequence[Sample]) -> bool:
    """Whether the run samples its own responses; recorded and scored responses are trained on as they are."""
    recorded = any(sample.responses or sample.chosen or sample.label is not None for sample in samples)
    return algorithm.online is not None and not recorded


def prepare_data(
    config: Config, loaded: dict[str, Loaded], tokenizer: Any, *, online: bool, context: int | None = None
) -> RunData:
    """Rendered and checked; rows that are too long are dropped, truncated or refused (`data.overlong`).

    Rows that are longer than the `context` of the model are reported.
    """
    convert: Callable[..., tuple[list[Any], int]] = partial(_prompts if online else _items, context=context)
    parts = {name: convert(config, part, tokenizer, name) for name, part in loaded.items()}
    held_out: list[Any] = []
    for name, path in config.data.val_files.items():
        held_out += convert(config, _load(config, path), tokenizer, f"{name}, held out")[0]
    if config.has_held_out and not config.data.val_files:
        made = environment_rows(config, held_out=True)
        held_out += convert(config, made, tokenizer, f"{config.rollout.env}, held out")[0]
    rows = [row for part, _ in parts.values() for row in part]
    if config.batch_size > len(rows):
        logger.warning("a step of %d rows repeats the %d rows there are", config.batch_size, len(rows))
    source = _source(config, {name: part for name, (part, _) in parts.items()})
    return RunData(source, rows, held_out, sum(count for _, count in parts.values()))


def _items(config: Config, loaded: Loaded, tokenizer: Any, name: str, *, context: int | None) -> tuple[list[Item], int]:
    """Items to train on, and the number of rows that were left out."""
    data = config.data
    rendered = assemble(
        loaded.samples,
        first_algorithm(config),
        renderer(config, tokenizer),
        max_len=data.max_seq_len,
        overlong=data.overlong,
        bad_rows=data.bad_rows,
        track=progress_bar(f"reading {name}"),
    )
    unread = [f"{where}: {reason}" for where, reason in loaded.skipped]
    logger.info("%s: %s", name, rendered._replace(skipped=[*unread, *rendered.skipped]).describe())
    _warn_beyond_context(name, {row.id: len(row) for item in rendered.items for row in item}, context)
    _warn_out_of_bounds(name, loaded.samples, action_codec(data.actions))
    if rendered.empty:
        logger.warning(
            "%s: %d rows train on no more than the end of their reply, which is empty: %s", name, len(rendered.empty),
            _examples([row.id for row in rendered.empty]),
        )  # fmt: skip
    return rendered.items, len(unread) + len(rendered.skipped) + rendered.dropped


def _warn_beyond_context(name: str, lengths: Mapping[str, int], context: int | None) -> None:
    """`lengths` are the tokens that each row needs."""
    if context is not None and (beyond := [row for row, length in lengths.items() if length > context]):
        logger.warning(
            "%s: %d rows need more than the %d tokens that the model was made for: %s; data.max_seq_len: %d leaves "
            "them out", name, len(beyond), context, _examples([f"{row} ({lengths[row]})" for row in beyond]), context,
        )  # fmt: skip


def _warn_out_of_bounds(name: str, samples: Iterable[Sample], codec: ActionCodec | None) -> None:
    if not isinstance(codec, ActionTokens):
        return
    answers = ((each.id, each.messages[-1].extra) for each in samples if each.messages)
    given = [(row, extra["actions"]) for row, extra in answers if "actions" in extra]
    if beyond := [row for row, actions in given if codec.out_of_bounds(actions)]:
        logger.warning(
            "%s: %d of %d rows have actions outside of data.actions low and high, which count as the nearest bound: %s",
            name, len(beyond), len(given), _examples(beyond),
        )  # fmt: skip


def _examples(rows: Sequence[str]) -> str:
    return ", ".join(rows[:ROWS_NAMED]) + (", ..." if len(rows) > ROWS_NAMED else "")


def _prompts(
    config: Config, loaded: Loaded, tokenizer: Any, name: str, *, context: int | None
) -> tuple[list[Sample], int]:
    """Prompts that leave room for a response and that the reward can grade, and the number of rows left out."""
    data = config.data
    render = renderer(config, tokenizer)
    room = None if data.max_seq_len is None else data.max_seq_len - config.rollout.max_tokens
    fitting: list[Sample] = []
    lengths: dict[str, int] = {}
    for sample in map(as_prompt, progress_bar(f"reading {name}")(loaded.samples)):
        length = len(render.prompt(sample.messages, tools=sample.tools, media=sample.media))
        if room is None or length <= room:
            fitting.append(sample)
            lengths[sample.id] = length + config.rollout.max_tokens
        elif data.overlong == "error":
            raise ConfigError(
                f"{sample.id}: a prompt of {length} tokens leaves no room for rollout.max_tokens="
                f"{config.rollout.max_tokens} in data.max_seq_len={data.max_seq_len}"
            )
    if not fitting:
        raise ConfigError(
            f"{name}: no prompt leaves room for rollout.max_tokens={config.rollout.max_tokens} in "
            f"data.max_seq_len={data.max_seq_len}: raise the latter or lower the former"
        )
    if config.reward.reward_func is not None:
        try:
            check_samples(configured_reward(config), fitting)
            check_references(config, fitting, render)
        except TypeError as error:
            raise ConfigError(f"reward.params do not suit {config.reward.reward_func}: {error}") from error
    _warn_beyond_context(name, lengths, context)
    left_out = len(loaded.samples) - len(fitting)
    logger.info("%s: %d prompts%s", name, len(fitting), f", {left_out} left out as over-long" if left_out else "")
    return fitting, left_out + len(loaded.skipped)


def progress_bar(title: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """For iterables; nothing is shown where the standard error is no terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return partial(track, description=title, console=console, transient=True, disable=not console.is_terminal)


def _source(config: Config, parts: dict[str, list[Any]]) -> DataSource[Any]:
    buffers = {name: _buffer(config, items) for name, items in parts.items()}
    if len(buffers) == 1:
        return next(iter(buffers.values()))
    ratios = config.data.train_ratios or {name: float(len(items)) for name, items in parts.items()}
    return MixedBuffer(buffers, ratios=ratios)


def _buffer(config: Config, items: list[Any]) -> DataBuffer[Any]:
    if config.rollout.sampler == "uniform" or not isinstance(items[0], Sample):
        return DataBuffer(items, seed=config.run.seed)
    params = config.rollout.sampler_params
    known = set(inspect.signature(SolveRateBuffer).parameters) - {"items", "seed"}
    if unknown := sorted(params.keys() - known):
        raise ConfigError(f"rollout.sampler_params.{unknown[0]} is no parameter: {', '.join(sorted(known))}")
    return SolveRateBuffer(items, seed=config.run.seed, **params)


def longest_possible_items(spec: RunSpec, vocabulary: int) -> list[Item]:
    """The longest rows of a run; online, responses of the maximum length to the longest prompts."""
    from oxrl.loops.memory_warmup import longest_answers

    if not spec.online:
        return spec.rows
    config = spec.config
    return longest_answers(
        spec.rows,
        renderer(config, spec.tokenizer),
        spec.algorithm,
        prompts=config.batch_size,
        answers=config.rollout.n_samples,
        max_tokens=config.rollout.max_tokens,
        vocabulary=vocabulary,
        enough=config.train.micro_batch_tokens,
    )
