"""A model's processor from transformers: text with placeholders and media to token ids, and media to features.

A chat template writes one placeholder per medium; the processor replaces it by as many as the medium has features, with
the tokens around them. That expansion is a function of the medium's size, so that ids need no decoded medium. Features
are the keyword arguments of the model. Reading files is in `media`.
"""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from oxrl.data.media import Kind, Size, describe, identity, load_audio, load_image, measure
from oxrl.types import Media

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

V = TypeVar("V")

PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"),
)
MAX_EXPANSIONS = 4096
MAX_FEATURE_BYTES = 1 << 28
_TEXT_KEYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
_ARGUMENTS = {"image": "images", "audio": "audio"}


class MediaError(ValueError):
    """Placeholders and media of a row do not fit, or a medium does not fit the model; the message has no row yet."""


class ProcessorSource(NamedTuple):
    """Where the processor of a tokenizer is: `ProcessorSource("/models/qwen", "qwen2_vl")`."""

    where: str
    model_type: str
    trust_remote_code: bool = False
    revision: str | None = None


def set_processor_source(tokenizer: PreTrainedTokenizerBase, source: ProcessorSource) -> None:
    """Let `processor_of` find the processor of this tokenizer; it is read when it is first needed."""
    tokenizer.media_source = source


def processor_of(tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
    """Return the processor that belongs to a tokenizer; None for one of a model of text."""
    source: ProcessorSource | None = getattr(tokenizer, "media_source", None)
    if source is not None and getattr(tokenizer, "media_processor", None) is None:
        tokenizer.media_processor = read_processor(tokenizer, *source)
    return getattr(tokenizer, "media_processor", None)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer and the files of its processor, as they came with the model."""
    tokenizer.save_pretrained(folder)
    source: ProcessorSource | None = getattr(tokenizer, "media_source", None)
    for name in PROCESSOR_FILES if source is not None else ():
        assert source is not None
        file = _model_file(source, name)
        if file is not None and file.resolve() != (Path(folder) / name).resolve():
            shutil.copyfile(file, Path(folder) / name)


def _model_file(source: ProcessorSource, name: str) -> Path | None:
    """Return a file of a model's folder or hub repository, None if it has none of that name."""
    if Path(source.where).is_dir():
        return file if (file := Path(source.where) / name).is_file() else None
    from transformers.utils import cached_file

    found = cached_file(source.where, name, revision=source.revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def read_processor(
    tokenizer: PreTrainedTokenizerBase, where: str, model_type: str, trust_remote_code: bool, revision: str | None
) -> MediaProcessor:
    """Read the processor in a model's folder or hub repository; it uses this tokenizer."""
    from transformers import AutoProcessor

    known = _processor_class(model_type)
    reader: Any = AutoProcessor if known is None else _without_video(known)
    try:
        processor = reader.from_pretrained(where, trust_remote_code=trust_remote_code, revision=revision or "main")
    except ImportError as error:
        raise ValueError(f"the processor of {where} needs another package: {_one_line(error)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the processor of {where} cannot be read: {_one_line(error)}") from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    processor.tokenizer = tokenizer
    return MediaProcessor(processor)


def _processor_class(model_type: str) -> type[ProcessorMixin] | None:
    """The class of transformers for a type of model; None: a class of the model's own."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    return None if name is None else getattr(transformers, name)


def _without_video(known: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The same class without its part for videos, which transformers has only with torchvision."""
    from transformers.utils import is_torchvision_available

    names = known.get_attributes()
    if is_torchvision_available() or "video_processor" not in names:
        return known

    def from_args_and_dict(cls: Any, args: list[Any], *rest: Any, **options: Any) -> Any:
        complete = [*args, None] if names[-1] == "video_processor" else args
        return known.from_args_and_dict.__func__(cls, complete, *rest, **options)

    parts = [name for name in names if name != "video_processor"]
    return type(
        known.__name__,
        (known,),
        {
            "get_attributes": classmethod(lambda _: parts),
            "from_args_and_dict": classmethod(from_args_and_dict),
            "__module__": known.__module__,
        },
    )


class MediaProcessor:
    """`MediaProcessor(processor).ids("<|image_pad|>What is it?", (Media("image", "cat.png"),))`."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor = processor
        self.tokenizer: PreTrainedTokenizerBase = processor.tokenizer
        self._expansions: _Bounded[str] = _Bounded(MAX_EXPANSIONS, lambda _: 1)
        self._sizes: _Bounded[Size] = _Bounded(MAX_EXPANSIONS, lambda _: 1)
        self._features: _Bounded[dict[str, Tensor]] = _Bounded(MAX_FEATURE_BYTES, _num_bytes)
        if not self.placeholders:
            raise ValueError(f"{type(processor).__name__} names no placeholder for images or audio; it cannot be used")

    @cached_property
    def placeholders(self) -> dict[Kind, str]:
        """The text that stands for one medium in the output of the chat template: `{"image": "<|image_pad|>"}`."""
        kinds: dict[Kind, Any] = {
            "image": getattr(self.processor, "image_processor", None) and getattr(self.processor, "image_token", None),
            "audio": self._audio_processor and getattr(self.processor, "audio_token", None),
        }
        return {kind: str(token) for kind, token in kinds.items() if token}

    @cached_property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids that stand for features: a model must not sample them, and is not trained on them."""
        names = ("image_token_ids", "audio_token_ids", "video_token_ids")
        found = {id for name in names for id in getattr(self.processor, name, ())}
        found |= {self.tokenizer.convert_tokens_to_ids(token) for token in self.placeholders.values()}
        return frozenset(int(id) for id in found if id is not None)

    @property
    def sampling_rate(self) -> int:
        return int(self._audio_processor.sampling_rate)

    def ids(self, text: str, media: Sequence[Media] = ()) -> list[int]:
        """Return the token ids of a text in which every placeholder is replaced by those of its medium."""
        return self._tokenize(self.expand(text, media))

    def expand(self, text: str, media: Sequence[Media]) -> str:
        """Return the text in which each placeholder is replaced by what the processor makes of its medium."""
        pieces = self._pattern.split(text)
        self._check_kinds(pieces[1::2], media)
        expanded = [self._expansion(medium) for medium in media]
        return "".join(a + b for a, b in zip(pieces[::2], [*expanded, ""], strict=True))

    def placed(self, text: str) -> int:
        """Return how many placeholders a text has."""
        return len(self._pattern.findall(text))

    def spans(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[tuple[int, int], ...]:
        """Return where each of these media begins and ends in ids with what the processor makes of them."""
        found: list[tuple[int, int]] = []
        position = 0
        for medium in media:
            core = self._core(medium)
            start = _find(ids, core, position)
            if start is None:
                raise MediaError(f"the placeholders of {describe(medium)} are not in the token ids: were they cut?")
            position = start + len(core)
            found.append((start, position))
        return tuple(found)

    def unexpanded(self, ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Return ids with one placeholder per medium, from ids with what the processor makes of these media."""
        rest, result = 0, list[int]()
        for medium, (start, end) in zip(media, self.spans(ids, media), strict=True):
            result += [*ids[rest:start], int(self.tokenizer.convert_tokens_to_ids(self.placeholders[medium.kind]))]
            rest = end
        if self.placeholder_ids & set(ids[rest:]):
            raise MediaError(f"the token ids have more placeholders than the {len(media)} media of their row")
        return [*result, *ids[rest:]]

    def count(self, media: Sequence[Media]) -> list[int]:
        """Return how many tokens each medium becomes."""
        return [len(self._tokenize(self._expansion(medium))) for medium in media]

    def features(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """Return the keyword arguments of the model for these media, in order: `{"pixel_values": ..., ...}`."""
        if not media:
            return {}
        key = tuple(identity(medium) for medium in media)
        return self._features.get(key, lambda: self._process(media))

    def size(self, medium: Media) -> Size:
        """Return the size of a medium, by its header."""
        return self._sizes.get(identity(medium), lambda: measure(medium))

    def check(self, medium: Media) -> None:
        """Raise a ValueError that names the medium unless this model can read it; nothing is decoded."""
        if medium.kind not in self.placeholders:
            known = " and ".join(self.placeholders)
            raise MediaError(f"{describe(medium)}: the model cannot read {medium.kind}, only {known}")
        size = self.size(medium)
        if medium.kind == "audio" and (longest := getattr(self._audio_processor, "chunk_length", None)):
            seconds = size.width / size.sampling_rate
            if seconds > longest:
                raise MediaError(
                    f"the sound {describe(medium)} has {seconds:.1f} s, but the model reads {longest} s; cut it"
                )

    @property
    def _audio_processor(self) -> Any:
        return getattr(self.processor, "audio_processor", getattr(self.processor, "feature_extractor", None))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.placeholders.values(), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _check_kinds(self, found: Sequence[str], media: Sequence[Media]) -> None:
        kinds = {token: kind for kind, token in self.placeholders.items()}
        wanted = [kinds[token] for token in found]
        given = [medium.kind for medium in media]
        if wanted == given:
            return
        for kind in ("image", "audio"):
            if wanted.count(kind) != given.count(kind):
                raise MediaError(
                    f"{wanted.count(kind)} placeholders of {kind} for {given.count(kind)} media of that kind; the text "
                    "needs exactly one for each"
                )
        raise MediaError(f"the placeholders are {', '.join(wanted)}, but the media {', '.join(given)}: another order")

    def _expansion(self, medium: Media) -> str:
        """What the processor makes of the placeholder of this medium; media of one size are expanded alike."""
        self.check(medium)
        size = self.size(medium)
        if medium.kind == "image":
            return self._expansions.get(("image", size), lambda: self._expand_blank(medium, _blank_image(size)))
        samples = -(-size.width * self.sampling_rate // size.sampling_rate)
        return self._expansions.get(
            ("audio", samples), lambda: self._expand_blank(medium, np.zeros(samples, np.float32))
        )

    def _expand_blank(self, medium: Media, blank: Any) -> str:
        ids: list[int] = self._call([self.placeholders[medium.kind]], {medium.kind: [blank]}, medium)["input_ids"][0]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if self._tokenize(text) != list(ids) or not self.placeholder_ids & set(ids):
            name, placeholder = type(self.processor).__name__, self.placeholders[medium.kind]
            raise MediaError(
                f"{name} replaces {placeholder} by {text[:80]!r}, which does not become the same ids again; this "
                "processor cannot be used"
            )
        return text

    def _core(self, medium: Media) -> list[int]:
        """The ids of an expansion from its first special token to its last; others may merge with the text around."""
        ids = self._tokenize(self._expansion(medium))
        special = [index for index, id in enumerate(ids) if id in self._special_ids]
        return ids[special[0] : special[-1] + 1]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return self.placeholder_ids | frozenset(self.tokenizer.added_tokens_decoder)

    def _process(self, media: Sequence[Media]) -> dict[str, Tensor]:
        decoded: dict[str, list[Any]] = {}
        for medium in media:
            self.check(medium)
            each = load_image(medium) if medium.kind == "image" else load_audio(medium, self.sampling_rate)
            decoded.setdefault(medium.kind, []).append(each)
        text = "".join(self.placeholders[medium.kind] for medium in media)
        output = self._call([text], decoded, media[0], return_tensors="pt")
        self._check_features(output["input_ids"][0].tolist(), media)
        return {name: value for name, value in output.items() if name not in _TEXT_KEYS}

    def _check_features(self, ids: list[int], media: Sequence[Media]) -> None:
        """The placeholders that the processor counts for the media themselves are those of the token ids."""
        expected = sum(id in self.placeholder_ids for medium in media for id in self._core(medium))
        if (found := sum(id in self.placeholder_ids for id in ids)) != expected:
            raise MediaError(
                f"{type(self.processor).__name__} makes {found} placeholders of {', '.join(map(describe, media))}, but "
                f"{expected} of media of the same sizes; this processor cannot be used"
            )

    def _call(self, text: list[str], decoded: dict[str, list[Any]], medium: Media, **options: Any) -> Any:
        given: dict[str, Any] = {_ARGUMENTS[kind]: values for kind, values in decoded.items()}
        if "audio" in decoded:
            given["sampling_rate"] = self.sampling_rate
        try:
            return self.processor(text=text, add_special_tokens=False, **given, **options)
        except (ValueError, IndexError, RuntimeError) as error:
            raise MediaError(
                f"{type(self.processor).__name__} cannot use {describe(medium)}: {_one_line(error)}"
            ) from error

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


class _Bounded(Generic[V]):
    """The values used last, up to a total cost."""

    def __init__(self, limit: int, cost: Callable[[V], int]) -> None:
        self.limit, self.cost = limit, cost
        self.values: OrderedDict[Hashable, V] = OrderedDict()
        self.total = 0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        value = self.values.pop(key, None)  # threads may use it at the same time
        if value is None:
            value = make()
            self.total += self.cost(value)
        self.values[key] = value
        while self.total > self.limit and self.values:
            _, oldest = self.values.popitem(last=False)
            self.total -= self.cost(oldest)
        return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _num_bytes(features: dict[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in features.values())


def _blank_image(size: Size) -> Any:
    from PIL import Image

    return Image.new("RGB", (size.width, size.height))


def _find(ids: Sequence[int], part: list[int], start: int) -> int | None:
    last = len(ids) - len(part) + 1
    return next((i for i in range(start, last) if ids[i] == part[0] and list(ids[i : i + len(part)]) == part), None)
