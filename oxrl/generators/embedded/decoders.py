"""Rows of token ids to the logits of the next token, by a transformers model with a key-value cache.

`SlotDecoder` runs sequences that enter and leave at any time; `PaddedDecoder` runs any model, one padded batch after
the other. `engine` assigns sequences to rows and samples from the logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from oxrl.data.media_features import (
    MediaRow,
    Placed,
    body_inputs,
    media_towers,
    own_inputs,
    padding_token,
    place,
    probe_rows,
    without_placeholders,
)
from oxrl.generators.embedded.cache import (
    STEP,
    Continue,
    Pass,
    Prefill,
    SlotCache,
    attention_configs,
    next_logits,
    own_attention,
    padded_length,
)
from oxrl.generators.embedded.captured import (
    COMPILED_TOKENS,
    NOT_FINITE,
    Capture,
    CapturedDecoder,
    why_not_captured,
)
from oxrl.machine.out_of_memory import ran_out_of_memory
from oxrl.tensors import count_windowed_layers
from oxrl.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Mode = Literal["shrinking", "fixed"]
CHUNK = 64  # tokens per prefill pass in fixed mode
CACHES = ("past_key_values", "cache_params")  # names under which models take and return their cache
PREFILL = 2048  # tokens per prefill pass in shrinking mode, if a single prompt is not longer


class Context(NamedTuple):
    """What a sequence has so far; equal ones are computed once."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()


class Decoder(Protocol):
    """Rows are numbered from 0; `next_logits` continues each with its token; rows with None are idle."""

    shrinks: bool  # rows can be moved, so that none is idle
    late_entry: bool  # sequences may enter while others are in flight

    def enter(
        self, rows: Sequence[int], contexts: Sequence[Sequence[int]], media: Sequence[tuple[Media, ...]] = ()
    ) -> Tensor:
        """Return the logits after each context, `[len(rows), V]`; `media` are those of each, () if none has any."""
        ...

    def next_logits(self, tokens: Sequence[int | None]) -> Tensor: ...

    def move(self, source: int, target: int) -> None: ...

    def clear(self) -> None: ...


