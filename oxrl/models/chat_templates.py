"""Chat templates by name, for base models and instead of a model's own, and their proof for a tokenizer.

A template is accepted if the renderer can determine the assistant's tokens with it, and its end-of-turn token becomes
the tokenizer's end of sequence, at which engines stop. Tokens are never added to a vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oxrl.names import did_you_mean
from oxrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "model.chat_template"
_MAX_CHARACTERS = 1_000_000  # of a file


class ChatTemplate(NamedTuple):
    """`ChatTemplate("...{{ message.content }}<|im_end|>...", ("<|im_start|>", "<|im_end|>"))`."""

    text: str
    special: tuple[str, ...] = ()  # special tokens that a tokenizer must have; beside them, its eos_token


_NO_TOOLS = "{% if tools %}{{ raise_exception('this template has no format for tools') }}{% endif %}"
_BOS = "{% if bos_token %}{{ bos_token }}{% endif %}"
_SYSTEM_FIRST = (  # for formats without a system role: its text is put before the first user message
    "{% set system = namespace(text='') %}"
    "{% if messages and messages[0].role == 'system' %}{% set system.text = messages[0].content + '\n\n' %}{% endif %}"
)
_USER = "{{ system.text }}{% set system.text = '' %}{{ message.content }}"

TEMPLATES = {
    "chatml": ChatTemplate(
        _NO_TOOLS + "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatTemplate(
        _NO_TOOLS + _BOS + "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": ChatTemplate(
        _NO_TOOLS + _BOS + _SYSTEM_FIRST + "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ '<start_of_turn>model\n' + message.content + '<end_of_turn>\n' }}{% elif message.role != 'system' %}"
        "{{ '<start_of_turn>' + message.role + '\n' }}" + _USER + "{{ '<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "mistral": ChatTemplate(
        _NO_TOOLS + _BOS + _SYSTEM_FIRST + "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ ' ' + message.content + eos_token }}{% elif message.role != 'system' %}"
        "{{ '[INST] ' }}" + _USER + "{{ ' [/INST]' }}{% endif %}{% endfor %}",
    ),
    "phi3": ChatTemplate(
        _NO_TOOLS + "{% for message in messages %}"
        "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "plain": ChatTemplate(
        _NO_TOOLS + _BOS + "{% for message in messages %}{{ message.role | capitalize + ':\n' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}",
    ),
}
"""Formats of model families; `plain` needs nothing but an end-of-sequence token and fits any base model."""


def read_template(given: str) -> str:
    """Return a name of the table or a template as it is, and the content of a file."""
    if given.lower() in TEMPLATES:
        return given.lower()
    if "{{" in given or "{%" in given:
        return given
    try:
        file = Path(given).expanduser()
        if file.exists() and not file.is_file():
            raise OSError("it is not a file")
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        known = ", ".join(TEMPLATES)
        raise ValueError(
            f"{KEY}: no template is called {given!r:.80}{did_you_mean(given.lower(), TEMPLATES)}, and there is no such "
            f"file; use one of {known}, a file, or the template itself"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # also no UTF-8, a null byte, `~` of an unknown user
        raise ValueError(f"{KEY}: {given!r:.80} cannot be read: {error}") from None
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{KEY}: {given!r:.80} has more than {_MAX_CHARACTERS:,} characters, which no template has")
    return text


def set_template(tokenizer: PreTrainedTokenizerBase, given: str) -> None:
    """Give a tokenizer this template; raise a ValueError if a conversation cannot be trained with it."""
    from oxrl.data.render import Renderer, special_tokens
    from oxrl.data.template import TemplateError

    name = read_template(given)
    template = TEMPLATES.get(name, ChatTemplate(name))
    if missing := sorted(set(template.special) - set(special_tokens(tokenizer).values())):
        raise ValueError(
            f"{KEY}: {name} needs the special tokens {', '.join(missing)}, which the tokenizer does not have: use "
            "plain, or a model whose tokenizer has them"
        )
    tokenizer.chat_template = template.text
    try:
        (row,) = Renderer(tokenizer).conversation(_TRIAL, id="a conversation of one turn")
    except TemplateError as error:
        raise ValueError(f"{KEY}: {error}") from error
    end: Any = tokenizer.convert_ids_to_tokens(int(row.tokens[-1]))
    if tokenizer.eos_token != end:
        tokenizer.eos_token = end


_TRIAL = (Message("user", "What is 2 + 2?"), Message("assistant", "The answer is 4."))
