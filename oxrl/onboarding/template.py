"""What a chat template does, found by rendering trial conversations: no text of a template is interpreted.

The proof that a turn ends inside of the trained mask is the renderer's own. Corrections are in `repair`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oxrl.data.render import Renderer, special_tokens
from oxrl.data.template import EndlessTemplateError, TemplateError, apply_template
from oxrl.models.chat_templates import TEMPLATES
from oxrl.onboarding.findings import Finding
from oxrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oxrl.data.media import Kind

TURNS = (
    Message("user", "What is 2 + 2?"),
    Message("assistant", "The answer is 4."),
    Message("user", "And 3 + 3?"),
    Message("assistant", "It is 6."),
)
SYSTEM = "Reply in one sentence."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SWITCHES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "add_nothink_token", "think")
_MARKS = {
    "chatml": "<|im_start|>",
    "llama3": "<|start_header_id|>",
    "gemma": "<start_of_turn>",
    "mistral": "[INST]",
    "phi3": "<|user|>",
    "deepseek": "<｜User｜>",
    "cohere": "<|START_OF_TURN_TOKEN|>",
    "granite": "<|start_of_role|>",
}


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends the assistant's turns, which is inside of the trained mask; raise if there is none."""
    rows = Renderer(tokenizer).conversation(TURNS, id="a conversation of two turns")
    ends = {int(row.tokens[-1]) for row in rows}
    assert all(bool(row.mask[-1]) for row in rows), "a row of a conversation ends with its last trained token"
    if len(ends) != 1:
        raise TemplateError(f"the chat template ends turns with different tokens: {sorted(ends)}")
    return ends.pop()


def template_findings(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Yield what was found out about the chat template of a tokenizer."""
    if tokenizer.chat_template is None:
        family = family_by_tokens(tokenizer)
        how = f"its special tokens are those of {family}" if family else "a plain one fits base models"
        yield Finding("template", "repair", f"there is no chat template: {how}", repair="template")
        return
    try:
        yield Finding("template", "ok", f"there is a chat template of the family {family_of(tokenizer)}")
        end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer))
    except EndlessTemplateError as error:
        yield Finding("turn_end", "repair", str(error), repair="template")
        return
    except ValueError as error:
        mark = foreign_mark(tokenizer)
        foreign = f"; it writes {mark}, which is no token of this tokenizer: it may be another model's" if mark else ""
        yield Finding("turn_end", "repair", f"the end of a turn is not trained: {error}{foreign}", repair="template")
        return
    yield Finding("turn_end", "ok", f"turns end with {end}, which is inside of the trained mask")
    yield _system_role(tokenizer)
    yield _tools(tokenizer)
    yield _thinking(tokenizer)
    yield _generation_prompt(tokenizer)


def media_findings(tokenizer: PreTrainedTokenizerBase, placeholders: Mapping[Kind, str]) -> Iterator[Finding]:
    """Yield whether the template writes the placeholder of each kind of media, which the processor replaces."""
    for kind, placeholder in placeholders.items():
        parts = [{"type": kind}, {"type": "text", "text": TURNS[0].text}]
        try:
            text = apply_template(tokenizer, [{"role": "user", "content": parts}], (), generation_prompt=True)
        except TemplateError as error:
            yield Finding("media", "note", f"rows with {kind} are refused: {error}")
            continue
        if placeholder in text:
            yield Finding("media", "ok", f"the template writes {placeholder} for {kind}")
        else:
            message = f"the template writes no {placeholder} for {kind}: such rows are refused"
            yield Finding("media", "note", f"{message}; use the template that comes with the model")


def family_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the family whose marks the rendered text has; "own" if it is none of them."""
    text = render(tokenizer, TURNS[:1], generation_prompt=True)
    return next((name for name, mark in _MARKS.items() if mark in text), "own")


def foreign_mark(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the mark of the template's family if it is a special token elsewhere, and not in this tokenizer."""
    try:
        mark = _MARKS.get(family_of(tokenizer), "[")
    except TemplateError:
        return None
    return mark if mark.startswith("<") and mark not in tokenizer.get_vocab() else None


def family_by_tokens(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the named template all of whose special tokens the tokenizer has."""
    have = set(special_tokens(tokenizer).values())
    return next((name for name, each in TEMPLATES.items() if each.special and have >= set(each.special)), None)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] = (),
    generation_prompt: bool = False,
    **switches: Any,
) -> str:
    """Return the text of a conversation; templates that take lists of parts get them."""
    chat: list[dict[str, Any]] = [message.to_dict() for message in messages]
    if Renderer(tokenizer)._takes_parts:
        chat = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat]
    return apply_template(tokenizer, chat, tools, generation_prompt=generation_prompt, **switches)


def _system_role(tokenizer: PreTrainedTokenizerBase) -> Finding:
    try:
        text = render(tokenizer, (Message("system", SYSTEM), *TURNS[:1]), generation_prompt=True)
    except TemplateError as error:
        return Finding("system_role", "note", f"a system message is refused: {error}")
    if SYSTEM not in text:
        return Finding("system_role", "note", "a system message is dropped without an error")
    return Finding("system_role", "ok", "a system message is part of the prompt")


def _tools(tokenizer: PreTrainedTokenizerBase) -> Finding:
    try:
        text = render(tokenizer, TURNS[:1], tools=[TOOL], generation_prompt=True)
    except TemplateError as error:
        return Finding("tools", "note", f"tools are refused: {error}")
    if TOOL["function"]["name"] not in text:  # type: ignore[index]
        return Finding("tools", "note", "tools are dropped without an error")
    return Finding("tools", "ok", "tools are part of the prompt")


def _thinking(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Try each known switch: one that changes the text exists."""
    plain = render(tokenizer, TURNS[:1], generation_prompt=True)
    found = []
    for switch in SWITCHES:
        values: tuple[Any, ...] = ("low", "high") if switch == "reasoning_effort" else (True, False)
        try:
            texts = [render(tokenizer, TURNS[:1], generation_prompt=True, **{switch: value}) for value in values]
        except TemplateError:
            continue
        if any(text != plain for text in texts):
            found.append(switch)
    if found:
        return Finding("thinking", "note", f"thinking is switched by {', '.join(found)}")
    opened = Renderer(tokenizer).opened(Renderer(tokenizer).prompt(TURNS[:1]))  # type: ignore[arg-type]
    if opened:
        return Finding("thinking", "note", f"the prompt opens the answer with {opened.strip()}; there is no switch")
    return Finding("thinking", "ok", "there is no thinking switch")


def _generation_prompt(tokenizer: PreTrainedTokenizerBase) -> Finding:
    with_prompt = render(tokenizer, TURNS[:1], generation_prompt=True)
    without = render(tokenizer, TURNS[:1])
    if with_prompt == without:
        return Finding("generation_prompt", "ok", "the answer follows the user's message without a generation prompt")
    if with_prompt.startswith(without):
        return Finding("generation_prompt", "ok", f"the generation prompt is {with_prompt.removeprefix(without)!r}")
    after = with_prompt.rpartition(TURNS[0].text)[2]  # the template ends conversations otherwise than prompts (Phi 3)
    return Finding("generation_prompt", "ok", f"the user's message is followed by {after!r}")