class SlotDecoder:
    """Sequences in the rows of one `SlotCache`.

    Shrinking: whole prompts in one pass, decoding as wide as there are rows. Fixed: prompts one by one in padded chunks
    of one size, decoding always `width` wide; then every product has the same shape, whatever else is in the batch.
    """

    late_entry = True

    def __init__(self, model: PreTrainedModel, slots: int, mode: Mode) -> None:
        self.model, self.fixed = model, mode == "fixed"
        self.slots = self.width = slots  # the width may be larger, if that makes all rows equal
        self.shrinks = not self.fixed
        self.configs = attention_configs(model)
        self.cache = SlotCache()
        self.lengths = [0] * slots
        self.deltas = [0] * slots  # of positions, in models that count those of media in another way

    def widen(self, width: int) -> None:
        self.width = width
        self.clear()

    def enter(
        self, rows: Sequence[int], contexts: Sequence[Sequence[int]], media: Sequence[tuple[Media, ...]] = ()
    ) -> Tensor:
        rows_of: dict[Context, list[int]] = {}  # each prompt once
        entering = _with_media(contexts, media)
        for row, context in zip(rows, entering, strict=True):
            rows_of.setdefault(context, []).append(row)
            self.lengths[row] = len(context.tokens)
        rows_of = dict(sorted(rows_of.items(), key=lambda item: len(item[0].tokens)))  # equal lengths run as a batch
        self._reserve(max(rows) + 1, max(map(len, contexts)))
        logits = self._in_chunks(rows_of) if self.fixed else self._in_passes(rows_of)
        order = {context: index for index, context in enumerate(rows_of)}
        return logits[[order[context] for context in entering]]

    def next_logits(self, tokens: Sequence[int | None]) -> Tensor:
        rows = len(tokens)
        tokens = [*tokens, *[None] * (self.width - rows)] if self.fixed else tokens
        starts = [0 if token is None else self.lengths[row] for row, token in enumerate(tokens)]
        ends = [start + 1 for start in starts]
        self.lengths[: len(tokens)] = ends
        self._reserve(len(tokens), max(ends))
        positions = torch.tensor(starts, device=self.model.device)[:, None]
        step = Continue(self.cache, 0, positions, ends, exact=self.fixed)
        deltas = torch.tensor([*self.deltas, *[0] * len(tokens)][: len(tokens)], device=self.model.device)[:, None]
        inputs = {"input_ids": _column(tokens, self.model.device)}
        return self._pass(inputs, positions + deltas, step, 1)[:rows, -1]

    def move(self, source: int, target: int) -> None:
        self.cache.copy(source, target, self.lengths[source])
        self.lengths[target], self.deltas[target] = self.lengths[source], self.deltas[source]

    def clear(self) -> None:
        self.cache.clear()
        self.lengths, self.deltas = [0] * self.width, [0] * self.width

    def _reserve(self, rows: int, length: int) -> None:
        if self.fixed:
            self.cache.reserve(self.width, padded_length(-(-length // CHUNK) * CHUNK))
        elif rows > self.cache.rows or length > self.cache.length:
            # A little more than needed, so that it grows rarely; on a CPU memory that is never touched costs nothing.
            ahead = -(-(length + length // 4) // STEP) * STEP if length > self.cache.length else 0
            self.cache.reserve(min(self.slots, max(rows, self.cache.rows * 2)), ahead)

    def _in_passes(self, rows_of: dict[Context, list[int]]) -> Tensor:
        logits, portion = [], dict[Context, list[int]]()
        for context, rows in rows_of.items():
            if portion and sum(len(each.tokens) for each in portion) + len(context.tokens) > PREFILL:
                logits.append(self._prefill(portion))
                portion = {}
            portion[context] = rows
        return torch.cat([*logits, self._prefill(portion)])

    def _prefill(self, rows_of: dict[Context, list[int]]) -> Tensor:
        device, lengths = self.model.device, [len(context.tokens) for context in rows_of]
        tokens = torch.tensor([token for context in rows_of for token in context.tokens], device=device)[None]
        placed = self._place(rows_of)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        if placed is not None and placed.positions is not None:
            positions = placed.positions[:, None]
        prefill = Prefill(self.cache, lengths, list(rows_of.values()), device)
        keep = torch.tensor(prefill.borders[1:], device=device) - 1
        return self._pass(body_inputs(self.model, tokens, placed), positions, prefill, keep)[0]

    def _place(self, rows_of: Mapping[Context, Sequence[int]]) -> Placed | None:
        """Return the features of these contexts, and note how positions continue after them."""
        placed = place_contexts(self.model, list(rows_of))
        for number, rows in enumerate(rows_of.values()):
            for row in rows:
                self.deltas[row] = 0 if placed is None else placed.deltas[number]
        return placed

    def _in_chunks(self, rows_of: dict[Context, list[int]]) -> Tensor:
        logits = []
        for (context, media), rows in rows_of.items():
            placed = self._place({Context(context, media): rows})
            for start in range(0, len(context), CHUNK):
                end = min(start + CHUNK, len(context))
                tokens = torch.full((1, CHUNK), padding_token(self.model), dtype=torch.int64)
                tokens[0, : end - start] = torch.tensor(context[start:end])
                positions = torch.arange(start, start + CHUNK, device=self.model.device)[None]
                chunk = Continue(self.cache, rows[0], positions, [start + CHUNK], exact=True)
                last = torch.tensor([end - start - 1], device=self.model.device)
                seen = positions.clamp_max(end - 1)  # padding must not use positions that the model does not have
                if placed is not None and placed.positions is not None:
                    seen = placed.positions[:, seen]
                own = torch.arange(start, end, device=self.model.device)
                inputs = body_inputs(self.model, tokens.to(self.model.device), placed, own)
                one = self._pass(inputs, seen, chunk, last)[0]
            logits.append(one)
            for row in rows[1:]:
                self.cache.copy(rows[0], row, len(context))
        return torch.cat(logits)

    def _pass(self, inputs: Mapping[str, Any], positions: Tensor, how: Pass, keep: int | Tensor) -> Tensor:
        self.cache.current = how
        with own_attention(self.configs):
            return next_logits(self.model, self.cache, inputs, positions, how, keep)


class PaddedDecoder:
    """For models whose layers have other kinds of state: left-padded waves over the model's own cache."""

    shrinks = late_entry = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        names = [name for name in CACHES if name in accepted]
        if not names:
            raise ValueError(
                f"the embedded engine cannot sample from {type(model).__name__}: its forward has no argument "
                f"{' or '.join(CACHES)}"
            )
        self.cache_name = names[0]
        self.clear()

    def enter(
        self, rows: Sequence[int], contexts: Sequence[Sequence[int]], media: Sequence[tuple[Media, ...]] = ()
    ) -> Tensor:
        assert self.cache is None, "a wave enters when the last one is done"
        assert list(rows) == list(range(len(contexts))), f"a wave fills the rows from 0, not {rows}"
        width = max(map(len, contexts))
        padding = padding_token(self.model)
        padded = [[padding] * (width - len(context)) + list(context) for context in contexts]
        present = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
        self.present = torch.tensor(present, device=self.model.device)
        placed = place_contexts(self.model, _with_media(contexts, media))
        positions = self._positions(width)
        self.deltas = torch.zeros(len(contexts), 1, dtype=torch.int64, device=self.model.device)
        if placed is not None and placed.positions is not None:
            self.deltas = torch.tensor(placed.deltas, device=self.model.device)[:, None]
            positions = positions.expand(3, -1, -1).clone()
            positions[:, self.present.bool()] = placed.positions
        return self._pass(body_inputs(self.model, torch.tensor(padded, device=self.model.device), placed), positions)

    def next_logits(self, tokens: Sequence[int | None]) -> Tensor:
        self.present = torch.nn.functional.pad(self.present, (0, 1), value=1)
        inputs = {"input_ids": _column(tokens, self.model.device)}
        return self._pass(inputs, self._positions(1) + self.deltas)

    def move(self, source: int, target: int) -> None:
        raise NotImplementedError("rows of the model's own cache cannot be moved")

    def clear(self) -> None:
        self.cache: Any = None
        self.present = self.deltas = torch.empty(0)

    def _positions(self, count: int) -> Tensor:
        return (self.present.cumsum(-1) - 1).clamp_min(0)[:, -count:]

    def _pass(self, inputs: Mapping[str, Any], positions: Tensor) -> Tensor:
        # Only the first pass of a Mamba model has padding; its later ones accept no mask.
        masked = self.cache is None or self.cache_name == "past_key_values"
        output = self.model(
            **inputs,
            attention_mask=self.present if masked else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        self.cache = getattr(output, self.cache_name)
        logits: Tensor = output.logits[:, -1]
        return logits


def place_contexts(model: PreTrainedModel, contexts: Sequence[Context]) -> Placed | None:
    rows = [MediaRow("of a request", np.array(tokens), media) for tokens, media in contexts]
    return place(model, rows) if any(row.media for row in rows) else None


def _with_media(contexts: Sequence[Sequence[int]], media: Sequence[tuple[Media, ...]]) -> list[Context]:
    return [Context(tuple(tokens), own) for tokens, own in zip(contexts, media or [()] * len(contexts), strict=True)]


def _column(tokens: Sequence[int | None], device: torch.device) -> Tensor:
    return torch.tensor([token or 0 for token in tokens], device=device)[:, None]


def choose_decoder(
    model: PreTrainedModel,
    slots: int,
    mode: Mode,
    capture: Capture = Capture(),  # noqa: B008 - immutable
) -> Decoder | CapturedDecoder:
    """Return the fastest decoder whose probe gives the model's own logits; log the reason why it is not a faster one.

    On a GPU a `CapturedDecoder`, else a `SlotDecoder`, else a `PaddedDecoder`.
    """
    wanted = model.device.type == "cuda" if capture.capture is None else capture.capture
    if wanted and media_towers(model) is not None:
        if capture.capture:
            raise ValueError("inference_engine.capture is true, but the model reads images or audio: set auto or false")
        logger.warning("generation runs without captured graphs, which is slower: the model reads images or audio")
    elif wanted and mode == "shrinking" and (captured := _captured(model, slots, capture)) is not None:
        return captured
    reason = _why_no_slots(model, mode)
    if reason is None:
        decoder = SlotDecoder(model, slots, mode)
        if mode == "fixed":
            _make_rows_equal(decoder)
        return decoder
    variance = "; results are not batch-invariant" if mode == "fixed" else ""
    logger.warning("generation runs in padded waves, which is slower: %s%s", reason, variance)
    return PaddedDecoder(model)


def _captured(model: PreTrainedModel, slots: int, capture: Capture) -> CapturedDecoder | None:
    compiles = capture.compiles
    if compiles is None:
        compiles = capture.expected_tokens >= COMPILED_TOKENS
    decoder = CapturedDecoder(model, slots, capture._replace(compiles=compiles))
    if (reason := _why_no_slots(model, "shrinking") or why_not_captured(decoder)) is None:
        return decoder
    if capture.capture:
        raise ValueError(f"inference_engine.capture is true, but {reason}: set auto or false")
    logger.warning("generation runs without captured graphs, which is slower: %s", reason)
    return None


def _make_rows_equal(decoder: SlotDecoder) -> None:
    """Find a width at which a sequence gets bit-identical logits in every row.

    Products are split among threads by rows, and a thread with a single row sums in another order.
    """
    for width in (decoder.slots, *(-(-decoder.slots // step) * step for step in (4, 8, 16, 32, 64))):
        decoder.widen(width)
        rows = list(range(width))
        decoder.enter(rows, [[1, 2, 3]] * width)
        logits = decoder.next_logits([4] * width)
        decoder.clear()
        if bool((logits == logits[:1]).all()):
            logger.info("fixed mode runs %d rows wide for %d slots", width, decoder.slots)
            return
    logger.warning("on this machine results depend on the slot of a sequence; fewer threads or other slots may help")


def _why_no_slots(model: PreTrainedModel, mode: Mode) -> str | None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"the model has {others[0]} layers"
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    probes = [MediaRow("probe", np.array(own[:length])) for own, length in zip(tokens, (7, 10), strict=True)]
    probes = probe_rows(model, probes)
    following = [tokens[0][7], *[int(without_placeholders(model, np.array(tokens[1]))[10])] * (len(probes) - 1)]
    decoder = SlotDecoder(model, len(probes), mode)
    try:
        contexts, media = [row.tokens.tolist() for row in probes], [row.media for row in probes]
        ours = [decoder.enter(range(len(probes)), contexts, media), decoder.next_logits(following)]
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        return f"the model does not support a cache in slots ({str(error).splitlines()[0]})"
    for more, logits in enumerate(ours):
        for row, probe in enumerate(probes):
            seen = probe._replace(tokens=np.append(probe.tokens, following[row])) if more else probe
            theirs = model(**own_inputs(model, seen), use_cache=False, logits_to_keep=1).logits[0, -1].float()
            if not bool(theirs.isfinite().all()):
                raise FloatingPointError(NOT_FINITE)
            gap = float((logits[row].float() - theirs).norm() / theirs.norm().clamp_min(1e-12))
            if not gap <= (1e-4 if model.dtype == torch.float32 else 5e-2):
                return f"its logits over a cache in slots differ by {gap:.1e}"
    expected, seen_windows = count_windowed_layers(config), decoder.cache.current and decoder.cache.current.windows
    if seen_windows != expected:
        return f"{expected} layers have a sliding window, but it reaches the attention of {seen_windows}"
    return None
