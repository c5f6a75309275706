"""Media to what a model computes with: the features that stand at their placeholders, and the positions of their rows.

The towers of a model (vision and audio encoders with their projections) run once per medium; the model's own forward
then puts the features in place of the placeholders' embeddings. Frozen towers keep what they computed. Reading files
and making ids of texts is left to `processor`; attention over the rows to the backends and generators.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from oxrl.data.media import identity
from oxrl.types import Batch, IntArray, Media

TYPE_NUMBERS = {"image": 1, "audio": 3}  # of a token in transformers' `mm_token_type_ids`; 0 is text
FEATURE_BYTES = 2**30  # of frozen towers' outputs that are kept
LENGTHS = 2**16  # of media whose number of features is kept


class Processor(Protocol):
    """What this module uses of a `MediaProcessor`."""

    @property
    def placeholders(self) -> Mapping[Any, str]:
        """The text of a placeholder, by the kinds of media that can be read."""
        ...

    def features(self, media: Sequence[Media]) -> Mapping[str, Tensor]:
        """Return the model's keyword arguments for these media, in order: `pixel_values`, `input_features`, ..."""
        ...


class MediaRow(NamedTuple):
    """A row as a model gets it: expanded token ids, and its media in the order of their placeholders."""

    id: str
    tokens: IntArray
    media: tuple[Media, ...] = ()


class Placed(NamedTuple):
    """Features of rows end to end, and where they stand."""

    features: Mapping[str, tuple[Tensor, ...]]  # kind -> [F, width] each: embeddings, then what deeper layers add
    indices: Mapping[str, Tensor]  # kind -> [T] a token's feature; -1: it is no placeholder
    positions: Tensor | None  # [3, T] where the model has a rule of its own; None: 0, 1, 2, ... in each row
    deltas: tuple[int, ...]  # per row: what is added to the positions of tokens after it
    idle: Tensor | None = None  # 0, with the gradient of tower passes that only other ranks need


