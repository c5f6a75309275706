"""The corrections behind the repairs: each changes the small files of a copy, and says what it changed.

A correction that is not possible raises a ValueError. Choosing, proving and undoing them is in `repair`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from oxrl.data.render import special_tokens
from oxrl.data.template import TemplateError
from oxrl.models.chat_templates import TEMPLATES
from oxrl.models.load import load_hf_tokenizer, load_model_config
from oxrl.onboarding.fields import OLD_THETA, rope_as_written
from oxrl.onboarding.files import ModelFiles, stored_dtype
from oxrl.onboarding.template import TURNS, family_by_tokens, foreign_mark, render, turn_end
from oxrl.onboarding.tokens import embedding_rows, ids_of, text_section, written
from oxrl.parsing import read_json
from oxrl.types import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
TOKEN_MAP, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
USUAL_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
USUAL_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<eos>", "<|endoftext|>")
_AFTER_LAST = (
    "{%% if messages and messages[-1].role == 'assistant' and not add_generation_prompt %%}{{ '%s' }}{%% endif %%}"
)


class Template(NamedTuple):
    """`Template("plain", TEMPLATES["plain"].text, "a plain template ...")`."""

    name: str
    text: str
    message: str


def correct_vocabulary(files: ModelFiles) -> str:
    rows = embedding_rows(files.tensors)
    if rows is None:
        raise ValueError("no tensor of the weights has the name of an embedding")
    config = dict(files.config)
    before = text_section(config).get("vocab_size")
    _set_text(config, vocab_size=rows)
    _write(files, CONFIG, config)
    return f"config.json: vocab_size {rows}, as the embedding in the weights, instead of {before}"


def correct_dtype(files: ModelFiles) -> str:
    stored = stored_dtype(files.tensors.values())
    config = {key: value for key, value in files.config.items() if key != "torch_dtype"}
    before = files.config.get("dtype") or files.config.get("torch_dtype")
    _write(files, CONFIG, {**config, "dtype": stored})
    return f"config.json: dtype {stored}, as the weights, instead of {before}"


def correct_rope(files: ModelFiles) -> str:
    """Write the fields in their present names."""
    parsed = load_model_config(ModelConfig(files.loadable, trust_remote_code=files.trusted))
    meant = rope_as_written(text_section(files.config))
    read = dict(parsed.get_text_config().rope_parameters or {})
    fields = {key: value for key, value in {**read, **meant}.items() if key != "type"}
    config = dict(files.config)
    _set_text(config, rope_parameters=fields, **dict.fromkeys([*OLD_THETA, "rope_scaling"]))
    _write(files, CONFIG, config)
    return f"config.json: rope_parameters {', '.join(f'{key} {value}' for key, value in meant.items())}"


def correct_pad_token(files: ModelFiles) -> str:
    """Take the padding token that another file names, else one of the usual names, else the end token."""
    tokenizer = _tokenizer(files)
    pad = tokenizer.pad_token
    if pad is None:
        special = special_tokens(tokenizer)
        named = [special[id] for ids in written(files, "pad_token_id").values() for id in ids if id in special]
        usual = [token for token in USUAL_PADS if token in special.values()]
        pad = next(iter([*named, *usual, *([tokenizer.eos_token] if tokenizer.eos_token else [])]), None)
        if pad is None:
            raise ValueError("no token of the tokenizer can be used for padding")
        _set_token(files, "pad_token", str(pad))
    id = tokenizer.convert_tokens_to_ids(pad)
    config = dict(files.config)
    _set_text(config, pad_token_id=id)
    _write(files, CONFIG, {**config, "pad_token_id": id})
    _update(files, GENERATION, pad_token_id=id)
    return f"the padding token is {pad} in all files"


def correct_template(files: ModelFiles) -> str:
    template = template_for(_tokenizer(files))
    settings = files.json(TOKENIZER)
    settings.pop("chat_template", None)
    _write(files, TOKENIZER, settings)
    (files.folder / TEMPLATE).write_text(template.text, encoding="utf-8")
    (files.folder / "chat_template.json").unlink(missing_ok=True)
    return f"chat_template.jinja: {template.message}"


def template_for(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Return the first template that passes the proof; the tokenizer is changed."""
    own = tokenizer.chat_template
    for template in list(_templates(tokenizer)):
        tokenizer.chat_template = template.text
        try:
            turn_end(tokenizer)
        except ValueError:
            continue
        return template
    tokenizer.chat_template = own
    raise ValueError("no template passes the proof with this tokenizer: it has no special token that could end a turn")


