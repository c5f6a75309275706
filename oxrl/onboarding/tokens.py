"""Special tokens and vocabulary: whether tokenizer, config, generation config, template and weights agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oxrl.onboarding.files import ModelFiles, Tensor
from oxrl.onboarding.findings import Finding
from oxrl.onboarding.template import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embeddings", "embed_in"}
_SHOWN = 3


def token_findings(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yield what was found out about padding and end tokens, and about the vocabulary."""
    yield from _pad(files, tokenizer)
    yield from _ends(files, tokenizer)
    yield from _vocabulary(files, tokenizer)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def ids_of(value: Any) -> tuple[int, ...]:
    """`ids_of(2) == ids_of([2]) == (2,)`; what is not an id is left out."""
    given = value if isinstance(value, list | tuple) else [value]
    return tuple(each for each in given if isinstance(each, int) and not isinstance(each, bool))


def written(files: ModelFiles, key: str) -> dict[str, tuple[int, ...]]:
    """Return the ids of a special token in each file that names it."""
    generation = files.json("generation_config.json")
    sources = {"config.json": {**text_section(files.config), **files.config}, "generation_config.json": generation}
    return {file: ids_of(content[key]) for file, content in sources.items() if content.get(key) is not None}


def embedding_rows(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the rows of the token embedding by the headers; None if no tensor has the name of one."""
    named = [tensor for name, tensor in tensors.items() if {*name.split(".")[-2:-1]} & EMBEDDINGS]
    rows = [tensor.shape[0] for tensor in named if len(tensor.shape) == 2]
    return max(rows, default=None)


def _pad(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    pad = tokenizer.pad_token_id
    if pad is None and files.source.kind == "gguf":
        yield Finding("pad_token", "note", "the file names no padding token; the end token is used")
        return
    if pad is None:
        yield Finding("pad_token", "repair", "the tokenizer has no padding token", repair="pad_token")
        return
    others = {file: ids for file, ids in written(files, "pad_token_id").items() if ids != (pad,)}
    if others:
        files_ = " and ".join(f"{file} has {_names(tokenizer, ids)}" for file, ids in others.items())
        message = f"the tokenizer pads with {_names(tokenizer, (pad,))}, but {files_}"
        yield Finding("pad_token", "repair", message, repair="pad_token")
    elif pad == tokenizer.eos_token_id:
        yield Finding("pad_token", "note", f"the padding token is the end token, {tokenizer.pad_token}")
    else:
        yield Finding("pad_token", "ok", f"the padding token is {tokenizer.pad_token}")


def _ends(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Engines must stop at the token that ends the assistant's turns: by the generation config, else by the others.

    The tokenizer's end token may be another one (Gemma) if the generation config has both.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        yield Finding("end_token", "repair", "the tokenizer has no end token", repair="end_token")
        return
    try:
        end, what, ends_turns = (
            turn_end(tokenizer),
            "the assistant's turns end with",
            ", which ends the assistant's turns",
        )
    except ValueError:  # reported as a finding about the template
        end, what, ends_turns = eos, "the tokenizer's end token is", ""
    stops = written(files, "eos_token_id")
    if unusable := [file for file, ids in stops.items() if not ids]:
        message = f"{' and '.join(unusable)} has an eos_token_id that is not the id of a token"
        yield Finding("end_token", "repair", message, repair="end_token")
        return
    generation = stops.get("generation_config.json", stops.get("config.json", (eos,)))
    name = _names(tokenizer, (end,))
    if end in generation:
        also = "" if end == eos else f"; the tokenizer's end token is {_names(tokenizer, (eos,))}"
        yield Finding("end_token", "ok", f"generation stops at {name}{ends_turns}{also}")
        return
    problems = [f"{file} ends with {_names(tokenizer, ids)}" for file, ids in stops.items() if end not in ids]
    if end != eos:
        problems = [f"the tokenizer's end token is {_names(tokenizer, (eos,))}", *problems]
    message = f"{what} {name}, but {', '.join(problems)}: generation would not stop there"
    yield Finding("end_token", "repair", message, repair="end_token")


def _vocabulary(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    declared = text_section(files.config).get("vocab_size")
    rows = embedding_rows(files.tensors)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if rows is not None and declared is not None and rows != declared:
        message = f"config.json has vocab_size {declared}, but the embedding in the weights has {rows} rows"
        yield Finding("vocabulary", "repair", message, repair="vocabulary")
    size = rows or declared
    if size is None:
        return
    if largest >= size:
        message = f"the tokenizer has the id {largest}, but the embedding has {size} rows: take the model's tokenizer"
        yield Finding("vocabulary", "blocked", message)
    elif largest + 1 < size:
        spare = size - largest - 1
        message = (
            f"{spare} ids from {largest + 1} on have no token: the model may sample them, and they decode to nothing"
        )
        yield Finding("spare_ids", "note", message, repair="spare_ids")
    elif rows in (None, declared):
        yield Finding("vocabulary", "ok", f"tokenizer and embedding have {size} ids")


def _names(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    named = {id: token for token, id in tokenizer.get_vocab().items()}
    shown = [f"{id} ({named.get(id, 'no token')})" for id in ids[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(ids) > _SHOWN else shown)