class _Bounded:
    """The values used last, up to so many bytes of tensors."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.values: OrderedDict[Any, tuple[tuple[Tensor, ...], int]] = OrderedDict()

    def get(self, key: Any) -> tuple[Tensor, ...] | None:
        if key not in self.values:
            return None
        self.values.move_to_end(key)
        return self.values[key][0]

    def add(self, key: Any, value: tuple[Tensor, ...]) -> None:
        size = sum(level.nbytes for level in value)
        self.values[key] = value, size
        self.size += size
        while self.size > self.limit and len(self.values) > 1:
            self.size -= self.values.popitem(last=False)[1][1]

    def clear(self) -> None:
        self.values.clear()
        self.size = 0


class MediaTowers:
    """The towers of one model, given to it by `attach_towers`. `passes` counts how often they ran."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.passes = 0
        self.agree: Callable[[list[int]], list[int]] = list  # passes of each kind that all ranks make, given this one's
        self._outputs = _Bounded(FEATURE_BYTES)
        self._weights_seen: tuple[int, ...] = ()
        self._lengths: dict[Any, int] = {}
        self._forms: dict[
            str, tuple[type, int]
        ] = {}  # of a tower's output: its class, and features per block; 0: a list

    def __deepcopy__(self, memo: dict[int, Any]) -> MediaTowers:
        return MediaTowers(self.processor)

    def __reduce__(self) -> tuple[type[MediaTowers], tuple[Processor]]:
        return MediaTowers, (self.processor,)

    def inputs(self, body: Any, medium: Media) -> dict[str, Tensor]:
        """Return the towers' inputs for one medium, on the CPU; the processor keeps those used last."""
        accepted = _parameters(type(body))
        return {name: value for name, value in self.processor.features((medium,)).items() if name in accepted}

    def own_inputs(self, model: Any, tokens: Sequence[int], media: Sequence[Media]) -> dict[str, Any]:
        """Return what transformers' forward of this model gets for one row; callers without this module use it."""
        return own_inputs(model, MediaRow("row", np.asarray(tokens), tuple(media)))

    @property
    def kinds(self) -> list[Any]:
        """The kinds of media that the model can read."""
        return [kind for kind in TYPE_NUMBERS if kind in self.processor.placeholders]

    def placeholders(self, model: Any, medium: Media) -> list[int]:
        """Return as many placeholders as the medium has features."""
        return [placeholder_ids(model.config)[medium.kind]] * self.length(body_of(model), medium)

    def length(self, body: Any, medium: Media) -> int:
        """Return the number of a medium's features; its tower runs for the first medium with inputs of this shape."""
        if (key := identity(medium)) not in self._lengths:
            shape = medium.kind, _shape_of(self.inputs(body, medium))
            if shape not in self._lengths:
                with torch.no_grad(), _evaluating(body):
                    encoded, _ = self.encode(body, [medium])
                self._keep_length(shape, len(encoded[medium][0]))
            self._keep_length(key, self._lengths[shape])
        return self._lengths[key]

    def _keep_length(self, key: Any, length: int) -> None:
        self._lengths[key] = length
        if len(self._lengths) > LENGTHS:
            del self._lengths[next(iter(self._lengths))]

    def encode(self, body: Any, media: Sequence[Media]) -> tuple[dict[Media, tuple[Tensor, ...]], Tensor | None]:
        """Return the features of each medium, `[n, width]` per level, and the sum of idle passes times 0.

        Those of frozen towers are computed one medium at a time, so that their bits do not depend on what was kept.
        """
        distinct = list(dict.fromkeys(media))
        weights = [weight for tower in towers_of(body) for weight in tower.parameters()]
        if any(weight.requires_grad for weight in weights):
            self._outputs.clear()
            return self._pass_all(body, self._groups(body, distinct), least=int(torch.is_grad_enabled()))
        self._forget_unless(tuple(weight._version for weight in weights))
        found = {medium: kept for medium in distinct if (kept := self._outputs.get(identity(medium))) is not None}
        with torch.no_grad(), _evaluating(body):
            computed, _ = self._pass_all(body, [[medium] for medium in distinct if medium not in found])
        for medium, outputs in computed.items():
            self._outputs.add(identity(medium), outputs)
        return found | computed, None

    def rebuilt(self, kind: str, levels: Sequence[Tensor]) -> Any:
        """Return `[n, width]` levels in the form of the tower's output, as the model's forward takes it."""
        form, block = self._forms[kind]
        first = levels[0]
        whole = block and len(first) % block == 0
        embeddings = first.view(-1, block if whole else len(first), first.shape[-1]) if block else [first]
        deeper = {"deepstack_features": [[level] for level in levels[1:]]} if len(levels) > 1 else {}
        return form(pooler_output=embeddings, **deeper)

    def _forget_unless(self, weights: tuple[int, ...]) -> None:
        if weights != self._weights_seen:
            self._outputs.clear()
        self._weights_seen = weights

    def _groups(self, body: Any, media: Sequence[Media]) -> list[list[Media]]:
        """Split into media whose inputs can be concatenated."""
        groups: dict[Any, list[Media]] = {}
        for medium in media:
            shapes = [(name, _without(x.shape, _joined_along(x))) for name, x in self.inputs(body, medium).items()]
            groups.setdefault((medium.kind, tuple(sorted(shapes))), []).append(medium)
        return list(groups.values())

    def _pass_all(
        self, body: Any, groups: Sequence[Sequence[Media]], least: int = 0
    ) -> tuple[dict[Media, tuple[Tensor, ...]], Tensor | None]:
        """Run the towers over each group; where other ranks have more of them, also over an example, times 0.

        Trained towers run at least once: their optimizer steps must not depend on how rows are spread over passes, and
        DeepSpeed keeps the last gradient of weights that get none.
        """
        found: dict[Media, tuple[Tensor, ...]] = {}
        idle: Tensor | None = None
        kinds = self.kinds
        own = [sum(group[0].kind == kind for group in groups) for kind in kinds]
        for kind, count, agreed in zip(kinds, own, self.agree(own), strict=True):
            for group in groups:
                if group[0].kind == kind:
                    found |= self._run(body, group)
            for _ in range(max(agreed, least) - count):
                outputs = self._run(body, [example(kind)])
                for level in (level for levels in outputs.values() for level in levels):
                    idle = level.float().sum() * 0.0 + (0.0 if idle is None else idle)
        return found, idle

    def _run(self, body: Any, media: Sequence[Media]) -> dict[Media, tuple[Tensor, ...]]:
        """One pass of a tower, over media of one kind."""
        self.passes += 1
        device = body.get_input_embeddings().weight.device
        each = [self.inputs(body, medium) for medium in media]
        sizes = [next(x.shape[_joined_along(x)] for x in inputs.values() if x.is_floating_point()) for inputs in each]
        joined = {
            name: torch.cat([inputs[name] for inputs in each], dim=_joined_along(first)).to(device)
            for name, first in each[0].items()
        }
        output = _tower_output(body, media[0].kind, joined)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        self._forms[media[0].kind] = type(output), 0 if isinstance(levels[0], list | tuple) else levels[0].shape[-2]
        pieces = [_pieces(level, sizes) for level in levels]
        return {medium: tuple(level[index] for level in pieces) for index, medium in enumerate(media)}