def _templates(tokenizer: PreTrainedTokenizerBase) -> Iterator[Template]:
    """Its own with the end of the last turn added, then that of its family, then a plain one.

    Its own comes later if it seems to be that of another tokenizer.
    """
    own, of_family = list(_completed(tokenizer)), list(_of_family(tokenizer))
    yield from [*of_family, *own] if own and foreign_mark(tokenizer) else [*own, *of_family]
    message = "the plain template (User:, Assistant:), which THE MODEL HAS NEVER SEEN: it has to learn to chat"
    yield Template("plain", TEMPLATES["plain"].text, message)


def _completed(tokenizer: PreTrainedTokenizerBase) -> Iterator[Template]:
    own = tokenizer.chat_template
    if isinstance(own, str):
        for end in dict.fromkeys([_end_before_next(tokenizer), tokenizer.eos_token]):
            if end:
                message = f"its own, with {end} also after the last turn of the assistant"
                yield Template("own", own + _AFTER_LAST % end, message)


def _of_family(tokenizer: PreTrainedTokenizerBase) -> Iterator[Template]:
    if (family := family_by_tokens(tokenizer)) is not None:
        message = f"the {family} template, by the special tokens; compare it with what the model was trained on"
        yield Template(family, TEMPLATES[family].text, message)


def _end_before_next(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the special token that follows the assistant's content once another message comes."""
    try:
        text = render(tokenizer, TURNS[:3])
    except TemplateError:
        return None
    after = text.partition(TURNS[1].text)[2]
    found = {after.find(token): token for token in special_tokens(tokenizer).values() if token in after}
    return found[min(found)] if found else None


def correct_end_token(files: ModelFiles) -> str:
    """Make the token that ends the assistant's turns the end token of all files; others that end stay in the list."""
    tokenizer = _tokenizer(files)
    before = tokenizer.eos_token
    end = _end_id(files, tokenizer)
    token = str(tokenizer.convert_ids_to_tokens(end))
    if before != token:
        _set_token(files, "eos_token", token)
    not_ends = {tokenizer.bos_token_id, tokenizer.pad_token_id, end}
    others = [id for id in ids_of(files.json(GENERATION).get("eos_token_id")) if id not in not_ends]
    config = dict(files.config)
    _set_text(config, eos_token_id=end)
    _write(files, CONFIG, {**config, "eos_token_id": end})
    _update(files, GENERATION, eos_token_id=[end, *others] if others else end)
    return f"the end token is {token} in all files" + ("" if before in (None, token) else f", instead of {before}")


def _end_id(files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> int:
    try:
        return turn_end(tokenizer)
    except ValueError:  # without a working template: what another file names, or a usual name
        special = special_tokens(tokenizer)
    named = [id for ids in written(files, "eos_token_id").values() for id in ids if id in special]
    usual = [id for token in USUAL_ENDS for id, each in special.items() if each == token]
    if not named + usual:
        raise ValueError("no special token of the tokenizer could end a turn")
    return (named + usual)[0]


def name_spare_ids(files: ModelFiles) -> str:
    """Give each id without a token a reserved one, so that whatever is sampled can be read back."""
    tokenizer = _tokenizer(files)
    ids = sorted(tokenizer.get_vocab().values())
    rows = embedding_rows(files.tensors) or text_section(files.config)["vocab_size"]
    if ids != list(range(len(ids))):
        raise ValueError("the ids of the tokenizer have gaps, so new ones would not be the spare ones")
    names = [f"<|oxrl_reserved_{id}|>" for id in range(len(ids), rows)]
    tokenizer.add_tokens(names, special_tokens=True)
    if tokenizer.convert_tokens_to_ids(names) != list(range(len(ids), rows)):
        raise ValueError("the tokenizer gave the new tokens other ids than the spare ones")
    tokenizer.save_pretrained(files.folder)
    return f"tokenizer: {len(names)} reserved tokens for the ids from {len(ids)} on"


def _tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    return load_hf_tokenizer(files.loadable, trust_remote_code=files.trusted)


def _set_text(config: dict[str, Any], **fields: Any) -> None:
    """Set fields of the language model's part of a config; None removes them."""
    section = dict(text_section(config))
    nested = isinstance(config.get("text_config"), dict)
    section |= fields
    kept = {key: value for key, value in section.items() if value is not None or key not in fields}
    if nested:
        config["text_config"] = kept
    else:
        config.clear()
        config.update(kept)


def _set_token(files: ModelFiles, name: str, token: str) -> None:
    settings = files.json(TOKENIZER)
    _write(files, TOKENIZER, {**settings, name: token})
    if (files.folder / TOKEN_MAP).is_file():  # it takes precedence in older versions
        _update(files, TOKEN_MAP, **{name: token})


def _update(files: ModelFiles, file: str, **fields: Any) -> None:
    if (files.folder / file).is_file():
        _write(files, file, {**read_json(files.folder / file), **fields})


def _write(files: ModelFiles, file: str, content: dict[str, Any]) -> None:
    (files.folder / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