def attach_towers(model: Any, processor: Processor) -> None:
    """Give a model with towers what reads media for it; passes over rows with media need it."""
    model.media_towers = MediaTowers(processor)


def media_towers(model: Any) -> MediaTowers | None:
    """Return what `attach_towers` gave to this transformers model; None for a model of text."""
    attached: MediaTowers | None = getattr(model, "media_towers", None)
    return attached


def body_of(model: Any) -> Any:
    """Return the part of a transformers model below its head."""
    names = (model.base_model_prefix, "model")  # the prefix of Llama4ForCausalLM is another than its body's name
    return next((getattr(model, name) for name in names if hasattr(model, name)), model)


def language_model_of(model: Any) -> Any:
    """Return the part of a transformers model that reads embeddings; the model itself if it has no towers."""
    body = body_of(model)
    return body.get_decoder() if towers_of(body) else model


def towers_of(body: Any) -> list[nn.Module]:
    """Return the parts of a model's body before its language model: encoders and projections; [] for one of text."""
    if not placeholder_ids(body.config):
        return []
    decoder = body.get_decoder()
    return [child for child in body.children() if child is not decoder] if decoder is not body else []


def placeholder_ids(config: Any) -> dict[str, int]:
    """Return the token at which the features of each kind of media stand, by a model's config."""
    found = {kind: getattr(config, f"{kind}_token_id", None) for kind in TYPE_NUMBERS}
    return {kind: int(token) for kind, token in found.items() if token is not None}


def never_sampled(model: Any) -> list[int]:
    """Return the placeholders of a model with towers: a sampled one would stand for a medium that is not there."""
    towers = media_towers(model)
    if towers is None:
        return []
    ids = {*placeholder_ids(model.config).values(), getattr(model.config, "video_token_id", None)}
    ids |= set(getattr(towers.processor, "placeholder_ids", ()))
    rows = model.get_input_embeddings().weight.shape[0]
    return sorted(int(token) for token in ids if token is not None and token < rows)


def rows_of(batch: Batch) -> list[MediaRow]:
    tokens = batch.tokens.cpu().numpy()
    media = batch.media or ((),) * batch.num_rows
    return [
        MediaRow(id, tokens[start:end], own)
        for id, own, start, end in zip(batch.ids, media, batch.borders, batch.borders[1:], strict=False)
    ]


def place(model: Any, rows: Sequence[MediaRow]) -> Placed | None:
    """Return the features and positions of these rows, end to end; None if no rank has media.

    A row whose number of placeholders is not that of its media's features is a ValueError with the row's id.
    """
    towers, body = _towers_for(model, rows), body_of(model)
    if towers is None:
        return None
    encoded, idle = towers.encode(body, [medium for row in rows for medium in row.media])
    device = body.get_input_embeddings().weight.device
    features, starts = _tables(encoded)
    index = {}
    for kind, token in placeholder_ids(model.config).items():
        indices = np.concatenate([_feature_indices(row, kind, token, encoded, starts) for row in rows])
        index[kind] = torch.from_numpy(indices).to(device)
    if not encoded:
        return None if idle is None else Placed({}, {}, None, (0,) * len(rows), idle)
    rules = [_positions(towers, model, row) for row in rows] if hasattr(body, "get_rope_index") else []
    positions = torch.cat([positions for positions, _ in rules], dim=1).to(device) if rules else None
    return Placed(features, index, positions, tuple(delta for _, delta in rules) or (0,) * len(rows), idle)


def body_inputs(model: Any, tokens: Tensor, placed: Placed | None, computed: Tensor | None = None) -> dict[str, Any]:
    """Return what the model's body gets for tokens `[B, N]`: ids, features at their placeholders, types of tokens.

    `computed` are the indices of these tokens among those of `placed`; by default they are all of them, in order.
    """
    towers, body = media_towers(model), body_of(model)
    if towers is None:
        return {"input_ids": tokens}
    accepted = _parameters(type(body))
    typed = {"token_type_ids": token_types(tokens, model.config)} if "token_type_ids" in accepted else {}
    levels: dict[str, list[Tensor]] = {}
    if placed is None:
        return {"input_ids": tokens, **typed}
    for kind, table in placed.features.items():
        own = placed.indices[kind] if computed is None else placed.indices[kind][computed]
        if len(own := own[own >= 0]):
            # An embedding is a gather whose gradient is summed in a fixed order, on a GPU too.
            levels[kind] = [nn.functional.embedding(own, level) for level in table]
    if not levels:
        return {"input_ids": tokens, **typed}
    if "mm_encoder_outputs" in accepted:
        outputs = {kind: towers.rebuilt(kind, each) for kind, each in levels.items()}
        return {"input_ids": tokens, "mm_encoder_outputs": outputs, **typed}
    embedded = body.get_input_embeddings()(tokens)
    for kind, (embeddings, *_) in levels.items():
        where = (tokens == placeholder_ids(model.config)[kind])[..., None]
        embedded = embedded.masked_scatter(where, embeddings.to(embedded.dtype))
    return {"inputs_embeds": embedded, **typed}


def padding_token(model: Any) -> int:
    """Return a token that is no placeholder: models look for placeholders in masked tokens, too."""
    placeholders = never_sampled(model)
    return next(token for token in range(len(placeholders) + 1) if token not in placeholders)


def without_placeholders(model: Any, tokens: IntArray) -> IntArray:
    return np.where(np.isin(tokens, never_sampled(model)), padding_token(model), tokens)


def probe_rows(model: Any, texts: Sequence[MediaRow]) -> list[MediaRow]:
    """Return rows of text with its placeholders replaced, and rows with media for a model with towers.

    Of those, two begin alike, with two media of different sizes; one has the same tokens with a different medium.
    """
    rows = [row._replace(tokens=without_placeholders(model, row.tokens)) for row in texts]
    towers = media_towers(model)
    if towers is None:
        return rows
    vocabulary = model.get_input_embeddings().weight.shape[0]
    words = without_placeholders(model, np.random.default_rng(1).integers(0, vocabulary, 14)).tolist()
    for kind in towers.kinds:
        media = [example(kind, width, height) for width, height in ((56, 56), (112, 56), (56, 112))]
        for number, (own, end) in enumerate((((0, 1), words[8:12]), ((0, 1), words[12:]), ((0, 2), words[8:12]))):
            pieces = [[*towers.placeholders(model, media[index]), words[4 + place]] for place, index in enumerate(own)]
            tokens = np.array([*words[:4], *(token for piece in pieces for token in piece), *end])
            rows.append(MediaRow(f"probe {kind} {number}", tokens, tuple(media[index] for index in own)))
    return rows


def own_inputs(model: Any, row: MediaRow) -> dict[str, Any]:
    """Return what transformers' forward of this model gets for one row, with the media themselves."""
    device = model.get_input_embeddings().weight.device
    tokens = torch.from_numpy(np.asarray(row.tokens))[None].to(device)
    towers, accepted = media_towers(model), _parameters(type(body_of(model)))
    if towers is None:
        return {"input_ids": tokens}
    types = {"token_type_ids", "mm_token_type_ids"} & accepted
    inputs: dict[str, Any] = {"input_ids": tokens, **dict.fromkeys(types, token_types(tokens, model.config))}
    each = [towers.inputs(body_of(model), medium) for medium in row.media]
    if each:
        inputs |= {
            name: torch.cat([own[name] for own in each], dim=_joined_along(first)).to(device)
            for name, first in each[0].items()
        }
    return inputs


def token_types(tokens: Tensor, config: Any) -> Tensor:
    types = torch.zeros_like(tokens)
    for kind, token in placeholder_ids(config).items():
        types[tokens == token] = TYPE_NUMBERS[kind]
    return types


def example(kind: str, width: int = 56, height: int = 56) -> Media:
    """Return a small picture or sound, for passes whose content does not matter."""
    import io

    noise = np.random.default_rng(width * height)
    buffer = io.BytesIO()
    if kind == "image":
        from PIL import Image

        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
        return Media("image", buffer.getvalue(), "image/png")
    import wave

    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((noise.standard_normal(width * 100) * 3000).astype("<i2").tobytes())
    return Media("audio", buffer.getvalue(), "audio/wav")


def check_placeholders(model: Any, row: MediaRow) -> None:
    """Raise a ValueError with the row's id unless it has as many placeholders as its media have features."""
    towers = _towers_for(model, [row])
    if towers is not None:
        for kind, token in placeholder_ids(model.config).items():
            own = [medium for medium in row.media if medium.kind == kind]
            _check_count(row, kind, token, [towers.length(body_of(model), medium) for medium in own])


def _towers_for(model: Any, rows: Sequence[MediaRow]) -> MediaTowers | None:
    towers = media_towers(model)
    for row in rows:
        for medium in row.media:
            if towers is None or medium.kind not in towers.kinds:
                raise ValueError(f"row {row.id} has media, but {type(model).__name__} does not read {medium.kind}")
    return towers


def _check_count(row: MediaRow, kind: str, token: int, lengths: Sequence[int]) -> None:
    found = int((np.asarray(row.tokens) == token).sum())
    if found != sum(lengths):
        each = f" ({' + '.join(map(str, lengths))})" if len(lengths) > 1 else ""
        owner = "medium has" if len(lengths) == 1 else f"{len(lengths)} media have"
        raise ValueError(
            f"row {row.id} has {found} {kind} placeholders (token {token}), but its {owner} {sum(lengths)} features"
            f"{each}: render the row with the processor of this model, and do not cut it inside of a medium"
        )


def _feature_indices(
    row: MediaRow,
    kind: str,
    token: int,
    encoded: Mapping[Media, tuple[Tensor, ...]],
    starts: Mapping[Media, int],
) -> IntArray:
    """Return for each token of a row its feature of this kind, -1 for other tokens."""
    own = [medium for medium in row.media if medium.kind == kind]
    lengths = [len(encoded[medium][0]) for medium in own]
    _check_count(row, kind, token, lengths)
    indices = np.full(len(row.tokens), -1, dtype=np.int64)
    if own:
        indices[np.asarray(row.tokens) == token] = np.concatenate(
            [np.arange(length) + starts[medium] for medium, length in zip(own, lengths, strict=True)]
        )
    return indices


def _tables(
    encoded: Mapping[Media, tuple[Tensor, ...]],
) -> tuple[dict[str, tuple[Tensor, ...]], dict[Media, int]]:
    """Return all features of each kind in one table per level, and where those of each medium start."""
    features: dict[str, tuple[Tensor, ...]] = {}
    starts: dict[Media, int] = {}
    for kind in dict.fromkeys(medium.kind for medium in encoded):
        own = {medium: levels for medium, levels in encoded.items() if medium.kind == kind}
        features[kind] = tuple(torch.cat(level) for level in zip(*own.values(), strict=True))
        lengths = [len(levels[0]) for levels in own.values()]
        starts |= zip(own, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True)
    return features, starts


def _positions(towers: MediaTowers, model: Any, row: MediaRow) -> tuple[Tensor, int]:
    """Return the positions of one row by the model's own rule, `[3, n]`, and the delta of those after it."""
    if not row.media:
        return torch.arange(len(row.tokens)).expand(3, -1), 0
    body = body_of(model)
    tokens = torch.from_numpy(np.asarray(row.tokens))[None]
    each = [towers.inputs(body_of(model), medium) for medium in row.media]
    named = _parameters(type(body), "get_rope_index")
    grids = {name: torch.cat([own[name] for own in each if name in own]) for own in each for name in own.keys() & named}
    positions, deltas = body.get_rope_index(tokens, mm_token_type_ids=token_types(tokens, model.config), **grids)
    return positions[:, 0], int(deltas[0])


def _tower_output(body: Any, kind: str, inputs: dict[str, Tensor]) -> Any:
    """Run the tower of one kind; `pooler_output` of what it returns has the features."""
    own = getattr(body, f"get_{kind}_features", None)
    if own is not None:
        return own(**inputs, return_dict=True)
    if kind == "audio" and hasattr(body, "audio_tower") and hasattr(body, "multi_modal_projector"):
        return _qwen2_audio_output(body, **inputs)
    raise ValueError(f"{type(body).__name__} has no get_{kind}_features, by which oxRL computes features of {kind}")


def _qwen2_audio_output(body: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Any:
    """As in the forward of Qwen2-Audio, which has no function for it."""
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tower = body.audio_tower
    heard, lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    frames = (input_features.shape[-1] - 2) // 2 + 1
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(len(input_features), frames, 1),
        attention_mask=(torch.arange(frames, device=heard.device) < heard[:, None]).long(),
    )
    features = body.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
    return BaseModelOutputWithPooling(
        pooler_output=[own[:length] for own, length in zip(features, lengths.tolist(), strict=True)]
    )


def _pieces(level: Any, sizes: Sequence[int]) -> list[Tensor]:
    """Split a tower's output into `[n, width]` of each medium; `sizes` are those of its inputs."""
    if isinstance(level, list | tuple) and len(level) == len(sizes):
        return [piece.reshape(-1, piece.shape[-1]) for piece in level]
    whole = torch.stack(list(level)) if isinstance(level, list | tuple) else level
    return [piece.reshape(-1, piece.shape[-1]) for piece in whole.split(list(sizes))]


def _joined_along(inputs: Tensor) -> int:
    """Return the dimension in which inputs of several media are concatenated: pictures of a row are [1, n, 3, H, W]."""
    return 1 if inputs.ndim == 5 else 0


def _shape_of(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What the number of features follows from: shapes, and whole numbers and masks themselves (grids, lengths)."""
    return tuple(
        (name, tuple(x.shape), b"" if x.is_floating_point() else hashlib.sha256(x.numpy().tobytes()).digest())
        for name, x in sorted(inputs.items())
    )


def _without(shape: Sequence[int], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _parameters(owner: type, method: str = "forward") -> frozenset[str]:
    return _parameters_of(getattr(owner, method))


@lru_cache(maxsize=64)
def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@contextmanager
def _evaluating(body: Any) -> Iterator[None]:
    """Disable dropout in the towers inside the block."""
    training = [part for tower in towers_of(body) for part in tower.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
